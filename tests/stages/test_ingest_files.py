"""Every container that people's rows come in, whole, broken, cut off and enormous; on any executor and in any number of parts."""

import dataclasses
import gzip
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.contract import Context, Executor, StageError
from stages.ingest import IngestConfig, IngestResources, SourceConfig, _sources, ingest
from stages.text.chats import Texts
from stages.text.containers import Reading
from stages.text.conversion import parts
from stages.text.faults import RULES, Fault
from stages.text.files import Container, TextUnit, find
from stages.text.formats import EncodingErrors, Fields, Format
from stages.text.sources import Source
from tests.services import Service
from tests.stages.test_ingest import quarantine, read, take, tree

MakeContext = Callable[..., Context]
CHAT = {"messages": [{"role": "user", "content": "a \u2028\n"}, {"role": "assistant", "content": "b"}]}


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def texts(make_context: MakeContext, path: Path, **source: Any) -> list[str]:
    return [row["text"] for row in read(take(make_context, path, **source))]


def test_json_is_an_array_rows_under_data_one_object_or_lines(make_context: MakeContext, tmp_path: Path) -> None:
    rows = [{"text": f"{i} [{{,"} for i in range(3)]
    for name, content in (
        ("array", json.dumps(rows)),
        ("pretty", json.dumps(rows, indent=2) + "\n"),
        ("data", json.dumps({"version": "1.0", "n": 3, "data": rows})),
        ("lines", jsonl(*rows).decode()),
        ("arrays", f"{json.dumps(rows[:1])}\n{json.dumps(rows[1:], indent=1)}"),
        ("mixed", f"{json.dumps(rows[0], indent=1)}{json.dumps(rows[1:])}\n[]\n"),
        ("joined", f"{json.dumps(rows[:2], indent=1)}\n\ufeff{json.dumps(rows[2:])}"),
        ("data first", json.dumps({"data": rows, "n": {"rows": 3}}, indent=1) + "\n \n"),
        ("data in lines", jsonl(*(row | {"data": [{"text": "no row"}]} for row in rows)).decode()),
    ):
        path = tmp_path / f"{name}.json"
        path.write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert texts(make_context, path) == [row["text"] for row in rows], name
    (tmp_path / "wide.json").write_bytes(jsonl({"text": "x" * 2_500_000}, {"text": "y"}))
    assert [len(text) for text in texts(make_context, tmp_path / "wide.json")] == [2_500_000, 1]
    (tmp_path / "one.json").write_text(json.dumps(CHAT, indent=1))
    assert json.loads(read(take(make_context, tmp_path / "one.json"))[0]["messages"]) == CHAT["messages"]
    (tmp_path / "long.json").write_text(json.dumps([{"text": "x" * 3_000_000}, {"text": "y" * 50}] * 2))
    found = take(make_context, tmp_path / "long.json")
    assert [row["id"][-2:] for row in read(found)] == ["01", "02", "03", "04"]
    assert [len(row["text"]) for row in read(found)] == [3_000_000, 50] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b', "item 2 is cut off"),
        ('[{"text": "a"}', "the array is cut off after item 1"),
        ('[{"text": "a"} {"text": "b"}]', "has no comma after item 1"),
        (
            '[{"text": "a"}, {"text": secret}, {"text": "long enough to see it"}]',
            r"item 2 is broken JSON \(character 10",
        ),
        ('{\n"text": "a"\n}\n{\n"text": "b"\n', "item 2 is cut off"),
        ('{"text": "a"} tail', r"item 2 is broken JSON \(character 1 of it"),
        ('[{"text": "a"},\n]', "item 2 is missing: a comma stands before the end of the array"),
        ('// rows\n[{"text": "a"}]', "JSON has no comments"),
        ('{"rows": [{"text": "a"}], "n": 1}', r"are the rows in rows\? jq -c '.rows\[\]' writes them"),
        ('{"train": [{"text": "a"}]}', 'one object with the keys train; want an array of rows, or {"data"'),
        ("<html>", "begins with neither"),
        ('[{"text": "a"}], {"text": "b"}]', r"item 2 is broken JSON \(character 1 of it"),
        ('[{"text": "a"}]]', r"item 2 is broken JSON \(character 1 of it"),
        ('{"data": [{"text": "a"}]}\n{"data": [{"text": "b"}]}', r"found the fields data \(list of object of text\)"),
        (
            '{"data":\n[{"text": "a"}]}\n{"data":\n[{"text": "b"}]}',
            r"""behind the 1 rows of the first "data".*'.data\[\]'""",
        ),
        ('{"data": [{"text": "a"}], "data": [{"text": "b"}]}', r"""behind the 1 rows of the first "data";"""),
        ('{"data": [{"text": "a"}], "n":', "item 2 is cut off"),
        ('{"data": [{"text": "a"}]', "item 2 is cut off"),
        ('{"text": {"0": "a", "1": "b"}}', r"one object with the keys text;.*orient='records', lines=True"),
    ],
)
def test_json_that_is_not_whole_is_refused_with_its_place(
    make_context: MakeContext, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(StageError, match=message) as caught:
        take(make_context, tmp_path / "x.json")
    assert "secret" not in str(caught.value)


def test_a_key_that_stands_twice_costs_its_row_and_no_value_is_lost_in_silence(
    make_context: MakeContext, tmp_path: Path
) -> None:
    rows = [
        '{"text": "a", "text": "secret"}',
        '{"text": "b", "n": {"k": [1], "k": [2]}}',
        '{"text": "c", "text": "c"}',
        '{"text": "d", "n": ' + "9" * 5_000 + "}",
        '{"text": "e"}',
    ]
    for name, content in (("x.jsonl", "\n".join(rows)), ("x.json", f"[{','.join(rows)}]"), ("y.json", "\n".join(rows))):
        (tmp_path / name).write_text(content)
        found = take(make_context, tmp_path / name, max_bad_fraction=1)
        assert [row["text"] for row in read(found)] == ["c", "e"], name
        assert quarantine(found) == [(name, 1, "repeated_key"), (name, 2, "repeated_key"), (name, 4, "broken_json")]
        assert "secret" not in (found.local() / "quarantine.jsonl").read_text("utf-8")


def test_csv_values_are_text_and_may_hold_line_ends(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,response,n\r\n"ab\r\ncd, x",NA,1\r\n\r\n007,"null ""1e5""",\r\n')
    rows = read(take(make_context, path))
    assert [(row["id"][-1], row["prompt"], row["text"]) for row in rows] == [
        ("2", "ab\r\ncd, x", "NA"),
        ("5", "007", 'null "1e5"'),
    ]
    path.write_text("text\tn\nx,y\t1\n")
    assert texts(make_context, path, delimiter="\\t") == ["x,y"]
    path.rename(tmp_path / "x.tsv")
    assert texts(make_context, tmp_path / "x.tsv") == ["x,y"]
    (tmp_path / "m.csv").write_text('id,messages\n1,"' + json.dumps(CHAT["messages"]).replace('"', '""') + '"\n')
    assert json.loads(read(take(make_context, tmp_path / "m.csv"))[0]["messages"]) == CHAT["messages"]


def test_quoted_newlines_are_read_at_every_size(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("prompt,response\n" + '"ab\ncd, x",ok\n' * 30_000)
    rows = take(make_context, path)
    assert rows.summary()["rows"] == 30_000 and rows.summary()["quarantined"] == 0
    assert read(rows)[-1] | {"prompt": "ab\ncd, x", "text": "ok", "id": "x.csv:000060000"} == read(rows)[-1]


def test_broken_csv_costs_its_rows_and_a_wrong_header_the_file(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'text,n\na,1\nb\nc,2,3\n"d"e,4\ncaf\xe9,5\nf,6\n"g')
    rows = take(make_context, path, max_bad_fraction=1)
    assert [row["text"] for row in read(rows)] == ["a", "f"]
    assert quarantine(rows) == [
        ("x.csv", 3, "column_count"),
        ("x.csv", 4, "column_count"),
        ("x.csv", 5, "broken_csv"),
        ("x.csv", 6, "invalid_utf8"),
        ("x.csv", 8, "cut_off"),
    ]
    for content, message in (
        ("prompt;response\na;b\n", r"found 1 column `prompt;response`, expected prompt,response;.*delimiter=';'"),
        ("prompt\tresponse\na\tb\n", r"delimiter='\\t'"),
        ("text,text\na,b\n", "the column text stands twice"),
        ('text\n"a\n' + "x\n" * 2_000, "x.csv:2: a quote that is opened in this line is never closed"),
        ("text\n" + "x\n" * 99 + '"a\n' + "x\n" * 900, "x.csv:101: .* never closed, so the 900 lines behind it"),
        ("text\n" + "x\n" * 999 + '"cut\noff', "x.csv:1001: .* never closed, so the 1 lines behind it"),
        ("text\n", "found no rows"),
        ("", "found no rows"),
        ("sep=;\ntext;n\n", "begins with Excel's 'sep=;'; remove this line and set delimiter"),
        ("somebody's secret text, with a comma\nx,y\n", r"found the fields \("),
    ):
        path.write_text(content)
        with pytest.raises(StageError, match=message) as caught:
            take(make_context, path)
        assert "secret" not in str(caught.value)


def test_every_line_that_a_quote_swallows_is_counted(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for tail, rule in (('5,"x"', "broken_csv"), ('5,",x', "column_count")):
        path.write_text("n,text\n" + '1,"a\nb"\n' * 10 + f'2,"open\n3,b\n4,c\n{tail}\n6,f\n')
        with pytest.raises(
            StageError, match=rf"4 of 15 rows cannot be used(?s:.*)4  {rule}: x.csv:22 \(.*lines 22 to 25"
        ):
            take(make_context, path)
        rows = take(make_context, path, max_bad_fraction=0.3)
        assert [row["text"] for row in read(rows)] == ["a\nb"] * 10 + ["f"]
        assert quarantine(rows) == [("x.csv", line, rule) for line in (22, 23, 24, 25)]
        assert rows.summary()["waterfall"][0] == {"step": "in", "rows": 15}
    path.write_text('text\na\n"' + "x\n" * 5_000 + '"\nb\n')
    resources = IngestResources(executor=Executor.inline)
    cfg = IngestConfig(source=SourceConfig(path=str(path)), max_row_bytes=1_000, resources=resources)
    with pytest.raises(
        StageError, match=r"x.csv:3: .* is longer than stages.ingest.max_row_bytes=1000 .* never closed"
    ):
        ingest(cfg, make_context())


def test_a_header_that_is_not_utf_8_is_told_or_repaired(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("text,catégorie\nhello,résumé\n".encode("cp1252"))
    with pytest.raises(StageError, match=r"x.csv:1: the name of column 2 is not UTF-8; save the file as such"):
        take(make_context, path)
    rows = take(make_context, path, encoding_errors=EncodingErrors.replace)
    assert [row["text"] for row in read(rows)] == ["hello"]
    assert texts(make_context, path, encoding_errors=EncodingErrors.replace, text_field="cat\ufffdgorie") == [
        "r\ufffdsum\ufffd"
    ]
    path.write_bytes("text,é,è\nhello,1,2\n".encode("cp1252"))
    with pytest.raises(StageError, match="stands twice in the header"):
        take(make_context, path, encoding_errors=EncodingErrors.replace)
    path.write_bytes('"prompt";"completion";"né"\n"a";"b";"c"\n'.encode("cp1252"))
    with pytest.raises(StageError, match="delimiter=';'") as caught:
        take(make_context, path)
    assert str(caught.value).encode()


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt"])
def test_compressed_files_give_the_same_rows_and_cut_ones_are_refused(
    make_context: MakeContext, tmp_path: Path, name: str
) -> None:
    rows = [{"text": f"{i} {'wörd ' * (i % 7)}"} for i in range(3_000)]
    content = {
        "x.jsonl": jsonl(*rows),
        "x.json": json.dumps(rows).encode(),
        "x.csv": "".join(["text\n", *(f"{row['text']}\n" for row in rows)]).encode(),
        "x.txt": "".join(f"{row['text']}\n" for row in rows).encode(),
    }[name]
    unit: dict[str, Any] = {"text_unit": TextUnit.line} if name == "x.txt" else {}
    (tmp_path / name).write_bytes(content)
    plain = texts(make_context, tmp_path / name, **unit)
    assert len(plain) == 3_000
    zst = pyarrow.compress(content, codec="zstd", asbytes=True)
    half = pyarrow.compress(content[:999], codec="zstd", asbytes=True) + pyarrow.compress(
        content[999:], codec="zstd", asbytes=True
    )
    for suffix, data in ((".gz", gzip.compress(content)), (".zst", zst), (".zst", half)):
        (tmp_path / f"{name}{suffix}").write_bytes(data)
        assert texts(make_context, tmp_path / f"{name}{suffix}", **unit) == plain
        (tmp_path / f"{name}{suffix}").write_bytes(data[:-10])
        with pytest.raises(StageError, match=rf"{name}{suffix}: truncated at byte {len(data) - 10}"):
            take(make_context, tmp_path / f"{name}{suffix}", **unit)
        (tmp_path / f"{name}{suffix}").write_bytes(b"")
        with pytest.raises(StageError, match=rf"{name}{suffix}: truncated at byte 0"):
            take(make_context, tmp_path / f"{name}{suffix}", **unit)
        (tmp_path / f"{name}{suffix}").write_bytes(content)
        with pytest.raises(StageError, match=r"not a whole (gzip|zstd) file"):
            take(make_context, tmp_path / f"{name}{suffix}", **unit)


def test_a_last_line_that_is_cut_off_is_told_from_a_broken_one(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for tail, rule in (
        (b'{"text": "a', "cut_off"),
        (b'{"text": ', "cut_off"),
        (b'{"text": "a"', "cut_off"),
        (b'{"text": a}', "broken_json"),
        (b'{"text": "a\n', "broken_json"),
    ):
        path.write_bytes(jsonl(*[{"text": "x"}] * 200) + tail)
        assert quarantine(take(make_context, path)) == [("x.jsonl", 201, rule)], tail
    path.write_bytes(b'{"text": "a"}\r\n{"text": "b"}')
    assert texts(make_context, path) == ["a", "b"]


def test_json_under_the_name_of_json_lines_is_told(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for content in (json.dumps([{"text": "a"}]), json.dumps([{"text": "a"}], indent=1)):
        path.write_text(content)
        with pytest.raises(StageError, match=r"is it JSON, not JSON Lines\? container=json"):
            take(make_context, path)
        assert texts(make_context, path, container=Container.json) == ["a"]


def test_a_file_without_one_usable_row_in_a_thousand_is_no_source(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"caf\xe9\n" * 2_000 + jsonl({"text": "a"}))
    with pytest.raises(
        StageError, match=r"x.jsonl: none of the first 1,000 rows can be used \(1,000 invalid_utf8: bytes"
    ):
        take(make_context, path, max_bad_fraction=1)


def test_a_file_whose_name_is_no_text_is_refused(make_context: MakeContext, tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.jsonl").write_bytes(jsonl({"text": "a"}))
    with pytest.raises(StageError, match="has a name that is not UTF-8; rename it"):
        take(make_context, tmp_path)


def test_a_row_that_is_too_long_is_quarantined_and_its_bytes_are_skipped(
    make_context: MakeContext, tmp_path: Path
) -> None:
    resources = IngestResources(executor=Executor.inline, blocks=3)
    for name, content in (
        ("x.jsonl", jsonl({"text": "a"}, {"text": "x" * 3_000_000}, {"text": "b"})),
        ("x.txt", b"a\n" + b"x" * 3_000_000 + b"\nb\n"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        source = SourceConfig(path=str(path), text_unit=TextUnit.line)
        cfg = IngestConfig(source=source, max_row_bytes=100_000, max_bad_fraction=1, resources=resources)
        rows = ingest(cfg, make_context())
        assert [row["text"] for row in read(rows)] == ["a", "b"]
        assert [row["id"][-1] for row in read(rows)] == ["1", "3"]
        assert [rule for _, _, rule in quarantine(rows)] == ["row_too_long"]


def test_parquet_may_nest_pad_and_hold_bytes_that_are_no_text(make_context: MakeContext, tmp_path: Path) -> None:
    message = pyarrow.struct(
        [("role", pyarrow.string()), ("content", pyarrow.large_string()), ("tool_calls", pyarrow.null())]
    )
    chat = [m | {"tool_calls": None} for m in CHAT["messages"]]
    path = tmp_path / "x.parquet"
    columns = {
        "messages": pyarrow.array([chat, [], None, chat], pyarrow.list_(message)),
        "system": pyarrow.array([None, None, None, "s"]),
        "unused": pyarrow.array([1, 2, 3, 4]),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    rows = take(make_context, path, max_bad_fraction=1)
    assert [json.loads(row["messages"]) for row in read(rows)] == [
        CHAT["messages"],
        [{"role": "system", "content": "s"}, *CHAT["messages"]],
    ]
    assert quarantine(rows) == [("x.parquet", 2, "empty_conversation"), ("x.parquet", 3, "not_a_list")]
    for column in (pyarrow.array([b"a", b"b"]), pyarrow.array(["a", "b"]).dictionary_encode()):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
        assert texts(make_context, path) == ["a", "b"]
    raw = pyarrow.array([[b"ok"], [b"caf\xe9"]], pyarrow.list_(pyarrow.binary()))
    kind = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    said = raw.flatten().view(pyarrow.string())
    structs = pyarrow.StructArray.from_arrays([pyarrow.array(["assistant"] * 2), said], names=["role", "content"])
    nested = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2], pyarrow.int32()), structs)
    pyarrow.parquet.write_table(pyarrow.table({"messages": nested.cast(kind)}), path)
    assert quarantine(take(make_context, path, max_bad_fraction=1)) == [("x.parquet", 2, "invalid_utf8")]
    repaired = take(make_context, path, encoding_errors=EncodingErrors.replace)
    assert [json.loads(row["messages"])[0]["content"] for row in read(repaired)] == ["ok", "caf\ufffd"]
    assert repaired.summary()["repaired"] == 1


def test_bytes_that_are_not_utf_8_are_repaired_when_asked_and_counted(
    make_context: MakeContext, tmp_path: Path
) -> None:
    for name, content in (
        ("x.jsonl", b'{"text": "caf\xe9"}\n{"text": "ok \\ud83d"}\n{"text": "b"}\n'),
        ("x.json", b'[{"text": "caf\xe9"}, {"text": "ok \\ud83d"}, {"text": "b"}]'),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        rows = take(make_context, path, encoding_errors=EncodingErrors.replace)
        assert [row["text"] for row in read(rows)] == ["caf\ufffd", "ok \ufffd", "b"]
        assert rows.summary()["repaired"] == 2
        rows = take(make_context, path, max_bad_fraction=1)
        assert [rule for _, _, rule in quarantine(rows)] == ["invalid_utf8", "lone_surrogate"]


def test_text_beside_files_of_rows_stays_out_and_this_is_said(make_context: MakeContext, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "README.md").write_text("about")
    (root / "x.jsonl").write_bytes(jsonl({"text": "a"}))
    (root / "picture.png").write_bytes(b"x")
    said: list[str] = []
    ctx = dataclasses.replace(make_context(), headline=said.append)
    rows = ingest(config(root, 1), ctx)
    assert [row["id"] for row in read(rows)] == ["x.jsonl:000000001"]
    assert "2 files left out" in said[0]


def test_a_file_whose_name_says_nothing_is_read_when_told_how(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "export"
    path.write_bytes(jsonl({"text": "a"}))
    with pytest.raises(StageError, match=r"a file whose name has no ending, want .jsonl.*container=jsonl"):
        take(make_context, path)
    assert texts(make_context, path, container=Container.jsonl) == ["a"]
    path.write_bytes(gzip.compress(jsonl({"text": "a"})))
    assert texts(make_context, path, container=Container.jsonl) == ["a"]
    (tmp_path / "x.jsonl").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(StageError, match=r"x.jsonl: is gzip data; name it .gz"):
        take(make_context, tmp_path / "x.jsonl")


def test_a_format_that_is_given_is_wanted_of_every_row(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl({"text": "a"}, {"text": "b"}, CHAT))
    assert take(make_context, path, max_bad_fraction=1).summary()["sources"][0]["format"] == "text"
    rows = take(make_context, path, format=Format.chat, max_bad_fraction=1)
    assert [row["kind"] for row in read(rows)] == ["chat"]
    assert quarantine(rows) == [("x.jsonl", 1, "other_format"), ("x.jsonl", 2, "other_format")]
    assert rows.summary()["waterfall"] == [
        {"step": "in", "rows": 3},
        {"step": "other_format", "rows": 2},
        {"step": "out", "rows": 1},
    ]


def test_neither_the_order_of_rows_nor_what_stands_in_other_rows_changes_a_row(
    make_context: MakeContext, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"text": f"t{i}", "meta": m} for i, m in enumerate([None, "s", 3, {"a": 1}, [1], {"b": "x"}] * 50)
    ]
    found = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(jsonl(*order))
        found.append(sorted(texts(make_context, tmp_path / name / "x.jsonl")))
    assert found[0] == found[1] == sorted(row["text"] for row in rows)


def test_an_id_on_two_different_rows_is_reported(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl(*({"id": i, "text": str(i)} for i in (1, 2, 1)), {"id": 2, "text": "other"}))
    said: list[str] = []
    ctx = make_context()
    object.__setattr__(ctx, "headline", said.append)
    inline = IngestResources(executor=Executor.inline)
    rows = ingest(IngestConfig(source=SourceConfig(path=str(path)), resources=inline), ctx)
    assert rows.summary()["id_clashes"] == 1 and rows.summary()["rows"] == 4
    assert "1 rows have an id of other rows (first: x.jsonl:000000004)" in said[0]
    assert take(make_context, path, id_field=None).summary()["id_clashes"] == 0


def test_a_mix_names_its_rows_by_source_and_keeps_weights(make_context: MakeContext, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "a"}, {"text": "b"}))
    (tmp_path / "c.jsonl").write_bytes(jsonl(CHAT))
    mix = {
        "web": SourceConfig(path=str(tmp_path / "a.jsonl"), weight=3),
        "chats": SourceConfig(path=str(tmp_path / "c.jsonl")),
    }
    rows = ingest(IngestConfig(mix=mix, resources=IngestResources(executor=Executor.inline)), make_context())
    assert [(row["id"], row["source"], row["kind"]) for row in read(rows)] == [
        ("chats/c.jsonl:000000001", "chats", "chat"),
        ("web/a.jsonl:000000001", "web", "text"),
        ("web/a.jsonl:000000002", "web", "text"),
    ]
    sources = {source["name"]: source for source in rows.summary()["sources"]}
    assert {name: (s["weight"], s["rows"], s["format"]) for name, s in sources.items()} == {
        "web": (3, 2, "text"),
        "chats": (1, 1, "chat"),
    }
    assert rows.summary()["kind"] == "chat+text"


def test_a_mix_is_composed_from_one_override() -> None:
    from pipelines.config import compose

    app = compose(["+stages.ingest.mix={mine: {path: a.jsonl, weight: 3}, web: {path: web/}}"])
    cfg = app.stages["ingest"]
    assert isinstance(cfg, IngestConfig)
    assert {name: (source.path, source.weight) for name, source in cfg.mix.items()} == {
        "mine": ("a.jsonl", 3.0),
        "web": ("web/", 1.0),
    }


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a JSON Lines file of 1.5 MB, some lines of it broken or 100 KB long, small files and Parquet."""
    root = tmp_path_factory.mktemp("many") / "data"
    root.mkdir()
    lines = [json.dumps({"text": f"{i} {'wörd ' * (i % 40)}", "id": i % 900}) for i in range(9_000)]
    lines[3] = lines[8_999] = '{"text": '
    lines[10] = lines[5_000] = json.dumps({"text": "long " * 20_000})
    lines[7:7] = ["", "\r"]
    (root / "b.jsonl").write_text("\n".join(lines))
    for i in range(20):
        (root / f"a{i:02d}.jsonl").write_bytes(jsonl({"text": f"small {i}"}))
    table = pyarrow.table({"text": [f"row {i} " * 20 for i in range(5_000)]})
    pyarrow.parquet.write_table(table, root / "c.parquet", row_group_size=700, compression="none")
    return root


def config(path: Path, blocks: int, executor: Executor = Executor.inline, limit: int | None = None) -> IngestConfig:
    resources = IngestResources(blocks=blocks, executor=executor)
    return IngestConfig(source=SourceConfig(path=str(path)), limit=limit, resources=resources)


SLOW = [pytest.param(limit, marks=pytest.mark.slow) for limit in (1, 20, 9_500)]


@pytest.mark.parametrize("limit", [None, 4_000, *SLOW])
def test_any_number_of_parts_gives_one_digest_and_ids_that_tell_the_line(
    make_context: MakeContext, many: Path, limit: int | None
) -> None:
    trees = [tree(ingest(config(many, blocks, limit=limit), make_context()).local()) for blocks in (1, 7, 40)]
    assert trees[0] == trees[1] == trees[2]
    rows = ingest(config(many, 40, limit=limit), make_context())
    lines = (many / "b.jsonl").read_text().split("\n")
    found = read(rows)
    assert len(found) == (limit or 20 + 8_998 + 5_000)
    assert [row["id"] for row in found] == sorted(row["id"] for row in found)
    for row in found:
        name, _, number = row["id"].rpartition(":")
        if name == "b.jsonl":
            assert row["text"] == json.loads(lines[int(number) - 1])["text"]
    if limit is None:
        assert quarantine(rows) == [("b.jsonl", 4, "broken_json"), ("b.jsonl", 9_002, "cut_off")]
        assert [row["text"] for row in found[-5_000:]] == [f"row {i} " * 20 for i in range(5_000)]


@pytest.mark.ray
@pytest.mark.slow
def test_ray_and_one_process_give_one_digest(ray_session: None, make_context: MakeContext, many: Path) -> None:
    for limit in (None, 4_000):
        trees = [
            tree(ingest(config(many, blocks, executor, limit), make_context()).local())
            for blocks, executor in ((3, Executor.inline), (5, Executor.ray))
        ]
        assert trees[0] == trees[1]


@pytest.mark.slow
def test_an_object_store_holds_the_same_rows(
    make_context: MakeContext, many: Path, s3: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    from stages.storage.bucket import Bucket

    bucket = Bucket("s3://store/ingest")
    bucket.upload(many, [file.name for file in many.iterdir()], "data")
    bucket.put("data/.hidden.jsonl", b"{")
    uri = "s3://store/ingest/data"
    inline = IngestResources(executor=Executor.inline, blocks=5)
    local = ingest(config(many, 5), make_context())
    assert tree(ingest(IngestConfig(source=SourceConfig(path=uri), resources=inline), make_context()).local()) == tree(
        local.local()
    )
    assert [file.name for file in find(f"{uri}/a0*.jsonl").files] == [f"a0{i}.jsonl" for i in range(10)]
    assert [file.name for file in find("s3://store/ingest/**/c.parquet").files] == ["data/c.parquet"]
    one = find(f"{uri}/b.jsonl").files[0]
    assert (one.name, one.bytes) == ("b.jsonl", (many / "b.jsonl").stat().st_size)
    cfg = IngestConfig(source=SourceConfig(path=f"{uri}/b.jsonl"))
    before = _sources(cfg, None)  # type: ignore[arg-type]
    assert list(before) == ["b.jsonl"]
    bucket.put("data/b.jsonl", jsonl({"text": "changed"}))
    assert _sources(cfg, None) != before  # type: ignore[arg-type]
    for missing in (f"{uri}/none.jsonl", f"{uri}/*.nothing", "s3://store/nowhere"):
        with pytest.raises(StageError, match="nothing there"):
            find(missing)
    with pytest.raises(StageError, match=r"ftp:// is not known; want a path, s3://"):
        find("ftp://host/x.jsonl")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set as the hub's own client keeps it, and no network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place = tmp_path / "hub" / "datasets--owner--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    snapshot = place / "snapshots" / ("a" * 40)
    (snapshot / "data").mkdir(parents=True)
    for split, rows in (("train", ["x", "y"]), ("test", ["z"])):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": rows}), snapshot / "data" / f"{split}-00000-of-00001.parquet"
        )
    return snapshot


def take_hub(make_context: MakeContext, **source: Any) -> list[str]:
    inline = IngestResources(executor=Executor.inline)
    cfg = IngestConfig(source=SourceConfig(hub="owner/name", **source), resources=inline)
    rows = read(ingest(cfg, make_context()))
    assert {row["source"] for row in rows} == {"name"}
    return [row["text"] for row in rows]


def test_a_hubs_data_set_is_its_files_at_one_commit(make_context: MakeContext, hub: Path) -> None:
    cfg = IngestConfig(source=SourceConfig(hub="owner/name"))
    assert _sources(cfg, None) == {"owner/name": "a" * 40}  # type: ignore[arg-type]
    assert take_hub(make_context) == ["x", "y"]
    assert take_hub(make_context, split="test", revision="a" * 40) == ["z"]
    with pytest.raises(StageError, match="no file of split 'dev'"):
        take_hub(make_context, split="dev")
    (hub / "data" / "train-00000-of-00001.parquet").unlink()
    with pytest.raises(
        StageError, match=r"no file of split 'train' among 1; stages.ingest.source.split= names another"
    ):
        take_hub(make_context)
    for name in ("data", "dev/data", "latest"):
        (hub / f"{name}.jsonl").parent.mkdir(exist_ok=True)
        (hub / f"{name}.jsonl").write_bytes(jsonl({"text": name}))
    assert take_hub(make_context) == ["data", "latest"]
    assert take_hub(make_context, subset="dev") == ["dev/data"]
    assert take_hub(make_context, split="test") == ["z"]
    (hub / "other.jsonl").write_bytes(jsonl({"text": "o"}))
    (hub / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files:\n  - split: train\n    path: data/train-*\n"
        "- config_name: two\n  data_files: other.jsonl\n---\n# About\n"
    )
    assert take_hub(make_context, subset="two") == ["o"]
    with pytest.raises(StageError, match="it has the subsets one, two"):
        take_hub(make_context)
    with pytest.raises(StageError, match="its splits are train"):
        take_hub(make_context, subset="one", split="test")


def test_a_hub_that_does_not_answer_is_named_with_what_to_do(make_context: MakeContext, hub: Path) -> None:
    with pytest.raises(StageError, match=r"owner/name at v2: not in the local cache .* give its files as path"):
        take_hub(make_context, revision="v2")
    with pytest.raises(StageError, match=r"owner/name at bbbbbbbbbb: not in the local cache"):
        take_hub(make_context, revision="b" * 40)


def test_impossible_sources_are_refused_by_name() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"path": "x", "hub": "a/b"}, "hub must be null"),
        ({"hub": "nameless"}, "hub must be owner/name"),
        ({"delimiter": ";;"}, "delimiter must be one character"),
        ({"weight": 0}, "weight must be above 0"),
        ({"weight": float("nan")}, "weight"),
        ({"messages_field": ""}, "messages_field"),
    ]
    for values, message in wrong:
        with pytest.raises(ValueError, match=message):
            SourceConfig(**values)
    one = SourceConfig(path="x")
    wrong = [
        ({"mix": {"a": one}, "source": one}, "must be null with a mix"),
        ({"mix": {"a/b": one}}, "mix must have names"),
        ({"max_row_bytes": 0}, "max_row_bytes"),
    ]
    for values, message in wrong:
        with pytest.raises(ValueError, match=message):
            IngestConfig(**values)
    with pytest.raises(ValueError, match=r"resources\.blocks"):
        IngestResources(blocks=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet", "x.jsonl.gz", "x.jsonl.zst"])
def test_no_bytes_make_a_reader_do_anything_but_read_quarantine_or_refuse(tmp_path: Path, name: str) -> None:
    rows = [
        CHAT,
        {"text": "é"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"instruction": "a", "output": "b"},
    ] * 5
    path = tmp_path / name
    pyarrow.parquet.write_table(pyarrow.table({"messages": [CHAT["messages"]] * 60}), path, row_group_size=20)
    lines = jsonl(*rows)
    whole = {
        "x.json": json.dumps({"version": "1", "data": rows}, indent=1).encode(),
        "x.csv": 'prompt,completion\r\n"a\nb",c\né,"e ""f"""\n'.encode() * 5,
        "x.txt": "é\n\nb\n".encode() * 10,
        "x.parquet": path.read_bytes(),
        "x.jsonl.gz": gzip.compress(lines),
        "x.jsonl.zst": pyarrow.compress(lines, codec="zstd", asbytes=True),
    }.get(name, lines)
    chance = random.Random(name)
    signs = [b'"', b"\n", b"{", b"[", b"\xef\xbb\xbf", b"\xf0\x9f", b",", b"\\ud83d", b"\0", b"\xff"]
    outcomes: Counter[str] = Counter()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3, 20))):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.choice((0, 1, 1, 30))] = chance.choice(signs)
        path.write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        outcomes.update(_read_all(path, chance))
    assert set(outcomes) <= {"read", "refused"} | RULES.keys()
    assert len(outcomes) > 1


def _read_all(path: Path, chance: random.Random) -> Iterator[str]:
    files = find(str(path)).files
    replace = chance.random() < 0.5
    reading = Reading(Fields(), chance.choice(list(TextUnit)), None, replace, chance.choice((60, 10**6)))
    try:
        source = Source("s", "", files, reading, Format.auto, "id").decided()
        for _, row in source.rows(files[0]):
            try:
                if isinstance(row, Fault):
                    raise row
                made = parts(row, source.format, source.reading.fields, Texts(replace=replace))
                assert all(value.encode() or True for value in made.values())
                yield "read"
            except Fault as fault:
                yield fault.rule
    except StageError:
        yield "refused"


@pytest.mark.slow
def test_a_line_of_two_gigabytes_takes_no_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        file.seek(2**31)  # a hole, which takes no room on the disk
        file.write(b'"}\n{"text": "b"}\n')
    code = (
        "import re, sys; from pathlib import Path; sys.path.insert(0, 'tests'); import conftest;"
        "from stages.contract import Context, Executor; from stages.ingest import *;"
        "o = Path(sys.argv[1]); w = o / 'w'; w.mkdir(parents=True); x = IngestResources(executor=Executor.inline);"
        "ingest(IngestConfig(source=SourceConfig(path=sys.argv[2]), max_bad_fraction=1, resources=x),"
        "Context(output=o, work=w, state=o, fingerprint='0' * 64, seed=0,"
        "tracker=conftest.MemoryTracker(), registry=conftest.MemoryRegistry(),"
        "progress=lambda f, t: None, headline=print));"
        # Not getrusage: its peak begins with that of the process that started this one.
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out"), str(path)]
    said, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "2 rows, 2 characters" in said and "1 row_too_long" in said
    assert int(peak) < 800_000, "KB"
