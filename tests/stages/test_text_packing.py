"""Packing loses nothing, doubles nothing and wastes little."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.text.packing import pack, pieces


@given(st.integers(2, 3_000), st.integers(2, 300))
def test_pieces_cover_a_document_once_and_none_is_a_single_token(length: int, sequence_length: int) -> None:
    found = pieces(length, sequence_length)
    assert [place for start, end in found for place in range(start, end)] == list(range(length))
    assert all(2 <= end - start <= sequence_length for start, end in found) or sequence_length == 2


def test_a_document_of_rows_and_one_token_gives_that_token_company() -> None:
    assert pieces(10, 3) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert pieces(3, 3) == [(0, 3)]
    assert pieces(1, 3) == [(0, 1)]


@given(st.lists(st.integers(1, 40), max_size=200))
def test_every_piece_stands_in_one_row_that_holds_it(lengths: list[int]) -> None:
    rows = pack(lengths, 40)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 40 for row in rows)
    assert rows == sorted(rows) == pack(lengths, 40)


def test_the_fullest_row_with_room_is_taken() -> None:
    assert pack([6, 7, 3, 4], 10) == [[0, 3], [1, 2]]
    assert pack([10, 1, 9, 5, 5], 10) == [[0], [1, 2], [3, 4]]


def test_rows_of_lognormal_documents_are_at_least_95_percent_full() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 2_000).astype(int), 2, 256).tolist()
    assert sum(lengths) / (len(pack(lengths, 256)) * 256) >= 0.95
