"""Takes rows in: the standard library's own documentation, or a person's files. Apart, because here bad input stops."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from stages.artifacts import Rows
from stages.contract import Context, Resolver, StageConfig, StageError, location, stage
from stages.text.files import Bad, Reader, Row, TextUnit, find

PROGRESS_EVERY = 1_000
LINES_SHOWN = 5


@dataclass(kw_only=True)
class SourceConfig:
    """Where rows come from, and what they are called there."""

    path: str | None = location(None)
    """A file, a directory or a glob of .jsonl, .parquet, .txt or .md files (text also as .gz). Null: the documentation of the
    installed Python standard library."""
    text_field: str = "text"
    """The field that holds the text of a row of plain text."""
    prompt_field: str = "prompt"
    """The field that holds what a model is given, of a row of prompt and completion."""
    completion_field: str = "completion"
    """The field that holds what a model should answer, of a row of prompt and completion: loss is taken on it alone."""
    text_unit: TextUnit = TextUnit.file
    """What makes one row of a .txt or .md file: the whole file, a paragraph (up to a blank line) or a line."""

    def __post_init__(self) -> None:
        if self.path == "":
            raise ValueError("path must name a file, a directory or a glob, got an empty string; null means docstrings")
        for name in ("text_field", "prompt_field", "completion_field"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be the name of a field, got an empty string")


@dataclass(kw_only=True)
class IngestConfig(StageConfig):
    """Rows from a source, in the order of their ids."""

    source: SourceConfig = field(default_factory=SourceConfig)
    """Where rows come from."""
    limit: int | None = None
    """Take only the first so many rows, in the order of their ids. Null: all of them."""
    max_bad_fraction: float = 0.01
    """The stage fails when more than this share of the rows cannot be used (0 to 1)."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}; null takes all rows")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction must be between 0 and 1, got {self.max_bad_fraction}")


def _sources(cfg: IngestConfig, resolver: Resolver) -> Mapping[str, str]:
    if cfg.source.path is None:
        from stages.text import docstrings

        return {"stdlib": docstrings.identity()}
    return {name: resolver.path(path) for name, path in find(cfg.source.path)}


@stage(libraries=("pyarrow",), sources=_sources)
def ingest(cfg: IngestConfig, ctx: Context) -> Rows:
    """Read the source, quarantine what cannot be used, write the rest as Parquet."""
    from stages.text.record import TEXT, Record
    from stages.text.shards import ROWS_SCHEMA, ShardWriter

    source = cfg.source
    reader, name = None, "docstrings"
    if source.path is not None:
        name = PurePath(source.path).name
        fields = (source.text_field, source.prompt_field, source.completion_field)
        reader = Reader(find(source.path), *fields, unit=source.text_unit)
    rows, characters, quarantined = 0, 0, Quarantined()
    with (
        ShardWriter(ctx.output / "rows", ROWS_SCHEMA) as writer,
        (ctx.output / "quarantine.jsonl").open("w", encoding="utf-8") as quarantine,
    ):
        for item in reader or _documentation():
            if isinstance(item, Bad):
                quarantined.add(item)
                quarantine.write(json.dumps(vars(item), sort_keys=True, ensure_ascii=False) + "\n")
                continue
            kind = reader.kind if reader else TEXT
            writer.write(*Record(item.id, name, kind, item.prompt, item.text).values())
            rows += 1
            characters += len(item.prompt) + len(item.text)
            if rows % PROGRESS_EVERY == 0:
                ctx.progress(reader.fraction if reader else 1.0, f"{rows:,} rows")
            if rows == cfg.limit:
                break
    quarantined.refuse_above(cfg.max_bad_fraction, rows)
    if not rows:
        raise StageError(f"stages.ingest.source.path={source.path}: found no rows, wanted at least one")
    kind, described = (reader.kind, reader.described) if reader else ("docstrings", "the standard library's docstrings")
    ctx.tracker.log_metrics({"rows": rows, "characters": characters, "quarantined": quarantined.total})
    ctx.headline(f"{rows:,} rows, {characters:,} characters: {described}{quarantined.described}")
    facts = {"kind": kind, "rows": rows, "characters": characters}
    Rows.write(ctx.output, facts | {"quarantined": quarantined.total, "reasons": dict(quarantined.reasons)})
    return Rows(uri=ctx.output.resolve().as_uri())


def _documentation() -> Iterator[Row]:
    from stages.text import docstrings

    for name, _, text in docstrings.rows():
        yield Row(name, "", text)


class Quarantined:
    """Counts of the rows that could not be used, with the first lines for each reason."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.first: dict[str, list[str]] = {}

    def add(self, bad: Bad) -> None:
        self.reasons[bad.reason] += 1
        where = f"{bad.source}:{bad.line}" + (f" ({bad.detail})" if bad.detail else "")
        if len(shown := self.first.setdefault(bad.reason, [])) < LINES_SHOWN:
            shown.append(where)

    @property
    def total(self) -> int:
        return self.reasons.total()

    @property
    def described(self) -> str:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.reasons.items()))
        return f"; {self.total:,} quarantined ({counts})" if self.total else ""

    def refuse_above(self, fraction: float, good: int) -> None:
        if not self.total or self.total <= fraction * (self.total + good):
            return
        table = "\n".join(
            f"  {count:>9,}  {reason}: {', '.join(self.first[reason])}{', ...' if count > LINES_SHOWN else ''}"
            for reason, count in sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
        )
        raise StageError(
            f"{self.total:,} of {self.total + good:,} rows cannot be used, at most {fraction:.1%} are allowed "
            f"(stages.ingest.max_bad_fraction); mend these lines:\n{table}"
        )
