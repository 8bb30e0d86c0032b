"""What became of the documents on their way to tokens, in numbers: a waterfall by reason, a profile of each split, one of
each source. Apart from the verb, because every row that does not become tokens must be accounted for in one place."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from stages.contract import StageError
from stages.text.pieces import LENGTH
from stages.text.template_check import FIXES

SPLITS = ("train", "validation")
COUNTED = (
    "rows documents pieces tokens prompt_tokens prompt_bytes supervised_tokens supervised_bytes first_tokens"
    " unsupervised_bytes dropped_pieces dropped_tokens split_documents truncated_documents truncated_tokens"
)
OF_SOURCE = "rows documents tokens supervised_tokens supervised_bytes first_tokens unsupervised_bytes"
POLICY = {
    "over_long": "longer than stages.tokenize.sequence_length, with stages.tokenize.over_long=drop",
    "answer_cut_off": "nothing to learn within stages.tokenize.sequence_length: the prompt alone fills the row",
}
"""Reasons that a person has chosen: counted, but no sign of bad rows."""
BAD = {"no_supervised_tokens": "there is no token to learn", **FIXES}
"""Reasons that lie in the rows."""
LINES_SHOWN = 5


class Tally:
    """Adds up what the windows report. Order of arrival does not matter."""

    def __init__(self, reports: Iterable[Mapping[str, Any]]) -> None:
        self.came: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.first: dict[str, list[str]] = defaultdict(list)
        self.counts: dict[str, dict[str, Counter[str]]] = {split: defaultdict(Counter) for split in SPLITS}
        """split -> source -> numbers"""
        self.chunks: dict[str, dict[str, list[dict[str, Any]]]] = {split: defaultdict(list) for split in SPLITS}
        """split -> source -> files of pieces, in the order of the documents"""
        for report in sorted(reports, key=lambda report: int(report["window"])):
            self.came.update(report["came"])
            self.reasons.update(report["reasons"])
            for reason, ids in report["first"].items():
                self.first[reason] += ids[: LINES_SHOWN - len(self.first[reason])]
            for found in report["found"]:
                split, source = found["split"], found["source"]
                self.counts[split][source].update(found["counts"])
                self.chunks[split][source] += found["chunks"]

    def refuse_above(self, share: float) -> None:
        """StageError, with the table of reasons, when more than this share of the documents was bad."""
        bad = {reason: count for reason, count in self.reasons.items() if reason not in POLICY}
        total, came = sum(bad.values()), self.came.total()
        if total <= share * came:
            return
        lines = [
            f"  {count:>9,}  {reason}: {BAD.get(reason, 'the chat template refuses it')}; {', '.join(self.first[reason])}"
            for reason, count in sorted(bad.items(), key=lambda item: (-item[1], item[0]))
        ]
        raise StageError(
            f"{total:,} of {came:,} rows ({total / came:.1%}) do not become tokens, more than "
            f"stages.tokenize.max_bad_fraction={share:g} allows; mend the rows or raise it:\n" + "\n".join(lines)
        )

    def refuse_empty(self, weights: Mapping[str, float]) -> None:
        """StageError when a split has nothing to learn from, or when a source that has a weight has no row to draw."""
        for name in weights:
            if len(weights) > 1 and not self.counts["train"][name]["pieces"]:
                raise StageError(
                    f"source {name!r} has a weight of {weights[name]:g} in the mix but no row left to train on; add rows to "
                    f"it, loosen the rules that dropped them, or take stages.ingest.mix.{name} out"
                )
        for split in SPLITS:
            if not any(counts["pieces"] for counts in self.counts[split].values()):
                left = "".join(f"\n  {count:>9,}  {reason}" for reason, count in sorted(self.reasons.items()))
                raise StageError(
                    f"the {split} split of the corpus has no text to learn from or to score; add rows"
                    + (f" or keep those that left:{left}" if left else "")
                )

    def described(self, sequence_length: int) -> str:
        """The training split in a sentence, and a warning when a tenth of its documents is longer than a row."""
        train, counts = self.profile("train", sequence_length), sum(self.counts["train"].values(), Counter())
        said = f"{train['tokens']:,} training tokens in rows of {sequence_length}, {train['utilisation']:.1%} used"
        cut = (counts["split_documents"] + counts["truncated_documents"]) / max(counts["documents"], 1)
        return f"{said}; {cut:.0%} of the documents are longer than a row" if cut >= 0.1 else said

    @property
    def left(self) -> str:
        """What did not become tokens, by reason; nothing when all did."""
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.reasons.items()))
        return f"; dropped: {counts}" if counts else ""

    def waterfall(self) -> list[dict[str, str | int]]:
        """Documents that came in, that left for each reason, and that became tokens."""
        steps = {"in": self.came.total()} | dict(sorted(self.reasons.items()))
        steps["out"] = self.came.total() - self.reasons.total()
        return [{"step": step, "documents": documents} for step, documents in steps.items()]

    def profile(self, split: str, sequence_length: int) -> dict[str, int | float]:
        """One split in numbers. `unsupervised_bytes` are the text's bytes under `first_tokens`, which carry no label; with
        `supervised_bytes` they are all bytes that are to be learned."""
        counts = sum(self.counts[split].values(), Counter())
        places = counts["rows"] * sequence_length
        profile: dict[str, int | float] = {name: counts[name] for name in COUNTED.split()}
        profile["padding_tokens"] = places - counts["tokens"]
        profile["utilisation"] = round(counts["tokens"] / places, 6) if places else 0.0
        return profile

    def lengths(self) -> dict[str, int]:
        """Power of two -> documents with so many tokens: n counts those from 2^(n-1) to 2^n - 1."""
        every = [counts for sources in self.counts.values() for counts in sources.values()]
        total = sum(every, Counter())
        return {name.removeprefix(LENGTH): count for name, count in total.items() if name.startswith(LENGTH)}

    def words(self) -> dict[str, str]:
        """What the reasons mean for which documents left."""
        known = {**POLICY, **BAD}
        return {reason: known.get(reason, "the chat template refuses it") for reason in sorted(self.reasons)}

    def sources(self, weights: Mapping[str, float]) -> list[dict[str, Any]]:
        """For each source, by name: its weight and what it has in each split."""
        names = sorted({*weights, *(source for split in SPLITS for source in self.counts[split])})
        return [
            {
                "name": name,
                "weight": weights.get(name, 1.0),
                **{split: {unit: self.counts[split][name][unit] for unit in OF_SOURCE.split()} for split in SPLITS},
            }
            for name in names
        ]
