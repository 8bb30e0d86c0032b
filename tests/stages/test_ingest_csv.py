"""Lines of CSV that are too long, or stand twice: what is behind them keeps its row and its place."""

import csv
import io
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.contract import Context, Executor, StageError
from stages.ingest import IngestConfig, IngestResources, SourceConfig, ingest
from stages.text.csv_lines import _Quotes
from tests.stages.test_ingest import quarantine, read, take

MakeContext = Callable[..., Context]
LONG = "x" * 5_000


def found(
    make_context: MakeContext, path: Path, content: str | bytes
) -> tuple[list[tuple[int, str, str]], list[tuple[int, str]]]:
    """Rows (line, prompt, completion) and faults (line, rule)."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    inline = IngestResources(executor=Executor.inline)
    source = SourceConfig(path=str(path))
    rows = ingest(
        IngestConfig(source=source, max_row_bytes=1_000, max_bad_fraction=1, resources=inline), make_context()
    )
    kept = [(int(row["id"].rpartition(":")[2]), row["prompt"], row["text"]) for row in read(rows)]
    return kept, [(line, rule) for _, line, rule in quarantine(rows)]


@pytest.mark.parametrize(
    ("row", "lines"),
    [
        (f"{LONG},2\n", 1),
        (f'"{LONG}",2\n', 1),
        (f'"{LONG}\nmore,of it\nthird",2\n', 3),
        (f'"{LONG}\r\nmore,of it\r\n""third"" x",2\r\n', 3),
        (f'1,"{LONG}\n""\n\n",\n', 4),
        (f'"a\nb\n{LONG}\nc",2\n', 4),
        (f'"a\n{LONG}",2\n', 2),
        (f'"a\n{LONG}","\n3"\n', 3),
        (f'"a\n{LONG}"",\n3"\n', 3),
        (f'{LONG} 5" wide,2\n', 1),
        (f'{LONG},"2\n2"\n', 2),
        (f'"{"y" * 2**20}{LONG}""{LONG}\nz",2\n', 2),
    ],
)
def test_lines_behind_one_that_is_too_long_belong_to_the_row_that_they_stand_in(
    make_context: MakeContext, tmp_path: Path, row: str, lines: int
) -> None:
    content = f'prompt,completion\na,"b"\n{row}c,d\n"e\nf",g\n'
    rows, faults = found(make_context, tmp_path / "x.csv", content)
    assert rows == [(2, "a", "b"), (3 + lines, "c", "d"), (4 + lines, "e\nf", "g")]
    assert faults == [(3, "row_too_long")]


def test_a_line_that_is_too_long_and_never_closes_its_quote_is_told_by_its_place(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(
        StageError, match=r"x.csv:3: a quote that is opened in this line is never closed, so the 2 lines"
    ):
        found(make_context, path, f'prompt,completion\na,b\n"{LONG}\nc,d\ne,f\n')
    rows, faults = found(make_context, path, f'prompt,completion\na,b\n"{LONG}')
    assert (rows, faults) == ([(2, "a", "b")], [(3, "row_too_long")])
    with pytest.raises(StageError, match=r"x.csv:1: the header is longer than stages.ingest.max_row_bytes=1000"):
        found(make_context, path, f"{LONG},completion\na,b\n")


def test_what_is_open_behind_a_line_is_what_the_csv_module_says() -> None:
    chance = random.Random(6)
    agreed = 0
    for _ in range(3_000):
        line = "".join(chance.choice('"",;a é') for _ in range(chance.randrange(1, 12)))
        for within in (False, True):
            quotes = _Quotes(",")
            quotes.begin(within)
            data = f"{line}\n".encode()
            cut = chance.randrange(len(data))
            quotes.follow(data[:cut])
            quotes.follow(data[cut:])
            reader = csv.reader(io.StringIO(f"{'' if not within else chr(34)}{line}\n"), strict=True)
            try:
                next(reader)
                is_open = False
            except csv.Error as error:
                if "unexpected end" not in str(error):
                    continue  # broken: whatever is behind it is told with it
                is_open = True
            assert quotes.open is is_open, (line, within)
            agreed += 1
    assert agreed > 2_000


def test_a_header_that_stands_again_is_no_row(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for again in ("prompt,completion", "\ufeffprompt,completion", '\ufeff"prompt","completion"', "prompt, completion "):
        rows, faults = found(make_context, path, f"prompt,completion\na,b\n{again}\nc,d\n")
        assert (rows, faults) == ([(2, "a", "b"), (4, "c", "d")], [(3, "repeated_header")]), again
    path.write_text("text\ntext\nb\n")
    assert [row["text"] for row in read(take(make_context, path))] == ["text", "b"]  # it may be what somebody wrote
    path.write_text("text\na\n\ufefftext\nb\n")
    rows = take(make_context, path, max_bad_fraction=1)
    assert [row["text"] for row in read(rows)] == ["a", "b"]
    assert quarantine(rows) == [("x.csv", 3, "repeated_header")]
