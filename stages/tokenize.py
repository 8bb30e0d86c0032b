"""Turns a corpus into packed rows of token ids. Apart from clean: another model needs other tokens of the same text."""

import json
import shutil
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import Checkpoint, Corpus, TokenDataset
from stages.contract import Context, StageConfig, StageError, TaskResources, stage
from stages.text.choices import OverLong, Packing

if TYPE_CHECKING:
    from stages.text.shards import Table
    from stages.text.tally import Tally
    from stages.text.tokenising import Settings

LEFT = "dropped"
TOKENS_PER_SHARD = 1 << 23
"""8 M tokens, and at most 1,024 rows: 64 MB of ids and labels."""
ROWS_PER_SHARD = 1_024
ROWS_PER_GROUP = 128
"""So many rows' worth of pieces are packed together at least: what a group wastes is about half a row at its end."""
LEFT_PER_SHARD = 100_000
BYTES_AND_EOS = 257


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
    """Tokens in a row (context length in training)."""
    over_long: OverLong = OverLong.split
    """What becomes of a document that is longer than a row: `split` into pieces (nothing is lost), `truncate` to its
    beginning, or `drop`. What leaves is counted."""
    packing: Packing = Packing.best_fit_decreasing
    """`best_fit_decreasing`: documents of one source share rows, isolated from each other. `none`: a row for each."""
    max_bad_fraction: float = 0.01
    """The stage fails when more than this share of the rows cannot become tokens (0 to 1). What over_long removes is
    not among them."""
    resources: TokenizeResources = field(default_factory=TokenizeResources)
    """How the work is spread."""

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.vocab_size < BYTES_AND_EOS:
            raise ValueError(f"vocab_size must be at least {BYTES_AND_EOS} (all bytes and EOS), got {self.vocab_size}")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction must be between 0 and 1, got {self.max_bad_fraction}")
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
    from stages.text.tally import SPLITS, Tally
    from stages.text.tokenising import Settings
    from stages.text.tokenizer import Encoder

    tokenizer = ctx.output / "tokenizer"
    ctx.progress(0.0, "tokenizer")
    if base is None:
        _train_tokenizer(corpus.local(), cfg, tokenizer)
    else:
        _take_over_tokenizer(base.local(), cfg, tokenizer)
    encoder = Encoder.load(tokenizer)
    ctx.progress(0.3, f"tokenizer of {encoder.vocab_size:,} tokens")

    settings = Settings(
        tokenizer=tokenizer, sequence_length=cfg.sequence_length, over_long=cfg.over_long, packing=cfg.packing
    )
    parts = ctx.work / "parts"
    shutil.rmtree(parts, ignore_errors=True)  # another attempt's
    for name in ("chunks", LEFT, *SPLITS):
        (parts / name).mkdir(parents=True)
    tally = Tally(_tokenise(Table.of(shards(corpus.local())), settings, cfg.resources, ctx, parts))
    tally.refuse_above(cfg.max_bad_fraction)
    tally.refuse_empty()
    _pack(tally, settings, cfg.resources, ctx, parts)
    _write(parts, cfg, ctx)
    shutil.rmtree(parts)
    remove_partial(ctx.output)

    splits = {split: tally.profile(split, cfg.sequence_length) for split in SPLITS}
    for split, profile in splits.items():
        ctx.tracker.log_metrics({f"{split}_{name}": number for name, number in profile.items()})
    ctx.tracker.log_metrics({f"dropped_{reason}": count for reason, count in sorted(tally.reasons.items())})
    tokens, used = splits["train"]["tokens"], splits["train"]["utilisation"]
    left = ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.reasons.items()))
    ctx.headline(
        f"{tokens:,} training tokens in rows of {cfg.sequence_length}, {used:.1%} used; "
        f"{encoder.vocab_size:,} in vocabulary" + (f"; dropped: {left}" if left else "")
    )
    facts: dict[str, Any] = {"sequence_length": cfg.sequence_length, "vocab_size": encoder.vocab_size}
    facts |= {"eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    facts |= {"waterfall": tally.waterfall(), "sources": tally.sources(_weights(corpus))}
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


def _tokenise(
    corpus: "Table", settings: "Settings", resources: TokenizeResources, ctx: Context, parts: Path
) -> list[dict[str, Any]]:
    """Tokenise each window of documents in a task; what each reports."""
    from stages.text import tokenising
    from stages.text.blocks import results

    edges = [*range(0, corpus.total, tokenising.DOCUMENTS_PER_WINDOW), corpus.total]
    orders = [{"window": n, "first": first, "last": last} for n, (first, last) in enumerate(pairwise(edges))]
    shared = {"settings": settings, "chunks": parts / "chunks", "left": parts / LEFT}
    reports: list[dict[str, Any]] = []
    for batch in results(orders, tokenising.tokenise_window, resources, corpus=corpus, **shared):
        reports += map(json.loads, batch.column("facts").to_pylist())
        ctx.progress(0.3 + 0.4 * len(reports) / len(orders), f"{len(reports)} of {len(orders)} windows tokenised")
    return reports


def _pack(tally: "Tally", settings: "Settings", resources: TokenizeResources, ctx: Context, parts: Path) -> None:
    """Make rows of pieces, a group of chunks of one source in a task; count the rows."""
    from stages.text import tokenising
    from stages.text.blocks import results

    orders = [
        {"split": split, "source": source, "group": group, "chunks": [chunk["name"] for chunk in chunks]}
        for split, sources in tally.chunks.items()
        for group, (source, chunks) in enumerate(
            (source, chunks)
            for source in sorted(sources)
            for chunks in _groups(sources[source], ROWS_PER_GROUP * settings.sequence_length)
        )
    ]
    shared = {"settings": settings, "chunks": parts / "chunks", "packed": parts}
    done = 0
    for batch in results(orders, tokenising.pack_group, resources, **shared):
        for facts in map(json.loads, batch.column("facts").to_pylist()):
            tally.counts[facts["split"]][facts["source"]]["rows"] += facts["rows"]
            done += 1
        ctx.progress(0.7 + 0.2 * done / len(orders), f"{done} of {len(orders)} groups packed")


def _groups(chunks: list[dict[str, Any]], tokens: int) -> list[list[dict[str, Any]]]:
    """Neighbouring chunks that have at least so many tokens together; a rest with fewer joins the group before it."""
    groups: list[list[dict[str, Any]]] = []
    size = tokens
    for chunk in chunks:
        if size >= tokens:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk["tokens"]
    if len(groups) > 1 and size < tokens:
        rest = groups.pop()
        groups[-1] += rest
    return groups


def _write(parts: Path, cfg: TokenizeConfig, ctx: Context) -> None:
    """Cut the rows, in their order, into shards of fixed size; after them the ids of what left, with reasons."""
    from stages.text import tokenising
    from stages.text.blocks import results
    from stages.text.shards import Table
    from stages.text.tally import SPLITS

    tables = {name: Table.of(sorted((parts / name).glob("part-*.parquet"))) for name in (*SPLITS, LEFT)}
    rows = min(ROWS_PER_SHARD, max(1, TOKENS_PER_SHARD // cfg.sequence_length))
    sizes = dict.fromkeys(SPLITS, rows) | {LEFT: LEFT_PER_SHARD}
    orders = [
        {"table": name, "shard": shard, "first": first, "last": min(first + sizes[name], table.total)}
        for name, table in tables.items()
        for shard, first in enumerate(range(0, table.total, sizes[name]))
    ]
    for _ in results(orders, tokenising.write_packed, cfg.resources, packed=tables, output=ctx.output):
        pass
    ctx.progress(1.0, f"{len(orders)} shards written")


def _weights(corpus: Corpus) -> dict[str, float]:
    """Name -> weight of the sources that the corpus was made of, as ingest was told."""
    return {source["name"]: float(source["weight"]) for source in corpus.summary().get("sources", [])}
