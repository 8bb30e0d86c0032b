"""The data card: what a reviewer must know of the data before trusting a model made of it. Apart from the report, because that tells
of one run, and a card of the data whoever made it, from the summaries of the stages alone. `pipelines/data_page.py` draws it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.plan import Step
from stages.artifacts import Artifact, Checkpoint, Corpus, PairDataset, Rows, TokenDataset

Facts = Mapping[str, Any]
SPLITS = ("train", "validation")
MADE: tuple[tuple[type[Artifact], ...], ...] = ((TokenDataset, PairDataset), (Corpus,), (Rows,))
"""What a card is about: the first of these that a pipeline makes."""
EXAMPLES = "dropped/examples.jsonl"
EXAMPLES_LIMIT = 2_000_000
"""Bytes of examples that a report takes up."""


@dataclass
class Card:
    """Summaries along the way of the data; empty where a stage did not run."""

    rows: Facts = field(default_factory=dict)
    corpus: Facts = field(default_factory=dict)
    tokens: Facts = field(default_factory=dict)
    trained: Facts = field(default_factory=dict)
    """Source -> what training drew from it."""
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Reason -> rows that left for it, with their text: only where the configuration asked for that."""

    def __bool__(self) -> bool:
        return bool(self.rows or self.corpus or self.tokens)

    @classmethod
    def of(cls, steps: Sequence[Step], summaries: Mapping[str, Facts]) -> "Card":
        """From the summaries (by step) of the last data set of the pipeline and of what it was made from."""
        by_name = {step.name: step for step in steps}
        found: dict[type[Artifact], Step] = {}
        last = next((s for kinds in MADE for s in reversed(steps) if s.stage.output in kinds), None)
        while last is not None:
            found.setdefault(last.stage.output, last)
            above = [by_name[name] for name in last.cfg.inputs.values() if name in by_name]
            last = next((s for kind in (Corpus, Rows) for s in above if s.stage.output is kind), None)
        tokens = found.get(TokenDataset) or found.get(PairDataset)
        rows, corpus, made = (_summary(step, summaries) for step in (found.get(Rows), found.get(Corpus), tokens))
        card = cls(rows, corpus, made)
        for step in steps:
            if step.stage.output is Checkpoint and tokens in step.upstream:
                card.trained = _summary(step, summaries).get("sources") or {}
        return card


def _summary(step: Step | None, summaries: Mapping[str, Facts]) -> Facts:
    return summaries.get(step.name, {}) if step is not None else {}


def examples_of(steps: Sequence[Step]) -> str | None:
    """Digest of the corpus whose examples a person asked for (`examples_per_reason`), or None."""
    for step in reversed(steps):
        if step.stage.output is Corpus and step.record is not None and getattr(step.cfg, "examples_per_reason", 0) > 0:
            return step.record.digest
    return None


def read_examples(data: bytes | None) -> dict[str, list[dict[str, str]]]:
    """Reason -> examples, from `dropped/examples.jsonl`; a line that is none is left out."""
    found: dict[str, list[dict[str, str]]] = {}
    for line in (data or b"")[:EXAMPLES_LIMIT].decode("utf-8", "replace").split("\n"):
        try:
            row = json.loads(line)
            example = {name: str(row[name]) for name in ("id", "source", "text")}
            found.setdefault(str(row["reason"]), []).append(example)
        except (ValueError, KeyError, TypeError):
            continue
    return found


@dataclass(frozen=True)
class Level:
    """One line of the waterfall: a total, or what left for a reason."""

    label: str
    rows: int
    characters: int | None = None
    words: str = ""
    left: bool = False
    bad: bool = False
    """It left because it could not be used; else because a rule says so."""


def waterfall(card: Card) -> list[Level]:
    """From what the files hold to what became tokens: totals, and between them what left and why."""
    from stages.text.faults import RULES

    levels: list[Level] = []
    if card.rows:
        rows, quarantined = int(card.rows.get("rows", 0)), int(card.rows.get("quarantined", 0))
        if quarantined:
            levels.append(Level("found", rows + quarantined))
            levels += [
                Level(reason, int(count), words=RULES.get(reason, ""), left=True, bad=True)
                for reason, count in by_count(card.rows.get("reasons") or {})
            ]
        levels.append(Level("read", rows, card.rows.get("characters")))
    steps = {entry["step"]: entry for entry in card.corpus.get("waterfall") or []}
    if steps:
        words = card.corpus.get("reasons") or {}
        came = steps.pop("in", None)
        if came and not (levels and levels[-1].rows == came["rows"]):
            levels.append(Level("into clean", int(came["rows"]), came["characters"]))
        out = steps.pop("out", None)
        for name, entry in steps.items():
            if entry["rows"] or entry["characters"]:
                rewrote = not entry["rows"]
                says = "shortened by rewriting" if rewrote else words.get(name, "")
                levels.append(Level(name, int(entry["rows"]), entry["characters"], says, left=True))
        if out:
            levels.append(Level("kept", int(out["rows"]), out["characters"]))
    pairs = "pairs" in card.tokens.get("train", {})
    entries = [
        {"step": e["step"], "rows": int(e["rows" if pairs else "documents"])}
        for e in card.tokens.get("waterfall") or []
    ]
    words = card.tokens.get("reasons") or {}
    if entries and not (levels and levels[-1].rows == entries[0]["rows"]):
        levels.append(Level("into pair" if pairs else "into tokenize", entries[0]["rows"]))
    levels += [
        Level(e["step"], e["rows"], words=words.get(e["step"], ""), left=True) for e in entries[1:-1] if e["rows"]
    ]
    if entries:
        levels.append(Level("became pairs" if pairs else "became tokens", entries[-1]["rows"]))
    return levels


def shares(card: Card) -> list[dict[str, Any]]:
    """For each source: what was asked for (its share of the weights) and what training gets, with its facts by stage."""
    stages = [{s["name"]: s for s in facts.get("sources") or []} for facts in (card.rows, card.corpus, card.tokens)]
    names = list(dict.fromkeys(name for stage in stages for name in stage))
    weights = {n: float(next((s[n]["weight"] for s in stages if n in s and "weight" in s[n]), 1.0)) for n in names}
    tokens = {n: int(stages[2].get(n, {}).get("train", {}).get("tokens", 0)) for n in names}
    total, all_tokens = sum(weights.values()) or 1.0, sum(tokens.values())
    return [
        {
            "name": name,
            "weight": weights[name],
            "wanted": weights[name] / total,
            "stored": tokens[name] / all_tokens if all_tokens else None,
            "drawn": (card.trained.get(name) or {}).get("share"),
            "epochs": (card.trained.get(name) or {}).get("epochs"),
            "tokens": tokens[name],
            "read": stages[0].get(name, {}),
            "kept": stages[1].get(name, {}),
        }
        for name in names
    ]


def by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((str(k), int(v)) for k, v in counts.items()), key=lambda item: (-item[1], item[0]))


def lines(card: Card) -> Iterator[tuple[str, str, str]]:
    """The card in short, for the description in MLflow: (what, number, remark)."""
    found = shares(card)
    for source in found if len(found) > 1 else ():
        drawn = source["drawn"] if source["drawn"] is not None else source["stored"]
        got = f", {drawn:.1%} of training" if drawn is not None else ""
        remark = f"{source['read'].get('format', '')}; asked {source['wanted']:.1%}{got}".lstrip("; ")
        yield f"source {source['name']}", f"{source['read'].get('rows', source['kept'].get('rows', 0)):,}", remark
    for level in _worst(waterfall(card)):
        characters = f"{level.characters:,} characters" if level.characters else ""
        yield level.label.replace("_", " "), f"{'−' if level.left else ''}{level.rows:,}", characters or level.words
    for split in SPLITS:
        facts = card.tokens.get(split) or {}
        if "pairs" in facts:
            answers = facts.get("chosen_tokens", 0) + facts.get("rejected_tokens", 0)
            yield f"{split} pairs", f"{facts['pairs']:,}", f"{answers:,} tokens in answers"
        elif facts:
            share = facts.get("supervised_tokens", 0) / (facts.get("tokens") or 1)
            yield (
                f"{split} tokens",
                f"{facts.get('tokens', 0):,}",
                f"{facts.get('documents', 0):,} documents; loss on {share:.1%}",
            )
    if "split_overlap" in card.corpus:
        yield "on both sides of the split", f"{card.corpus['split_overlap']:,}", "contents"


def _worst(levels: Sequence[Level], most: int = 8) -> Iterable[Level]:
    """All totals, and the reasons that took the most rows."""
    left = sorted((level for level in levels if level.left and level.rows), key=lambda level: -level.rows)[:most]
    return [level for level in levels if not level.left or level in left]
