"""Takes rows in: the standard library's own documentation, or people's files, from one source or a mix of several. Apart,
because here bad input stops.

Every file is cut into parts; each part's rows become canonical records, or are quarantined with a reason. Then the records
are written in the order of their ids. Parts are worked on by Ray tasks, or one after the other in this process; the result
shows nothing of either.
"""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stages.artifacts import Rows
from stages.contract import Context, Executor, Resolver, StageConfig, StageError, TaskResources, location, stage
from stages.text.files import Container, Found, TextUnit, find
from stages.text.formats import EncodingErrors, Fields, Format

if TYPE_CHECKING:
    from stages.text.sources import Source

DOCSTRINGS = "docstrings"
LINES_SHOWN = 5
Facts = dict[str, Any]


@dataclass(kw_only=True)
class SourceConfig:
    """Where rows come from, what they are called there, and how much they count."""

    path: str | None = location(None)
    """A file, a directory or a glob, also below s3://, gs:// or az://: .jsonl, .json, .parquet, .csv, .tsv, .txt or .md, each
    also as .gz or .zst. Null without `hub`: the documentation of the installed Python standard library."""
    hub: str | None = None
    """A hub's data set (`owner/name`) in place of a path. Only its files are taken, never code that it brings."""
    revision: str = location("main")
    """Branch, tag or commit of the hub's data set. It is resolved to a commit when the run is planned."""
    subset: str | None = None
    """Subset (config) of the hub's data set. Null: its default one."""
    split: str = "train"
    """Split of the hub's data set."""
    container: Container = Container.auto
    """How rows are packed in the files, for files whose names do not say it."""
    format: Format = Format.auto
    """How a row says what it has to say. `auto`: what most of the first usable rows are; rows of another format are
    quarantined."""
    text_field: str = "text"
    """The field that holds the text of a row of plain text."""
    prompt_field: str = "prompt"
    """The field that holds what a model is given, of a row of prompt and completion or of a preference."""
    completion_field: str = "completion"
    """The field that holds what a model should answer, of a row of prompt and completion: loss is taken on it alone. Where
    there is no `completion`, `response` is taken."""
    messages_field: str | None = None
    """The field that holds a chat's messages. Null: `messages` or `conversations`."""
    chosen_field: str = "chosen"
    """The field that holds the preferred answer."""
    rejected_field: str = "rejected"
    """The field that holds the other answer."""
    id_field: str | None = "id"
    """The rows' own id, where they have one: an id that stands on different rows is reported. Null: nothing is compared."""
    delimiter: str | None = None
    """What parts the values of a CSV file. Null: a comma, and a tab in .tsv."""
    text_unit: TextUnit = TextUnit.file
    """What makes one row of a .txt or .md file: the whole file, a paragraph (up to a blank line) or a line."""
    encoding_errors: EncodingErrors = EncodingErrors.quarantine
    """What happens to a row whose text is not UTF-8, or holds half a UTF-16 character or U+0000: quarantined, or `replace`d by
    U+FFFD and counted."""
    weight: float = 1.0
    """How often the sampler draws from this source, in relation to the others of a mix."""

    def __post_init__(self) -> None:
        if self.path == "":
            raise ValueError("path must name a file, a directory or a glob, got an empty string; null means docstrings")
        for name in (
            "text_field",
            "prompt_field",
            "completion_field",
            "messages_field",
            "chosen_field",
            "rejected_field",
        ):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must be the name of a field, got an empty string")
        if self.hub is not None and self.path is not None:
            raise ValueError(f"hub must be null with a path ({self.path}), got {self.hub}: rows come from one place")
        if self.hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub):
            raise ValueError(f"hub must be owner/name, got {self.hub!r}")
        if self.delimiter is not None:
            self.delimiter = "\t" if self.delimiter == "\\t" else self.delimiter
            if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
                raise ValueError(f"delimiter must be one character, got {self.delimiter!r}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight must be above 0, got {self.weight}; take a source out to give it none")


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
    """Several sources by name, each with the fields of `source`, which is then left as it is. Written in a YAML file of one's
    own, or as `+stages.ingest.mix='{mine: {path: my.jsonl, weight: 3}, web: {path: web/}}'`."""
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
            files = find(source.path, source.container).files
            # The source's name is in every row: what is not already in the name of its one file is part of its identity.
            inside = prefix or ("" if [file.name for file in files] == [name] else f"{name}/")
            for file in files:
                found[inside + file.name] = file.identity if file.key else resolver.path(Path(file.where))
    return found


@stage(libraries=("pyarrow",), ray=True, sources=_sources)
def ingest(cfg: IngestConfig, ctx: Context) -> Rows:
    """Find the files, settle their formats, read them in parts, quarantine what cannot be used, write the rest as Parquet."""
    from stages.text import ingesting

    ctx.progress(0.0, "looking for files")
    sources = [_source(cfg, *each) for each in _configured(cfg)]
    resources = cfg.resources
    if not any(source.files for source in sources):
        resources = IngestResources(executor=Executor.inline)
    parts = ctx.work / "parts"
    shutil.rmtree(parts, ignore_errors=True)  # another attempt's
    parts.mkdir()
    reports = _read(cfg, sources, resources, parts, ctx)
    _quarantine(reports, parts, ctx.output)

    found = [_profile(n, source, cfg, reports) for n, source in enumerate(sources)]
    rows, bad, rules = sum(f["rows"] for f in found), sum(f["quarantined"] for f in found), _rules(reports)
    _refuse_above(cfg.max_bad_fraction, rows, rules, reports)
    if not rows:
        raise StageError(f"stages.ingest.source.path={cfg.source.path}: found no rows, wanted at least one")
    clashes, first = _clashes(ingesting.clashing(parts, [report["part"] for report in reports]), parts)
    _write(reports, resources, parts, ctx)
    shutil.rmtree(parts)

    characters = sum(f["characters"] for f in found)
    repaired = sum(report["repaired"] for report in reports)
    numbers = {"rows": rows, "characters": characters, "quarantined": bad, "repaired": repaired, "id_clashes": clashes}
    ctx.tracker.log_metrics(numbers)
    ctx.headline(
        f"{rows:,} rows, {characters:,} characters: {_described(sources)}"
        + (
            f"; {bad:,} quarantined ({', '.join(f'{count:,} {rule}' for rule, count in sorted(rules.items()))})"
            if bad
            else ""
        )
        + (f"; {repaired:,} repaired" if repaired else "")
        + (f"; {clashes:,} rows have an id of other rows (first: {first})" if clashes else "")
    )
    waterfall = [{"step": "in", "rows": rows + bad}, *({"step": r, "rows": n} for r, n in sorted(rules.items()))]
    facts: Facts = {"kind": "+".join(sorted({kind for f in found for kind in f["kinds"]})), **numbers}
    facts |= {"reasons": dict(rules), "waterfall": [*waterfall, {"step": "out", "rows": rows}], "sources": found}
    Rows.write(ctx.output, facts)
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
    fields = Fields(
        text=source.text_field,
        prompt=source.prompt_field,
        completion=source.completion_field,
        messages=source.messages_field,
        chosen=source.chosen_field,
        rejected=source.rejected_field,
    )
    replace = source.encoding_errors is EncodingErrors.replace
    reading = Reading(fields, source.text_unit, source.delimiter, replace, cfg.max_row_bytes)
    made = Source(name, prefix, found.files, reading, source.format, source.id_field, left_out=found.left_out)
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


def _quarantine(reports: list[Facts], parts: Path, output: Path) -> None:
    with (output / "quarantine.jsonl").open("wb") as whole:
        for report in reports:
            with (parts / f"faults-{report['part']:06d}.jsonl").open("rb") as part:
                shutil.copyfileobj(part, whole)


def _rules(reports: list[Facts]) -> Counter[str]:
    return sum((Counter(report["rules"]) for report in reports), Counter())


def _profile(number: int, source: "Source", cfg: IngestConfig, reports: list[Facts]) -> Facts:
    """One source in numbers."""
    mine = [report for report in reports if report["source"] == number]
    weight = cfg.mix[source.name].weight if cfg.mix else cfg.source.weight
    return {
        "name": source.name,
        "weight": weight,
        "files": len(source.files),
        "left_out": source.left_out,
        "format": source.format.value if source.files else DOCSTRINGS,
        "why": source.why,
        "rows": sum(report["rows"] for report in mine),
        "characters": sum(report["characters"] for report in mine),
        "quarantined": _rules(mine).total(),
        "reasons": dict(_rules(mine)),
        "kinds": dict(sum((Counter(report["kinds"]) for report in mine), Counter())),
    }


def _refuse_above(fraction: float, good: int, rules: Counter[str], reports: list[Facts]) -> None:
    """Fails with the table of reasons when too many rows cannot be used."""
    from stages.text.faults import RULES

    bad = rules.total()
    if not bad or bad <= fraction * (bad + good):
        return
    first: dict[str, list[str]] = {}
    for report in reports:
        for rule, where in report["first"].items():
            first.setdefault(rule, []).extend(where)
    lines = []
    for rule, count in sorted(rules.items(), key=lambda item: (-item[1], item[0])):
        shown = ", ".join(first[rule][:LINES_SHOWN]) + (", ..." if count > LINES_SHOWN else "")
        lines.append(f"  {count:>9,}  {rule}: {shown}\n             {RULES[rule]}")
    table = "\n".join(lines)
    raise StageError(
        f"{bad:,} of {bad + good:,} rows cannot be used, at most {fraction:.1%} are allowed "
        f"(stages.ingest.max_bad_fraction); mend these lines:\n{table}"
    )


def _clashes(found: Any, parts: Path) -> tuple[int, str]:
    """How many rows carry an id that stands on another row, and where the first is."""
    if not len(found):
        return 0, ""
    from stages.text.shards import Table, shard_name

    part, row = int(found[0]["part"]), int(found[0]["row"])
    table = next(Table.of([parts / "rows" / shard_name(part)]).slices(row, row + 1))
    return len(found), str(table.column("id")[0])


def _described(sources: list["Source"]) -> str:
    """What was read, and as what."""
    if len(sources) > 1:
        return f"{len(sources)} sources ({', '.join(f'{s.name}: {s.format.value}' for s in sources)})"
    source = sources[0]
    if not source.files:
        return "the standard library's docstrings"
    what = source.files[0].name if len(source.files) == 1 else f"{len(source.files):,} files"
    left = f", {source.left_out:,} files left out" if source.left_out else ""
    return f"{what} as {source.format.value} ({source.why}{left})"
