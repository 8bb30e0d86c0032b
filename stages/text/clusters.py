"""Joins what was found alike, pair by pair, into clusters. Apart, because the split and the removal of near-duplicates build
on the same clusters, whatever order the pairs were found in."""

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


def pairs(keys: npt.NDArray[np.uint64], positions: Positions) -> tuple[Positions, Positions]:
    """(first, other) for each position that shares its key with an earlier one: `first` is the smallest with that key."""
    order = np.lexsort((positions, keys))
    keys, positions = keys[order], positions[order]
    new = np.ones(len(keys), bool)
    new[1:] = keys[1:] != keys[:-1]
    firsts = positions[new][np.cumsum(new) - 1]
    return firsts[~new], positions[~new]


def components(left: Positions, right: Positions) -> tuple[Positions, Positions]:
    """Union-find over the pairs (left[i], right[i]): (members, ascending; the smallest member of each one's cluster)."""
    members, ends = np.unique(np.concatenate([left, right]), return_inverse=True)
    a, b = ends[: len(left)], ends[len(left) :]
    parent = np.arange(len(members))
    while len(a):
        a, b = parent[a], parent[b]
        apart = a != b
        a, b = a[apart], b[apart]
        # Hang the larger root below the smaller: parents only ever get smaller, so no circle can come about.
        np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(above := parent[parent], parent):
            parent = above
    return members, members[parent]
