"""Other people's exports as they are: read rightly, or told in one message what is wrong where and what to do about it."""

import dataclasses
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.contract import Context, Executor, StageError
from stages.ingest import IngestConfig, IngestResources, _sources, ingest
from stages.text.files import Container, find
from stages.text.formats import Format
from stages.text.source_config import SourceConfig
from tests.stages.test_ingest import read, take
from tests.stages.test_ingest_files import jsonl, texts
from tests.stages.test_text_formats import CHAT, assistant, fault, made, user

MakeContext = Callable[..., Context]


def refusal(make_context: MakeContext, path: Path, **source: Any) -> str:
    with pytest.raises(StageError) as caught:
        take(make_context, path, **source)
    return str(caught.value)


# Chats


def test_roles_are_known_in_capitals_and_by_the_names_that_products_give_them() -> None:
    for asks, answers in (("User", "Chatbot"), ("USER", "ASSISTANT"), ("human", "ai"), ("Human", "Bing")):
        chat = [{"role": asks, "content": "a"}, {"role": answers, "content": "b"}]
        assert made({"messages": chat})["messages"] == CHAT


def test_a_part_that_is_nothing_but_a_text_is_text_whether_it_says_so_or_not() -> None:
    parts = [{"text": "a", "image": None}]
    assert made({"messages": [user(parts), assistant([{"text": "b"}])]})["messages"] == CHAT
    assert fault({"messages": [user([{"text": "a", "image": "x.png"}]), CHAT[1]]})[0] == "unsupported_content_part"


def test_thoughts_are_kept_under_one_name() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        chat = made({"messages": [CHAT[0], assistant("b", **{name: "hm"})]})["messages"]
        assert chat[1] == assistant("b", reasoning_content="hm"), name


def test_a_message_without_content_names_what_it_has_instead() -> None:
    row = {"conversations": [{"from": "human", "text": "a"}, {"from": "gpt", "text": "b"}]}
    assert fault(row, Format.sharegpt) == ("null_content", "conversations[0].value", "found from, text")


def test_messages_by_their_columns_are_the_same_messages(make_context: MakeContext, tmp_path: Path) -> None:
    column = {"role": ["user", "assistant"], "content": ["a", "b"]}
    kind = pyarrow.struct([(name, pyarrow.list_(pyarrow.string())) for name in column])
    pyarrow.parquet.write_table(pyarrow.table({"messages": pyarrow.array([column], kind)}), tmp_path / "x.parquet")
    (row,) = read(take(make_context, tmp_path / "x.parquet"))
    assert json.loads(row["messages"]) == CHAT
    assert made({"conversations": {"from": ["human", "gpt"], "value": ["a", "b"]}})["messages"] == CHAT


def test_a_system_field_moves_no_place_and_is_not_said_twice() -> None:
    system = {"role": "system", "content": "s"}
    assert fault({"system": "s", "messages": [*CHAT, system]})[1] == "messages[2]"
    assert made({"system": "s", "messages": [system, *CHAT]})["messages"] == [system, *CHAT]
    assert fault({"system": "t", "messages": [system, *CHAT]}) == (
        "role_order",
        "system",
        "another system message begins the chat",
    )
    row = {"prompt": "q", "chosen": [assistant("g"), system], "rejected": [assistant("b")]}
    assert fault(row | {"chosen": [assistant("g"), system, assistant("h")]}, Format.preference)[1] == "chosen[1]"


@pytest.mark.parametrize("field", ["image", "images", "videos", "audio"])
def test_a_chat_about_a_picture_is_no_chat_without_it(field: str) -> None:
    row = {"conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}]}
    assert fault(row | {field: ["cat.png"]}, Format.sharegpt) == ("attachment", field, "list")
    assert made(row | {field: []})["messages"][1] == assistant("a cat")


def test_dolly_is_alpaca_under_other_names() -> None:
    row = {"instruction": "when?", "context": "It was 1999.", "response": "1999", "category": "closed_qa"}
    assert made(row)["messages"] == [user("when?\nIt was 1999."), assistant("1999")]
    assert made(row | {"context": ""})["messages"] == [user("when?"), assistant("1999")]
    assert fault(row | {"response": ""}, Format.alpaca) == ("no_assistant_turn", "response", "")


# Fields that nobody knows


@pytest.mark.parametrize(
    ("row", "found", "advice"),
    [
        (
            {"question": "q", "answer": "a"},
            "answer (text), question (text)",
            "prompt_field=question {}completion_field=answer",
        ),
        (
            {"Prompt": "q", "Completion": "a"},
            "Completion (text), Prompt",
            "prompt_field=Prompt {}completion_field=Completion",
        ),
        ({"id": 1, "Text": "a"}, "Text (text), id (number)", "text_field=Text"),
        (
            {"items": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "items (list of object",
            "messages_field=items",
        ),
        (
            {"question": "q", "response_j": "g", "response_k": "b"},
            "question (text)",
            "chosen_field=response_j {}rejected_field=response_k",
        ),
    ],
)
def test_fields_of_another_name_are_advised_and_the_advice_is_right(
    make_context: MakeContext, tmp_path: Path, row: dict[str, Any], found: str, advice: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl(row))
    message = refusal(make_context, path)
    where = "stages.ingest.source."
    assert f"found the fields {found}" in message and f"perhaps {where}{advice.format(where)}" in message, message
    _, _, overrides = message.rpartition("; perhaps ")
    given = dict(override.removeprefix(where).split("=") for override in overrides.split())
    assert len(read(take(make_context, path, **given))) == 1


def test_what_stands_deeper_is_told(make_context: MakeContext, tmp_path: Path) -> None:
    for name, row, message in (
        ("a", {"custom_id": "r", "body": {"model": "m", "messages": CHAT}}, "rows may be what stands in body"),
        ("b", {"messages": [{"type": "human", "data": {"content": "q"}}]}, "messages (list of object of type, data)"),
        ("c", {"messages": str(CHAT)}, "messages (text)"),
        ("d", {"My secret is 42!": "x"}, "(16 characters) (text)"),
        ("e", {"": "x"}, "(0 characters) (text)"),
    ):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(row))
        said = refusal(make_context, tmp_path / f"{name}.jsonl")
        assert message in said and "secret" not in said, said


def test_columns_of_parquet_that_no_format_asks_for_are_named(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"Text": ["a"], "tokens": [[1]]}), path)
    message = refusal(make_context, path)
    assert (
        "found the fields Text (text), tokens (" in message
        and "perhaps stages.ingest.source.text_field=Text" in message
    )
    assert texts(make_context, path, text_field="Text") == ["a"]


# Containers


def test_objects_one_behind_the_other_are_rows_of_a_json_file(make_context: MakeContext, tmp_path: Path) -> None:
    rows = [{"text": f"{i} }}{{"} for i in range(3)]
    path = tmp_path / "x.json"
    for content in ("\n".join(json.dumps(row, indent=2) for row in rows), "".join(map(json.dumps, rows)) + "\n"):
        path.write_text(content)
        assert texts(make_context, path) == [row["text"] for row in rows]
    path.write_text("\n".join(json.dumps({"text": "x" * 2_000_000, "n": n}, indent=1) for n in range(3)))
    assert [row["id"][-1] for row in read(take(make_context, path))] == ["1", "2", "3"]
    lines = tmp_path / "x.jsonl"
    lines.write_text("\n".join(json.dumps(row, indent=2) for row in rows))
    assert "is it JSON, not JSON Lines? container=json" in refusal(make_context, lines)
    assert texts(make_context, lines, container=Container.json) == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"},\n{"text": "b"},\n', "(column 14; a comma ends the line)"),
        ('{"text": "a"}{"text": "b"}\n', "(column 14; more than one value in a line)"),
        ('{"text": "a"}\r{"text": "b"}\r', r"the lines end in \r alone: write \n"),
        ("{'text': 'a'}\n", "is it Python's way to write it? use json.dumps"),
        ('{"text": None}\n', "is it Python's way to write it? use json.dumps"),
        ("<!DOCTYPE html><html>secret</html>", "is it a page of HTML?"),
        ('[{"role": "user", "content": "secret"}]\n', '(list of messages; want {"messages": [...]})'),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a pointer of Git LFS"),
    ],
)
def test_what_is_no_line_of_json_is_told_by_its_looks(
    make_context: MakeContext, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "x.jsonl").write_text(content, newline="")
    said = refusal(make_context, tmp_path / "x.jsonl")
    assert message in said and "secret" not in said, said


def test_a_pointer_of_git_lfs_is_no_broken_file(make_context: MakeContext, tmp_path: Path) -> None:
    for name in ("x.parquet", "x.json", "x.csv"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert f"{name}: is a pointer of Git LFS and not the file itself" in refusal(make_context, tmp_path / name)


def test_parquet_that_is_compressed_once_more_is_told(make_context: MakeContext, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "x.parquet")
    for ending, packed in (("gz", gzip.compress), ("zst", lambda data: pyarrow.compress(data, "zstd", asbytes=True))):
        path = tmp_path / f"x.parquet.{ending}"
        path.write_bytes(packed((tmp_path / "x.parquet").read_bytes()))
        message = refusal(make_context, path)
        assert f"x.parquet.{ending}: Parquet is compressed inside already; unpack it" in message
    (tmp_path / "x.tar").write_bytes(b"x")
    assert ".txt, .md, each but .parquet also with .gz or .zst" in refusal(make_context, tmp_path / "x.tar")


def test_sheets_leave_rows_and_columns_without_anything_in_them(make_context: MakeContext, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("prompt, completion,,\na, b,,\n,,,\nc,NA,,\n")
    rows = read(take(make_context, path))
    assert [(row["prompt"], row["text"], row["id"][-1]) for row in rows] == [("a", " b", "2"), ("c", "NA", "4")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'\xef\xbb\xbf"prompt";"completion"\r\n"a";"b"\r\n', "expected prompt,completion;.*delimiter=';'"),
        (b"prompt,completion\ra,b\r", r"x.csv:1: the lines end in \\r alone"),
        (b'prompt,completion\n"say \\"hi\\"",b\n', "x.csv:2\n.*is written twice"),
        (b"hi,there\nhow,are\n", r"hi \(text\), there \(text\) \(names from line 1\)"),
        (
            "prompt,completion\nGr\u00f6\u00dfe,b\n".encode("cp1252"),
            r"x.csv:2 \(prompt character 3\)\n.*Excel: CSV UTF-8",
        ),
    ],
)
def test_what_is_wrong_with_a_sheet_is_told_with_the_way_out(
    make_context: MakeContext, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    assert re.search(message, refusal(make_context, tmp_path / "x.csv"))


# Places


@contextmanager
def nobody() -> Iterator[None]:
    """As a user who may not read everything, which root may."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_that_may_not_be_opened_is_told_and_not_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "closed").mkdir(parents=True)
    for name in ("a.jsonl", "closed/b.jsonl"):
        (root / name).write_bytes(jsonl({"text": "a"}))
    modes = {directory: directory.stat().st_mode for directory in (tmp_path, *list(tmp_path.parents)[:3])}
    for directory in modes:
        directory.chmod(0o755)
    (root / "closed").chmod(0)
    try:
        for path in (root, root / "**" / "*.jsonl", root / "closed"):
            with nobody(), pytest.raises(StageError, match=r"the directory .*closed cannot be read by this user"):
                find(str(path))
    finally:
        (root / "closed").chmod(0o755)
        for directory, mode in modes.items():
            directory.chmod(mode)


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    root = tmp_path / "data"
    root.mkdir()
    for name in ("data/a.jsonl", "far/b.jsonl"):
        (tmp_path / name).write_bytes(jsonl({"text": "a"}))
    (root / "far").symlink_to("../far")
    (root / "self").symlink_to(".")
    (tmp_path / "far" / "up").symlink_to("../data")
    for path in (root, root / "**" / "*.jsonl"):
        assert [file.name for file in find(str(path)).files] == ["a.jsonl", "far/b.jsonl"]
    (root / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(StageError, match=r"gone.jsonl is a link to a file that is not there"):
        find(str(root))


def test_what_is_no_file_matters_only_under_a_name_for_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "a"}))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "README").symlink_to("nowhere")
    found = find(str(tmp_path))
    assert [file.name for file in found.files] == ["a.jsonl"] and found.left_out == ("README", "pipe")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(StageError, match=r"pipe.jsonl is no ordinary file"):
        find(str(tmp_path))


def test_an_unpacked_export_is_its_conversations(make_context: MakeContext, tmp_path: Path) -> None:
    root = tmp_path / "export"
    root.mkdir()
    chats = [{"uuid": "u", "chat_messages": [{"sender": "human", "text": "a"}, {"sender": "assistant", "text": "b"}]}]
    (root / "conversations.json").write_text(json.dumps(chats))
    (root / "users.json").write_text(json.dumps([{"uuid": "z", "full_name": "secret"}]))
    (root / "user.json").write_text(json.dumps({"id": "user-1", "email": "secret"}))
    (root / "cat.png").write_bytes(b"x")
    context = make_context("ingest")
    said: list[str] = []
    cfg = IngestConfig(source=SourceConfig(path=str(root)), resources=IngestResources(executor=Executor.inline))
    rows = ingest(cfg, dataclasses.replace(context, headline=said.append))
    assert [json.loads(row["messages"]) for row in read(rows)] == [CHAT]
    assert said[0].endswith("3 files left out: .png, user.json, users.json)")


def test_a_test_set_beside_the_training_set_is_pointed_out(make_context: MakeContext, tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "test-00000.jsonl", "latest.jsonl"):
        (tmp_path / name).write_bytes(jsonl({"text": name}))
    said: list[str] = []
    for path in (tmp_path, tmp_path / "*train*"):
        cfg = IngestConfig(source=SourceConfig(path=str(path)), resources=IngestResources(executor=Executor.inline))
        ingest(cfg, dataclasses.replace(make_context("ingest"), headline=said.append))
    assert "test-00000.jsonl among them: a path like .../*train*" in said[0] and "among them" not in said[1]
    (tmp_path / "train-00000.jsonl").unlink()
    for path in (tmp_path / "*.jsonl", tmp_path / "test*"):
        cfg = IngestConfig(source=SourceConfig(path=str(path)), resources=IngestResources(executor=Executor.inline))
        ingest(cfg, dataclasses.replace(make_context("ingest"), headline=said.append))
    assert "test-00000.jsonl among them: a path like" in said[2] and "among them" not in said[3]


@pytest.mark.parametrize(
    ("name", "content", "container"),
    [
        ("x.jsonl.txt", '{"text": "a"}\n{"text": "b"}\n', "jsonl"),
        ("x.txt", '{"text": "a"}\n{"text": "b"}\n', "jsonl"),
        ("x.csv.txt", "text\na\nb\n", "csv"),
    ],
)
def test_rows_under_the_name_of_a_text_are_not_one_text(
    make_context: MakeContext, tmp_path: Path, name: str, content: str, container: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert f"{name}: is named as a text, but holds rows of {container}" in refusal(make_context, path)
    assert texts(make_context, path, container=Container(container)) == ["a", "b"]
    assert texts(make_context, path, container=Container.text) == [content]


def test_what_no_reader_knows_is_named_with_what_to_do(tmp_path: Path) -> None:
    for name, message in (
        ("x.tar.gz", "ends in '.tar', .*unpack it and give the directory"),
        ("x.jsonl.lz4", "compress it again as .gz or .zst"),
        ("x.jsonl.part", "a download that is not finished"),
        ("x.db", "write its table out as CSV or JSONL"),
    ):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(StageError, match=message):
            find(str(tmp_path / name))


def test_a_refusal_shows_lines_of_each_rule_and_says_where_the_rest_of_them_stand(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "secret\n' * 7 + jsonl({"text": "a"}))
    message = refusal(make_context, path)
    kept = Path(re.search(r"all of them: (\S+)", message)[1])  # type: ignore[index]
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["file"], line["line"], line["rule"]) for line in lines] == [
        ("x.jsonl", n, "broken_json") for n in range(1, 8)
    ]
    path.write_bytes(b'{"text": "secret\n' + jsonl({"text": "a"}))
    assert "all of them" not in refusal(make_context, path)


def test_an_empty_answer_among_others_is_not_learned() -> None:
    empty = [user("a"), assistant(" "), user("again"), assistant("b")]
    assert fault({"messages": empty}) == ("empty_answer", "messages[1]", "")
    assert fault({"system": "s", "messages": empty}) == ("empty_answer", "messages[1]", "")
    assert fault({"messages": empty[:2]}) == ("no_assistant_turn", "messages", "")
    thought = [user("a"), assistant("", reasoning_content="hm"), user("b"), assistant("c")]
    assert made({"messages": thought})["messages"] == thought


def test_a_source_of_a_mix_is_told_by_its_own_fields(make_context: MakeContext, tmp_path: Path) -> None:
    inline = IngestResources(executor=Executor.inline)
    (tmp_path / "a.csv").write_text("prompt;completion\na;b\n")
    (tmp_path / "b.jsonl").write_bytes(jsonl({"question": "q", "answer": "a"}))
    for path, said in (
        (tmp_path / "a.csv", "stages.ingest.mix.mine.delimiter=';'"),
        (tmp_path / "b.jsonl", "perhaps stages.ingest.mix.mine.prompt_field=question"),
        (tmp_path / "none.jsonl", "stages.ingest.mix.mine.path: no file or directory"),
    ):
        cfg = IngestConfig(mix={"mine": SourceConfig(path=str(path))}, resources=inline)
        with pytest.raises(StageError, match=re.escape(said)):
            ingest(cfg, make_context("ingest"))
    with pytest.raises(StageError, match=r"stages.ingest.mix.mine.path: no file or directory"):
        _sources(cfg, None)  # type: ignore[arg-type]
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(StageError, match=r"stages.ingest.mix \(mine\): found no rows"):
        ingest(
            IngestConfig(mix={"mine": SourceConfig(path=f"{tmp_path}/empty.jsonl")}, resources=inline), make_context()
        )
