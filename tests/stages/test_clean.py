"""Cleaning on a real Ray: one digest however the work is cut, nothing lost without a reason, a split that never moves."""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from stages.artifacts import ArtifactError, Corpus, Rows
from stages.clean import CleanConfig, CleanResources, clean
from stages.contract import Context, Executor, StageError
from stages.text.corpus import documents
from stages.text.record import Record
from stages.text.shards import ROWS_SCHEMA, ShardWriter

MakeContext = Callable[..., Context]
Given = Sequence[tuple[str, str, str]]
pytestmark = pytest.mark.ray


def rows_of(directory: Path, given: Given, rows_per_shard: int = 10_000) -> Rows:
    """Rows (id, prompt, text) as ingest writes them."""
    directory.mkdir(parents=True)
    with ShardWriter(directory / "rows", ROWS_SCHEMA, rows_per_shard=rows_per_shard) as writer:
        for row_id, prompt, text in given:
            writer.write(*Record(row_id, "test", "prompt_completion" if prompt else "text", prompt, text).values())
    Rows.write(directory, {})
    return Rows(uri=directory.as_uri())


def table(corpus: Corpus, name: str = "rows") -> list[dict[str, str]]:
    parts = sorted((corpus.local() / name).glob("*"))
    return [row for part in parts for row in pyarrow.parquet.read_table(part).to_pylist()]


def digest(directory: Path) -> str:
    files = sorted(f for f in directory.rglob("*") if f.is_file())
    content = [(f.relative_to(directory).as_posix(), hashlib.sha256(f.read_bytes()).hexdigest()) for f in files]
    return hashlib.sha256(repr(content).encode()).hexdigest()


@pytest.fixture(scope="module")
def many() -> Given:
    """25,000 rows of which 4,000 repeat an earlier one with other white space, far away; 500 are empty, 500 long."""
    chance = random.Random(1)
    texts = [f"text {i} " + "wörd " * chance.randint(1, 9) for i in range(20_000)]
    repeated = [text.rstrip() + "  \r\n" for text in chance.sample(texts, 4_000)]
    texts += repeated + [" \n"] * 500 + ["long " * 100 + str(i) for i in range(500)]
    return [(f"row:{i:09d}", "", text) for i, text in enumerate(texts)]


def test_one_digest_for_any_blocks_and_executor_and_for_any_shards_that_the_rows_came_in(
    ray_session: None, make_context: MakeContext, many: Given, tmp_path: Path
) -> None:
    digests = set()
    for blocks, executor, rows_per_shard in (
        (1, Executor.inline, 10_000),
        (2, Executor.inline, 3_333),
        (7, Executor.ray, 3_333),
    ):
        rows = rows_of(tmp_path / f"in{blocks}{executor.name}", many, rows_per_shard)
        config = CleanConfig(max_characters=400, resources=CleanResources(blocks=blocks, executor=executor))
        corpus = clean(config, make_context(), rows)
        corpus.check()
        digests.add(digest(corpus.local()))
    assert len(digests) == 1
    kept = table(corpus)
    assert [row["id"] for row in kept] == sorted(row["id"] for row in kept)
    assert [row["text"] for row in kept] == [text.rstrip() for _, _, text in many[:20_000]]
    dropped = {row["id"]: row["reason"] for row in table(corpus, "dropped")}
    assert len(dropped) == 5_000
    assert {reason: list(dropped.values()).count(reason) for reason in set(dropped.values())} == {
        "duplicate": 4_000,
        "too_short": 500,
        "too_long": 500,
    }
    parts = sorted((corpus.local() / "rows").glob("*"))
    assert [part.name for part in parts] == ["part-00000.parquet", "part-00001.parquet"]
    assert {pyarrow.parquet.read_metadata(part).num_rows for part in parts} == {10_000}
    steps = {step["step"]: step for step in corpus.summary()["waterfall"]}
    for unit in ("rows", "characters"):
        assert (
            steps["in"][unit] - sum(s[unit] for n, s in steps.items() if n not in ("in", "out")) == steps["out"][unit]
        )
    assert steps["in"]["characters"] == sum(len(text) for _, _, text in many)
    splits = corpus.summary()
    for name in ("train", "validation"):
        texts = [text for _, _, text in documents(corpus.local(), name)]
        assert splits[name] == {
            "rows": len(texts),
            "characters": sum(map(len, texts)),
            "bytes": sum(len(text.encode()) for text in texts),
        }
    assert 0.04 < splits["validation"]["rows"] / 20_000 < 0.06


def test_the_smallest_id_of_equal_rows_stays_and_equal_texts_with_other_prompts_are_not_equal(
    ray_session: None, make_context: MakeContext, tmp_path: Path
) -> None:
    given = [
        ("a", "p", "x"),
        ("b", "p", "x \n"),
        ("c", "q", "x"),
        ("d", "", "x"),
        ("e", "", "e\u0301"),
        ("f", "", "\u00e9"),
    ]
    more = [(f"g{i:03d}", "", str(i)) for i in range(200)]
    corpus = clean(CleanConfig(), make_context(), rows_of(tmp_path / "in", given + more))
    assert [row["id"] for row in table(corpus)] == ["a", "c", "d", "e", *(row[0] for row in more)]
    assert table(corpus, "dropped") == [
        {"id": "b", "reason": "duplicate", "detail": "of a"},
        {"id": "f", "reason": "duplicate", "detail": "of e"},
    ]


def test_adding_rows_never_moves_an_old_row_to_the_other_side(
    ray_session: None, make_context: MakeContext, tmp_path: Path
) -> None:
    old = [(f"b{i:04d}", "", f"old {i}") for i in range(400)]
    new = [(f"a{i:04d}", "", f"new {i}") for i in range(397)]
    alone, together = (
        {
            row["text"]: row["split"]
            for row in table(clean(CleanConfig(), make_context(), rows_of(tmp_path / name, given)))
        }
        for name, given in (("alone", old), ("together", new + old))
    )
    assert alone.items() < together.items()
    assert set(alone.values()) == {"train", "validation"}


def test_when_every_row_is_filtered_out_the_counts_of_each_rule_are_named(
    ray_session: None, make_context: MakeContext, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path / "in", [("a", "", "secret"), ("b", "", "secret " * 9), ("c", "", " ")])
    with pytest.raises(StageError, match=r"all 3 rows were filtered out") as caught:
        clean(CleanConfig(min_characters=10, max_characters=20), make_context(), rows)
    assert "2  too_short: below stages.clean.min_characters" in str(caught.value)
    assert "1  too_long: above stages.clean.max_characters" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_empty_split_says_what_to_set(ray_session: None, make_context: MakeContext, tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "in", [("a", "", "one row")])
    for fraction, empty in (
        (1e-9, "the validation split is empty.*set a larger"),
        (1 - 1e-9, "the train split is empty.*smaller"),
    ):
        with pytest.raises(StageError, match=empty):
            clean(CleanConfig(validation_fraction=fraction), make_context(), rows)


def test_rows_out_of_id_order_are_refused(ray_session: None, make_context: MakeContext, tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "in", [("b", "", "x"), ("a", "", "y"), ("a", "", "z")])
    with pytest.raises(ArtifactError, match=r"^row a stands after b"):
        clean(CleanConfig(), make_context(), rows)


def test_cleaning_says_nothing_on_the_console(
    ray_session: None, make_context: MakeContext, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(tmp_path / "in", [(f"{i:04d}", "", f"row {i}") for i in range(300)])
    clean(CleanConfig(), make_context(), rows)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_impossible_values_are_refused_by_name() -> None:
    wrong: list[tuple[dict[str, float], str]] = [
        ({"min_characters": 0}, "min_characters"),
        ({"min_characters": 9, "max_characters": 3}, "max_characters"),
        ({"validation_fraction": 0}, "validation_fraction"),
        ({"validation_fraction": 1}, "validation_fraction"),
    ]
    for values, name in wrong:
        with pytest.raises(ValueError, match=name):
            CleanConfig(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"resources\.blocks"):
        CleanResources(blocks=0)
