"""Calls of tools and what answers them: each answer belongs to one call, nothing that is written twice loses one of its values, and
nothing that a file can hold in a call ends the stage."""

import datetime
import decimal
import json
from typing import Any

import pytest

from stages.text.formats import Format
from tests.stages.test_text_formats import CHAT, PAIR, Row, assistant, call, fault, made, user


def chat(calls: list[Row], *answers: Row) -> Row:
    return {"messages": [user("q"), assistant(None, tool_calls=calls), *answers, assistant("x")]}


def tool(**more: Any) -> Row:
    return {"role": "tool", "content": "7", **more}


def without_id(name: str) -> Row:
    return {"type": "function", "function": {"name": name, "arguments": {}}}


# Who answers whom


def test_an_answer_that_names_nothing_is_to_the_open_call() -> None:
    assert made(chat([without_id("f")], tool()))["messages"][2] == tool()
    assert made(chat([call("{}", id="a")], tool()))["kind"] == "chat"
    assert made(chat([call("{}", id=name) for name in "ab"], tool(tool_call_id="b"), tool()))["kind"] == "chat"
    assert made(chat([without_id("f")], tool(), tool()))["kind"] == "chat"  # the second says more of the same
    shown = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    turns = [{"from": "human", "value": "q"}, shown, {"from": "observation", "value": "7"}]
    assert made({"conversations": [*turns, {"from": "gpt", "value": "x"}]})["kind"] == "chat"


@pytest.mark.parametrize("calls", [[without_id("f"), without_id("g")], [call("{}", id=name) for name in "ab"]])
def test_an_answer_that_names_none_of_several_open_calls_may_be_to_all_of_them(calls: list[Row]) -> None:
    for answers in ([tool()], [tool(), tool()], [tool(tool_call_id=""), tool(tool_call_id="")]):
        assert made(chat(calls, *answers))["kind"] == "chat", answers


def test_an_answer_without_id_is_told_by_the_name_of_its_function() -> None:
    for role in ("tool", "function"):
        f, g = ({"role": role, "name": name, "content": "7"} for name in "fg")
        calls = [without_id("f"), without_id("g")]
        for answers in ([f, g], [g, f], [f, tool()]):
            assert made(chat(calls, *answers))["kind"] == "chat", answers
        assert fault(chat(calls, f))[:2] == ("unanswered_tool_call", "messages[3]")
        assert fault(chat(calls, f, f)) == (
            "orphan_tool_call_id",
            "messages[3]",
            "no open call of a function of this name",
        )
        assert made(chat([without_id("f"), without_id("f")], f, f))["kind"] == "chat"  # in the order of the calls
        assert fault(chat([without_id("f"), without_id("f")], f))[0] == "unanswered_tool_call"
        assert fault(chat([without_id("f")], g))[0] == "orphan_tool_call_id"
    older = [user("q"), assistant(None, function_call={"name": "f", "arguments": "{}"})]
    assert fault({"messages": [*older, {"role": "function", "name": "g", "content": "7"}]})[:2] == (
        "orphan_tool_call_id",
        "messages[2]",
    )


def test_one_id_on_two_calls_wants_two_answers() -> None:
    calls = [call("{}", id="a"), call("{}", id="a")]
    assert fault(chat(calls, tool(tool_call_id="a")))[:2] == ("unanswered_tool_call", "messages[3]")
    assert made(chat(calls, tool(tool_call_id="a"), tool(tool_call_id="a")))["kind"] == "chat"


# What is written twice


def test_a_call_under_both_its_names_is_one_call_or_two_values() -> None:
    older = {"name": "f", "arguments": '{"n": 1}'}
    both = assistant(None, function_call=older, tool_calls=[call({"n": 1})])
    assert made({"messages": [user("q"), both]})["messages"][1]["tool_calls"] == [call({"n": 1})]
    for calls in ([call({"n": 2})], [call({"n": True})], [call({"n": 1}, name="g")], [call({"n": 1}), call({})]):
        wrong = assistant(None, function_call=older, tool_calls=calls)
        assert fault({"messages": [user("q"), wrong]}) == (
            "two_values",
            "messages[1].function_call",
            "tool_calls has others",
        )
    alone = assistant(None, function_call={"name": None, "arguments": None}, tool_calls=[call({"n": 1})])
    assert made({"messages": [user("q"), alone]})["messages"][1]["tool_calls"] == [call({"n": 1})]
    said = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "tool_calls": [call({})]}
    assert fault({"conversations": [{"from": "human", "value": "q"}, said]}, Format.sharegpt)[0] == "two_values"


def test_tools_thoughts_and_system_messages_under_two_names_are_one_or_two_values() -> None:
    one, other = ({"name": name, "parameters": {}} for name in "fg")
    assert made({"messages": CHAT, "tools": [one], "functions": [one]})["tools"][0]["function"] == one
    assert made({"messages": CHAT, "tools": "[]", "functions": [one]})["tools"][0]["function"] == one
    assert fault({"messages": CHAT, "tools": [one], "functions": [other]})[:2] == ("two_values", "functions")
    for first, second, kept in (("hm", "hm", "hm"), ("", "hm", "hm"), ("hm", "", "hm"), ("", "", "")):
        thinking = assistant("b", reasoning_content=first, thinking=second)
        assert made({"messages": [user("a"), thinking]})["messages"][1]["reasoning_content"] == kept
    thinking = assistant("b", reasoning="hm", thinking="well")
    assert fault({"messages": [user("a"), thinking]})[:2] == ("two_values", "messages[1].thinking")
    row = {"messages": CHAT, "system": "s", "system_prompt": "t"}
    assert fault(row) == ("two_values", "system_prompt", "system has another")
    assert made(row | {"system_prompt": "s"})["messages"][0] == {"role": "system", "content": "s"}


def test_a_system_prompt_is_a_system_message() -> None:
    """As OpenOrca has it."""
    said = [{"role": "system", "content": "s"}, user("q"), assistant("a")]
    assert made({"system_prompt": "s", "prompt": "q", "response": "a"})["messages"] == said
    assert made({"system_prompt": "s", "messages": said[1:]})["messages"] == said
    assert made({"system_prompt": "s", "instruction": "q", "output": "a"})["messages"] == said
    assert made(PAIR | {"system_prompt": "s"})["messages"] == said[:2]
    assert made({"system_prompt": "", "prompt": "q", "response": "a"})["kind"] == "prompt_completion"


REPEATED = '{"x": 1, "x": 2}'


@pytest.mark.parametrize(
    ("row", "format", "field"),
    [
        ({"messages": f'[{{"role": "user", "content": "a", "content": "b"}}, {REPEATED}]'}, Format.chat, "messages"),
        ({"messages": CHAT, "tools": f'[{{"name": "f", "parameters": {REPEATED}}}]'}, Format.chat, "tools"),
        (
            {"messages": [user("q"), assistant(None, tool_calls=[call(REPEATED)])]},
            Format.chat,
            "messages[1].tool_calls[0].arguments",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": REPEATED}]},
            Format.sharegpt,
            "conversations[1].value",
        ),
        (
            {"prompt": "q", "chosen": '[{"role": "assistant", "content": "a", "content": "b"}]', "rejected": "b"},
            Format.preference,
            "chosen",
        ),
        ({"instruction": "q", "output": "a", "history": f"[{REPEATED}]"}, Format.alpaca, "history"),
    ],
)
def test_a_key_that_stands_twice_in_a_string_of_json_costs_its_row(row: Row, format: Format, field: str) -> None:
    assert fault(row, format)[:2] == ("repeated_key", field)


def test_repeated_keys_with_one_value_and_in_texts_are_none() -> None:
    twice = '[{"role": "user", "role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    assert made({"messages": twice})["messages"] == CHAT
    odd = '[{"id": 1, "id": 2, "role": "user", "content": "a"}]'
    assert fault({"prompt": "q", "chosen": odd, "rejected": "b"}, Format.preference)[:2] == ("repeated_key", "chosen")
    assert made({"messages": [user(f"[{REPEATED}]"), CHAT[1]]})["messages"][0] == user(f"[{REPEATED}]")
    assert made({"prompt": f"[{REPEATED}]", "completion": "a"})["prompt"] == f"[{REPEATED}]"


# What is written in another way


def test_a_call_that_is_said_by_a_role_is_a_call_under_any_names_of_the_fields() -> None:
    value = '{"name": "f", "arguments": {"n": 1}}'
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}]
    for named, said in (("role", "content"), ("from", "value")):
        for role in ("function_call", "Function_Call"):
            turns = [{named: "user", said: "q"}, {named: role, said: value, "reasoning": "hm"}]
            assert made({"messages": turns})["messages"][1] == {
                "role": "assistant",
                "content": "",
                "tool_calls": expected,
                "reasoning_content": "hm",
            }


def test_calls_in_a_string_of_json_are_calls_and_none_are_none() -> None:
    calls = [call({"n": 1})]
    for written in (json.dumps(calls), json.dumps(calls).encode()):
        assert (
            made({"messages": [user("q"), assistant(None, tool_calls=written)]})["messages"][1]["tool_calls"] == calls
        )
    for none in ("[]", "", [], None):
        assert made({"messages": [user("a"), assistant("b", tool_calls=none)]})["messages"] == CHAT
    wrong = assistant(None, tool_calls="f(1)")
    assert fault({"messages": [user("a"), wrong]}) == ("broken_tool_call", "messages[1].tool_calls", "text")


def test_the_prompt_of_a_preference_may_be_a_string_of_json() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"preferred_output": [assistant("g")], "non_preferred_output": [assistant("b")]}
    found = made(row | {"input": json.dumps({"messages": [user("q")], "tools": tools})})
    assert (found["messages"], found["tools"]) == ([user("q")], tools)
    repeated = '{"messages": [], "messages": [{"role": "user", "content": "q"}]}'
    assert fault(row | {"input": repeated}, Format.preference)[:2] == ("repeated_key", "input")


def test_bytes_that_are_no_utf_8_are_told_in_a_string_of_json_too() -> None:
    assert fault({"messages": b'[{"role": "user", "content": "\xff"}]'}) == ("invalid_utf8", "messages", "byte 31")


@pytest.mark.parametrize("given", [{"image_url": "x"}, {"image": "x.png"}, {"file": {"file_id": "x"}}])
def test_a_text_part_that_holds_more_than_text_is_named(given: Row) -> None:
    part = {"type": "text", "text": "a", **given}
    name = next(iter(given))
    assert fault({"messages": [user([part]), CHAT[1]]})[:2] == ("attachment", f"messages[0].content[0].{name}")
    nothing = {"type": "text", "text": "a", "image_url": {"url": None}, "annotations": [], "cache_control": {"x": 1}}
    assert made({"messages": [user([nothing]), CHAT[1]]})["messages"] == CHAT


# What ends no stage


def nested(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("levels", [101, 300, 700, 5_000])
def test_what_is_nested_too_deeply_costs_its_row(levels: int) -> None:
    deep = {"a": nested(levels)}
    messages = [user("q"), assistant(None, tool_calls=[call(deep)])]
    assert fault({"messages": messages})[0] == "nested_too_deeply"
    assert fault({"messages": CHAT, "tools": [{"name": "f", "parameters": deep}]})[0] == "nested_too_deeply"
    assert made({"messages": [user("q"), assistant(None, tool_calls=[call({"a": nested(90)})])]})["kind"] == "chat"
    if levels > 300:
        assert fault({"messages": CHAT, "images": nested(levels)})[0] in ("nested_too_deeply", "attachment")


@pytest.mark.parametrize(
    "value", [datetime.datetime(2026, 1, 2), datetime.date(2026, 1, 2), decimal.Decimal("1.5"), b"x", {1: {2}}]
)
def test_values_that_json_has_not_cost_their_row(value: Any) -> None:
    """Parquet has them within structs."""
    messages = [user("q"), assistant(None, tool_calls=[call({"when": value})])]
    at = "messages[1].tool_calls[0].arguments"
    assert fault({"messages": messages}) == ("not_text", at, "a date, bytes or another kind that JSON has not")
    schema = {"name": "f", "parameters": {"default": value}}
    assert fault({"messages": CHAT, "tools": [schema]})[:2] == ("not_text", "tools")
