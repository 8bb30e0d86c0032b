"""Curation in one process: near-duplicates and the split, what counts as the same chat, what stays byte for byte, and that each
row that leaves leaves a reason and, where asked for, an example."""

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from stages.artifacts import Corpus, Rows
from stages.clean import CleanConfig, CleanResources, _refuse_overlap, clean
from stages.contract import Context, Executor, StageError
from stages.text import duplicates
from stages.text.curation import NearDuplicates
from stages.text.duplicates import Found, cluster_sides, keys_schema, straddling
from stages.text.record import Record, canonical
from stages.text.shards import ROWS_SCHEMA, ShardWriter

MakeContext = Callable[..., Context]


def rows_of(directory: Path, records: Iterable[Record], sources: list[dict[str, Any]] | None = None) -> Rows:
    directory.mkdir(parents=True)
    with ShardWriter(directory / "rows", ROWS_SCHEMA, rows_per_shard=300) as writer:
        for record in records:
            writer.write(*record.values())
    Rows.write(directory, {"sources": sources or []})
    return Rows(uri=directory.as_uri())


def texts(given: Iterable[str]) -> list[Record]:
    return [Record(f"row:{i:09d}", "test", "text", text=text) for i, text in enumerate(given)]


def inline(blocks: int = 2) -> CleanResources:
    return CleanResources(blocks=blocks, executor=Executor.inline)


def table(corpus: Corpus, name: str = "rows") -> list[dict[str, str]]:
    parts = sorted((corpus.local() / name).glob("part-*"))
    return [row for part in parts for row in pyarrow.parquet.read_table(part).to_pylist()]


def dropped(corpus: Corpus) -> dict[str, tuple[str, str]]:
    return {row["id"]: (row["reason"], row["detail"]) for row in table(corpus, "dropped")}


def digest(directory: Path) -> str:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    content = [(f.relative_to(directory).as_posix(), hashlib.sha256(f.read_bytes()).hexdigest()) for f in files]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def families(count: int, copies: int, seed: int = 1) -> list[str]:
    """`count` texts of 60 words, each with `copies` more that differ in their last word; all shuffled."""
    chance = random.Random(seed)
    found = []
    for family in range(count):
        words = [f"w{chance.randrange(10_000)}" for _ in range(60)]
        found += [" ".join([*words[:-1], f"end{family}n{copy}"]) for copy in range(copies + 1)]
    chance.shuffle(found)
    return found


def family(text: str) -> str:
    return text.rpartition("end")[2].partition("n")[0]


def test_of_near_duplicates_the_smallest_id_stays_whatever_the_blocks(
    make_context: MakeContext, tmp_path: Path
) -> None:
    given = families(150, 3)
    digests = set()
    for blocks in (1, 2, 7):
        rows = rows_of(tmp_path / f"in{blocks}", texts(given))
        corpus = clean(CleanConfig(near_duplicates=NearDuplicates(), resources=inline(blocks)), make_context(), rows)
        corpus.check()
        digests.add(digest(corpus.local()))
    assert len(digests) == 1
    first: dict[str, int] = {}
    for index, text in enumerate(given):
        first.setdefault(family(text), index)
    assert [row["text"] for row in table(corpus)] == [given[index] for index in sorted(first.values())]
    assert dropped(corpus) == {
        f"row:{index:09d}": ("near_duplicate", f"of row:{first[family(text)]:09d}")
        for index, text in enumerate(given)
        if index != first[family(text)]
    }
    facts = corpus.summary()
    assert facts["clusters"] == {"exact": {}, "near": {"4": 150}} and facts["split_overlap"] == 0
    assert {
        "step": "near_duplicate",
        "rows": 450,
        "characters": sum(map(len, given)) - facts["characters"],
    } in facts["waterfall"]


def test_near_duplicates_that_stay_are_on_one_side_and_no_other_row_moves_them(
    make_context: MakeContext, tmp_path: Path
) -> None:
    given, more = families(200, 3), families(100, 2, seed=2)
    near = NearDuplicates(remove=False)
    sides = {}
    for name, some in (("alone", given), ("together", more + given)):
        config = CleanConfig(near_duplicates=near, validation_fraction=0.4, resources=inline())
        context = make_context()
        corpus = clean(config, context, rows_of(tmp_path / name, texts(some)))
        sides[name] = {row["text"]: row["split"] for row in table(corpus)}
        assert len(sides[name]) == len(some) and not dropped(corpus)
        assert ("split_overlap", 0, None) in context.tracker.metrics  # type: ignore[attr-defined]
    assert sides["alone"].items() < sides["together"].items()
    of_family: dict[str, set[str]] = defaultdict(set)
    for text, side in sides["alone"].items():
        of_family[family(text)].add(side)
    assert {len(found) for found in of_family.values()} == {1}
    assert 0.3 < sum(found == {"validation"} for found in of_family.values()) / 200 < 0.5
    # By content alone, most families would stand on both sides.
    apart = clean(
        CleanConfig(validation_fraction=0.4, resources=inline()),
        make_context(),
        rows_of(tmp_path / "apart", texts(given)),
    )
    by_content: dict[str, set[str]] = defaultdict(set)
    for row in table(apart):
        by_content[family(row["text"])].add(row["split"])
    assert sum(len(found) == 2 for found in by_content.values()) > 100


def test_a_cluster_falls_into_validation_as_often_as_a_row_does() -> None:
    sides = np.random.default_rng(1).integers(0, 2**64, 30_000, np.uint64)
    roots = np.repeat(np.arange(5_000), 6)
    drawn = cluster_sides(roots, sides)
    assert (drawn.reshape(-1, 6) == drawn.reshape(-1, 6)[:, :1]).all()
    assert abs(float((drawn < 0.1 * 2.0**64).mean()) - 0.1) < 0.015
    order = np.random.default_rng(2).permutation(30_000)
    assert (cluster_sides(roots[order], sides[order]) == drawn[order]).all()


def test_equal_bytes_and_equal_normal_forms_are_told_apart_and_keys_meet_in_many_tasks_as_in_one(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["one", "two", "one", "one \r\n", "two", "one \r\n", "é", "e\u0301"] + [f"row {i}" for i in range(200)]
    digests = set()
    for number in (duplicates.KEYS_PER_TASK, 50):
        monkeypatch.setattr(duplicates, "KEYS_PER_TASK", number)
        config = CleanConfig(near_duplicates=NearDuplicates(ngram=2), resources=inline())
        corpus = clean(config, make_context(), rows_of(tmp_path / f"in{number}", texts(given)))
        digests.add(digest(corpus.local()))
    assert len(digests) == 1
    assert {row_id[-1]: found for row_id, found in dropped(corpus).items()} == {
        "2": ("exact_duplicate", "of row:000000000"),
        "3": ("duplicate", "of row:000000000"),
        "4": ("exact_duplicate", "of row:000000001"),
        "5": ("exact_duplicate", "of row:000000000"),
        "7": ("duplicate", "of row:000000006"),
    }
    assert corpus.summary()["clusters"]["exact"] == {"2": 2, "4": 1}


def test_rows_repeated_under_other_ids_with_trailing_spaces_never_stand_on_both_sides(
    make_context: MakeContext, tmp_path: Path
) -> None:
    given = [f"Caf\u00e9 number {i}\nis open." for i in range(100)]
    again = [text.replace("\u00e9", "e\u0301").replace("\n", " \n") + "  " for text in given[:10]]
    context = make_context()
    config = CleanConfig(validation_fraction=0.5, resources=inline())
    corpus = clean(config, context, rows_of(tmp_path / "in", texts(given + again)))
    assert dropped(corpus) == {f"row:{100 + i:09d}": ("duplicate", f"of row:{i:09d}") for i in range(10)}
    sides = Counter(row["text"] for row in table(corpus))
    assert set(sides) == set(given) and set(sides.values()) == {1}
    assert ("dropped_duplicate", 10, None) in context.tracker.metrics  # type: ignore[attr-defined]
    assert ("split_overlap", 0, None) in context.tracker.metrics  # type: ignore[attr-defined]


def chat(row: int, *said: str, **more: Any) -> Record:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text, **more} for i, text in enumerate(said)]
    return Record(f"chat:{row:09d}", "chats", "chat", messages=canonical(turns))


def test_equal_chats_are_found_and_what_they_say_stays_byte_for_byte(make_context: MakeContext, tmp_path: Path) -> None:
    odd = "e\u0301 \r\n\n\n\n x\u200b\t"
    given = [
        chat(0, odd, "yes"),
        chat(1, odd, "yes"),
        chat(2, " " + odd.replace("\r\n", "\n"), "yes \n"),
        chat(3, odd, "no"),
        chat(4, odd, "yes", name="ann"),
        Record("chat:000000005", "chats", "chat", messages=given_messages(odd, "yes"), tools='[{"name":"f"}]'),
        Record(
            "pair:000000000",
            "pairs",
            "preference",
            messages=given_messages(odd),
            chosen=given_messages("a"),
            rejected=given_messages("b"),
        ),
        Record(
            "pair:000000001",
            "pairs",
            "preference",
            messages=given_messages(odd),
            chosen=given_messages("b"),
            rejected=given_messages("a"),
        ),
        Record(
            "pair:000000002",
            "pairs",
            "preference",
            messages=given_messages(odd),
            chosen=given_messages("a"),
            rejected=given_messages("b"),
        ),
        *(chat(100 + i, f"question {i}", "yes") for i in range(60)),
    ]
    given = sorted(given, key=lambda record: record.id)
    corpus = clean(
        CleanConfig(resources=inline(), validation_fraction=0.2), make_context(), rows_of(tmp_path / "in", given)
    )
    assert dropped(corpus) == {
        "chat:000000001": ("exact_duplicate", "of chat:000000000"),
        "chat:000000002": ("duplicate", "of chat:000000000"),
        "pair:000000002": ("exact_duplicate", "of pair:000000000"),
    }
    stays = {record.id: record for record in given if record.id not in dropped(corpus)}
    assert {row["id"]: Record(**{k: v for k, v in row.items() if k != "split"}) for row in table(corpus)} == stays


def given_messages(*said: str) -> str:
    return canonical([{"role": "user", "content": text} for text in said])


def test_text_stays_byte_for_byte_where_it_is_not_to_be_normalised(make_context: MakeContext, tmp_path: Path) -> None:
    given = ["e\u0301 \r\n\n\n\nx\x07 ", "\u00e9\n\nx", *(f"row {i} \r\n" for i in range(100))]
    corpus = clean(
        CleanConfig(normalise=False, resources=inline()), make_context(), rows_of(tmp_path / "in", texts(given))
    )
    assert [row["text"] for row in table(corpus)] == [given[0], *given[2:]]
    assert dropped(corpus) == {"row:000000001": ("duplicate", "of row:000000000")}
    normal = clean(CleanConfig(resources=inline()), make_context(), rows_of(tmp_path / "in2", texts(given)))
    assert [row["text"] for row in table(normal)] == ["\u00e9\n\nx", *(f"row {i}" for i in range(100))]
    assert [row["split"] for row in table(normal)] == [row["split"] for row in table(corpus)]


def test_examples_of_rows_that_left_are_shown_only_where_asked_for(make_context: MakeContext, tmp_path: Path) -> None:
    given = [f"text {i}" for i in range(100)] + ["text 7", "a", "text 8", "b", "text 9", "x" * 5_000]
    for number in (0, 2):
        config = CleanConfig(examples_per_reason=number, min_characters=3, max_characters=4_000, resources=inline(5))
        corpus = clean(config, make_context(), rows_of(tmp_path / str(number), texts(given)))
        shown = corpus.local() / "dropped" / "examples.jsonl"
        assert shown.exists() == bool(number)
    lines = [json.loads(line) for line in shown.read_text("utf-8").splitlines()]
    assert [(line["reason"], line["id"][-3:], line["text"]) for line in lines] == [
        ("too_short", "101", "a"),
        ("too_short", "103", "b"),
        ("too_long", "105", "x" * 2_000),
        ("exact_duplicate", "100", "text 7"),
        ("exact_duplicate", "102", "text 8"),
    ]


def test_each_source_is_accounted_for_with_its_weight(make_context: MakeContext, tmp_path: Path) -> None:
    given = [
        Record(f"{name}/x:{i:09d}", name, "text", text=f"{name} text {i % 90}") for name in "ab" for i in range(100)
    ]
    sources = [
        {"name": "a", "weight": 2.5, "rows": 100},
        {"name": "b", "weight": 1.0},
        {"name": "empty", "weight": 4.0},
    ]
    corpus = clean(
        CleanConfig(validation_fraction=0.2, resources=inline()),
        make_context(),
        rows_of(tmp_path / "in", given, sources),
    )
    facts = corpus.summary()
    kept = Counter((row["source"], row["split"]) for row in table(corpus))
    found = {source["name"]: source for source in facts["sources"]}
    assert [(name, source["weight"]) for name, source in found.items()] == [("a", 2.5), ("b", 1.0), ("empty", 4.0)]
    for name in "ab":
        assert found[name]["in"]["rows"] == 100 and found[name]["rows"] == 90
        assert found[name]["dropped"] == {"exact_duplicate": 10}
        assert {split: found[name][split]["rows"] for split in ("train", "validation")} == {
            split: kept[name, split] for split in ("train", "validation")
        }
    assert found["empty"]["rows"] == 0
    assert sum(source["characters"] for source in found.values()) == facts["characters"]


def test_an_overlap_of_the_split_is_seen_and_stops_the_stage() -> None:
    columns = [[0, 1, 2, 3], [0] * 4, [0] * 4, [0] * 4, [5, 5, 6, 6], [0] * 4, [True, True, False, True], [8, 9, 7, 7]]
    keys = pyarrow.table(
        [pyarrow.array(column, field.type) for column, field in zip(columns, keys_schema(1), strict=True)],
        keys_schema(1),
    )

    def overlap(column: str, kept: list[int], validation: list[int]) -> int:
        return sum(
            straddling(part, 3, column, np.packbits(kept).tobytes(), np.packbits(validation).tobytes(), keys)
            for part in range(3)
        )

    assert overlap("side", [1, 1, 1, 1], [1, 1, 0, 0]) == 0
    assert overlap("side", [1, 1, 1, 1], [1, 0, 1, 0]) == 2
    assert overlap("side", [1, 0, 1, 1], [1, 0, 1, 0]) == 1
    assert overlap("band0", [1, 1, 1, 1], [1, 1, 1, 0]) == 0  # row 2 is too short to have a band's key
    nothing = np.zeros(0, bool)
    with pytest.raises(StageError, match="3 contents stand on both sides of the split, wanted none"):
        _refuse_overlap(Found(nothing, nothing, nothing, overlap=3))


def test_impossible_values_are_refused_by_name() -> None:
    for values in ({"bands": 0}, {"rows": 0}, {"ngram": 0}):
        with pytest.raises(ValueError, match=rf"near_duplicates\.{next(iter(values))} must be at least 1, got 0"):
            NearDuplicates(**values)
    with pytest.raises(ValueError, match="examples_per_reason"):
        CleanConfig(examples_per_reason=-1)
