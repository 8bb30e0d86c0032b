"""Puts documents of many lengths into rows of one length. Pure and apart, because a slip here costs tokens silently."""

from collections.abc import Sequence


def pieces(length: int, sequence_length: int) -> list[tuple[int, int]]:
    """(start, end) of the pieces of a document of `length` tokens: whole rows and a rest, which is never a single token
    (the first token of a piece carries no label, so one alone would teach nothing)."""
    edges = list(range(0, length, sequence_length))
    if len(edges) > 1 and length - edges[-1] == 1:
        edges[-1] -= 1
    return list(zip(edges, [*edges[1:], length], strict=True))


def pack(lengths: Sequence[int], sequence_length: int) -> list[list[int]]:
    """Best-fit decreasing: for each row the indices of the pieces in it, ascending; rows by their first piece.

    The longest piece goes first, into the fullest row that still has room for it; ties go to the earlier piece and the
    earlier row, so that the result follows from the lengths alone.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(sequence_length + 1)]  # free tokens -> rows
    mask = 0  # bit n: some row has n free tokens
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        assert 0 < length <= sequence_length
        fitting = mask >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = with_room[free].pop()
            if not with_room[free]:
                mask ^= 1 << free
            rows[row].append(index)
        else:
            free, row = sequence_length, len(rows)
            rows.append([index])
        if free > length:
            with_room[free - length].append(row)
            mask |= 1 << (free - length)
    return sorted(sorted(row) for row in rows)
