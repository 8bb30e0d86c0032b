"""Answers that grow together: one cache, one forward pass a token. Apart from the engine, because joining and leaving a cache is
arithmetic on tensors that is proved against answers made alone.

Rows are padded on the left: the newest tokens of all stand in the last column. Where padding cannot be hidden from a model (a sliding
window, a recurrent state, positions counted by the cache's width), each row has a cache of its own, and a step is one pass for each.
"""

import copy

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from stages.serving.model import LoadedModel
from stages.serving.rows import Row

SAME = 1e-3
"""Logits that differ by no more are the same: float32 rounds differently in matrices of another shape."""


class Group:
    """Rows that share a cache. At least one joins before the first step."""

    def __init__(self, loaded: LoadedModel, shared: bool) -> None:
        self.loaded, self.rows = loaded, list[Row]()
        self._shared = shared
        self._cache = loaded.new_cache()
        self._mask = torch.ones((0, 0), dtype=torch.long)
        """[rows, width]: 1 where the cache holds a token."""

    @property
    def room(self) -> bool:
        """Whether another row may join."""
        return self._shared or not self.rows

    def join(self, row: Row, cache: DynamicCache) -> None:
        """`cache` holds the row's tokens but the newest; others may go on from it too, so it is left as it is."""
        if not self._shared:
            self._cache, self.rows = copy.deepcopy(cache), [row]
            return
        length, width = int(cache.get_seq_length()), self._mask.shape[1]
        for mine, other in zip(self._cache.layers, cache.layers, strict=True):
            assert isinstance(mine, DynamicLayer) and isinstance(other, DynamicLayer)
            if not mine.is_initialized:
                mine.lazy_initialization(other.keys, other.values)
                mine.keys, mine.values = other.keys, other.values
            else:
                mine.keys = torch.cat([_pad(mine.keys, length), _pad(other.keys, width)])
                mine.values = torch.cat([_pad(mine.values, length), _pad(other.values, width)])
        ones = torch.ones((1, length), dtype=torch.long)
        self._mask = torch.cat([_pad_mask(self._mask, length), _pad_mask(ones, width)]) if self.rows else ones
        self.rows.append(row)

    def step(self) -> torch.Tensor:
        """Logits [rows, vocab_size] (float32) of each row's next token."""
        ids = [[row.made[-1]] for row in self.rows]
        positions = torch.tensor([[row.position] for row in self.rows])
        if not self._shared:
            return self.loaded.forward(ids, self._cache, positions=positions)[:, -1].float()
        self._mask = torch.cat([self._mask, torch.ones((len(ids), 1), dtype=torch.long)], dim=1)
        # Without padding no mask is needed, and the kernels for that are faster.
        mask = None if all(row.position + 1 == self._mask.shape[1] for row in self.rows) else self._mask
        return self.loaded.forward(ids, self._cache, mask=mask, positions=positions)[:, -1].float()

    def keep(self, staying: list[int]) -> None:
        """The rows at these indices stay; columns that are padding for all of them leave too."""
        if len(staying) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in staying]
        if not self._shared or not staying:
            self._cache, self._mask = self.loaded.new_cache(), self._mask[:0, :0]
            return
        width = self._mask.shape[1]
        cut = width - max(row.position for row in self.rows)  # the newest token of each is not in the cache yet
        indices = torch.tensor(staying)
        for layer in self._cache.layers:
            assert isinstance(layer, DynamicLayer)
            layer.keys, layer.values = layer.keys[indices, :, cut:], layer.values[indices, :, cut:]
        self._mask = self._mask[indices, cut:]


def can_share(loaded: LoadedModel) -> bool:
    """Whether rows of different length may share a cache: its layers keep every token, and padding changes no logit. The second is
    tried out: a short prompt beside a long one, against the same prompt alone, read whole and then by one more token."""
    if not all(type(layer) is DynamicLayer for layer in loaded.new_cache().layers):
        return False
    size = min(loaded.vocab_size, 97)
    long, short = [number * 7 % size for number in range(1, 12)], [number * 5 % size for number in range(1, 5)]
    alone, long_cache = loaded.new_cache(), loaded.new_cache()
    loaded.forward([short], alone)
    loaded.forward([long], long_cache)
    group = Group(loaded, shared=True)
    group.join(_Probe(long, 3), long_cache)  # type: ignore[arg-type]
    group.join(_Probe(short, 2), alone)  # type: ignore[arg-type]
    beside = group.step()[1]
    whole = loaded.forward([[*short, 2]], loaded.new_cache())[0, -1].float()
    return bool((beside - whole).abs().max() <= SAME * whole.abs().max().clamp(min=1.0))


class _Probe:
    """Stands for a row: a prompt and one token behind it."""

    def __init__(self, prompt: list[int], token: int) -> None:
        self.made, self.position = [token], len(prompt)


def _pad(states: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, heads, columns, size] with nothing before it, up to `width` columns."""
    missing = width - states.shape[2]
    return torch.nn.functional.pad(states, (0, 0, missing, 0)) if missing > 0 else states


def _pad_mask(mask: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - mask.shape[1]
    return torch.nn.functional.pad(mask, (missing, 0)) if missing > 0 else mask
