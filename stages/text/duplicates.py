"""Finds rows that are equal or nearly so, whichever blocks they were read in. Apart, because these steps need all rows, and
hold no text: only keys move, and each task sees all keys of one range.

The driver keeps a byte or two for each row, and for each row of a cluster which one it belongs to.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from stages.text.blocks import Resources, call
from stages.text.clusters import Positions, components, pairs
from stages.text.curation import NearDuplicates
from stages.text.shards import Table

KEYS_PER_TASK = 2_000_000
"""So many keys of 40 bytes in one deduplicating task."""
KEYS_SCHEMA = pyarrow.schema(
    [
        ("position", pyarrow.int64()),  # where the row stands
        ("high", pyarrow.uint64()),  # half of the sha256 of its normal form: 128 bits tell 10^15 rows apart
        ("low", pyarrow.uint64()),
        ("raw", pyarrow.uint64()),  # of the row as it came: asked only among rows of one normal form
        ("side", pyarrow.uint64()),  # of the row as it leaves
        ("fate", pyarrow.uint8()),  # STAYS, LEAVES_LATER or LEAVES, as far as the row alone decides
        ("compared", pyarrow.bool_()),  # it has band keys: the columns after these
    ]
)
_KINDS: dict[str, Any] = {"position": np.int64, "fate": np.uint8, "compared": np.bool_}
COPIES_SCHEMA = pyarrow.schema(
    [("position", pyarrow.int64()), ("reason", pyarrow.string()), ("twin", pyarrow.string())]
)
STAYS, LEAVES_LATER, LEAVES = range(3)
"""LEAVES_LATER: for a reason that is asked after near-duplicates were compared."""
Bools = npt.NDArray[np.bool_]


def keys_schema(bands: int) -> pyarrow.Schema:
    return pyarrow.schema([*KEYS_SCHEMA, *((f"band{band}", pyarrow.uint64()) for band in range(bands))])


@dataclass
class Found:
    """What became of each row, by position."""

    first: Bools
    """Is no exact duplicate and within the length limits."""
    kept: Bools
    """Stays."""
    validation: Bools
    twins: dict[str, tuple[Positions, Positions]] = field(default_factory=dict)
    """Reason -> (rows that leave for it, ascending; the row that each is a copy of)."""
    sizes: dict[str, Counter[int]] = field(default_factory=dict)
    """"exact" and "near" -> rows in a cluster -> clusters."""
    overlap: int = 0
    """Keys, of contents or of bands, that rows on both sides of the split have."""

    def copies(self, table: Table) -> "Copies":
        """The rows that leave as copies, with the ids of what they repeat."""
        names = sorted(self.twins)
        positions = np.concatenate([self.twins[name][0] for name in names])
        twins = np.concatenate([self.twins[name][1] for name in names])
        reasons = np.repeat(np.arange(len(names)), [len(self.twins[name][0]) for name in names])
        order = np.argsort(positions)
        return Copies(positions[order], reasons[order], twins[order], names, *_ids(table, np.unique(twins)))


class Copies:
    """Rows that leave as copies, in the order of their positions."""

    def __init__(
        self, positions: Positions, reasons: Positions, twins: Positions, names: list[str], known: Positions, ids: Any
    ) -> None:
        self._positions, self._reasons, self._twins, self._names = positions, reasons, twins, names
        self._known, self._ids = known, ids

    def between(self, first: int, last: int) -> pyarrow.Table:
        """(position, reason, twin: id of the row that stays) of rows first..last-1."""
        low, high = np.searchsorted(self._positions, [first, last])
        ids = self._ids.take(np.searchsorted(self._known, self._twins[low:high]))
        reasons = pyarrow.array(self._names).take(pyarrow.array(self._reasons[low:high]))
        return pyarrow.table([self._positions[low:high], reasons, ids], schema=COPIES_SCHEMA)


def _ids(table: Table, positions: Positions) -> tuple[Positions, Any]:
    """(positions, ascending; their rows' ids): one walk over the column."""
    found, at = [pyarrow.array([], pyarrow.string())], 0
    for part in table.slices(0, table.total if len(positions) else 0, ["id"]):
        low, high = np.searchsorted(positions, [at, at + part.num_rows])
        found.append(part.column("id").combine_chunks().take(positions[low:high] - at))
        at += part.num_rows
    return positions, pyarrow.concat_arrays(found)


def find(keys: Sequence[Any], total: int, fraction: float, near: NearDuplicates | None, resources: Resources) -> Found:
    """`keys`: tables of `keys_schema` or references to them; together at most one row for each of `total` positions."""
    parts = -(-max(total, 1) // KEYS_PER_TASK)
    found = Found(np.zeros(total, bool), np.zeros(total, bool), np.zeros(total, bool))
    _equal(keys, parts, fraction, found, resources)
    columns = ["side", *(f"band{band}" for band in range(near.bands if near else 0))]
    if near is not None:
        _alike(keys, parts, columns, fraction, near.remove, found, resources)
    sides = tuple(np.packbits(array).tobytes() for array in (found.kept, found.validation))
    orders = [(part, parts, column, *sides, *keys) for column in columns for part in range(parts)]
    found.overlap = sum(call(straddling, orders, resources))
    return found


def _equal(keys: Sequence[Any], parts: int, fraction: float, found: Found, resources: Resources) -> None:
    gone: dict[str, list[tuple[Positions, Positions]]] = {"exact_duplicate": [], "duplicate": []}
    sizes: Counter[int] = Counter()
    for result in call(equal_rows, [(part, parts, fraction, *keys) for part in range(parts)], resources):
        found.first[result["first"]] = True
        found.kept[result["kept"]] = True
        found.validation[result["validation"]] = True
        sizes.update(result["sizes"])
        for reason, twins in gone.items():
            twins.append(result[reason])
    found.sizes["exact"] = sizes
    for reason, twins in gone.items():
        left, first = (np.concatenate(side) for side in zip(*twins, strict=True))
        order = np.argsort(left)
        found.twins[reason] = left[order], first[order]


def _alike(
    keys: Sequence[Any],
    parts: int,
    columns: list[str],
    fraction: float,
    remove: bool,
    found: Found,
    resources: Resources,
) -> None:
    """Clusters of rows that share a key of any column. Their `side` too: so rows that masks made equal are on one side."""
    first = np.packbits(found.first).tobytes()
    members = roots = np.zeros(0, np.int64)
    orders = [(part, parts, column, first, *keys) for column in columns for part in range(parts)]
    for one, other in call(alike_rows, orders, resources):
        members, roots = components(np.concatenate([members, other]), np.concatenate([roots, one]))
    found.sizes["near"] = _sizes(np.unique(roots, return_counts=True)[1])
    for positions, sides in call(sides_of, [(members, *keys)], resources):
        assert np.array_equal(positions, members)
        found.validation[members] = cluster_sides(roots, sides) < np.float64(fraction) * 2**64
    others = members != roots
    found.twins["near_duplicate"] = members[others][: None if remove else 0], roots[others][: None if remove else 0]
    found.kept[found.twins["near_duplicate"][0]] = False


def equal_rows(part: int, parts: int, fraction: float, *tables: pyarrow.Table) -> dict[str, Any]:
    """Of all keys with `high % parts == part`, so that equal rows meet in one task: which stay, and what the others repeat."""
    names = ("position", "high", "low", "raw", "side", "fate")
    position, high, low, raw, side, fate = _columns(names, part, parts, "high", tables)
    order = np.lexsort((position, raw, low, high))
    position, high, low, raw, side, fate = (column[order] for column in (position, high, low, raw, side, fate))
    group = np.cumsum(_new(high, low)) - 1
    firsts = np.full(group[-1] + 1 if len(group) else 0, np.iinfo(np.int64).max)
    np.minimum.at(firsts, group, position)
    first = firsts[group]
    again = ~_new(high, low, raw)  # an earlier row of the group has the very same bytes
    other = ~again & (position != first)
    return {
        "first": position[position == first],
        "kept": position[(position == first) & (fate == STAYS)],
        "validation": position[side < np.float64(fraction) * 2**64],
        "exact_duplicate": (position[again], first[again]),
        "duplicate": (position[other], first[other]),
        "sizes": _sizes(np.bincount(group)),
    }


def alike_rows(part: int, parts: int, column: str, first: bytes, *tables: pyarrow.Table) -> tuple[Positions, Positions]:
    """(first, other) of the rows that are to be compared and share a key of this column."""
    position, keys, fate, compared = _columns(("position", column, "fate", "compared"), part, parts, column, tables)
    mine = (fate != LEAVES) & (compared | (column == "side")) & _bits(first, position)
    return pairs(keys[mine], position[mine])


def straddling(part: int, parts: int, column: str, kept: bytes, validation: bytes, *tables: pyarrow.Table) -> int:
    """Keys of this column that rows on both sides have."""
    position, keys, compared = _columns(("position", column, "compared"), part, parts, column, tables)
    mine = (compared | (column == "side")) & _bits(kept, position)
    held = _bits(validation, position)
    return len(np.intersect1d(keys[mine & held], keys[mine & ~held]))


def sides_of(members: Positions, *tables: pyarrow.Table) -> tuple[Positions, npt.NDArray[np.uint64]]:
    """(positions, their `side`) of the members, ascending."""
    position, side = _columns(("position", "side"), 0, 1, "side", tables)
    mine = np.isin(position, members)
    position, side = position[mine], side[mine]
    order = np.argsort(position)
    return position[order], side[order]


def cluster_sides(roots: Positions, sides: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One of its members' sides for each member of a cluster: drawn by the members' content, not by where they stand, so
    that other rows and other file names move no cluster."""
    drawn = sides * np.uint64(0x9E3779B97F4A7C15)  # not the smallest side itself: that would favour validation
    order = np.lexsort((drawn, roots))
    new = _new(roots[order])
    result = np.empty_like(sides)
    result[order] = sides[order][new][np.cumsum(new) - 1]
    return result


def _columns(names: Sequence[str], part: int, parts: int, by: str, tables: Sequence[pyarrow.Table]) -> list[Any]:
    """Columns of all tables together, as arrays; of the rows whose key `by` belongs to this part."""
    found: list[list[Any]] = [[np.zeros(0, _KINDS.get(name, np.uint64))] for name in names]
    for table in tables:
        mine = table.column(by).to_numpy() % np.uint64(parts) == part
        for name, column in zip(names, found, strict=True):
            column.append(table.column(name).to_numpy()[mine])
    return [np.concatenate(column) for column in found]


def _bits(packed: bytes, positions: Positions) -> Bools:
    bits = np.frombuffer(packed, np.uint8)
    return (bits[positions >> 3] >> (7 - (positions & 7)).astype(np.uint8) & 1).astype(bool)


def _new(*columns: npt.NDArray[Any]) -> Bools:
    """Where sorted columns differ from the row before."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new


def _sizes(counts: npt.NDArray[np.int64]) -> Counter[int]:
    """Rows in a cluster -> clusters, of those with more than one."""
    sizes, numbers = np.unique(counts[counts > 1], return_counts=True)
    return Counter(dict(zip(sizes.tolist(), numbers.tolist(), strict=True)))
