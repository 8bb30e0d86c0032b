"""The steps of clean that look at one row alone, in their order. Apart, because the order is what makes them right: a row is
compared after it was repaired and before it is masked.

    repair -> normalise -> length -> (exact duplicates) -> quality, language -> (near-duplicates) -> contamination -> masks

The steps in brackets need all rows; here stands what they compare, and clean gives the first reason in this order.
"""

from collections import Counter
from dataclasses import dataclass, field

from stages.text.curation import NearDuplicates
from stages.text.normalise import key_of, normal_form, side
from stages.text.record import Record, prose
from stages.text.rewriting import is_nested

CONTAMINATED = "contaminated"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What clean was asked to do to each row. None: a step left out."""

    normalise: bool
    min_characters: int
    max_characters: int
    near_duplicates: NearDuplicates | None


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

    def judge(self, raw: Record) -> Judged:
        plain = normal_form(raw)
        record = plain if self.steps.normalise and not is_nested(raw) else raw
        said = prose(record)
        judged = Judged(record, len(prose(raw)), len(said), len(said), len(said.encode()))
        self._length(judged, plain)
        if judged.reason:
            return judged
        judged.key = key_of(plain)
        judged.raw = judged.key if plain is raw else key_of(raw)
        judged.side = side(judged.key)
        if self.steps.near_duplicates is not None:
            judged.compared = said
        return judged

    def _length(self, judged: Judged, plain: Record) -> None:
        """Limits are told after normalisation, also of rows that keep their form: white space alone teaches nothing."""
        characters = len(prose(plain))
        if characters - len(plain.prompt) < self.steps.min_characters:
            judged.reason, judged.detail = "too_short", f"{characters - len(plain.prompt)} characters"
        elif characters > self.steps.max_characters:
            judged.reason, judged.detail = "too_long", f"{characters} characters"
