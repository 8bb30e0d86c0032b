"""`make preview`: three rows of the token data set as a person reads them: which tokens carry loss, where documents begin, what is padding.
Apart, because a wrong mask trains a wrong model without any error, and looking at the tokens is how it is found.

Reads what is published; what is not made yet is made first (`run.until` the stage that makes tokens). Shows without Ray and torch.
"""

import dataclasses
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from pipelines import plan, session, token_view
from pipelines.commands import as_typed
from pipelines.config import AppConfig, compose
from pipelines.console import Console
from pipelines.mistakes import ConfigError, did_you_mean
from pipelines.plan import Step
from pipelines.store import Store
from pipelines.token_view import IGNORED, Token, Vocabulary, visible
from stages.artifacts import PairDataset, TokenDataset

PARTS = ("prompt", "chosen", "rejected")
TOO_LITTLE, TOO_MUCH = 0.01, 0.95
"""Shares of supervised tokens outside of which a mask is probably not what was meant (prompts given)."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is asked for beside the pipeline: variables after the target, `make preview ROWS=5 SPLIT=validation`."""

    rows: int = 3
    split: str = "train"
    seed: int = 0
    ids: bool = False
    whole: bool = False

    @classmethod
    def from_environment(cls) -> "Wanted":
        """Raises ConfigError for what is no number."""
        return cls(
            rows=_number("ROWS", 3, least=1),
            split=os.environ.get("SPLIT") or "train",
            seed=_number("SEED", 0, least=0),
            ids=bool(_number("IDS", 0, least=0)),
            whole=bool(_number("WHOLE", 0, least=0)),
        )


def preview(console: Console, overrides: list[str], conf: str | None) -> int:
    """Find or make the token data set, then show some of its rows."""
    wanted = Wanted.from_environment()
    app = compose(overrides, conf)
    steps, store = session.planned(app)
    step = _chosen(steps, os.environ.get("STAGE", ""))
    if step.record is None:
        step, store = _made(console, app, step, overrides)
    assert step.record is not None
    dataset = plan.artifact(step, step.record, store)
    for line in shown(dataset.local(), dataset.summary(), wanted, console.out.width):
        console.out.print(line, soft_wrap=True)
    return 0


def _chosen(steps: list[Step], name: str) -> Step:
    makers = {step.name: step for step in steps if step.stage.output in (TokenDataset, PairDataset)}
    if not makers:
        raise ConfigError("this pipeline makes no tokens: nothing to preview")
    if name and name not in makers:
        raise ConfigError(f"STAGE={name}: no stage of that name makes tokens{did_you_mean(name, list(makers))}")
    return makers[name or next(iter(makers))]


def _made(console: Console, app: AppConfig, step: Step, overrides: list[str]) -> tuple[Step, Store]:
    """Run the pipeline up to the step, as `make run run.until=` does."""
    from pipelines import log_file, runner

    console.line(f"{step.name} is not made yet; now: make run run.until={step.name}")
    until = dataclasses.replace(app, run=dataclasses.replace(app.run, until=step.name))
    log_file.start(until)
    with session.signals(), session.Session(until, console) as opened:
        typed = [o for o in overrides if not o.startswith("run.until=")]
        outcome = runner.run(until, opened, as_typed("run", [*typed, f"run.until={step.name}"]))
    console.line("")
    return next(made for made in outcome.steps if made.name == step.name), Store.open(app)


def _number(name: str, default: int, least: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}={text}: wanted a whole number of at least {least}")
    return int(text)


def shown(directory: Path, summary: dict[str, Any], wanted: Wanted, width: int) -> Iterator[Text]:
    """All lines of a preview of the TokenDataset or PairDataset in `directory`."""
    from stages.text.corpus import shards
    from stages.text.shards import Table

    if not (directory / wanted.split).is_dir():
        there = sorted(path.name for path in directory.iterdir() if any(path.glob("part-*.parquet")))
        raise ConfigError(
            f"SPLIT={wanted.split}: no such split{did_you_mean(wanted.split, there)}; there are: {', '.join(there)}"
        )
    table = Table.of(shards(directory, wanted.split))
    pairs = "pairs" in summary.get(wanted.split, {})
    yield from _legend()
    yield Text("")
    yield from (_facts_of_pairs if pairs else _facts)(summary, wanted.split, table.total)
    vocabulary = Vocabulary(directory / "tokenizer")
    for number in spread(table.total, wanted.rows, wanted.seed):
        part = next(iter(table.slices(number, number + 1)))
        row = {name: part.column(name)[0].as_py() for name in part.column_names}
        place = f"{number + 1:,} of {table.total:,}"
        yield Text("")
        if pairs:
            yield from _pair(row, place, wanted, vocabulary, width)
        else:
            yield from _row(row, place, wanted, vocabulary, summary.get("pad_token_id"), width)


def spread(total: int, rows: int, seed: int) -> list[int]:
    """Numbers of rows to show: one out of each of `rows` equal stretches, so that they come from all over; ascending."""
    chance = random.Random(seed)
    rows = min(rows, total)
    return [min(total - 1, int((place + chance.random()) * total / rows)) for place in range(rows)]


def _legend() -> Iterator[Text]:
    for sign, style, words in token_view.LEGEND:
        yield Text.assemble("  ", (sign, style), " " * max(1, 9 - len(sign)), (words, "dim"))


def _facts(summary: dict[str, Any], split: str, rows: int) -> Iterator[Text]:
    """What one would ask first, and what looks wrong."""
    facts = summary.get(split, {})
    length, tokens = summary.get("sequence_length", 0), facts.get("tokens", 0)
    learned = facts.get("supervised_tokens", 0)
    share = learned / tokens if tokens else 0.0
    used = f", {facts['utilisation']:.1%} used" if "utilisation" in facts else ""
    yield Text(
        f"{split}: {rows:,} row{'' if rows == 1 else 's'} of {length:,} tokens{used}; {facts.get('documents', 0):,} documents"
    )
    yield Text(f"loss on {share:.1%} of the tokens: {learned:,} of {tokens:,}")
    if share < TOO_LITTLE:
        yield _warning(
            f"under {TOO_LITTLE:.0%} of the tokens carry loss: training would learn from almost nothing; look at the marks below"
        )
    elif share > TOO_MUCH and _has_prompts(summary, facts):
        yield _warning(
            f"over {TOO_MUCH:.0%} of the tokens carry loss although there are prompts: are they masked? look at the marks below"
        )


def _has_prompts(summary: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether something was to be left out of the loss: prompts, or turns of a chat that are not the assistant's."""
    template = summary.get("chat_template")
    return bool(facts.get("prompt_tokens")) or bool(template and template.get("loss_on") != "all")


def _facts_of_pairs(summary: dict[str, Any], split: str, rows: int) -> Iterator[Text]:
    facts = summary[split]
    parts = ", ".join(f"{facts.get(f'{part}_tokens', 0):,} {part}" for part in PARTS)
    yield Text(
        f"{split}: {rows:,} pair{'' if rows == 1 else 's'} of at most {summary.get('sequence_length', 0):,} tokens"
    )
    yield Text(f"tokens: {parts}; {facts.get('truncated', 0):,} prompts were cut")


def _warning(words: str) -> Text:
    return Text.assemble(("warning:", "yellow"), " ", words)


def _pair(row: dict[str, Any], place: str, wanted: Wanted, vocabulary: Vocabulary, width: int) -> Iterator[Text]:
    """One preference row: the prompt, then both answers, which alone carry loss."""
    yield _rule(f"pair {place}: {visible(row['id'])}, source {visible(row['source'])}", "═", "bold", width)
    for part in PARTS:
        ids, answer = row[f"{part}_ids"], part != "prompt"
        logprob = row.get(f"reference_{part}_logprob")
        base = f", log-probability under the base {logprob:.2f}" if logprob is not None else ""
        yield _rule(f"{part}: {len(ids):,} tokens, {'all' if answer else 'none'} with loss{base}", "─", "cyan", width)
        yield from _text(vocabulary, ids, [answer] * len(ids), wanted, width)


def _text(vocabulary: Vocabulary, ids: list[int], loss: list[bool], wanted: Wanted, width: int) -> Iterator[Text]:
    seen: list[Token] = list(token_view.tokens(vocabulary, ids, loss))
    for line in token_view.lines(list(token_view.folded(seen, wanted.whole)), width - 2, wanted.ids):
        yield Text("  ") + line


def _row(
    row: dict[str, Any], place: str, wanted: Wanted, vocabulary: Vocabulary, pad: int | None, width: int
) -> Iterator[Text]:
    """One packed row: a heading, then each document under its own."""
    ids, loss = row["input_ids"], [label != IGNORED for label in row["labels"]]
    edges = [*row["document_starts"], len(ids)]
    spans = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    padding = [spans.pop()] if len(spans) > 1 and _is_padding(ids, loss, *spans[-1], pad) else []
    source = f", source {visible(row['source'])}" if row.get("source") else ""
    counted = f"{len(spans)} document{'' if len(spans) == 1 else 's'}, loss on {sum(loss):,} of {len(ids):,} tokens"
    yield _rule(f"row {place}: {counted}{source}", "═", "bold", width)
    most = len(spans) if wanted.whole else token_view.FOLD_DOCUMENTS
    for number, (start, end) in enumerate(spans[:most]):
        learned = sum(loss[start:end])
        yield _rule(
            f"document {number + 1}: tokens {start:,} to {end - 1:,}, loss on {learned:,} of {end - start:,}",
            "─",
            "cyan",
            width,
        )
        yield from _text(vocabulary, ids[start:end], loss[start:end], wanted, width)
    if len(spans) > most:
        yield _rule(f"{len(spans) - most} more documents folded; WHOLE=1 shows them", "─", "dim", width)
    for start, end in padding:
        yield _rule(f"padding: {end - start:,} tokens without loss, folded", "─", "dim", width)


def _is_padding(ids: list[int], loss: list[bool], start: int, end: int, pad: int | None) -> bool:
    """What fills up a row is one token again and again, none of which is learned."""
    return not any(loss[start:end]) and set(ids[start:end]) == {ids[start] if pad is None else pad}


def _rule(words: str, line: str, style: str, width: int) -> Text:
    text = f"{line}{line} {words} "
    return Text(text + line * max(2, width - cell_len(text)), style)
