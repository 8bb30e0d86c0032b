"""Makes rows fit to learn from: one form, no extremes, no duplicates, and a split that never moves. Apart from ingest,
because rules change more often than sources.

Two passes over the shards. The first takes each row through all that concerns it alone, writes it to a scratch table as it
would leave, and hands on keys; tasks that see all keys of one range find what is equal or nearly so. The second puts the
output together: what stays, and why the rest leaves.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import Corpus, Rows
from stages.contract import Context, Resolver, StageConfig, StageError, TaskResources, stage
from stages.text.curation import Decontamination, Language, NearDuplicates, Pii, Quality, UnicodeRepair

if TYPE_CHECKING:
    from stages.text.duplicates import Found
    from stages.text.judging import Steps
    from stages.text.shards import Table
    from stages.text.waterfall import Tally

SPLITS = ("train", "validation")
PARTS_PER_BLOCK, LEAST_PARTS, ROWS_PER_PART = 4, 16, 100_000
"""Rows are judged in several parts for each block, so that no worker waits long for the last one, and at most so many rows at
once, whose keys are in memory."""
BEFORE = {
    "too_short": "below stages.clean.min_characters",
    "too_long": "above stages.clean.max_characters",
    "exact_duplicate": "the same row, byte for byte, stands earlier",
    "duplicate": "the same row, after normalisation, stands earlier",
}
"""Reasons that every row is asked for, in this order."""
ALWAYS_SHOWN = {*BEFORE, "near_duplicate", "contaminated"}
"""In the waterfall also when no row left for them; of the many rules for prose only those that caught something."""


@dataclass(kw_only=True)
class CleanResources(TaskResources):
    """How the work is spread. Nothing here changes the result."""

    blocks: int = 8
    """Parts that the rows are worked in; as many run at once as the cluster has CPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ValueError(f"resources.blocks must be at least 1, got {self.blocks}")


class Kind(Enum):
    """What a row is, as `stages.text.record` names it."""

    text = "text"
    prompt_completion = "prompt_completion"
    chat = "chat"
    preference = "preference"


@dataclass(kw_only=True)
class CleanConfig(StageConfig):
    """Repair, normalisation, limits, deduplication, quality, language, decontamination, personal data and split, in this order
    of fields. Each step that may be null is optional."""

    unicode_repair: UnicodeRepair | None = None
    """Undo what broken encoders did. Null: texts stay as they are."""
    normalise: bool = True
    """Rows of text and of prompt and completion are written in normal form: NFC, line ends as newlines, no control
    characters, no white space at line ends, at most one blank line in a row. False: they stay byte for byte; duplicates are
    told by the normal form either way. What stands in messages always stays as it is."""
    min_characters: int = 1
    """Rows whose text is shorter after normalisation leave (characters)."""
    max_characters: int = 200_000
    """Rows whose prompt and text are longer after normalisation leave (characters)."""
    validation_fraction: float = 0.05
    """Share of the rows that training never sees (0 to 1, exclusive). A row's side follows from its content alone, so it
    never changes when other rows come or go."""
    prose_kinds: list[Kind] = field(default_factory=lambda: [Kind.text])
    """Kinds of rows that quality and language are asked of. Chats and preferences break the rules for prose for no fault."""
    quality: Quality | None = None
    """Rules for prose. Null: none."""
    language: Language | None = None
    """Language identification. Null: languages are not told."""
    near_duplicates: NearDuplicates | None = None
    """Rows that are nearly the same, of any kind. Null: not looked for; the split is by content alone."""
    decontamination: Decontamination | None = None
    """Rows of any kind that hold parts of evaluation sets leave. Null: not looked for."""
    pii: Pii | None = None
    """Masks for personal data and secrets in rows of any kind, also in what messages say and tool calls pass. Null: none."""
    examples_per_reason: int = 0
    """So many rows that left are shown for each reason, with their text, in dropped/examples.jsonl. 0: no text is shown."""
    resources: CleanResources = field(default_factory=CleanResources)
    """How the work is spread."""

    def __post_init__(self) -> None:
        if self.min_characters < 1:
            raise ValueError(f"min_characters must be at least 1, got {self.min_characters}: empty rows teach nothing")
        if self.max_characters < self.min_characters:
            raise ValueError(
                f"max_characters must be at least min_characters ({self.min_characters}), got {self.max_characters}"
            )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        if (self.quality or self.language) and not self.prose_kinds:
            raise ValueError("prose_kinds is empty: name a kind (text, ...) or set quality and language to null")
        if self.examples_per_reason < 0:
            raise ValueError(f"examples_per_reason must be at least 0, got {self.examples_per_reason}")


def _sources(cfg: CleanConfig, resolver: Resolver) -> Mapping[str, str]:
    """Content of the evaluation sets, and as what it is read: moving their files re-runs nothing."""
    from stages.text.files import find

    return {
        f"decontamination.{task}.{number}.{file.container.value}": (
            file.identity if file.key else resolver.path(Path(file.where))
        )
        for task, path in (cfg.decontamination.tasks.items() if cfg.decontamination else ())
        for number, file in enumerate(find(path).files)
    }


@stage(libraries=("pyarrow", "ftfy", "py3langid", "phonenumbers"), ray=True, sources=_sources)
def clean(cfg: CleanConfig, ctx: Context, rows: Rows) -> Corpus:
    """Repair, filter, remove duplicates and split."""
    from stages.text.corpus import shards
    from stages.text.duplicates import find
    from stages.text.examples import write_examples
    from stages.text.shards import Table, remove_partial

    table, steps, scratch = Table.of(shards(rows.local())), _steps(cfg), ctx.output / "scratch"
    ctx.progress(0.0, f"{table.total:,} rows")
    scratch.mkdir()
    keys = _judge(table, steps, scratch, cfg.resources)
    ctx.progress(0.6, "rows judged")
    found = find(keys, table.total, cfg.validation_fraction, cfg.near_duplicates, cfg.resources)
    ctx.progress(0.7, "duplicates found")
    judged = Table.of(sorted(scratch.glob("part-*.parquet")))
    tally = _write(judged, found, cfg, ctx)

    reasons = _reasons(cfg)
    _refuse_empty(tally, reasons, cfg.validation_fraction)
    _refuse_overlap(found)
    write_examples(judged, tally.seen, reasons, ctx.output / "dropped", cfg.pii)
    shutil.rmtree(scratch)
    remove_partial(ctx.output)
    _report(tally, reasons, found, rows, ctx)
    return Corpus(uri=ctx.output.resolve().as_uri())


def _steps(cfg: CleanConfig) -> "Steps":
    from stages.text.judging import Steps

    sets, index = cfg.decontamination, None
    if sets is not None:
        from stages.text import evaluation_sets

        index = evaluation_sets.index(sets.tasks, sets.ngram)
    if cfg.language is not None:
        from stages.text.language import Identifier

        Identifier(cfg.language)  # what it refuses is refused here, not first on a worker
    return Steps(
        unicode_repair=cfg.unicode_repair,
        normalise=cfg.normalise,
        min_characters=cfg.min_characters,
        max_characters=cfg.max_characters,
        prose_kinds=frozenset(kind.value for kind in cfg.prose_kinds),
        quality=cfg.quality,
        language=cfg.language,
        near_duplicates=cfg.near_duplicates,
        evaluation_sets=index,
        max_overlap=sets.max_overlap if sets else 0.0,
        pii=cfg.pii,
    )


def _reasons(cfg: CleanConfig) -> dict[str, str]:
    """Reason -> the rule in words, in the order in which they are asked."""
    found = dict(BEFORE)
    if cfg.quality is not None:
        from stages.text.quality import reasons

        found |= {reason: f"{words} (stages.clean.quality)" for reason, words in reasons(cfg.quality).items()}
    if cfg.language is not None:
        from stages.text.language import REASONS

        found |= {reason: f"{words} (stages.clean.language)" for reason, words in REASONS.items()}
    if cfg.near_duplicates is not None:
        found["near_duplicate"] = "nearly the same row stands earlier (stages.clean.near_duplicates)"
    if cfg.decontamination is not None:
        found["contaminated"] = "holds part of an evaluation set (stages.clean.decontamination)"
    return found


def _judge(table: "Table", steps: "Steps", scratch: Path, resources: CleanResources) -> list[object]:
    """Have each range of rows judged by a task. Keys of the rows, where they were made."""
    from stages.text import cleaning
    from stages.text.blocks import ranges, references

    parts = max(PARTS_PER_BLOCK * resources.blocks, LEAST_PARTS, table.total // ROWS_PER_PART)
    orders = [{**order, "part": part} for part, order in enumerate(ranges(table.total, parts))]
    return references(orders, cleaning.judged, resources, table=table, steps=steps, scratch=scratch)


def _write(judged: "Table", found: "Found", cfg: CleanConfig, ctx: Context) -> "Tally":
    """Have each output shard written by a task. What was counted."""
    import numpy

    from stages.text import cleaning
    from stages.text.blocks import results
    from stages.text.shards import ROWS_PER_SHARD
    from stages.text.waterfall import Tally

    # A shard ends before the row that is one too many for it, wherever the blocks were cut; what leaves goes with it.
    edges = [0, *numpy.flatnonzero(found.kept)[ROWS_PER_SHARD::ROWS_PER_SHARD].tolist(), judged.total]
    copies = found.copies(judged)
    orders = [
        {
            "shard": shard,
            "first": first,
            "last": last,
            "validation": numpy.packbits(found.validation[first:last]).tobytes(),
            "copies": cleaning.packed(copies.between(first, last)),
        }
        for shard, (first, last) in enumerate(pairwise(edges))
    ]
    reports: list[dict[str, Any]] = []
    shared = {"table": judged, "output": ctx.output, "examples": cfg.examples_per_reason}
    for batch in results(orders, cleaning.write, cfg.resources, **shared):
        reports += map(json.loads, batch.column("facts").to_pylist())
        ctx.progress(0.7 + 0.3 * len(reports) / len(orders), f"{len(reports)} of {len(orders)} shards written")
    return Tally.of(sorted(reports, key=lambda report: int(report["shard"])), cfg.examples_per_reason)


def _report(tally: "Tally", reasons: dict[str, str], found: "Found", rows: Rows, ctx: Context) -> None:
    """The summary, the metrics and the headline."""
    total, splits, dropped = tally.out(), {split: tally.split(split) for split in SPLITS}, tally.dropped(reasons)
    weights = {source["name"]: source["weight"] for source in rows.summary().get("sources", [])}
    ctx.tracker.log_metrics(
        {
            "rows_in": tally.rows,
            "rows_out": total["rows"],
            "characters": total["characters"],
            "split_overlap": found.overlap,
        }
    )
    ctx.tracker.log_metrics({f"dropped_{reason}": count for reason, count in dropped.items()})
    ctx.tracker.log_metrics({f"masked_{kind.lower()}": count for kind, count in tally.masked.items()})
    ctx.tracker.log_metrics({f"contaminated_{task}": count for task, count in tally.tasks.items()})
    left = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
    held = splits["validation"]["rows"]
    ctx.headline(f"{total['rows']:,} of {tally.rows:,} rows, {held:,} of them validation; dropped: {left}")
    facts = {
        "waterfall": tally.waterfall([reason for reason in reasons if reason in ALWAYS_SHOWN or reason in dropped]),
        "reasons": {reason: reasons[reason] for reason in dropped},
        "sources": tally.by_source(weights),
        "clusters": {kind: {str(size): count for size, count in sizes.items()} for kind, sizes in found.sizes.items()},
        "characters_log2": dict(tally.lengths),
        "masked": dict(tally.masked),
        "contaminated": dict(tally.tasks),
        "split_overlap": found.overlap,
    }
    Corpus.write(ctx.output, {**facts, **total, **splits})


def _refuse_empty(tally: "Tally", reasons: dict[str, str], fraction: float) -> None:
    if not tally.out()["rows"]:
        lines = [f"  {tally.counts[reason]['rows']:>9,}  {reason}: {words}" for reason, words in reasons.items()]
        raise StageError(f"all {tally.rows:,} rows were filtered out; loosen these rules:\n" + "\n".join(lines))
    for split, other, direction in (("validation", "train", "larger"), ("train", "validation", "smaller")):
        if not tally.counts[split]["rows"]:
            raise StageError(
                f"the {split} split is empty: all {tally.counts[other]['rows']:,} rows fell into {other} with "
                f"stages.clean.validation_fraction={fraction}; set a {direction} fraction or add rows "
                "(one row a paragraph of text files: stages.ingest.source.text_unit=paragraph)"
            )


def _refuse_overlap(found: "Found") -> None:
    if found.overlap:
        raise StageError(
            f"{found.overlap:,} contents stand on both sides of the split, wanted none: no score on validation would mean "
            "anything. This is a fault of clean, not of the rows"
        )
