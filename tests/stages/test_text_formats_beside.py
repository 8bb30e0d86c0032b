"""What stands beside a row's text, or in another form than most files have, is learned or named: nothing is lost in silence."""

import json
from typing import Any

import pytest

from stages.text.formats import Format
from tests.stages.test_text_formats import ANSWERED, CHAT, PAIR, Row, assistant, call, fault, made, user

PLAIN = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize("label", [False, "false", " False", "FALSE", 0, "0", 0.0])
@pytest.mark.parametrize(
    ("row", "format"),
    [
        (PLAIN, Format.prompt_completion),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, Format.chat),
        ({"messages": CHAT}, Format.chat),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, Format.sharegpt),
        ({"instruction": "q", "output": "a"}, Format.alpaca),
    ],
)
def test_what_is_labelled_false_is_learned_in_no_format(row: Row, format: Format, label: Any) -> None:
    assert fault(row | {"label": label}, format)[:2] == ("labelled_false", "label")


def test_other_labels_change_nothing() -> None:
    for label in (True, "True", 1, "positive", "", None):
        assert made(PLAIN | {"label": label}) == made(PLAIN)
        assert made({"messages": CHAT, "label": label})["messages"] == CHAT
    assert made({"text": "a film", "label": 0})["text"] == "a film"  # a class of texts, no verdict on an answer


@pytest.mark.parametrize("write", [lambda turns: turns, json.dumps, lambda turns: json.dumps(turns).encode()])
def test_prompts_of_messages_are_chats_in_tables_too(write: Any) -> None:
    row = {"prompt": write(CHAT[:1]), "completion": write(CHAT[1:])}
    assert made(row) == made({"messages": CHAT})
    assert made(row | {"completion": "b"}) == made({"messages": CHAT})
    assert fault(row, Format.prompt_completion) == ("other_format", "prompt", "chat")


def test_prompts_that_only_look_like_lists_stay_texts() -> None:
    for prompt, completion in (
        ("[1, 2]", "[2]"),
        ("[]", "[]"),
        ("[Note] q", "[a"),
        ('[{"x": 1}]', '[{"role": "user"}]'),
    ):
        row = {"prompt": prompt, "completion": completion}
        assert made(row) == {"kind": "prompt_completion", "prompt": prompt, "text": completion}


@pytest.mark.parametrize("said", ["[1, 2]", "[Note] x", "[]", '[{"value": 1}]', "[", b"[1, 2]"])
def test_answers_and_prompts_that_begin_with_a_bracket_stay_texts(said: Any) -> None:
    text = said.decode() if isinstance(said, bytes) else said
    found = made({"prompt": said, "chosen": said, "rejected": "no"})
    assert (found["messages"], found["chosen"], found["rejected"]) == (
        [user(text)],
        [assistant(text)],
        [assistant("no")],
    )


def test_messages_that_are_broken_are_no_text() -> None:
    for cut in ('[{"role": "assistant", "content": "g', "[{'content': 'g', 'role': 'assistant'}]", '[ {"from": "gpt"'):
        assert fault({"prompt": "q", "chosen": cut, "rejected": "b"}, Format.preference)[:2] == (
            "broken_json",
            "chosen",
        )
        assert fault({"prompt": cut, "chosen": "g", "rejected": "b"}, Format.preference)[:2] == (
            "broken_json",
            "prompt",
        )
    whole = {name: json.dumps([user("q"), *PAIR[name]]) for name in ("chosen", "rejected")}
    assert made({"prompt": "[]", **whole}) == made(PAIR)  # a table's way to write that there is none


def test_a_system_message_history_or_tools_beside_a_prompt_make_it_a_chat() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    asked = [user("q"), assistant("a")]
    system, earlier = {"role": "system", "content": "s"}, [user("x"), assistant("y")]
    for beside, said in (
        ({"system": "s"}, [system, *asked]),
        ({"history": [["x", "y"]]}, [*earlier, *asked]),
        ({"history": json.dumps([["x", "y"]]), "system": "s"}, [system, *earlier, *asked]),
        ({"tools": [tool]}, asked),
    ):
        found = made(PLAIN | beside)
        assert (found["kind"], found["messages"]) == ("chat", said)
        assert found["tools"] == ([tool] if "tools" in beside else "")
    nothing = {"system": "", "history": "[]", "tools": None, "images": [], "image": {"bytes": None, "path": None}}
    assert made(PLAIN | nothing) == made(PLAIN)


def test_what_is_given_beside_an_instruction_belongs_to_a_preference() -> None:
    row = {"instruction": "do", "input": "this", "chosen": "g", "rejected": "b", "history": [["x", "y"]]}
    assert made(row)["messages"] == [user("x"), assistant("y"), user("do\nthis")]
    assert made({"prompt": "q", "chosen": "g", "rejected": "b", "history": [["x", "y"]]})["messages"] == [
        user("x"),
        assistant("y"),
        user("q"),
    ]


@pytest.mark.parametrize("format", [Format.prompt_completion, Format.text])
def test_a_text_about_a_picture_is_no_text_without_it(format: Format) -> None:
    row = PLAIN | {"text": "a cat"}
    assert fault(row | {"images": ["cat.png"]}, format) == ("attachment", "images", "list")
    assert made(row | {"images": "[]", "image": None, "audio": ""}, format) == made(row, format)


@pytest.mark.parametrize("name", ["image", "images", "video", "audio", "attachments", "files"])
def test_what_is_attached_to_a_message_is_named(name: str) -> None:
    chat = [user("q") | {name: [{"id": 1}]}, assistant("a")]
    assert fault({"messages": chat}) == ("attachment", f"messages[0].{name}", "list")
    pair = PAIR | {"chosen": [assistant("g") | {name: "x"}]}
    assert fault(pair, Format.preference) == ("attachment", f"chosen[0].{name}", "text")
    for none in (None, [], "", {"id": None}):
        assert made({"messages": [user("q") | {name: none}, assistant("a")]})["messages"] == [user("q"), assistant("a")]


def answered(*ids: str | None, tail: int = 1) -> Row:
    """Two calls, a and b, the answers to those of `ids`, and what follows."""
    calls = [call("{}", id=name) for name in "ab"]
    answers = [{"role": "tool", "content": "7"} | ({"tool_call_id": name} if name else {}) for name in ids]
    return {"messages": [user("q"), assistant(None, tool_calls=calls), *answers, *[assistant("x")] * tail]}


def test_every_call_with_an_id_has_its_answer() -> None:
    assert fault(answered("a")) == ("unanswered_tool_call", "messages[3]", "")
    assert fault(answered("b")) == ("unanswered_tool_call", "messages[3]", "")
    assert fault(answered("a", "a")) == ("unanswered_tool_call", "messages[4]", "")
    for ids in (("a", "b"), ("b", "a"), ("a", "b", "a"), ("a", None), (None, None), (None,)):
        assert made(answered(*ids))["kind"] == "chat"
    assert made(answered("a", tail=0))["kind"] == "chat"  # what is learned is the calls
    again = [*ANSWERED, *ANSWERED[1:], assistant("x")]
    assert made({"messages": again})["messages"][-1] == assistant("x")


@pytest.mark.parametrize("arguments", [[], 0, False, "[]", "0", '""', "false", 1.5])
def test_arguments_that_are_no_object_are_not_taken_for_none(arguments: Any) -> None:
    chat = [user("q"), assistant(None, tool_calls=[call(arguments)])]
    at = "messages[1].tool_calls[0].arguments"
    assert fault({"messages": chat}) == ("broken_tool_call", at, "not a JSON object")


def test_a_call_without_arguments_has_none() -> None:
    for arguments in (None, {}, "", "{}", {"a": None}):
        chat = [user("q"), assistant(None, tool_calls=[call(arguments)])]
        assert made({"messages": chat})["messages"][1]["tool_calls"][0]["function"]["arguments"] == {}


def test_u_0000_is_found_in_arguments_and_tools_and_words_about_it_are_none() -> None:
    for arguments in ('{"x": ["a\\u0000b"]}', {"x": ["a\0b"]}, {"a\0b": 1}):
        chat = [user("q"), assistant(None, tool_calls=[call(arguments)])]
        assert fault({"messages": chat})[:2] == ("nul_character", "messages[1].tool_calls[0].arguments")
    tool = {"type": "function", "function": {"name": "f", "description": "a\0b"}}
    assert fault({"messages": CHAT, "tools": [tool]})[:2] == ("nul_character", "tools")
    chat = [user("q"), assistant(None, tool_calls=[call({"x": "a\0b"})])]
    repaired = made({"messages": chat}, replace=True)["messages"][1]["tool_calls"][0]
    assert repaired["function"]["arguments"] == {"x": "a\ufffdb"}
    chat = [user("q"), assistant(None, tool_calls=[call({"x": "\\u0000"})])]
    assert made({"messages": chat})["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"x": "\\u0000"}
