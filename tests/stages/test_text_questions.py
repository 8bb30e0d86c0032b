"""Rows to questions and answers to rows: templates, chats, numbers."""

import json

import pytest

from stages.text.questions import (
    ANSWER_FIELDS,
    ROW_FIELDS,
    Form,
    Unanswerable,
    check_template,
    fill,
    number,
    seed_of,
)
from stages.text.record import Record, canonical


def form(**values) -> Form:
    given = {
        "template": None, "system": None, "kind": "prompt_completion", "prompt": "{asked}", "text": "{answer}",
        "source": None,
    }  # fmt: skip
    return Form(**(given | values))


TEXT = Record("a:000000001", "web", "text", text="Water boils at {100} degrees.")
PAIR = Record("a:000000002", "web", "prompt_completion", prompt="2+2?", text="4")
CHAT = Record(
    "a:000000003", "web", "chat",
    messages=canonical([
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"},
    ]),
)  # fmt: skip


def test_a_template_asks_about_the_row_and_braces_in_the_row_are_text() -> None:
    asked = form(template="Write a question that {{this}} answers: {text}").question(TEXT, chat=False)
    assert asked.asked == "Write a question that {this} answers: Water boils at {100} degrees."
    assert asked.messages is None


def test_without_a_template_a_row_asks_for_itself() -> None:
    assert form().question(TEXT, chat=False).asked == TEXT.text
    assert form().question(PAIR, chat=False).asked == "2+2?"
    assert form().question(PAIR, chat=True).messages == [{"role": "user", "content": "2+2?"}]
    assert [m["content"] for m in form().question(CHAT, chat=True).messages] == ["hi", "hello", "who?"]


def test_a_system_message_stands_first_once() -> None:
    system = {"role": "system", "content": "be brief"}
    assert form(system="be brief").question(PAIR, chat=True).messages == [system, {"role": "user", "content": "2+2?"}]
    assert form(system="be brief").question(CHAT, chat=True).messages[0] == system
    own = Record(
        "a",
        "web",
        "chat",
        messages=canonical([{"role": "system", "content": "mine"}, {"role": "user", "content": "?"}]),
    )
    assert [m["role"] for m in form(system="be brief").question(own, chat=True).messages] == ["system", "user"]


def test_an_answer_becomes_a_row_of_each_kind_under_the_id_it_came_from() -> None:
    asked = form().question(PAIR, chat=True)
    assert form().record(PAIR, asked, "four") == Record(PAIR.id, "web", "prompt_completion", prompt="2+2?", text="four")
    assert form(kind="text").record(PAIR, asked, "four") == Record(PAIR.id, "web", "text", text="four")
    made = form(kind="chat", source="new").record(CHAT, form().question(CHAT, chat=True), "it is me")
    assert made.source == "new" and made.kind == "chat"
    assert [m["content"] for m in json.loads(made.messages)] == ["hi", "hello", "who?", "it is me"]


def test_a_question_can_be_made_of_an_answer_and_an_answer_of_the_row() -> None:
    turned = form(template="Ask: {text}", prompt="{answer}", text="{text}")
    made = turned.record(TEXT, turned.question(TEXT, chat=False), "When does water boil?")
    assert (made.prompt, made.text) == ("When does water boil?", TEXT.text)


@pytest.mark.parametrize(
    ("row", "changes", "chat", "reason"),
    [
        (Record("a", "web", "text", text=" \n"), {}, False, "no_question"),
        (TEXT, {"template": "{prompt}?"}, False, "empty_field"),
        (CHAT, {}, False, "chat_without_template"),
        (Record("a", "web", "chat", messages=canonical([{"role": "assistant", "content": "hi"}])), {}, True, "no_question"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_says_why(row, changes, chat, reason) -> None:
    with pytest.raises(Unanswerable) as problem:
        form(**changes).question(row, chat=chat)
    assert problem.value.reason == reason


@pytest.mark.parametrize("template", ["{nothing}", "{text!r}", "{text:>9}", "{text.x}", "{0}", "{", "}"])
def test_a_template_names_what_there_is(template) -> None:
    with pytest.raises(ValueError, match=r"ask\.template"):
        check_template("ask.template", template, ROW_FIELDS)
    check_template("ask.template", "{{}} {text} {prompt} {conversation}", ROW_FIELDS)


def test_values_are_never_read_as_templates() -> None:
    assert fill("{asked}:{answer}", dict.fromkeys(ANSWER_FIELDS, "{text}{{")) == "{text}{{:{text}{{"


def test_the_last_number_of_an_answer_counts_within_its_limits() -> None:
    plain = r"-?\d+(?:\.\d+)?"
    assert number("I give 3 of 5, so: 4.5", plain, 0, 5) == 4.5
    assert number("Score: 2 (of 10)", r"Score: (\d+)", None, None) == 2
    for answer, reason in (("none", "no_number"), ("11", "number_out_of_range")):
        with pytest.raises(Unanswerable) as problem:
            number(answer, plain, 0, 10)
        assert problem.value.reason == reason


def test_seeds_follow_the_rows_id_alone() -> None:
    assert seed_of(0, "a:000000001") == seed_of(0, "a:000000001") < 2**63
    assert len({seed_of(seed, row) for seed in (0, 1) for row in ("a", "b")}) == 4
