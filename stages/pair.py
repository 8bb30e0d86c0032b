"""Turns preference rows into pairs of token ids that share a prompt, for preference optimisation. Apart from tokenize: pairs are
not packed, and may bring along what the base model thinks of them, so that training needs no second model in memory."""

import json
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import Checkpoint, Corpus, PairDataset
from stages.contract import Context, Resolver, StageConfig, StageError, TaskResources, location, stage
from stages.text.choices import ControlStrings, OverLongPair
from stages.training.preflight import require

if TYPE_CHECKING:
    from stages.text.shards import Table

ROWS_PER_SHARD = 1_024
IDS_SHOWN = 5
TRAIN, VALIDATION = SPLITS = ("train", "validation")
COUNTED = ("pairs", "prompt_tokens", "chosen_tokens", "rejected_tokens", "truncated", "truncated_tokens")


@dataclass(kw_only=True)
class PairResources(TaskResources):
    """How the work is spread. Nothing here changes the result."""

    actors: int = 2
    """Processes that hold the tokenizer, and the base model when reference log-probabilities are wanted."""
    cpus: float = 1.0
    """Logical CPUs that Ray reserves for each."""
    threads: int = 1
    """Threads of each one's tensor operations; another number may change the last digits of reference log-probabilities."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("actors", "cpus", "threads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"resources.{name} must be above 0, got {getattr(self, name)}")

    def cpus_wanted(self) -> float:
        return 1.0 if self.inline() else self.actors * self.cpus


@dataclass(kw_only=True)
class PairConfig(StageConfig):
    """Options in `conf/pair/`."""

    chat_template: str | None = location(None)
    """How chats are written: a file with a template, or the name of a built-in one (chatml, gemma, inst, llama3, zephyr). Null:
    the base model's own."""
    control_strings: ControlStrings = ControlStrings.quarantine
    """Rows in which somebody typed the words of a control token: `quarantine` drops them, `neutralise` takes them as text."""
    sequence_length: int = 1024
    """Most tokens of a prompt with either completion."""
    over_long: OverLongPair = OverLongPair.drop
    """`drop` longer rows, or `truncate_prompt`: cut as much as needed off the prompt's beginning (not its begin token)."""
    reference_logprobs: bool = False
    """Store for each completion its summed log-probability under the base model."""
    batch_rows: int = 8
    """Completions that the base model reads together, at most. Rows of a batch change each other's last digits, so it belongs to
    the result."""
    max_bad_fraction: float = 0.01
    """The stage fails when more than this share of the rows cannot become pairs (0 to 1). What is too long is not among them."""
    resources: PairResources = field(default_factory=PairResources)
    """How the work is spread."""

    def __post_init__(self) -> None:
        for name, least in (("sequence_length", 2), ("batch_rows", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction must be between 0 and 1, got {self.max_bad_fraction}")


def _sources(cfg: PairConfig, resolver: Resolver) -> dict[str, str]:
    """A template's content decides, not where its file stands; a built-in one is part of the code."""
    from stages.text.builtin_templates import TEMPLATES

    if cfg.chat_template is None:
        return {}
    name = cfg.chat_template
    return {"chat_template": f"built-in {name}" if name in TEMPLATES else resolver.path(Path(name))}


@stage(libraries=("torch", "transformers", "tokenizers", "jinja2", "peft", "pyarrow"), ray=True, sources=_sources)
def pair(cfg: PairConfig, ctx: Context, corpus: Corpus, base: Checkpoint) -> PairDataset:
    """Tokenise windows of the corpus into pairs, then cut them into shards."""
    from stages.text.corpus import shards
    from stages.text.shards import Table, remove_partial

    _require_context(cfg, base.local())
    tokenizer = _tokenizer(cfg, base.local(), ctx.output / "tokenizer")
    table = Table.of(shards(corpus.local()))
    windows = ctx.work / "windows"
    for part in (*SPLITS, "facts", "dropped"):
        (windows / part).mkdir(parents=True, exist_ok=True)
    counts = _pair_windows(cfg, ctx, table, base.local(), windows)
    totals = sum(counts.values(), Counter())
    _refuse(cfg, counts[TRAIN]["pairs"], totals, Table.of(shards(windows, "dropped")))
    for split in SPLITS:
        if counts[split]["pairs"]:
            _write(Table.of(shards(windows, split)), ctx.output / split, ROWS_PER_SHARD)
    _write(Table.of(shards(windows, "dropped")), ctx.output / "dropped", None)
    remove_partial(ctx.output)
    shutil.rmtree(windows)

    facts: dict[str, Any] = {split: {name: counts[split][name] for name in COUNTED} for split in SPLITS}
    for split in SPLITS:
        ctx.tracker.log_metrics({f"{split}_{name}": float(number) for name, number in facts[split].items()})
    left = {name: totals[name] for name in sorted(totals) if name not in (*COUNTED, "in")}
    ctx.tracker.log_metrics({f"dropped_{name}": float(number) for name, number in left.items()})
    shown = ", ".join(f"{number:,} {name}" for name, number in left.items()) or "none"
    ctx.headline(f"{totals['pairs']:,} pairs of {totals['in']:,} rows; dropped: {shown}")
    steps = {"in": totals["in"]} | left | {"out": totals["pairs"]}
    facts |= {"waterfall": [{"step": step, "rows": rows} for step, rows in steps.items()]}
    facts |= {"sequence_length": cfg.sequence_length, "reference_logprobs": cfg.reference_logprobs}
    facts |= {"base_digest": base.digest, "sources": corpus.summary().get("sources", []), **tokenizer}
    PairDataset.write(ctx.output, facts)
    return PairDataset(uri=ctx.output.resolve().as_uri())


def _require_context(cfg: PairConfig, base: Path) -> None:
    limit = json.loads((base / "config.json").read_text("utf-8")).get("max_position_embeddings")
    if isinstance(limit, int) and cfg.sequence_length > limit:
        raise StageError(
            f"stages.pair.sequence_length={cfg.sequence_length}: the base model reads at most {limit} tokens; set {limit} or less"
        )


def _tokenizer(cfg: PairConfig, base: Path, directory: Path) -> dict[str, Any]:
    """The base model's tokenizer with the template that was used, and the tokens at which an answer ends."""
    from stages.text.templates import Template
    from stages.text.tokenizer import take_over

    template = Template.load(base, cfg.chat_template, cfg.control_strings)
    take_over(base, directory)
    template.save(directory)
    return {"stop_token_ids": sorted(template.terminators)}


def _pair_windows(cfg: PairConfig, ctx: Context, table: "Table", base: Path, windows: Path) -> dict[str, Counter[str]]:
    """What was counted, by split."""
    from stages.text.blocks import pooled
    from stages.text.pairing import ROWS_PER_WINDOW, Pairing, Settings

    if not cfg.resources.inline():
        _require_room(cfg)
    orders = [
        {"window": window, "first": first, "last": min(first + ROWS_PER_WINDOW, table.total)}
        for window, first in enumerate(range(0, table.total, ROWS_PER_WINDOW))
    ]
    settings = Settings(
        chat_template=cfg.chat_template, control_strings=cfg.control_strings, sequence_length=cfg.sequence_length,
        over_long=cfg.over_long, reference=cfg.reference_logprobs, batch_rows=cfg.batch_rows,
    )  # fmt: skip
    shared = {"base": base, "corpus": table, "settings": settings, "windows": windows}
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    done = 0
    for batch in pooled(orders, Pairing, cfg.resources, threads=cfg.resources.threads, **shared):
        for facts in map(json.loads, batch.column("facts").to_pylist()):
            done += 1
            for split, numbers in facts.items():
                counts[split].update(numbers)
        ctx.progress(0.9 * done / len(orders), f"{done} of {len(orders)} windows paired")
    return counts


def _require_room(cfg: PairConfig) -> None:
    import ray

    from stages.storage.node import facts

    require(
        "CPU",
        workers=cfg.resources.actors,
        each=cfg.resources.cpus,
        nodes=facts(),
        free=ray.available_resources,
        fields=("stages.pair.resources.actors", "stages.pair.resources.cpus"),
    )


def _write(table: "Table", directory: Path, rows_per_shard: int | None) -> None:
    """The windows' rows in their order, in shards of fixed size (None: one)."""
    import pyarrow

    from stages.text.shards import shard_name, write_shard

    size = rows_per_shard or max(table.total, 1)
    for index, first in enumerate(range(0, max(table.total, 1), size)):
        parts = list(table.slices(first, min(first + size, table.total)))
        if parts:
            write_shard(directory / shard_name(index), pyarrow.concat_tables(parts).combine_chunks())


def _refuse(cfg: PairConfig, trained: int, totals: "Counter[str]", dropped: "Table") -> None:
    """StageError when nothing is left to train on, or too many rows are bad."""
    left = {name: number for name, number in totals.items() if name not in (*COUNTED, "in")}
    if not trained:
        raise StageError(f"no preference row of the training split became a pair:\n{_table(left, dropped)}")
    left.pop("too_long", None)  # asked for with sequence_length and over_long
    total, came = sum(left.values()), totals["in"]
    if total > cfg.max_bad_fraction * came:
        raise StageError(
            f"{total:,} of {came:,} rows ({total / came:.1%}) do not become pairs, more than "
            f"stages.pair.max_bad_fraction={cfg.max_bad_fraction:g} allows; mend the rows or raise it:\n{_table(left, dropped)}"
        )


def _table(left: dict[str, int], dropped: "Table") -> str:
    """Reasons with their number and the first rows that have them."""
    from stages.text.pairing import REASONS

    first: defaultdict[str, list[str]] = defaultdict(list)
    for part in dropped.slices(0, dropped.total, ["id", "reason"]):
        for row, reason in zip(*(part.column(name).to_pylist() for name in ("id", "reason")), strict=True):
            first[reason] += [row] if len(first[reason]) < IDS_SHOWN else []
    return "\n".join(
        f"  {number:>9,}  {name}" + (f": {REASONS[name]}" if name in REASONS else "") + f"; {', '.join(first[name])}"
        for name, number in sorted(left.items(), key=lambda each: (-each[1], each[0]))
    )
