"""A mix of sources: shares that hold at every step, epochs of each source, exact resume, and what training reports."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts import TokenDataset
from stages.contract import Context
from stages.train import train
from stages.training.sampler import RowSampler, mix
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import config


def stream(sampler: RowSampler) -> list[int]:
    return [int(row) for step in range(sampler.steps) for row in sampler.step(step)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 100)), min_size=2, max_size=5),
    st.integers(1, 30),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_each_source_has_its_share_at_every_place_of_the_stream(
    given_sources: list[tuple[int, float]], per_step: int, total: int, seed: int
) -> None:
    names = [f"s{index}" for index, (rows, _) in enumerate(given_sources) for _ in range(rows)]
    weights = {f"s{index}": weight for index, (_, weight) in enumerate(given_sources)}
    sampler = RowSampler(len(names), per_step, total, seed, mix(names, weights))
    drawn = stream(sampler)
    assert len(drawn) == total
    places = np.arange(1, total + 1)
    for name, weight in weights.items():
        count = np.cumsum([names[row] == name for row in drawn])
        assert np.abs(count - places * weight / sum(weights.values())).max() <= 0.5 * len(weights) + 0.01
        assert sampler.realised()[name] == count[-1]
        # Its rows come in epochs: none a second time before all came once.
        mine = [row for row in drawn if names[row] == name]
        own = names.count(name)
        for first in range(0, len(mine), own):
            assert max(Counter(mine[first : first + own]).values()) == 1


def test_the_same_rows_come_in_steps_of_any_size_and_after_any_restart() -> None:
    names = ["b", "a", "b", "b", "a", "c", "b"] * 9
    weights = {"a": 0.5, "b": 2.0, "c": 1.0}
    one, other = (RowSampler(len(names), size, 500, 3, mix(names, weights)) for size in (7, 32))
    assert stream(one) == stream(other)
    fresh = RowSampler(len(names), 7, 500, 3, mix(names, weights))
    assert [fresh.step(step).tolist() for step in (60, 2, 33)] == [one.step(step).tolist() for step in (60, 2, 33)]
    assert fresh.state(60) == one.state(60)
    assert stream(RowSampler(len(names), 7, 500, 4, mix(names, weights))) != stream(one)
    assert RowSampler(len(names), 7, 500, 3, mix(names, weights | {"a": 0.6})).state(5) != one.state(5)


def test_one_source_is_drawn_from_as_if_there_were_no_sources() -> None:
    assert mix(["only"] * 9, {"only": 0.3}) == ()


def two_sources(root: Path, **weights: float) -> TokenDataset:
    """The tiny data set, each fourth row of which is from another source."""
    data, _ = tiny.dataset(root)
    for shard in (data.local() / "train").glob("*.parquet"):
        table = pyarrow.parquet.read_table(shard)
        names = ["rare" if row % 4 == 0 else "common" for row in range(len(table))]
        place = table.schema.get_field_index("source")
        pyarrow.parquet.write_table(table.set_column(place, "source", pyarrow.array(names)), shard)
    sources = [{"name": name, "weight": weight} for name, weight in weights.items()]
    TokenDataset.write(data.local(), data.summary() | {"sources": sources})
    return data


def test_training_on_a_mix_says_what_it_drew(tmp_path: Path, make_context: Callable[..., Context]) -> None:
    context = make_context("train")
    data = two_sources(tmp_path / "data", common=1.0, rare=1.0)
    made = train(config(max_steps=4), context, data)
    drawn = made.summary()["sources"]
    assert {name: (facts["rows"], facts["share"]) for name, facts in drawn.items()} == {
        "common": (12, 0.5),
        "rare": (12, 0.5),
    }
    rows = data.summary()["train"]["rows"]
    assert drawn["rare"]["epochs"] == pytest.approx(12 / -(-rows // 4), abs=1e-4)
    logged = {name: value for name, value, _ in context.tracker.metrics if name.startswith("share_")}  # type: ignore[attr-defined]
    assert logged == {"share_common": 0.5, "share_rare": 0.5}
