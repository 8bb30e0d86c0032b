"""What `generate` may be told: whom to ask what, how answers are chosen, and what becomes of them. Apart from the verb, which is a
story, and free of heavy imports, because the verb's config holds these."""

import re
from dataclasses import dataclass, field
from enum import Enum

from stages.contract import location
from stages.text.questions import ANSWER_FIELDS, ROW_FIELDS, check_template


class AskAs(Enum):
    """How a question is put."""

    auto = "auto"
    chat = "chat"
    text = "text"


class Kind(Enum):
    """What the new rows are."""

    text = "text"
    prompt_completion = "prompt_completion"
    chat = "chat"


class ScoreBy(Enum):
    """Where a row's score comes from."""

    answer = "answer"
    log_probability = "log_probability"


@dataclass(kw_only=True)
class Ask:
    """What the model is asked about a row."""

    template: str | None = None
    """The question, with {prompt}, {text} and {conversation} (a chat's messages, one a line) of the row in it; {{ is a brace. Null:
    the row's own prompt, its chat up to the assistant's last turn, or its text, to go on with."""
    system: str | None = None
    """System message before each question. Needs a chat."""
    form: AskAs = AskAs.auto
    """`chat`: the question is a user's turn, in the model's chat template. `text`: a text that the model goes on with. `auto`: a
    chat with every endpoint, and with a checkpoint that has a chat template."""

    def __post_init__(self) -> None:
        if self.template is not None:
            check_template("ask.template", self.template, ROW_FIELDS)
        if self.system and self.form is AskAs.text:
            raise ValueError("ask.system must be null with ask.form=text: only a chat has a system message")


@dataclass(kw_only=True)
class Decoding:
    """How answers are chosen."""

    temperature: float = 0.0
    """0: the likeliest token each time. Above: sampled, from a generator seeded with the run's seed and the row's id."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability (above 0, up to 1)."""
    max_tokens: int = 256
    """Most tokens of an answer. Prompt and answer must fit into the model's context together."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer; it ends before them."""
    keep_unfinished: bool = False
    """Keep answers that `max_tokens` cut off. What learns from them learns not to end."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature must lie between 0 and 2, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not all(self.stop):
            raise ValueError(f"stop must hold texts of at least one character, got {self.stop}")


@dataclass(kw_only=True)
class Endpoint:
    """An OpenAI-compatible server. It is not immutable: what is asked for again may be answered by other weights."""

    base_url: str
    """Address up to and with the version, as in http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model there."""
    revision: str
    """What stands behind that name today, in your words (a version, a date): change it when the model there changes, and rows
    are made anew."""
    api_key_env: str | None = location(None)
    """Name of the environment variable that holds the key. Null: none is sent."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/\s@]+(/\S*)?", self.base_url):
            shown = self.base_url.rpartition("@")[2]  # what stands before it may be a password
            raise ValueError(f"base_url must be http(s)://host:port/v1 without a user, got {shown}")
        for name in ("model", "revision"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} must be a name, got an empty text")


@dataclass(kw_only=True)
class Output:
    """What becomes of an answer."""

    kind: Kind = Kind.prompt_completion
    """Of the new rows. A chat of one's own questions keeps its messages before the answer."""
    prompt: str = "{asked}"
    """The new row's prompt (of a chat: what the user says), with {asked}, {answer}, {prompt}, {text} and {conversation} in it."""
    text: str = "{answer}"
    """The new row's text, completion or last turn, with the same names in it: prompt "{answer}" and text "{text}" make a question
    of an answer and an answer of the row."""
    source: str | None = None
    """Name of the new rows' source, by which they are weighted in training. Null: that of the row they came from."""

    def __post_init__(self) -> None:
        check_template("output.prompt", self.prompt, ANSWER_FIELDS)
        check_template("output.text", self.text, ANSWER_FIELDS)


@dataclass(kw_only=True)
class Score:
    """A number for each row; the rows themselves stay as they are."""

    by: ScoreBy = ScoreBy.answer
    """`answer`: the last number in what the model answers. `log_probability`: the mean natural log-probability of the row's own
    text (of a chat: of what the assistant says) under the checkpoint."""
    pattern: str = r"-?\d+(?:\.\d+)?"
    """Regular expression that finds the number in an answer: its first group, or all of it."""
    minimum: float | None = None
    """Least number that an answer may give; others are quarantined."""
    maximum: float | None = None
    """Largest number that an answer may give; others are quarantined."""
    keep_from: float | None = None
    """Rows that score less are dropped. Null: all stay, and their scores stand beside them."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression ({error}), got {self.pattern!r}") from None
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"minimum must be at most maximum ({self.maximum}), got {self.minimum}")
