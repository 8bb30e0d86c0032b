"""Turns a corpus into packed rows of token ids. Apart from clean: another model needs other tokens of the same text."""

import json
import os
import shutil
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import Checkpoint, Corpus, TokenDataset
from stages.contract import Context, Resolver, StageConfig, StageError, TaskResources, location, stage
from stages.text.choices import ControlStrings, LossOn, OverLong, Packing

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
    """A tokenizer (trained here, or the base model's), how chats are written, and rows of one length."""

    vocab_size: int | None = None
    """Tokens of the byte-level BPE that is trained on the training split, the 256 bytes and EOS among them. It comes out
    smaller when the text is too short for so many. Null with a base model, whose tokenizer is taken as it is."""
    add_tokens: list[str] = field(default_factory=list)
    """Words that become tokens of their own, behind those that the tokenizer has. Training makes room for them in the model."""
    add_control_tokens: list[str] = field(default_factory=list)
    """The same for tokens that a chat template writes and no text becomes, such as <|im_end|>."""
    chat_template: str | None = location(None)
    """How chats are written: a file with a template, or the name of a built-in one (chatml, gemma, inst, llama3, zephyr). Null:
    the base model's own. It travels with the tokenizer, and a server answers in it."""
    as_chat: bool = False
    """Take rows of prompt and completion as a user's turn and the assistant's answer, in the chat template. False: as two
    texts, one behind the other."""
    loss_on: LossOn = LossOn.assistant
    """What is learned of a chat: all turns of the `assistant`, its `last` turn, or `all` that is said."""
    control_strings: ControlStrings = ControlStrings.quarantine
    """Chats in which somebody typed the words of a control token: `quarantine` leaves them out, `neutralise` takes them as
    the text that they are."""
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
        least = BYTES_AND_EOS + len(self.add_control_tokens)
        if self.vocab_size is not None and self.vocab_size < least:
            raise ValueError(
                f"vocab_size must be at least {least} (all bytes, EOS and add_control_tokens), got {self.vocab_size}"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction must be between 0 and 1, got {self.max_bad_fraction}")
        for name in ("add_tokens", "add_control_tokens"):
            if not all(token.strip() for token in getattr(self, name)):
                raise ValueError(f"{name} must be words of at least one letter, got {getattr(self, name)}")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {self.sequence_length}")

    def check(self, connected: frozenset[str]) -> None:
        if "base" in connected and self.vocab_size is not None:
            raise ValueError(f"vocab_size must be null with a base model, got {self.vocab_size}: its tokenizer is used")
        if "base" not in connected and self.vocab_size is None:
            raise ValueError("vocab_size must be set when no base model is connected: a tokenizer is trained")


def _sources(cfg: TokenizeConfig, resolver: Resolver) -> dict[str, str]:
    """A template's content decides, not where its file stands; a built-in one is part of the code."""
    from stages.text.builtin_templates import TEMPLATES

    if cfg.chat_template is None:
        return {}
    name = cfg.chat_template
    return {"chat_template": f"built-in {name}" if name in TEMPLATES else resolver.path(Path(name))}


@stage(libraries=("tokenizers", "transformers", "jinja2", "pyarrow"), ray=True, sources=_sources)
def tokenize(cfg: TokenizeConfig, ctx: Context, corpus: Corpus, base: Checkpoint | None = None) -> TokenDataset:
    """Get a tokenizer, tokenise, pack, write."""
    from stages.text.corpus import shards
    from stages.text.shards import Table, remove_partial
    from stages.text.tally import SPLITS, Tally
    from stages.text.tokenising import Settings
    from stages.text.tokenizer import Encoder

    _refuse_preferences(corpus)
    tokenizer = ctx.output / "tokenizer"
    ctx.progress(0.0, "tokenizer")
    facts: dict[str, Any] = {"added_tokens": _tokenizer(cfg, corpus, base, tokenizer)}
    encoder = Encoder.load(tokenizer)
    settings = Settings(
        tokenizer=tokenizer,
        sequence_length=cfg.sequence_length,
        over_long=cfg.over_long,
        packing=cfg.packing,
        as_chat=cfg.as_chat,
        loss_on=cfg.loss_on,
        control_strings=cfg.control_strings,
    )
    template = _chat_template(cfg, corpus, settings, tokenizer)
    ctx.progress(0.3, f"tokenizer of {encoder.vocab_size:,} tokens")

    if cfg.resources.inline():
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # no other process is at work
    parts = ctx.output / "parts"  # no other attempt writes here
    for name in ("chunks", LEFT, *SPLITS):
        (parts / name).mkdir(parents=True)
    tally = Tally(_tokenise(Table.of(shards(corpus.local())), settings, cfg.resources, ctx, parts))
    tally.refuse_above(cfg.max_bad_fraction)
    weights = _weights(corpus)
    tally.refuse_empty(weights)
    _pack(tally, settings, cfg.resources, ctx, parts)
    _write(parts, cfg, ctx)
    shutil.rmtree(parts)
    remove_partial(ctx.output)

    splits = {split: tally.profile(split, cfg.sequence_length) for split in SPLITS}
    for split, profile in splits.items():
        ctx.tracker.log_metrics({f"{split}_{name}": number for name, number in profile.items()})
    ctx.tracker.log_metrics({f"dropped_{reason}": count for reason, count in sorted(tally.reasons.items())})
    ctx.headline(f"{tally.described(cfg.sequence_length)}; {encoder.vocab_size:,} in vocabulary{tally.left}")
    facts |= {"sequence_length": cfg.sequence_length, "vocab_size": encoder.vocab_size, "chat_template": template}
    facts |= {"eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    facts["stop_token_ids"] = sorted({encoder.eos_id, *(template["terminators"] if template else ())})
    facts |= {"waterfall": tally.waterfall(), "sources": tally.sources(weights)}
    facts |= {"reasons": tally.words(), "tokens_log2": tally.lengths()}
    TokenDataset.write(ctx.output, facts | splits)
    return TokenDataset(uri=ctx.output.resolve().as_uri())


def _refuse_preferences(corpus: Corpus) -> None:
    from stages.text.record import PREFERENCE
    from stages.text.tokenising import kinds

    if PREFERENCE in kinds(corpus.local()):
        raise StageError(
            "the corpus holds preference pairs (chosen, rejected), which tokenize cannot use: connect it to the `pair` "
            "verb (make run pipeline=preferences), or ingest them apart from the other rows"
        )


def _tokenizer(cfg: TokenizeConfig, corpus: Corpus, base: Checkpoint | None, directory: Path) -> int:
    """Train one, or take over the base's; add tokens. How many the base has not."""
    from stages.text.tokenizer import extend

    if base is None:
        _train_tokenizer(corpus.local(), cfg, directory)
    else:
        _take_over_tokenizer(base.local(), cfg, directory)
    if not cfg.add_tokens and not cfg.add_control_tokens:
        return 0
    added = extend(directory, cfg.add_tokens, cfg.add_control_tokens)
    return added if base is not None else 0


def _train_tokenizer(corpus: Path, cfg: TokenizeConfig, directory: Path) -> None:
    from stages.text import tokenising

    assert cfg.vocab_size is not None  # `check` saw to it
    arguments = (corpus, cfg.vocab_size, list(cfg.add_control_tokens), directory)
    if cfg.resources.inline():
        tokenising.train_tokenizer(*arguments)
        return
    import ray

    from stages.storage.node import here

    ray.get(ray.remote(scheduling_strategy=here())(tokenising.train_tokenizer).remote(*arguments))


def _chat_template(cfg: TokenizeConfig, corpus: Corpus, settings: "Settings", directory: Path) -> dict[str, Any] | None:
    """Put the template beside the tokenizer and try it on the first chats. What was found; None when there are none."""
    from stages.text import tokenising
    from stages.text.template_check import SAMPLES

    chats = tokenising.samples(corpus.local(), settings, SAMPLES)
    if not chats and cfg.chat_template is None:
        return None
    from stages.text.templates import Template

    template = Template.load(directory, cfg.chat_template, cfg.control_strings)
    template.save(directory)
    return template.check(chats, cfg.loss_on) | {"loss_on": cfg.loss_on.value, "as_chat": cfg.as_chat}


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
    from stages.text.pieces import groups

    orders = [
        {"split": split, "source": source, "group": group, "chunks": [chunk["name"] for chunk in chunks]}
        for split, sources in tally.chunks.items()
        for group, (source, chunks) in enumerate(
            (source, chunks)
            for source in sorted(sources)
            for chunks in groups(sources[source], ROWS_PER_GROUP * settings.sequence_length)
        )
    ]
    shared = {"settings": settings, "chunks": parts / "chunks", "packed": parts}
    done = 0
    for batch in results(orders, tokenising.pack_group, resources, **shared):
        for facts in map(json.loads, batch.column("facts").to_pylist()):
            tally.counts[facts["split"]][facts["source"]]["rows"] += facts["rows"]
            done += 1
        ctx.progress(0.7 + 0.2 * done / len(orders), f"{done} of {len(orders)} groups packed")


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
