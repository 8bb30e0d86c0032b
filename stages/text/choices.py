"""What a person may choose about tokens. Apart and without imports, so that configs compose in milliseconds."""

from enum import Enum


class Documentation(Enum):
    """What an object of the standard library's documentation becomes."""

    text = "text"
    chat = "chat"
    preference = "preference"


class OverLong(Enum):
    """What becomes of a document that is longer than a row."""

    split = "split"
    truncate = "truncate"
    drop = "drop"


class OverLongPair(Enum):
    """What becomes of a preference row whose prompt and longer completion do not fit."""

    drop = "drop"
    truncate_prompt = "truncate_prompt"


class Packing(Enum):
    """How documents share rows."""

    best_fit_decreasing = "best_fit_decreasing"
    none = "none"


class LossOn(Enum):
    """Which turns of a chat a model learns to write."""

    assistant = "assistant"
    last = "last"
    all = "all"


class ControlStrings(Enum):
    """What becomes of a chat in which somebody typed the words of a control token."""

    quarantine = "quarantine"
    neutralise = "neutralise"
