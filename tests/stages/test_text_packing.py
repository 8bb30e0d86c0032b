"""Packing loses nothing, doubles nothing and wastes little."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.text.choices import OverLong
from stages.text.packing import IGNORED, assemble, fitted, pack, pieces


@given(st.integers(2, 3_000), st.integers(2, 300))
def test_pieces_cover_a_document_once_and_none_is_a_single_token(length: int, sequence_length: int) -> None:
    found = pieces(length, sequence_length)
    assert [place for start, end in found for place in range(start, end)] == list(range(length))
    assert all(2 <= end - start <= sequence_length for start, end in found) or sequence_length == 2


def test_a_document_of_rows_and_one_token_gives_that_token_company() -> None:
    assert pieces(10, 3) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert pieces(3, 3) == [(0, 3)]
    assert pieces(1, 3) == [(0, 1)]


def test_a_document_that_is_too_long_is_split_cut_or_left_out_and_one_that_fits_never() -> None:
    assert fitted(10, 4, OverLong.split) == [(0, 4), (4, 8), (8, 10)]
    assert fitted(10, 4, OverLong.truncate) == [(0, 4)]
    assert fitted(10, 4, OverLong.drop) == []
    assert all(fitted(4, 4, policy) == [(0, 4)] for policy in OverLong)


@given(st.lists(st.integers(1, 40), max_size=200))
def test_every_piece_stands_in_one_row_that_holds_it(lengths: list[int]) -> None:
    rows = pack(lengths, 40)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 40 for row in rows)
    assert rows == sorted(rows) == pack(lengths, 40)


def test_the_fullest_row_with_room_is_taken() -> None:
    assert pack([6, 7, 3, 4], 10) == [[0, 3], [1, 2]]
    assert pack([10, 1, 9, 5, 5], 10) == [[0], [1, 2], [3, 4]]


def test_rows_of_lognormal_documents_are_at_least_97_percent_full() -> None:
    draw = np.random.default_rng(0)
    for mean, spread, width in ((4, 1, 256), (5.5, 1.0, 1_024), (6.5, 0.9, 2_048), (7, 0.7, 4_096)):
        lengths = np.clip(draw.lognormal(mean, spread, 2_000).astype(int), 2, width).tolist()
        assert sum(lengths) / (len(pack(lengths, width)) * width) >= 0.97


@given(st.lists(st.integers(2, 12), min_size=1, max_size=40), st.integers(0, 2**32))
def test_pieces_are_laid_into_their_rows_token_by_token(lengths: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    total = sum(lengths)
    ids, labelled = draw.integers(1, 1_000, total).astype(np.int32), draw.random(total) < 0.5
    rows = pack(lengths, 12)
    inputs, labels, starts, counts = assemble(ids, labelled, np.array(lengths), rows, 12, pad_id=0)
    assert inputs.dtype == labels.dtype == starts.dtype == np.int32
    edges = np.append(0, np.cumsum(lengths))
    wanted_starts, wanted_counts = [], []
    for row, members in enumerate(rows):
        wanted: list[int] = []
        taught: list[int] = []
        begun: list[int] = []
        for member in members:
            begun.append(len(wanted))
            for place in range(edges[member], edges[member + 1]):
                wanted.append(int(ids[place]))
                taught.append(int(ids[place]) if labelled[place] else IGNORED)
        begun += [len(wanted)] if len(wanted) < 12 else []
        assert inputs[row].tolist() == wanted + [0] * (12 - len(wanted))
        assert labels[row].tolist() == taught + [IGNORED] * (12 - len(taught))
        wanted_starts += begun
        wanted_counts.append(len(begun))
    assert starts.tolist() == wanted_starts and counts.tolist() == wanted_counts
