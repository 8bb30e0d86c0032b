"""Other people's exports as they are: read rightly, or told in one message what is wrong where and what to do about it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.contract import Context, StageError
from stages.text.formats import Format
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
