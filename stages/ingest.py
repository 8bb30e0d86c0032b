"""Takes rows in: the standard library's own documentation, or people's files, from one source or a mix of several. Apart,
because here bad input stops.

Every file is cut into parts; each part's rows become canonical records, or are quarantined with a reason. Then the records
are written in the order of their ids. Parts are worked on by Ray tasks, or one after the other in this process; the result
shows nothing of either.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stages.artifacts import Rows
from stages.contract import Context, Executor, Resolver, StageConfig, StageError, TaskResources, stage
from stages.text.files import Container, Found, find
from stages.text.formats import EncodingErrors
from stages.text.source_config import SourceConfig

if TYPE_CHECKING:
    from stages.text.sources import Source

DOCSTRINGS = "docstrings"
Facts = dict[str, Any]


@dataclass(kw_only=True)
class IngestResources(TaskResources):
    """How the work is spread. Nothing here changes the result. Docstrings alone are read in the stage's own process."""

    blocks: int = 8
    """Parts that the files are read in, at the least; as many run at once as the cluster has CPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ValueError(f"resources.blocks must be at least 1, got {self.blocks}")


@dataclass(kw_only=True)
class IngestConfig(StageConfig):
    """Rows from one source or a mix, in the order of their ids."""

    source: SourceConfig = field(default_factory=SourceConfig)
    """Where rows come from."""
    mix: dict[str, SourceConfig] = field(default_factory=dict)
    """Several sources by name, each with the fields of `source`, which is then left as it is:
    `stages.ingest.mix.mine.path=my.jsonl stages.ingest.mix.mine.weight=3 stages.ingest.mix.web.path=web/`."""
    limit: int | None = None
    """Take only the first so many rows, in the order of their ids. Null: all of them."""
    max_bad_fraction: float = 0.01
    """The stage fails when more than this share of the rows cannot be used (0 to 1)."""
    max_row_bytes: int = 64 * 2**20
    """Longer rows are quarantined; their bytes are skipped, so that memory stays bounded (bytes)."""
    resources: IngestResources = field(default_factory=IngestResources)
    """How the work is spread."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}; null takes all rows")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction must be between 0 and 1, got {self.max_bad_fraction}")
        if self.max_row_bytes < 1:
            raise ValueError(f"max_row_bytes must be at least 1, got {self.max_row_bytes}")
        if self.mix and (self.source.path is not None or self.source.hub is not None):
            raise ValueError("source.path and source.hub must be null with a mix; give the mix one more source instead")
        for name in self.mix:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"mix must have names of letters, digits, '_', '.' and '-', got {name!r}")


def _configured(cfg: IngestConfig) -> Iterator[tuple[str, str, SourceConfig]]:
    """(name, what stands before its ids, config) of each source, in the order of their ids."""
    if not cfg.mix:
        source = cfg.source
        where = source.hub or (source.path or DOCSTRINGS).rstrip("/")
        yield PurePosixPath(where).name or where, "", source
    for name in sorted(cfg.mix, key=lambda name: f"{name}/"):
        yield name, f"{name}/", cfg.mix[name]


@contextmanager
def _told_of(name: str, prefix: str) -> Iterator[None]:
    """What is wrong with a source of a mix is told by the mix's fields."""
    try:
        yield
    except StageError as error:
        if not prefix:
            raise
        raise type(error)(str(error).replace("stages.ingest.source", f"stages.ingest.mix.{name}")) from None


def _sources(cfg: IngestConfig, resolver: Resolver) -> Mapping[str, str]:
    """Content digests of files; entity tags of what lies in an object store; a hub's commit."""
    found: dict[str, str] = {}
    for name, prefix, source in _configured(cfg):
        if source.hub is not None:
            from stages.text import hub

            found[f"{prefix}{source.hub}"] = hub.resolve_commit(source.hub, source.revision)
        elif source.path is None:
            from stages.text import docstrings

            found[f"{prefix}stdlib"] = docstrings.identity()
        else:
            with _told_of(name, prefix):
                files = find(source.path, source.container).files
            # The source's name is in every row: what is not already in the name of its one file is part of its identity.
            inside = prefix or ("" if [file.name for file in files] == [name] else f"{name}/")
            for file in files:
                found[inside + file.name] = file.identity if file.key else resolver.path(Path(file.where))
    return found


@stage(libraries=("pyarrow",), ray=True, sources=_sources)
def ingest(cfg: IngestConfig, ctx: Context) -> Rows:
    """Find the files, settle their formats, read them in parts, quarantine what cannot be used, write the rest as Parquet."""
    from stages.text import ingest_report, ingesting

    ctx.progress(0.0, "looking for files")
    sources: list[Source] = []
    for name, prefix, source in _configured(cfg):
        with _told_of(name, prefix):
            sources.append(_source(cfg, name, prefix, source))
    resources = cfg.resources
    if not any(source.files for source in sources):
        resources = IngestResources(executor=Executor.inline)
    parts = ctx.output / "parts"  # no other attempt writes here
    parts.mkdir()
    reports = _read(cfg, sources, resources, parts, ctx)
    ingest_report.quarantine(reports, parts, ctx.output)

    weights = [source.weight for _, _, source in _configured(cfg)]
    found = [ingest_report.profile(n, sources[n], weight, reports) for n, weight in enumerate(weights)]
    rules = ingest_report.rules_of(reports)
    numbers = {name: sum(f[name] for f in found) for name in ("rows", "characters", "quarantined")}
    kept = ctx.work / "quarantine.jsonl"
    ingest_report.refuse_above(cfg.max_bad_fraction, numbers["rows"], rules, reports, ctx.output, kept)
    for number, (name, prefix, given) in enumerate(_configured(cfg)):
        if given.prompt_repeated is None:
            with _told_of(name, prefix):
                ingest_report.refuse_unsettled(number, sources[number], reports)
    if not numbers["rows"]:
        where = f"source.path={cfg.source.path}" if not cfg.mix else f"mix ({', '.join(sorted(cfg.mix))})"
        raise StageError(f"stages.ingest.{where}: found no rows, wanted at least one")
    again = ingesting.clashing(parts, [report["part"] for report in reports])
    first = ingest_report.where(again, parts)
    _write(reports, resources, parts, ctx)
    shutil.rmtree(parts)

    numbers |= {"repaired": sum(report["repaired"] for report in reports), "id_clashes": len(again)}
    ctx.tracker.log_metrics(numbers)
    ctx.headline(ingest_report.headline(sources, numbers, rules, first))
    Rows.write(ctx.output, ingest_report.facts(found, numbers, rules))
    return Rows(uri=ctx.output.resolve().as_uri())


def _source(cfg: IngestConfig, name: str, prefix: str, source: SourceConfig) -> "Source":
    """The source with its files and its format."""
    from stages.text.containers import Reading
    from stages.text.sources import Source

    found = Found(())
    if source.hub is not None:
        from stages.text import hub

        commit = hub.resolve_commit(source.hub, source.revision)
        found = hub.find(source.hub, commit, source.subset, source.split, source.container)
    elif source.path is not None:
        found = find(source.path, source.container)
    replace = source.encoding_errors is EncodingErrors.replace
    reading = Reading(source.fields(), source.text_unit, source.delimiter, replace, cfg.max_row_bytes)
    made = Source(
        name,
        prefix,
        found.files,
        reading,
        source.format,
        source.id_field,
        source.documentation,
        left_out=found.left_out,
    )
    if source.container is Container.auto:
        made.refuse_disguised()
    return made.decided() if found.files else made


def _read(
    cfg: IngestConfig, sources: list["Source"], resources: IngestResources, parts: Path, ctx: Context
) -> list[Facts]:
    """Have every part read by a task, up to the limit; what each found, in the order of the parts."""
    from stages.text import ingesting
    from stages.text.blocks import results

    orders = ingesting.orders(sources, resources.blocks)
    unknown = [order for order in orders if order["line"] < 0]
    lines = {r["part"]: r["lines"] for r in _reports(results(unknown, ingesting.count, resources, sources=sources))}
    before = 0
    for order in unknown:  # ranges of one file stand one after the other
        before = 0 if order["start"] == 0 else before
        order["line"], before = before, before + lines[order["part"]]
    reports: list[Facts] = []
    # With a limit a few parts at a time, so that the first rows of much cost little.
    at_once = resources.blocks if cfg.limit else len(orders)
    for first in range(0, len(orders), at_once):
        work = [order | {"limit": cfg.limit or -1} for order in orders[first : first + at_once]]
        wave: list[Facts] = []
        for report in _reports(results(work, ingesting.read, resources, sources=sources, output=parts)):
            wave.append(report)
            done = len(reports) + len(wave)
            ctx.progress(0.8 * done / len(orders), f"{done} of {len(orders)} parts read")
        reports += sorted(wave, key=lambda report: int(report["part"]))
        if cfg.limit and sum(report["rows"] for report in reports) >= cfg.limit:
            break
    return _limited(cfg.limit, reports, orders, sources, parts)


def _limited(
    limit: int | None, reports: list[Facts], orders: list[Facts], sources: list["Source"], parts: Path
) -> list[Facts]:
    """The part in which the limit is reached is read again up to it; those behind it do not count."""
    from stages.text import ingesting

    rows = 0
    for number, report in enumerate(reports):
        if limit is not None and rows + report["rows"] >= limit:
            if rows == 0:  # it ended there
                return reports[: number + 1]
            again = orders[report["part"]] | {"limit": limit - rows}
            return [*reports[:number], *_reports(ingesting.read(again, sources, parts))]
        rows += report["rows"]
    return reports


def _reports(tables: Any) -> Iterator[Facts]:
    for table in tables:
        yield from map(json.loads, table.column("facts").to_pylist())


def _write(reports: list[Facts], resources: IngestResources, parts: Path, ctx: Context) -> None:
    """Cut the parts' rows, in their order, into shards of fixed size."""
    from stages.text import ingesting
    from stages.text.blocks import results
    from stages.text.shards import ROWS_PER_SHARD, Table, remove_partial, shard_name

    table = Table.of([parts / "rows" / shard_name(report["part"]) for report in reports if report["rows"]])
    orders = [
        {"shard": shard, "first": first, "last": min(first + ROWS_PER_SHARD, table.total)}
        for shard, first in enumerate(range(0, table.total, ROWS_PER_SHARD))
    ]
    for done, _ in enumerate(results(orders, ingesting.write, resources, table=table, output=ctx.output), 1):
        ctx.progress(0.8 + 0.2 * done / len(orders), f"{done} of {len(orders)} shards written")
    remove_partial(ctx.output)
