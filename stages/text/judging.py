"""The steps of clean that look at one row alone, in their order. Apart, because the order is what makes them right: a row is
compared after it was repaired and before it is masked.

    repair -> normalise -> length -> (exact duplicates) -> quality, language -> (near-duplicates) -> contamination -> masks

The steps in brackets need all rows; here stands what they compare, and clean gives the first reason in this order.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stages.text.curation import Language, NearDuplicates, Pii, Quality, UnicodeRepair
from stages.text.decontaminate import REASON as CONTAMINATED
from stages.text.decontaminate import Index
from stages.text.normalise import key_of, normal_form, side
from stages.text.record import TEXT, Record, learned, prose
from stages.text.rewriting import is_nested, rewritten, turns


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What clean was asked to do to each row. None: a step left out."""

    unicode_repair: UnicodeRepair | None
    normalise: bool
    min_characters: int
    max_characters: int
    prose_kinds: frozenset[str]
    quality: Quality | None
    language: Language | None
    near_duplicates: NearDuplicates | None
    evaluation_sets: Index | None
    max_overlap: float
    pii: Pii | None


@dataclass(slots=True)
class Judged:
    """A row as it leaves, or the reason why it does not; and what others are compared with."""

    record: Record
    came: int
    """Characters of the row as it came."""
    repaired: int
    """Characters once it was repaired and normalised."""
    leaves: int
    """Characters as it leaves."""
    size: int
    """UTF-8 bytes as it leaves."""
    reason: str = ""
    """Why it leaves by itself; whether it is a duplicate is not known here."""
    detail: str = ""
    """The value that broke the rule, or what was found."""
    language: str = ""
    masked: Counter[str] = field(default_factory=Counter)
    """Kind of personal data -> occurrences."""
    key: bytes = b""
    """32 bytes, equal for rows that are equal after normalisation. Empty: a length limit keeps it out of all comparison."""
    raw: bytes = b""
    """The same of the row as it came."""
    side: int = 0
    """64 bits that decide its side of the split, from the content as it leaves."""
    compared: str | None = None
    """What near-duplicates are told by. None: not compared."""


class Judge:
    """Loads what the steps need once; `judge(record)` for each row."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._rules = self._languages = self._masker = None
        if steps.quality is not None:
            from stages.text.quality import Rules

            self._rules = Rules(steps.quality)
        if steps.language is not None:
            from stages.text.language import Identifier

            self._languages = Identifier(steps.language)
        if steps.pii is not None:
            from stages.text.pii import Masker

            self._masker = Masker(steps.pii)

    def judge(self, raw: Record) -> Judged:
        record = rewritten(raw, _repair(self.steps.unicode_repair)) if self.steps.unicode_repair else raw
        plain = normal_form(record)
        if self.steps.normalise and not is_nested(record):
            record = plain
        said = prose(record)
        judged = Judged(record, len(prose(raw)), len(said), len(said), len(said.encode()))
        self._length(judged, plain)
        if judged.reason:
            return judged
        judged.key = key_of(plain)
        judged.raw = judged.key if plain is raw else key_of(raw)
        judged.side = side(judged.key)
        if record.kind in self.steps.prose_kinds:
            self._prose(judged, said)
        if judged.reason:
            return judged
        if self.steps.near_duplicates is not None:
            judged.compared = turns(judged.record)
        self._contamination(judged)
        if self._masker is not None and not judged.reason:
            judged.record, judged.masked = masked(judged.record, self._masker.mask)
        if judged.record is not record:
            said = prose(judged.record)
            judged.leaves, judged.size = len(said), len(said.encode())
            judged.side = side(key_of(normal_form(judged.record)))
        return judged

    def _length(self, judged: Judged, plain: Record) -> None:
        """Limits are told after normalisation, also of rows that keep their form: white space alone teaches nothing."""
        characters = len(prose(plain))
        if characters - len(plain.prompt) < self.steps.min_characters:
            judged.reason, judged.detail = "too_short", f"{characters - len(plain.prompt)} characters"
        elif characters > self.steps.max_characters:
            judged.reason, judged.detail = "too_long", f"{characters} characters"

    def _prose(self, judged: Judged, said: str) -> None:
        if self._rules is not None:
            judged.reason = self._rules.reason(said) or ""
            if judged.reason:
                return
            if judged.record.kind == TEXT and (left := self._rules.lines(said)) != said:
                judged.record = replace(judged.record, text=left)
        if self._languages is not None:
            judged.language, probability = self._languages.identify(said)
            if reason := self._languages.reason(judged.language):
                judged.reason, judged.detail = reason, f"{judged.language} {probability:.2f}"

    def _contamination(self, judged: Judged) -> None:
        """A row may repeat an evaluation text in what it says alone, or in all that is learned of it."""
        if self.steps.evaluation_sets is not None:
            texts = dict.fromkeys((prose(judged.record), learned(judged.record)))
            share, task = max(map(self.steps.evaluation_sets.overlap, texts), key=lambda found: found[0])
            if share > self.steps.max_overlap:
                judged.reason, judged.detail = CONTAMINATED, f"{task} {share:.3f}"


def masked(record: Record, mask: Callable[[str], tuple[str, Counter[str]]]) -> tuple[Record, Counter[str]]:
    """The row without personal data, and how much of each kind it held."""
    counts: Counter[str] = Counter()

    def change(text: str) -> str:
        text, found = mask(text)
        counts.update(found)
        return text

    return rewritten(record, change), counts


def _repair(cfg: UnicodeRepair) -> Callable[[str], str]:
    from stages.text.unicode_repair import repair

    return lambda text: repair(text, cfg)
