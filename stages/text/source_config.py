"""What a person says about a source of rows. Apart from the stage, which takes one or a mix of several, and light, because plans and
compositions load it.
"""

import math
import re
from dataclasses import dataclass

from stages.contract import location
from stages.text.choices import Documentation
from stages.text.files import Container, TextUnit
from stages.text.formats import EncodingErrors, Fields, Format


@dataclass(kw_only=True)
class SourceConfig:
    """Where rows come from, what they are called there, and how much they count."""

    path: str | None = location(None)
    """A file, a directory or a glob, also below s3://, gs:// or az://: .jsonl, .json, .parquet, .csv, .tsv, .txt or .md, each
    but .parquet also as .gz or .zst. Null without `hub`: the documentation of the installed Python standard library."""
    hub: str | None = None
    """A hub's data set (`owner/name`) in place of a path. Only its files are taken, never code that it brings."""
    revision: str = location("main")
    """Branch, tag or commit of the hub's data set. It is resolved to a commit when the run is planned."""
    subset: str | None = None
    """Subset (config) of the hub's data set. Null: its default one."""
    split: str = "train"
    """Split of the hub's data set."""
    container: Container = Container.auto
    """How rows are packed in the files, for files whose names do not say it."""
    format: Format = Format.auto
    """How a row says what it has to say. `auto`: what most of the first usable rows are; rows of another format are
    quarantined."""
    text_field: str = "text"
    """The field that holds the text of a row of plain text."""
    prompt_field: str = "prompt"
    """The field that holds what a model is given, of a row of prompt and completion or of a preference."""
    completion_field: str = "completion"
    """The field that holds what a model should answer, of a row of prompt and completion: loss is taken on it alone. Where
    there is no `completion`, `response` is taken."""
    messages_field: str | None = None
    """The field that holds a chat's messages. Null: `messages` or `conversations`."""
    chosen_field: str = "chosen"
    """The field that holds the preferred answer."""
    rejected_field: str = "rejected"
    """The field that holds the other answer."""
    prompt_repeated: bool | None = None
    """Of preferences in strings: take the prompt off answers that both begin with it. Null: where those of all rows do; a source
    of which most do, but not all, is refused."""
    id_field: str | None = "id"
    """The rows' own id, where they have one: an id that stands on different rows is reported. Null: nothing is compared."""
    delimiter: str | None = None
    """What parts the values of a CSV file. Null: a comma, and a tab in .tsv."""
    text_unit: TextUnit = TextUnit.file
    """What makes one row of a .txt or .md file: the whole file, a paragraph (up to a blank line) or a line."""
    encoding_errors: EncodingErrors = EncodingErrors.quarantine
    """What happens to a row whose text is not UTF-8, or holds half a UTF-16 character or U+0000: quarantined, or `replace`d by
    U+FFFD and counted."""
    documentation: Documentation = Documentation.text
    """What each object of the standard library's documentation becomes: a `text`; a `chat`, in which it is asked what the object
    does, and its description answers; or a `preference` of that description over another object's. Of no other source."""
    weight: float = 1.0
    """How often the sampler draws from this source, in relation to the others of a mix."""

    def __post_init__(self) -> None:
        if self.path == "":
            raise ValueError("path must name a file, a directory or a glob, got an empty string; null means docstrings")
        for name in (
            "text_field",
            "prompt_field",
            "completion_field",
            "messages_field",
            "chosen_field",
            "rejected_field",
        ):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must be the name of a field, got an empty string")
        if self.hub is not None and self.path is not None:
            raise ValueError(f"hub must be null with a path ({self.path}), got {self.hub}: rows come from one place")
        if self.documentation is not Documentation.text and (self.path or self.hub):
            raise ValueError(
                f"documentation must be text with a path or a hub, got {self.documentation.value}: it is about docstrings"
            )
        if self.hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub):
            raise ValueError(f"hub must be owner/name, got {self.hub!r}")
        if self.delimiter is not None:
            self.delimiter = "\t" if self.delimiter == "\\t" else self.delimiter
            if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
                raise ValueError(f"delimiter must be one character, got {self.delimiter!r}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight must be above 0, got {self.weight}; take a source out to give it none")

    def fields(self) -> Fields:
        """What the fields are called."""
        return Fields(
            text=self.text_field,
            prompt=self.prompt_field,
            completion=self.completion_field,
            messages=self.messages_field,
            chosen=self.chosen_field,
            rejected=self.rejected_field,
            prompt_repeated=self.prompt_repeated,
        )
