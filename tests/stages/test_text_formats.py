"""What people's rows mean: every known format into the one record, and every fault with its rule and its place."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stages.text.chats import Texts
from stages.text.conversion import parts
from stages.text.faults import RULES, Fault
from stages.text.formats import Decision, Fields, Format, by_names, recognise

Row = dict[str, Any]


def user(content: Any) -> Row:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Row:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, name: str = "f", **more: Any) -> Row:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def made(
    row: Row, format: Format | None = None, *, fields: Fields | None = None, replace: bool = False
) -> dict[str, Any]:
    """The record's parts, JSON decoded; the format is recognised unless given."""
    fields = fields or Fields()
    if format is None:
        found = recognise(row, fields)
        assert found is not None
        format = found[0]
    given = parts(row, format, fields, Texts(replace=replace))
    nested = ("messages", "tools", "chosen", "rejected")
    return {name: json.loads(value) if name in nested and value else value for name, value in given.items()}


def fault(row: Row, format: Format = Format.chat, **more: Any) -> tuple[str, str, str]:
    with pytest.raises(Fault) as caught:
        made(row, format, **more)
    assert caught.value.rule in RULES
    return caught.value.rule, caught.value.field, caught.value.detail


ANSWERED = [
    user("w?"),
    assistant(None, tool_calls=[call('{"city":"X"}')]),
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]
CHAT = [user("a"), assistant("b")]


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"text": "x"}, Format.text),
        ({"prompt": "x", "completion": "y"}, Format.prompt_completion),
        ({"prompt": "x", "response": "y", "text": "both"}, Format.prompt_completion),
        ({"messages": CHAT, "prompt": "a"}, Format.chat),
        ({"messages": json.dumps(CHAT)}, Format.chat),
        ({"conversations": CHAT}, Format.chat),
        ({"conversations": [{"from": "human", "value": "x"}]}, Format.sharegpt),
        ({"messages": None, "conversations": [{"from": "human", "value": "x"}]}, Format.sharegpt),
        ({"instruction": "x", "input": "", "output": "y", "text": "all"}, Format.alpaca),
        ({"prompt": "x", "chosen": "y", "rejected": "z", "messages": CHAT}, Format.preference),
        ({"input": {"messages": CHAT[:1]}, "preferred_output": [], "non_preferred_output": []}, Format.preference),
        ({"mapping": {}, "current_node": "a"}, Format.chat),
        ({"chat_messages": [], "uuid": "x"}, Format.chat),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, Format.chat),
        ({"question": "x", "answer": "y"}, None),
        ({"contents": [{"role": "user", "parts": []}]}, None),
        ({}, None),
    ],
)
def test_each_format_is_known_by_its_fields(row: Row, format: Format | None) -> None:
    found = recognise(row, Fields())
    assert (found[0] if found else None) is format


def test_questions_and_answers_are_taken_when_they_are_named() -> None:
    fields = Fields(prompt="question", completion="answer")
    assert made({"question": "x", "answer": "y"}, fields=fields) == {
        "kind": "prompt_completion",
        "prompt": "x",
        "text": "y",
    }
    assert by_names(["question", "answer"], fields) == "prompt_completion"
    assert by_names(["question", "answer"], Fields()) == ""


def test_most_rows_decide_and_their_order_does_not() -> None:
    votes = Counter({(Format.text, "field text"): 5, (Format.chat, "a"): 3, (Format.chat, "b"): 3})
    decision = Decision.of(votes, 12)
    assert (decision.format, decision.why) == (Format.chat, "a in 6 of the first 12 rows")
    tie = [(Format.text, "t"), (Format.alpaca, "a")]
    assert Decision.of(Counter(tie), 2) == Decision.of(Counter(tie[::-1]), 2)


def test_a_chat_keeps_its_strings_and_only_what_a_template_reads() -> None:
    odd = "  e\u0301 \u2028 <|im_end|>\r\n\t007 "
    row = {"messages": [user(odd) | {"id": "m1", "name": "bob"}, assistant("b", reasoning_content="hm", audio=None)]}
    assert made(row) == {
        "kind": "chat",
        "messages": [
            {"role": "user", "content": odd, "name": "bob"},
            {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        ],
        "tools": "",
    }


def test_text_parts_are_one_text_and_other_parts_are_named() -> None:
    texts = [{"type": "text", "text": "b"}, "c", {"type": "input_text", "text": "d"}]
    assert made({"messages": [user(texts), assistant("x")]})["messages"][0] == user("bcd")
    image = [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "secret"}}]
    found = fault({"messages": [user(image), assistant("x")]})
    assert found == ("unsupported_content_part", "messages[0].content[1]", "image_url")


def test_tool_calls_are_decoded_once_and_hold_their_own_keys_alone() -> None:
    schema = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    padded = {"city": None, "n": 3, "inner": {"a": None, "b": [None, {"c": None}]}}
    chat = [*ANSWERED, assistant("7", tool_calls=[call(padded)])]
    found = made({"messages": chat, "tools": [{"type": "function", "function": schema}]})
    assert found["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "X"}}}],
    }
    assert found["messages"][3]["tool_calls"][0]["function"]["arguments"] == {"n": 3, "inner": {"b": [None, {}]}}
    assert found["tools"] == [{"type": "function", "function": schema}]
    for written in ([schema], json.dumps([schema])):
        assert made({"messages": CHAT, "tools": written})["tools"] == found["tools"]
    said_null = made({"messages": [user("x"), assistant(None, tool_calls=[call('{"n":null}')])]})  # its author wrote it
    assert said_null["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"n": None}


def test_the_older_function_calls_of_openai_are_tool_calls() -> None:
    chat = [
        user("w?"),
        assistant(None, function_call={"name": "f", "arguments": '{"n": 3}'}),
        {"role": "function", "name": "f", "content": "7"},
        assistant("7", weight=1),
    ]
    found = made({"messages": chat, "functions": [{"name": "f", "parameters": {}}]})
    assert found["messages"][1:3] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"n": 3}}}],
        },
        {"role": "tool", "name": "f", "content": "7"},
    ]
    assert found["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_sharegpt_has_its_own_names_for_everything() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "b"},
    ]
    found = made({"conversations": turns, "tools": '[{"name": "f"}]'})
    assert [message["role"] for message in found["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found["messages"][2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert found["kind"] == "chat"


def test_alpaca_is_a_chat_with_its_history_and_its_system_message() -> None:
    row = {"instruction": "do", "input": "this", "output": "done", "history": [["q", "a"]], "system": "s"}
    said = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "do\nthis"), ("assistant", "done")]
    assert [(m["role"], m["content"]) for m in made(row)["messages"]] == said
    short = made({"instruction": "do", "input": None, "output": "done"})
    assert short["messages"] == [user("do"), assistant("done")]


def test_a_system_field_goes_before_the_chat_and_null_is_none() -> None:
    assert made({"messages": CHAT, "system": "s"})["messages"][0] == {"role": "system", "content": "s"}
    assert made({"messages": CHAT, "system": None})["messages"] == CHAT
    assert fault({"messages": [{"role": "system", "content": "x"}, *CHAT], "system": "s"})[0] == "role_order"


@pytest.mark.parametrize(
    ("chat", "rule", "field", "detail"),
    [
        ([], "empty_conversation", "messages", ""),
        (None, "not_a_list", "messages", "null"),
        ("hello", "not_a_list", "messages", "text"),
        ("[{", "broken_json", "messages", ""),
        (["x"], "not_a_message", "messages[0]", "text"),
        ([{"content": "x"}], "not_a_message", "messages[0]", "no role"),
        ([{"role": "narrator", "content": "x"}], "unknown_role", "messages[0]", "narrator"),
        ([{"role": "This Is Somebody's Secret", "content": "x"}], "unknown_role", "messages[0]", "text"),
        ([{"role": 3, "content": "x"}], "unknown_role", "messages[0]", "number"),
        ([user("a")], "no_assistant_turn", "messages", ""),
        ([user("a"), assistant(" \n")], "no_assistant_turn", "messages", ""),
        (
            [*CHAT, {"role": "system", "content": "late"}],
            "role_order",
            "messages[2]",
            "system behind the first message",
        ),
        ([user(3), assistant("b")], "not_text", "messages[0].content", "number"),
        ([user({"a": 1}), assistant("b")], "not_text", "messages[0].content", "object"),
        ([user(None), assistant("b")], "null_content", "messages[0].content", ""),
        ([user("a"), assistant(None)], "null_content", "messages[1].content", ""),
        ([user("a\0"), assistant("b")], "nul_character", "messages[0].content", ""),
        ([user("a \ud83d b"), assistant("b")], "lone_surrogate", "messages[0].content", ""),
        ([user("a"), assistant("b", weight=0)], "unsupported_weight", "messages[1]", ""),
        ([user("a"), assistant("b", train=False)], "unsupported_weight", "messages[1]", ""),
        (
            [*ANSWERED[:2], {"role": "tool", "tool_call_id": "c2", "content": "7"}],
            "orphan_tool_call_id",
            "messages[2]",
            "",
        ),
        ([user("a"), ANSWERED[2]], "role_order", "messages[1]", "tool without a call before it"),
        ([*ANSWERED[:2], user("never mind")], "unanswered_tool_call", "messages[2]", ""),
        (
            [user("a"), assistant(None, tool_calls=["x"])],
            "broken_tool_call",
            "messages[1].tool_calls[0]",
            "no function name",
        ),
        (
            [user("a"), assistant(None, tool_calls=[call("{bad")])],
            "broken_tool_call",
            "messages[1].tool_calls[0].arguments",
            "not JSON",
        ),
        (
            [user("a"), assistant(None, tool_calls=[call("[1]")])],
            "broken_tool_call",
            "messages[1].tool_calls[0].arguments",
            "not a JSON object",
        ),
        (
            [user("a"), assistant(None, tool_calls=[call('{"x": NaN}')])],
            "not_text",
            "messages[1].tool_calls[0].arguments",
            "a number that JSON has not",
        ),
    ],
)
def test_what_is_wrong_with_a_chat_has_a_rule_and_a_place(chat: Any, rule: str, field: str, detail: str) -> None:
    assert fault({"messages": chat}) == (rule, field, detail)


def test_wrong_tools_and_rows_of_another_format_are_told_apart() -> None:
    assert fault({"messages": CHAT, "tools": [{"x": 1}]}) == ("broken_tools", "tools[0]", "no function name")
    assert fault({"messages": CHAT, "tools": {"x": 1}}) == ("broken_tools", "tools", "object")
    assert fault({"text": "x"}) == ("other_format", "messages", "text")
    assert fault({"x": "x"}) == ("missing_field", "messages", "")
    assert fault({"prompt": "x", "completion": ["y"]}, Format.prompt_completion) == ("not_text", "completion", "list")
    assert fault({"text": float("nan")}, Format.text) == ("not_text", "text", "number")


def test_what_no_tokenizer_reads_is_repaired_when_asked() -> None:
    texts = Texts(replace=True)
    assert texts.take("a \ud83d\0 \U0001f600 \ude00", "x") == "a \ufffd\ufffd \U0001f600 \ufffd" and texts.repaired
    untouched = Texts(replace=True)
    assert untouched.take("caf\u00e9 \U0001f600", "x") == "caf\u00e9 \U0001f600" and not untouched.repaired
    assert made({"messages": [user("a\ud83d"), assistant("b")]}, replace=True)["messages"][0] == user("a\ufffd")


def test_a_prompt_and_a_completion_of_messages_are_one_chat() -> None:
    assert made({"prompt": CHAT[:1], "completion": CHAT[1:]})["messages"] == CHAT


def test_completions_that_are_labelled_false_are_not_learned() -> None:
    assert made({"prompt": "x", "completion": "y", "label": True})["text"] == "y"
    row = {"prompt": "x", "completion": "y", "label": False}
    assert fault(row, Format.prompt_completion) == ("labelled_false", "label", "")


def test_a_claude_export_is_a_chat_unless_its_files_are_missing() -> None:
    turns: list[Row] = [
        {"sender": "human", "text": "hi"},
        {"sender": "assistant", "content": [{"type": "text", "text": "yo"}]},
    ]
    assert made({"chat_messages": turns})["messages"] == [user("hi"), assistant("yo")]
    assert fault({"chat_messages": [turns[0] | {"files": [{"file_name": "x"}]}, turns[1]]})[0] == "attachment"
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "y"}, {"type": "text", "text": "o"}]
    both = turns[1] | {"text": "This block is not supported on your current device yet.", "content": parts}
    assert made({"chat_messages": [turns[0], both]})["messages"] == [
        user("hi"),
        assistant("yo", reasoning_content="hm"),
    ]
    for content in (None, [], [{"type": "thinking", "thinking": ""}], [{"type": "token_budget"}]):
        turn = turns[1] | {"text": "yo", "content": content}
        assert made({"chat_messages": [turns[0], turn]})["messages"] == [user("hi"), assistant("yo")], content
    for part in ({"type": "tool_use", "name": "f", "input": {}}, {"type": "image"}, {"text": "yo"}, None):
        row = {"chat_messages": [turns[0], turns[1] | {"text": "yo", "content": [*parts, part]}]}
        assert fault(row)[:2] == ("unsupported_content_part", "chat_messages[1]"), part
    assert made({"chat_messages": [turns[0], turns[1] | {"content": "yo"}]})["messages"][1] == assistant("yo")
    assert fault({"chat_messages": [{"sender": "x"}]})[0] == "unknown_role"
    assert fault({"chat_messages": "x"})[0] == "not_a_list"


PAIR = {"prompt": [user("q")], "chosen": [assistant("g")], "rejected": [assistant("b")]}


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": "q", "chosen": "g", "rejected": "b"},
        {"prompt": "q", "chosen": [user("q"), assistant("g")], "rejected": [user("q"), assistant("b")]},
        {"chosen": [user("q"), assistant("g")], "rejected": [user("q"), assistant("b")]},
        {
            "prompt": json.dumps([user("q")]),
            "chosen": json.dumps([assistant("g")]),
            "rejected": json.dumps([assistant("b")]),
        },
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "g"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"instruction": "q", "chosen": "g", "rejected": "b"},
        {"question": "q", "chosen": "g", "rejected": "b"},
        {
            "input": {"messages": [user("q")]},
            "preferred_output": [assistant("g")],
            "non_preferred_output": [assistant("b")],
        },
    ],
)
def test_a_preference_is_the_same_however_its_prompt_is_written(row: Row) -> None:
    assert made(row) == {
        "kind": "preference",
        "messages": PAIR["prompt"],
        "chosen": PAIR["chosen"],
        "rejected": PAIR["rejected"],
        "tools": "",
    }


def test_answers_that_begin_with_the_prompt_lose_it_only_where_all_rows_do() -> None:
    row = {"prompt": "I", "chosen": "I think", "rejected": "I know"}
    assert made(row)["chosen"] == [assistant("I think")]
    assert made(row, fields=Fields(prompt_repeated=True))["chosen"] == [assistant(" think")]


def test_what_two_transcripts_have_in_common_is_their_prompt() -> None:
    row = {"chosen": "\n\nUser: hi\n\nAssistant: yes", "rejected": "\n\nUser: hi\n\nAssistant: yeah"}
    found = made(row)
    assert found["messages"] == [user("\n\nUser: hi\n\nAssistant:")]
    assert (found["chosen"], found["rejected"]) == ([assistant(" yes")], [assistant(" yeah")])
    asked = "\n\nHuman: hi\n\nyou\n\nAssistant: yes?\n\nHuman: Assistant: what?\n\nAssistant:"
    found = made({"chosen": f"{asked}  good", "rejected": f"{asked} bad"})  # as HH-RLHF writes a whole chat
    assert found["messages"] == [user("hi\n\nyou"), assistant("yes?"), user("Assistant: what?")]
    assert (found["chosen"], found["rejected"]) == ([assistant(" good")], [assistant("bad")])
    longer = [user("q"), assistant("a"), user("r")]
    found = made({"chosen": [*longer, assistant("g")], "rejected": [*longer, assistant("b")]})
    assert found["messages"] == longer


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "q", "chosen": "x", "rejected": "x"}, "same_answers"),
        ({"prompt": "q", "chosen": [assistant("x")], "rejected": [assistant("x")]}, "same_answers"),
        ({"prompt": "q", "chosen": "", "rejected": "x"}, "empty_answer"),
        ({"prompt": "q", "chosen": None, "rejected": "x"}, "not_a_list"),
        ({"chosen": "ab", "rejected": "cd"}, "two_prompts"),
        ({"chosen": [user("1"), assistant("x")], "rejected": [user("2"), assistant("y")]}, "two_prompts"),
        (
            {"prompt": "3", "chosen": [user("1"), assistant("x")], "rejected": [user("1"), assistant("y")]},
            "two_prompts",
        ),
        ({"prompt": "q", "chosen": [user("x")], "rejected": [assistant("y")]}, "role_order"),
        ({"prompt": "q", "chosen": "x"}, "missing_field"),
        ({"prompt": "q", "completion": "x"}, "other_format"),
        ({"preferred_output": [assistant("a")]}, "missing_field"),
    ],
)
def test_what_is_wrong_with_a_preference_has_a_rule(row: Row, rule: str) -> None:
    assert fault(row, Format.preference)[0] == rule


def test_a_chatgpt_export_is_the_branch_that_was_shown_last() -> None:
    def node(role: str, said: Any, parent: str | None, **more: Any) -> Row:
        content = {"content_type": "text", "parts": [said]}
        return {"message": {"author": {"role": role}, "content": content, **more}, "parent": parent}

    tree = {
        "root": {"message": None, "parent": None},
        "s": node("system", "", "root"),
        "u": node("user", "hi", "s"),
        "old": node("assistant", "not this", "u"),
        "t": node("assistant", "search(1)", "u", recipient="browser"),
        "a": node("assistant", "yo", "t"),
    }
    assert made({"mapping": tree, "current_node": "a", "title": "x"})["messages"] == [user("hi"), assistant("yo")]
    assert fault({"mapping": tree, "current_node": "gone"})[0] == "broken_export"
    assert fault({"mapping": tree | {"u": node("user", "hi", "nowhere")}, "current_node": "a"})[0] == "broken_export"
    odd: list[Any] = [["b"], {"author": 3, "content": [3]}, {"author": {"role": []}}]
    for wrong in odd:
        broken = tree | {"t": {"message": wrong, "parent": "u"}}
        assert made({"mapping": broken, "current_node": "a"})["messages"] == [user("hi"), assistant("yo")]
    picture = tree | {"u": node("user", {"content_type": "image_asset_pointer"}, "s")}
    assert fault({"mapping": picture, "current_node": "a"}) == (
        "unsupported_content_part",
        "mapping",
        "image_asset_pointer",
    )


def test_the_documentation_names_every_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
    assert [rule for rule, meaning in RULES.items() if f"| `{rule}` | {meaning} |" not in page] == []
