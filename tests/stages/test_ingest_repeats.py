"""Nothing but the rows decides what an ingest gives: not the parts that it was read in, another attempt at the same time, what
lies beside the files, the container, or how much of a data set a hub's cache happens to hold."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.contract import Context, Executor, ResourcesUnavailable, StageError
from stages.ingest import IngestConfig, IngestResources, SourceConfig, ingest
from tests.stages.test_ingest import quarantine, read, take, tree

MakeContext = Callable[..., Context]


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def configured(path: Path, blocks: int = 8, **values: Any) -> IngestConfig:
    resources = IngestResources(blocks=blocks, executor=Executor.inline)
    return IngestConfig(source=SourceConfig(path=str(path)), resources=resources, **values)


def test_what_is_said_of_a_bad_row_does_not_depend_on_where_a_part_begins(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl({"text": "a"}) + jsonl(*([number] * 200 for number in range(800))))
    trees = [tree(ingest(configured(path, blocks, max_bad_fraction=1), make_context()).local()) for blocks in (1, 7)]
    assert trees[0] == trees[1]
    assert b"container=json" not in trees[1]["quarantine.jsonl"]


def test_a_row_that_is_too_long_is_quarantined_in_every_container(make_context: MakeContext, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "x" * 5_000}, {"text": "b"}]
    (tmp_path / "x.jsonl").write_bytes(jsonl(*rows))
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "x.csv").write_text("text\na\n" + "x" * 5_000 + "\nb\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": [row["text"] for row in rows]}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.json", "x.csv", "x.parquet"):
        found = ingest(configured(tmp_path / name, max_row_bytes=1_000, max_bad_fraction=1), make_context())
        assert [row["text"] for row in read(found)] == ["a", "b"], name
        assert [rule for _, _, rule in quarantine(found)] == ["row_too_long"], name


def test_two_attempts_in_one_work_directory_leave_each_other_alone(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl(*({"text": f"{number} " * 40} for number in range(3_000))))
    expected = tree(ingest(configured(path), make_context()).local())
    others = []

    def meanwhile(fraction: float, text: str) -> None:
        if text == "2 of 3 parts read":
            other = make_context(fingerprint="f" * 64)
            others.append(tree(ingest(configured(path, blocks=2), other).local()))

    ctx = dataclasses.replace(make_context(fingerprint="f" * 64), progress=meanwhile)
    assert tree(ingest(configured(path, blocks=3), ctx).local()) == expected
    assert others == [expected] and not list(ctx.work.iterdir())


def test_a_file_that_is_not_read_changes_no_byte(make_context: MakeContext, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "x.jsonl").write_bytes(jsonl({"text": "a"}))
    alone = tree(take(make_context, root).local())
    (root / "README.md").write_text("about")
    assert tree(take(make_context, root).local()) == alone


def test_sources_of_a_mix_may_count_their_rows_alike(make_context: MakeContext, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(*({"id": i, "text": f"{name} {i}"} for i in (1, 2))))
    mix = {name: SourceConfig(path=str(tmp_path / f"{name}.jsonl")) for name in ("a", "b")}
    inline = IngestResources(executor=Executor.inline)
    assert ingest(IngestConfig(mix=mix, resources=inline), make_context()).summary()["id_clashes"] == 0


def test_whether_answers_repeat_their_prompt_is_settled_by_all_rows_and_refused_where_it_is_not(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": f"q{n}", "chosen": f"q{n} yes", "rejected": f"q{n} no"} for n in range(30)]
    plain = {"prompt": "q", "chosen": "yes", "rejected": "no"}

    def chosen(*rows: Any, **values: Any) -> list[str]:
        path.write_bytes(jsonl(*rows))
        source = SourceConfig(path=str(path), **values)
        cfg = IngestConfig(source=source, resources=IngestResources(executor=Executor.inline, blocks=3))
        return sorted(json.loads(row["chosen"])[0]["content"] for row in read(ingest(cfg, make_context())))

    assert chosen(*rows) == [" yes"] * 30
    whole = sorted(["yes", *(row["chosen"] for row in rows)])
    for given in ([plain, *rows], [*rows, plain]):
        with pytest.raises(StageError, match=r"of 31 preferences 30 .*stages\.ingest\.source\.prompt_repeated=true"):
            chosen(*given)
        assert chosen(*given, prompt_repeated=True) == [" yes"] * 30 + ["yes"]
        assert chosen(*given, prompt_repeated=False) == whole
    by_chance = [rows[0], *[plain] * 30]
    assert chosen(*by_chance) == chosen(*by_chance[::-1]) == ["q0 yes", *["yes"] * 30]
    assert chosen(*rows, prompt_repeated=False) == whole[:-1]


def test_a_hubs_cache_that_holds_only_some_of_the_shards_is_refused(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "hub" / "datasets--owner--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    names = [f"train-0000{number}-of-00002.parquet" for number in (0, 1)]
    for name in names:
        pyarrow.parquet.write_table(pyarrow.table({"text": [name]}), snapshot / name)
    cfg = IngestConfig(
        source=SourceConfig(hub="owner/name", revision="a" * 40), resources=IngestResources(executor=Executor.inline)
    )
    assert [row["text"] for row in read(ingest(cfg, make_context()))] == names
    (snapshot / names[1]).unlink()
    with pytest.raises(ResourcesUnavailable, match=r"1 of 2 files .*train-00001-of-00002\.parquet"):
        ingest(cfg, make_context())
