"""Shows rows that left, reason by reason, to a person who asked for it. Apart, because it is the one place where clean shows
what rows say."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stages.text.curation import Pii
from stages.text.record import FIELDS, Record, canonical, prose
from stages.text.shards import Table

NAME = "examples.jsonl"
CHARACTERS = 2_000
"""Shown of each row."""


def write_examples(
    table: Table,
    seen: Mapping[str, Sequence[int]],
    reasons: Iterable[str],
    directory: Path,
    pii: Pii | None,
) -> None:
    """`examples.jsonl`: reason, id, source and the beginning of what the row says, for the rows at these positions. What the
    corpus must not hold (`pii`) is masked here too."""
    if not any(seen.values()):
        return
    masker = None
    if pii is not None:
        from stages.text.pii import Masker

        masker = Masker(pii)
    with (directory / NAME).open("w", encoding="utf-8", errors="surrogatepass") as file:
        for reason in reasons:
            for position in seen.get(reason, ()):
                for part in table.slices(position, position + 1, list(FIELDS)):
                    record = Record(**part.to_pylist()[0])
                    said = prose(record)
                    said = (masker.mask(said)[0] if masker else said)[:CHARACTERS]
                    shown = {"reason": reason, "id": record.id, "source": record.source, "text": said}
                    file.write(canonical(shown) + "\n")
