"""Reads evaluation sets, of which training must not hold parts. Apart from ingest, because here a row need not be of a known
format: all that it says counts, and a row that cannot be read may not be passed over.
"""

from collections.abc import Iterator, Mapping

from stages.contract import StageError
from stages.text.chats import Texts
from stages.text.containers import Item, Reading
from stages.text.conversion import parts
from stages.text.decontaminate import Index
from stages.text.faults import RULES, Fault
from stages.text.files import Container, File, TextUnit, find
from stages.text.formats import Fields, Format, Row, recognise
from stages.text.opening import opened
from stages.text.record import Record, learned, prose, strings
from stages.text.sources import Source
from stages.text.tables import parquet_file, parquet_rows

READING = Reading(fields=Fields(), unit=TextUnit.paragraph, delimiter=None, replace=True, max_row_bytes=64 * 2**20)


def index(tasks: Mapping[str, str], ngram: int) -> Index:
    """The n-grams of the evaluation sets: name -> path of each. StageError for one that says nothing."""
    return Index.of({task: _texts(task, path) for task, path in tasks.items()}, ngram)


def _texts(task: str, path: str) -> Iterator[str]:
    said = False
    for file in find(path).files:
        for line, row in _rows(task, file):
            if isinstance(row, Fault):
                raise StageError(
                    f"stages.clean.decontamination.tasks.{task}: {file.name}:{line}: {RULES[row.rule]}; a row of an "
                    "evaluation set that cannot be read would be overlooked in training: mend or remove it"
                )
            for text in _said(row):
                said = said or bool(text.strip())
                yield text
    if not said:
        raise StageError(f"stages.clean.decontamination.tasks.{task}={path}: found no text, wanted an evaluation set")


def _rows(task: str, file: File) -> Iterator[Item]:
    if file.container is Container.parquet:
        with opened(file) as source:
            names = frozenset(parquet_file(file, source).schema_arrow.names)
        return parquet_rows(file, READING, names, 0, None)
    return Source(task, "", (file,), READING, Format.auto, None).rows(file)


def _said(row: Row) -> list[str]:
    """Prompt and answer of a row of a known format, alone and with its thoughts and calls; and always all its texts."""
    said = ["\n".join(strings(row))]
    if (known := recognise(row, READING.fields)) is not None:
        try:
            record = Record("", "", **parts(row, known[0], READING.fields, Texts(replace=True)))
            said += [prose(record), learned(record)]
        except Fault:
            pass  # something is missing to be learned from: that does not matter here
    return list(dict.fromkeys(said))
