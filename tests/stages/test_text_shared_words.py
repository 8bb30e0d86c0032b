"""The longest run of words that a text shares with rows."""

import random

from stages.text.shared_words import Shared, longest_shared

ROWS = [
    ("a.txt:1", "Return the greatest common divisor of the integers."),
    ("a.txt:2", "RETURN   the greatest, common\ndivisor -- of two numbers!"),
    ("a.txt:3", "the greatest of all"),
    ("a.txt:4", ""),
]


def test_the_rows_with_the_longest_runs_come_first_as_they_are_written() -> None:
    found = longest_shared("It will return the greatest common divisor of two numbers.", ROWS)
    assert found == [
        Shared(8, "a.txt:2", "RETURN   the greatest, common\ndivisor -- of two numbers"),
        Shared(6, "a.txt:1", "Return the greatest common divisor of"),
    ]


def test_less_than_four_words_are_no_origin() -> None:
    assert longest_shared("the greatest of them", ROWS) == []
    assert longest_shared("one two", ROWS) == [] == longest_shared("", ROWS)


def test_of_equal_runs_the_first_rows_are_shown() -> None:
    rows = [(f"b:{number}", "one two three four") for number in range(9, 0, -1)]
    assert [shared.row for shared in longest_shared("one two three four five", rows, count=3)] == ["b:1", "b:2", "b:3"]


def test_it_agrees_with_looking_at_every_pair() -> None:
    draw = random.Random(5)
    for _ in range(40):
        text = " ".join(draw.choice("abc") for _ in range(30))
        rows = [(f"{number}", " ".join(draw.choice("abc") for _ in range(20))) for number in range(6)]
        wanted = {row: _by_hand(text.split(), said.split()) for row, said in rows}
        found = longest_shared(text, rows, count=10)
        assert {shared.row: shared.words for shared in found} == {row: n for row, n in wanted.items() if n >= 4}
        assert [shared.words for shared in found] == sorted((n for n in wanted.values() if n >= 4), reverse=True)


def _by_hand(one: list[str], other: list[str]) -> int:
    best = 0
    for i in range(len(one)):
        for j in range(len(other)):
            length = 0
            while i + length < len(one) and j + length < len(other) and one[i + length] == other[j + length]:
                length += 1
            best = max(best, length)
    return best
