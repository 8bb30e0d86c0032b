"""What the rows of the standard library's documentation are made into: texts, chats or preferences. Apart from `docstrings`,
which is a program of its own that only collects.

A chat asks what an object does and is answered with its description. In a preference the rejected answer is the description of
another object: as fluent, and wrong. So chats and preferences exist on every machine, with a right answer that can be looked up.
"""

import hashlib
from collections.abc import Iterator

from stages.text.choices import Documentation
from stages.text.record import CHAT, PREFERENCE, TEXT, Record, canonical


def records(rows: list[tuple[str, str, str]], source: str, prefix: str, kind: Documentation) -> Iterator[Record]:
    """A record for each of the rows (qualified name, module, text); a chat needs a description below the heading."""
    if kind is Documentation.text:
        for name, _, text in rows:
            yield Record(prefix + name, source, TEXT, text=text)
        return
    described = [(name, description) for name, _, text in rows if (description := text.partition("\n\n")[2].strip())]
    for index, (name, description) in enumerate(described):
        asked = {"role": "user", "content": f"What does {name} do?"}
        if kind is Documentation.chat:
            yield Record(prefix + name, source, CHAT, messages=canonical([asked, _said(description)]))
            continue
        wrong = _another(described, index)
        if wrong is not None:
            answers = (canonical([_said(text)]) for text in (description, wrong))
            yield Record(prefix + name, source, PREFERENCE, "", "", canonical([asked]), "", *answers)


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _another(described: list[tuple[str, str]], index: int) -> str | None:
    """The description of another object, drawn by the name of this one; many objects share theirs, so the next that differs."""
    name, description = described[index]
    start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    for step in range(len(described)):
        found = described[(start + step) % len(described)][1]
        if found != description:
            return found
    return None
