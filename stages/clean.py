"""Makes rows fit to learn from: one form, no extremes, no duplicates, and a split that never moves. Apart from ingest,
because rules change more often than sources.

Two passes of Ray Data over the shards. The first computes content keys and moves nothing else; tasks that see all keys of
one range of hashes pick the first row of each. The second reads again, writes what stays and why the rest leaves.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stages.artifacts import ArtifactError, Corpus, Rows
from stages.contract import Context, StageConfig, StageError, TaskResources, stage

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    from stages.text.cleaning import Rules
    from stages.text.shards import Table

SPLITS = ("train", "validation")
UNITS = ("rows", "characters", "bytes")
REASONS = {
    "too_short": "below stages.clean.min_characters",
    "too_long": "above stages.clean.max_characters",
    "duplicate": "the same row, after normalisation, stands earlier",
}
KEYS_PER_TASK = 2_000_000
"""48 MB of keys in one deduplicating task."""


@dataclass(kw_only=True)
class CleanResources(TaskResources):
    """How the work is spread. Nothing here changes the result."""

    blocks: int = 8
    """Parts that the rows are worked in; as many run at once as the cluster has CPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ValueError(f"resources.blocks must be at least 1, got {self.blocks}")


@dataclass(kw_only=True)
class CleanConfig(StageConfig):
    """Normalisation, limits, exact deduplication and split."""

    min_characters: int = 1
    """Rows whose text is shorter after normalisation leave (characters)."""
    max_characters: int = 200_000
    """Rows whose prompt and text are longer after normalisation leave (characters)."""
    validation_fraction: float = 0.05
    """Share of the rows that training never sees (0 to 1, exclusive). A row's side follows from its content alone, so it
    never changes when other rows come or go."""
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


@stage(libraries=("pyarrow",), ray=True)
def clean(cfg: CleanConfig, ctx: Context, rows: Rows) -> Corpus:
    """Normalise, filter, remove duplicates and split."""
    from stages.text.cleaning import Rules
    from stages.text.corpus import shards
    from stages.text.shards import Table, remove_partial

    table = Table.of(shards(rows.local()))
    rules = Rules(cfg.min_characters, cfg.max_characters, cfg.validation_fraction)
    ctx.progress(0.0, f"{table.total:,} rows")
    kept = _first_of_each(table, rules, cfg.resources)
    ctx.progress(0.5, "duplicates found")
    counts = _write(table, rules, kept, cfg.resources, ctx)

    _refuse_empty(counts, cfg.validation_fraction)
    remove_partial(ctx.output)
    splits = {split: counts[split] for split in SPLITS}
    total = {unit: sum(split[unit] for split in splits.values()) for unit in UNITS}
    dropped = {reason: counts[reason]["rows"] for reason in REASONS if counts[reason]["rows"]}
    ctx.tracker.log_metrics(
        {"rows_in": counts["in"]["rows"], "rows_out": total["rows"], "characters": total["characters"]}
    )
    ctx.tracker.log_metrics({f"dropped_{reason}": count for reason, count in dropped.items()})
    left = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
    held = splits["validation"]["rows"]
    ctx.headline(f"{total['rows']:,} of {counts['in']['rows']:,} rows, {held:,} of them validation; dropped: {left}")
    Corpus.write(ctx.output, {"waterfall": _waterfall(counts), **total, **splits})
    return Corpus(uri=ctx.output.resolve().as_uri())


def _first_of_each(table: "Table", rules: "Rules", resources: CleanResources) -> "numpy.typing.NDArray[numpy.bool_]":
    """[rows] bool: passes the rules and is the first of its kind. A byte a row is all that the driver holds."""
    import numpy

    from stages.text import cleaning
    from stages.text.blocks import call, ranges, references

    keys = references(ranges(table.total, resources.blocks), cleaning.keys, resources, table=table, rules=rules)
    parts = -(-max(table.total, 1) // KEYS_PER_TASK)
    kept = numpy.zeros(table.total, bool)
    for positions in call(cleaning.first_of_each, [(part, parts, *keys) for part in range(parts)], resources):
        kept[positions] = True
    return kept


def _write(
    table: "Table", rules: "Rules", kept: "numpy.typing.NDArray[numpy.bool_]", resources: CleanResources, ctx: Context
) -> dict[str, Counter[str]]:
    """Have each output shard written by a task. What was counted, by reason and split: rows, characters, bytes."""
    import numpy

    from stages.text import cleaning
    from stages.text.blocks import results
    from stages.text.shards import ROWS_PER_SHARD

    # A shard ends before the row that is one too many for it, wherever the blocks were cut; what leaves goes with it.
    edges = [0, *numpy.flatnonzero(kept)[ROWS_PER_SHARD::ROWS_PER_SHARD].tolist(), table.total]
    orders = [
        {"shard": shard, "first": first, "last": last, "kept": numpy.packbits(kept[first:last]).tobytes()}
        for shard, (first, last) in enumerate(pairwise(edges))
    ]
    reports: list[dict[str, Any]] = []
    for batch in results(orders, cleaning.write, resources, table=table, rules=rules, output=ctx.output):
        reports += map(json.loads, batch.column("facts").to_pylist())
        ctx.progress(0.5 + 0.5 * len(reports) / len(orders), f"{len(reports)} of {len(orders)} shards written")
    reports.sort(key=lambda report: report["shard"])
    for before, after in pairwise(reports):
        if before["last_id"] >= after["first_id"]:
            raise ArtifactError(
                f"row {after['first_id']} stands after {before['last_id']}: rows must stand in id order"
            )
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for report in reports:
        for name, numbers in report["counts"].items():
            counts[name].update(numbers)
    return {
        name: Counter({unit: counts[name][unit] for unit in UNITS}) for name in ("in", "normalised", *REASONS, *SPLITS)
    }


def _waterfall(counts: dict[str, Counter[str]]) -> list[dict[str, str | int]]:
    """What came in, what left at each step, what went out; `in` minus all that left is `out`, in rows and in characters."""
    out = sum((counts[split] for split in SPLITS), Counter())
    gone = Counter({"characters": counts["in"]["characters"] - counts["normalised"]["characters"]})
    steps = {"in": counts["in"], "normalise": gone} | {reason: counts[reason] for reason in REASONS} | {"out": out}
    return [{"step": step, "rows": n["rows"], "characters": n["characters"]} for step, n in steps.items()]


def _refuse_empty(counts: dict[str, Counter[str]], fraction: float) -> None:
    came = counts["in"]["rows"]
    if not any(counts[split]["rows"] for split in SPLITS):
        lines = [f"  {counts[reason]['rows']:>9,}  {reason}: {words}" for reason, words in REASONS.items()]
        raise StageError(f"all {came:,} rows were filtered out; loosen these rules:\n" + "\n".join(lines))
    for split, other, direction in (("validation", "train", "larger"), ("train", "validation", "smaller")):
        if not counts[split]["rows"]:
            raise StageError(
                f"the {split} split is empty: all {counts[other]['rows']:,} rows fell into {other} with "
                f"stages.clean.validation_fraction={fraction}; set a {direction} fraction or add rows "
                "(one row a paragraph of text files: stages.ingest.source.text_unit=paragraph)"
            )
