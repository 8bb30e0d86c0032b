"""JSON, as a line of a file or as a text within a row, from which no value is lost in silence. Apart, because a plain decoder keeps
the last of two values that stand under one key.
"""

import json
from typing import Any

from stages.text.faults import Fault, shown


class Decoder:
    """Decodes, and notes the keys that stand twice in one object with two values."""

    def __init__(self) -> None:
        self.json = json.JSONDecoder(object_pairs_hook=self._object)
        self.twice: list[str] = []

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            self.twice += [name for name, value in pairs if made[name] != value]
        return made

    def whole(self, text: str) -> Any:
        """The one value that a text is. Raises Fault for such keys."""
        self.twice = []
        value = self.json.decode(text)
        if self.twice:
            raise self.fault()
        return value

    def at(self, text: str, start: int) -> tuple[Any, int]:
        """The value that begins there, and where it ends."""
        self.twice = []
        return self.json.raw_decode(text, start)

    def fault(self, field: str = "") -> Fault:
        return Fault("repeated_key", field, shown(dict.fromkeys(self.twice)))


def value_of(text: str | bytes, field: str) -> Any:
    """What a field says that is written as JSON. Raises Fault."""
    decoder = Decoder()
    try:
        value = decoder.json.decode(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
    except UnicodeDecodeError as error:
        raise Fault("invalid_utf8", field, f"byte {error.start + 1}") from None
    except (ValueError, RecursionError):
        raise Fault("broken_json", field) from None
    if decoder.twice:
        raise decoder.fault(field)
    return value


def glance(text: str | bytes) -> Any:
    """The same for a look at what it may be, whatever its keys are; None where it is broken."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
