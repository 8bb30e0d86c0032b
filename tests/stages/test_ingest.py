"""Rows come in whole or not at all: the standard library without leaks, files with every fault people's files have."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.artifacts import Rows
from stages.contract import Context, Executor, StageError
from stages.ingest import IngestConfig, IngestResources, SourceConfig, _sources, ingest
from stages.text import docstrings
from stages.text.choices import Documentation
from stages.text.files import TextUnit

MakeContext = Callable[..., Context]


def read(rows: Rows) -> list[dict[str, str]]:
    parts = sorted((rows.local() / "rows").glob("part-*.parquet"))
    return [row for part in parts for row in pyarrow.parquet.read_table(part).to_pylist()]


def tree(directory: Path) -> dict[str, bytes]:
    return {f.relative_to(directory).as_posix(): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def take(make_context: MakeContext, path: Path | str, **source: object) -> Rows:
    bad = float(source.pop("max_bad_fraction", 0.01))  # type: ignore[arg-type]
    resources = IngestResources(executor=Executor.inline)
    source_config = SourceConfig(path=str(path), **source)  # type: ignore[arg-type]
    config = IngestConfig(source=source_config, max_bad_fraction=bad, resources=resources)
    rows = ingest(config, make_context("ingest"))
    rows.check()
    return rows


def files_of(rows: list[dict[str, str]]) -> list[str]:
    return [row["id"].rpartition(":")[0] for row in rows]


def quarantine(rows: Rows) -> list[tuple[str, int, str]]:
    lines = (rows.local() / "quarantine.jsonl").read_text("utf-8").splitlines()
    return [(bad["file"], bad["line"], bad["rule"]) for bad in map(json.loads, lines)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The standard library's documentation, collected by a process whose environment holds what must not get out."""
    output = tmp_path_factory.mktemp("library")
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'tests'); import conftest;"
        "from stages.contract import Context; from stages.ingest import IngestConfig, ingest;"
        "o = Path(sys.argv[1]); ingest(IngestConfig(), Context(output=o, work=o, state=o, fingerprint='0' * 64, seed=0,"
        "tracker=conftest.MemoryTracker(), registry=conftest.MemoryRegistry(),"
        "progress=lambda f, t: None, headline=lambda t: None))"
    )
    canaries = {"RAYKEEL_CANARY": "canary-4b1d", "HOME": "/home/canary-9f2c", "PYTHONHASHSEED": "7"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(output)], env={**os.environ, **canaries}, cwd=root, check=True)
    return Rows(uri=output.as_uri())


def test_the_standard_library_gives_thousands_of_distinct_documents_and_none_of_them_leaks(library: Rows) -> None:
    rows = read(library)
    texts = {row["id"]: row["text"] for row in rows}
    assert len(set(texts.values())) == len(rows) == library.summary()["rows"] > 4_500
    assert [row["id"] for row in rows] == sorted(texts)
    assert texts["os.path.join"].startswith("os.path.join(a, *p)\n\nJoin two or more pathname components")
    assert texts["json.dumps"].startswith("json.dumps(obj, *, skipkeys=False, ensure_ascii=True, check_circular=True")
    assert texts["len"] == "len(obj, /)\n\nReturn the number of items in a container."
    assert texts["str.zfill"].startswith("str.zfill(width, /)\n\nPad a numeric string with zeros")
    assert not any(
        name.partition(".")[0] in {"test", "idlelib", "turtledemo", "pip", "sitecustomize"} for name in texts
    )
    everything = "\n".join(texts.values())
    places = (str(Path.home()), sys.executable, sys.prefix, sys.base_prefix, str(Path.cwd()))
    for leak in ("canary", "CANARY", "environ({", *places):
        assert leak not in everything, leak
    assert not re.search(r"0x[0-9a-fA-F]{6,}", everything)
    assert not any(b"canary" in content for content in tree(library.local()).values())


def test_two_executions_give_the_same_bytes(library: Rows, make_context: MakeContext) -> None:
    assert tree(ingest(IngestConfig(), make_context()).local()) == tree(library.local())


def test_a_limit_takes_the_first_rows_in_the_order_of_their_ids(
    library: Rows, make_context: MakeContext, tmp_path: Path
) -> None:
    assert read(ingest(IngestConfig(limit=7), make_context())) == read(library)[:7]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(20)))
    inline = IngestResources(executor=Executor.inline)
    rows = ingest(IngestConfig(source=SourceConfig(path=str(path)), limit=3, resources=inline), make_context())
    assert [row["text"] for row in read(rows)] == ["0", "1", "2"]


def test_the_identity_of_the_standard_library_names_its_version_and_content() -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(re.escape(version) + r"-[0-9a-f]{64}", docstrings.identity())


def test_documentation_becomes_chats_and_preferences_whose_right_answer_is_known(
    library: Rows, make_context: MakeContext
) -> None:
    described = {row["id"]: row["text"].partition("\n\n")[2].strip() for row in read(library)}
    for kind in (Documentation.chat, Documentation.preference):
        rows = read(ingest(IngestConfig(source=SourceConfig(documentation=kind)), make_context()))
        assert {row["kind"] for row in rows} == {kind.value}
        assert [row["id"] for row in rows] == [name for name, text in described.items() if text]
        for row in rows:
            messages = json.loads(row["messages"])
            assert messages[0] == {"role": "user", "content": f"What does {row['id']} do?"}
            right = messages[1:] if kind is Documentation.chat else json.loads(row["chosen"])
            assert right == [{"role": "assistant", "content": described[row["id"]]}]
            if kind is Documentation.preference:
                wrong = json.loads(row["rejected"])[0]["content"]
                assert wrong != described[row["id"]] and wrong in described.values()
    few = ingest(IngestConfig(source=SourceConfig(documentation=kind), limit=5), make_context())
    assert read(few) == rows[:5]
    with pytest.raises(ValueError, match="documentation must be text with a path or a hub, got chat"):
        SourceConfig(path="x.jsonl", documentation=Documentation.chat)


def test_planning_an_ingest_imports_nothing_heavy() -> None:
    code = (
        "import sys; from stages.ingest import _sources, IngestConfig; _sources(IngestConfig(), None);"
        "print([m for m in ('pyarrow', 'numpy', 'pandas', 'ray', 'torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_jsonl_with_text_keeps_every_string_as_it_is(make_context: MakeContext, tmp_path: Path) -> None:
    strings = ["  a\tb  ", "007", "1e5", "e\u0301 \u00e9", "\U0001f600", "a\u2028b\r\n", "null", ""]
    path = tmp_path / "my.jsonl"
    path.write_text("".join(json.dumps({"text": s, "n": i}) + "\n\n" for i, s in enumerate(strings)), "utf-8")
    rows = take(make_context, path)
    assert [row["text"] for row in read(rows)] == strings
    assert [row["id"] for row in read(rows)] == [f"my.jsonl:{2 * i + 1:09d}" for i in range(len(strings))]
    assert {row["source"] for row in read(rows)} == {"my.jsonl"}
    numbers = {"rows": 8, "characters": sum(map(len, strings)), "quarantined": 0}
    summary = rows.summary()
    assert summary.items() >= {"kind": "text", "repaired": 0, "id_clashes": 0, "reasons": {}, **numbers}.items()
    assert summary["waterfall"] == [{"step": "in", "rows": 8}, {"step": "out", "rows": 8}]
    about = {"name": "my.jsonl", "weight": 1.0, "files": 1, "format": "text", "reasons": {}}
    why = {"why": "field text in 8 of the first 8 rows", "kinds": {"text": 8}}
    assert summary["sources"] == [about | why | numbers]


def test_prompt_and_completion_are_found_by_their_names_or_by_the_names_given(
    make_context: MakeContext, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "completion": "b"}\n')
    named = tmp_path / "named.jsonl"
    named.write_text('{"question": "a", "answer": "b"}\n')
    rows = take(make_context, pairs)
    assert [(r["prompt"], r["text"]) for r in read(rows)] == [("a", "b")]
    assert rows.summary()["kind"] == "prompt_completion"
    found = take(make_context, named, prompt_field="question", completion_field="answer")
    assert [(r["prompt"], r["text"]) for r in read(found)] == [("a", "b")]
    with pytest.raises(
        StageError,
        match=r"named.jsonl:1: found the fields answer \(text\), question \(text\); wanted 'text', or 'prompt' and",
    ):
        take(make_context, named)


def test_a_byte_order_mark_changes_nothing(make_context: MakeContext, tmp_path: Path) -> None:
    content = '{"text": "caf\u00e9"}\n{"text": "b"}\n'.encode()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x.jsonl").write_bytes(content)
    (tmp_path / "b" / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    plain, marked = (take(make_context, tmp_path / name / "x.jsonl") for name in "ab")
    assert tree(plain.local()) == tree(marked.local())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_refused(make_context: MakeContext, tmp_path: Path, encoding: str) -> None:
    (tmp_path / "x.jsonl").write_bytes('{"text": "a"}\n'.encode(encoding))
    with pytest.raises(StageError, match="save it as UTF-8"):
        take(make_context, tmp_path / "x.jsonl")


def test_bad_rows_are_quarantined_with_line_and_reason_but_never_their_text(
    make_context: MakeContext, tmp_path: Path
) -> None:
    lines = [
        b'{"text": "secret good"}',
        b'{"text": "secret \\ud83d cut"}',
        b'{"text": "secret caf\xe9"}',
        b'{"text": "secret',
        b'["secret"]',
        b'{"text": null}',
        b'{"text": ["secret"]}',
        b'{"other": "secret"}',
        b'{"text": "secret \\ud83d\\ude00 whole"}',
        b"[" * 100_000,
    ]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows = take(make_context, path, max_bad_fraction=0.9)
    assert [row["text"] for row in read(rows)] == ["secret good", "secret \U0001f600 whole"]
    reasons = [
        (2, "lone_surrogate"),
        (3, "invalid_utf8"),
        (4, "broken_json"),
        (5, "not_an_object"),
        (6, "not_text"),
        (7, "not_text"),
        (8, "missing_field"),
        (10, "broken_json"),
    ]
    assert quarantine(rows) == [("x.jsonl", line, reason) for line, reason in reasons]
    assert rows.summary()["reasons"]["broken_json"] == 2
    assert b"secret" not in (rows.local() / "quarantine.jsonl").read_bytes()
    with pytest.raises(StageError) as caught:
        take(make_context, path)
    message = str(caught.value)
    assert "8 of 10 rows cannot be used, at most 1.0% are allowed" in message
    assert "2  broken_json: x.jsonl:4 (column 17), x.jsonl:10" in message, message
    assert "2  not_text: x.jsonl:6 (text null), x.jsonl:7 (text list)" in message, message
    assert "secret" not in message


def test_one_bad_line_in_a_hundred_passes_and_two_do_not(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' * 99 + "{\n")
    assert take(make_context, path).summary()["quarantined"] == 1
    path.write_text('{"text": "a"}\n' * 98 + "{\n{\n")
    with pytest.raises(StageError, match="2 of 100 rows"):
        take(make_context, path)


def test_gzip_gives_the_same_rows_and_a_cut_one_is_refused(make_context: MakeContext, tmp_path: Path) -> None:
    content = b"".join(b'{"text": "%d"}\n' % i for i in range(5_000))
    (tmp_path / "x.jsonl").write_bytes(content)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(content)[:-10])
    (tmp_path / "no.jsonl.gz").write_bytes(content)
    plain = [row["text"] for row in read(take(make_context, tmp_path / "x.jsonl"))]
    assert [row["text"] for row in read(take(make_context, tmp_path / "x.jsonl.gz"))] == plain
    with pytest.raises(StageError, match=r"cut.jsonl.gz: truncated"):
        take(make_context, tmp_path / "cut.jsonl.gz")
    with pytest.raises(StageError, match=r"no.jsonl.gz: not a whole gzip file"):
        take(make_context, tmp_path / "no.jsonl.gz")


def test_a_line_of_ten_megabytes_is_one_row(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "x" * 10_000_000}) + "\n" + '{"text": "b"}\n')
    assert [len(row["text"]) for row in read(take(make_context, path))] == [10_000_000, 1]


def test_parquet_of_any_string_type_is_read(make_context: MakeContext, tmp_path: Path) -> None:
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        path = tmp_path / "x.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(["a", "007"], kind)}), path)
        rows = read(take(make_context, path))
        assert [(row["id"], row["text"]) for row in rows] == [
            ("x.parquet:000000001", "a"),
            ("x.parquet:000000002", "007"),
        ]
    invalid = pyarrow.array([b"a", b"\xe9", None], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), path)
    rows_with_bad = take(make_context, path, max_bad_fraction=0.9)
    assert quarantine(rows_with_bad) == [
        ("x.parquet", 2, "invalid_utf8"),
        ("x.parquet", 3, "not_text"),
    ]
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), path)
    with pytest.raises(StageError, match=r"1  not_text: x.parquet:1 \(text number\)"):
        take(make_context, path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StageError, match=r"x.parquet: not a whole Parquet file"):
        take(make_context, path)


def test_text_files_are_cut_into_files_paragraphs_or_lines(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("a\r\nb\n\n\n \nc\u00e9\n".encode())

    def texts(unit: TextUnit) -> list[tuple[str, str]]:
        return [(row["id"][-2:], row["text"]) for row in read(take(make_context, path, text_unit=unit))]

    assert texts(TextUnit.file) == [("01", "a\r\nb\n\n\n \nc\u00e9\n")]
    assert texts(TextUnit.paragraph) == [("01", "a\r\nb"), ("06", "c\u00e9")]
    assert texts(TextUnit.line) == [("01", "a"), ("02", "b"), ("06", "c\u00e9")]
    path.write_bytes(b"good\nb\xe9d\n")
    assert quarantine(take(make_context, path, max_bad_fraction=1, text_unit=TextUnit.line)) == [
        ("x.txt", 2, "invalid_utf8")
    ]


def test_a_directory_and_a_glob_give_rows_in_id_order_whose_ids_do_not_tell_where_they_lay(
    make_context: MakeContext, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    for name in ("b.md", "a/c.txt", "a.txt", ".hidden/d.txt", "a.txt.gz", "image.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(gzip.compress(b"z") if name.endswith("gz") else name.encode())
    rows = read(take(make_context, root))
    assert files_of(rows) == ["a.txt.gz", "a.txt", "a/c.txt", "b.md"]
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    assert {row["source"] for row in rows} == {"data"}
    assert files_of(read(take(make_context, root / "*.txt"))) == ["a.txt"]
    assert files_of(read(take(make_context, root / "**" / "*.txt"))) == [
        ".hidden/d.txt",
        "a.txt",
        "a/c.txt",
    ]


def test_what_cannot_be_a_source_is_named_before_anything_is_read(make_context: MakeContext, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n")
    (tmp_path / "x.xlsx").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "nothing").mkdir()
    for path, message in (
        (tmp_path / "none.jsonl", "no file or directory"),
        (tmp_path / "x.csv", "found no rows"),
        (tmp_path / "x.xlsx", "ends in '.xlsx', want .jsonl, .json-lines.*save the sheet as CSV"),
        (tmp_path / "nothing", "want .jsonl, .json-lines"),
        (tmp_path / "*.jsonx", "want .jsonl, .json-lines"),
        (tmp_path / "empty.jsonl", "found no rows"),
    ):
        with pytest.raises(StageError, match=message):
            take(make_context, path)


def test_impossible_values_are_refused_by_name() -> None:
    for wrong, name in (({"limit": 0}, "limit"), ({"max_bad_fraction": 1.5}, "max_bad_fraction")):
        with pytest.raises(ValueError, match=name):
            IngestConfig(**wrong)
    fields: list[dict[str, Any]] = [{f: ""} for f in ("path", "text_field", "prompt_field", "completion_field")]
    for values in fields:
        with pytest.raises(ValueError, match=next(iter(values))):
            SourceConfig(**values)


def test_the_identity_of_files_is_their_content_under_relative_names(tmp_path: Path) -> None:
    class Digests:
        def path(self, path: Path) -> str:
            return path.read_text()

        def model(self, model: str) -> str:
            raise AssertionError

    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "b.txt").write_text("2")
    cfg = IngestConfig(source=SourceConfig(path=str(tmp_path)))
    name = tmp_path.name  # stands in every row
    assert _sources(cfg, Digests()) == {f"{name}/a.txt": "1", f"{name}/b.txt": "2"}
    one = IngestConfig(source=SourceConfig(path=str(tmp_path / "a.txt")))
    assert _sources(one, Digests()) == {"a.txt": "1"}
    mix = IngestConfig(mix={"x": one.source, "y": cfg.source})
    assert _sources(mix, Digests()) == {"x/a.txt": "1", "y/a.txt": "1", "y/b.txt": "2"}
    with pytest.raises(StageError, match="no file or directory"):
        _sources(IngestConfig(source=SourceConfig(path=str(tmp_path / "c.txt"))), Digests())
