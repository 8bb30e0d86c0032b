"""Turns a corpus into packed rows of token ids. Apart from clean: another model needs other tokens of the same text."""

import json
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import Checkpoint, Corpus, TokenDataset
from stages.contract import Context, StageConfig, StageError, TaskResources, stage

if TYPE_CHECKING:
    from stages.text.shards import Table

SPLITS = ("train", "validation")
ROWS_PER_SHARD = 1_024
BYTES_AND_EOS = 257
COUNTED = (
    "rows documents pieces tokens prompt_tokens prompt_bytes supervised_tokens supervised_bytes"
    " first_tokens unsupervised_bytes dropped_pieces dropped_tokens"
)


@dataclass(kw_only=True)
class TokenizeResources(TaskResources):
    """How the work is spread. Nothing here changes the result."""

    blocks: int = 8
    """Parts that are worked on at once, as far as the cluster has CPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ValueError(f"resources.blocks must be at least 1, got {self.blocks}")


@dataclass(kw_only=True)
class TokenizeConfig(StageConfig):
    """A tokenizer (trained here, or the base model's) and rows of one length."""

    vocab_size: int | None = None
    """Tokens of the byte-level BPE that is trained on the training split, the 256 bytes and EOS among them. It comes out
    smaller when the text is too short for so many. Null with a base model, whose tokenizer is taken as it is."""
    sequence_length: int = 256
    """Tokens in a row (context length in training). Longer documents are cut into pieces."""
    resources: TokenizeResources = field(default_factory=TokenizeResources)
    """How the work is spread."""

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.vocab_size < BYTES_AND_EOS:
            raise ValueError(f"vocab_size must be at least {BYTES_AND_EOS} (all bytes and EOS), got {self.vocab_size}")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {self.sequence_length}")

    def check(self, connected: frozenset[str]) -> None:
        if "base" in connected and self.vocab_size is not None:
            raise ValueError(f"vocab_size must be null with a base model, got {self.vocab_size}: its tokenizer is used")
        if "base" not in connected and self.vocab_size is None:
            raise ValueError("vocab_size must be set when no base model is connected: a tokenizer is trained")


@stage(libraries=("tokenizers", "pyarrow"), ray=True)
def tokenize(cfg: TokenizeConfig, ctx: Context, corpus: Corpus, base: Checkpoint | None = None) -> TokenDataset:
    """Get a tokenizer, tokenise, pack, write."""
    from stages.text.corpus import shards
    from stages.text.shards import Table, remove_partial
    from stages.text.tokenizer import Encoder

    tokenizer = ctx.output / "tokenizer"
    ctx.progress(0.0, "tokenizer")
    if base is None:
        _train_tokenizer(corpus.local(), cfg, tokenizer)
    else:
        _take_over_tokenizer(base.local(), cfg, tokenizer)
    encoder = Encoder.load(tokenizer)
    ctx.progress(0.3, f"tokenizer of {encoder.vocab_size:,} tokens")

    table = Table.of(shards(corpus.local()))
    windows = ctx.work / "windows"
    shutil.rmtree(windows, ignore_errors=True)  # another attempt's
    windows.mkdir()
    counts = _pack(table, cfg, ctx, windows)
    for split in SPLITS:
        if not counts[split]["rows"]:
            raise StageError(f"the {split} split of the corpus has no text to learn from or to score; add rows")
    _write({split: Table.of(shards(windows, split)) for split in SPLITS}, cfg.resources, ctx)
    shutil.rmtree(windows)
    remove_partial(ctx.output)

    splits = {split: _profile(counts[split], cfg.sequence_length) for split in SPLITS}
    for split, profile in splits.items():
        ctx.tracker.log_metrics({f"{split}_{name}": number for name, number in profile.items()})
    tokens, used = splits["train"]["tokens"], splits["train"]["utilisation"]
    ctx.headline(
        f"{tokens:,} training tokens in rows of {cfg.sequence_length}, {used:.1%} used; {encoder.vocab_size:,} in vocabulary"
    )
    facts: dict[str, Any] = {"sequence_length": cfg.sequence_length, "vocab_size": encoder.vocab_size}
    facts |= {"eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    TokenDataset.write(ctx.output, facts | splits)
    return TokenDataset(uri=ctx.output.resolve().as_uri())


def _train_tokenizer(corpus: Path, cfg: TokenizeConfig, directory: Path) -> None:
    from stages.text import tokenising

    assert cfg.vocab_size is not None  # `check` saw to it
    if cfg.resources.inline():
        tokenising.train_tokenizer(corpus, cfg.vocab_size, directory)
        return
    import ray

    from stages.storage.node import here

    ray.get(
        ray.remote(scheduling_strategy=here())(tokenising.train_tokenizer).remote(corpus, cfg.vocab_size, directory)
    )


def _take_over_tokenizer(base: Path, cfg: TokenizeConfig, directory: Path) -> None:
    from stages.text import tokenizer

    limit = json.loads((base / "config.json").read_text("utf-8")).get("max_position_embeddings")
    if isinstance(limit, int) and cfg.sequence_length > limit:
        raise StageError(
            f"stages.tokenize.sequence_length={cfg.sequence_length}: the base model reads at most {limit} tokens; "
            f"set stages.tokenize.sequence_length={limit} or less"
        )
    tokenizer.take_over(base, directory)


def _pack(corpus: "Table", cfg: TokenizeConfig, ctx: Context, windows: Path) -> dict[str, Counter[str]]:
    """Tokenise and pack each window of documents in a task; what was counted, by split."""
    from stages.text import tokenising
    from stages.text.blocks import results

    edges = [*range(0, corpus.total, tokenising.DOCUMENTS_PER_WINDOW), corpus.total]
    orders = [{"window": n, "first": first, "last": last} for n, (first, last) in enumerate(pairwise(edges))]
    shared = {"tokenizer": ctx.output / "tokenizer", "sequence_length": cfg.sequence_length, "windows": windows}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    done = 0
    for batch in results(orders, tokenising.pack_window, cfg.resources, corpus=corpus, **shared):
        for facts in map(json.loads, batch.column("facts").to_pylist()):
            done += 1
            for split, numbers in facts.items():
                counts[split].update(numbers)
        ctx.progress(0.3 + 0.6 * done / len(orders), f"{done} of {len(orders)} windows packed")
    return counts


def _write(windows: "dict[str, Table]", resources: TokenizeResources, ctx: Context) -> None:
    """Cut the windows' rows, in their order, into shards of fixed size."""
    from stages.text import tokenising
    from stages.text.blocks import results

    orders = [
        {"split": split, "shard": shard, "first": first, "last": min(first + ROWS_PER_SHARD, table.total)}
        for split, table in windows.items()
        for shard, first in enumerate(range(0, table.total, ROWS_PER_SHARD))
    ]
    for _ in results(orders, tokenising.write_packed, resources, windows=windows, output=ctx.output):
        pass
    ctx.progress(1.0, f"{len(orders)} shards written")


def _profile(counts: Counter[str], sequence_length: int) -> dict[str, int | float]:
    """One split in numbers. `unsupervised_bytes` are the text's bytes under `first_tokens`, which carry no label; with
    `supervised_bytes` they are all bytes of the texts (without prompts)."""
    places = counts["rows"] * sequence_length
    profile: dict[str, int | float] = {name: counts[name] for name in COUNTED.split()}
    profile["padding_tokens"] = places - counts["tokens"]
    profile["utilisation"] = round(counts["tokens"] / places, 6) if places else 0.0
    return profile
