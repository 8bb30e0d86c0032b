"""Chats as tokens: what is learned, from where to where, under the templates of known models and three kinds of tokenizer."""

import copy
import functools
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from stages.contract import StageError
from stages.text.builtin_templates import TEMPLATES
from stages.text.choices import ControlStrings, LossOn
from stages.text.template_check import FIXES
from stages.text.templates import Encoded, Template
from tests.stages.chat_tokenizers import FAMILIES, KINDS, random_chat, save_tokenizer, text_template, tool_chat

U = {"role": "user", "content": "hi"}
A = {"role": "assistant", "content": "yo"}
S = {"role": "system", "content": "be brief"}
MODELS = sorted(FAMILIES)
EACH = [
    pytest.param(
        family, kind, marks=[] if kind == "byte_level" or family in ("chatml", "mistral_v1") else pytest.mark.slow
    )
    for family in MODELS
    for kind in KINDS
]
"""Every template with every kind of tokenizer; the fast suite has each once, and two of them with all."""


FOLDERS = tempfile.TemporaryDirectory(prefix="chat-tokenizers-")  # gone when the tests end


@functools.cache
def folder(kind: str, family: str) -> Path:
    return save_tokenizer(Path(FOLDERS.name) / f"{family}-{kind}", kind, family)


@functools.cache
def loaded(kind: str, family: str, override: str | None = None) -> Template:
    return Template.load(folder(kind, family), override)


def custom(tmp_path: Path, text: str, family: str = "chatml", kind: str = "byte_level") -> Template:
    return Template.load(save_tokenizer(tmp_path / "custom", kind, family, text), None)


def text(template: Template, ids: Any) -> str:
    return template.tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)


def learned(template: Template, encoded: Encoded) -> list[str]:
    """The labelled runs of ids, decoded."""
    assert encoded.reason is None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.labelled.astype(int), [0]])))
    return [text(template, encoded.ids[a:b]) for a, b in edges.reshape(-1, 2)]


def chats(family: str, count: int, seed: int = 1) -> list[list[dict[str, Any]]]:
    draw = random.Random(seed)
    return [random_chat(draw, system=family not in ("gemma2", "mistral_v1", "mistral_v3")) for _ in range(count)]


def thinking(content: str, last: bool) -> str:
    return f"<think>\n\n</think>\n\n{content.lstrip(chr(10))}" if last else content


def plainly(end: str) -> Callable[[str, bool], str]:
    return lambda content, last: content + end


TURNS: dict[str, Callable[[str, bool], str]] = {  # what a model's own documentation says that its answers look like
    "deepseek_r1": lambda content, last: content + "<｜end▁of▁sentence｜>",
    "gemma2": lambda content, last: content.strip() + "<end_of_turn>",
    "gemma3": lambda content, last: content.strip() + "<end_of_turn>",
    "llama31": lambda content, last: content.strip() + "<|eot_id|>",
    "mistral_v1": lambda content, last: content + "</s>",
    "mistral_v3": lambda content, last: " " + content.strip() + "</s>",
    "phi35": lambda content, last: content + "<|end|>",
    "phi4mini": lambda content, last: content + "<|end|>",
    "qwen3": lambda content, last: thinking(content, last) + "<|im_end|>",
    "zephyr": lambda content, last: content + "</s>",
}


@pytest.mark.parametrize("family", MODELS)
def test_what_is_learned_is_each_answer_and_the_end_of_its_turn(family: str) -> None:
    template = loaded("byte_level", family)
    turn = TURNS.get(family, plainly("<|im_end|>"))
    for chat in chats(family, 20):
        answers = [message["content"] for message in chat if message["role"] == "assistant"]
        wanted = [turn(content, content is answers[-1]) for content in answers]
        assert learned(template, template.encode(chat, None, LossOn.assistant)) == wanted
        assert learned(template, template.encode(chat, None, LossOn.last)) == wanted[-1:]
        everything = template.encode(chat, None, LossOn.all)
        assert everything.reason is None and everything.labelled[1:].all()


@pytest.mark.parametrize(("family", "kind"), EACH)
def test_before_each_answer_stands_what_the_server_feeds(family: str, kind: str) -> None:
    template = loaded(kind, family)
    for chat in chats(family, 8, seed=2):
        encoded = template.encode(chat, None, LossOn.assistant)
        starts = np.flatnonzero(np.diff(np.concatenate([[0], encoded.labelled.astype(int)])) == 1)
        prompts = [template.prompt_ids(chat[:n]) for n, message in enumerate(chat) if message["role"] == "assistant"]
        assert [encoded.ids[:start].tolist() for start in starts] == prompts


@pytest.mark.parametrize(("kind", "family"), [("byte_level", "chatml"), ("unigram", "gemma2"), ("wordpiece", "qwen25")])
def test_ids_are_those_of_apply_chat_template_on_200_chats(kind: str, family: str) -> None:
    template, tokenizer = loaded(kind, family), AutoTokenizer.from_pretrained(folder(kind, family))
    parted = 0
    for chat in chats(family, 200):
        ids = template.encode(chat, None, LossOn.assistant).ids.tolist()
        theirs = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        if ids != theirs:  # a token reaches over the beginning of an answer, where a prompt ends
            parted += 1
            assert any(message["content"][:1].isspace() for message in chat if message["role"] == "assistant")
            assert text(template, ids) == text(template, theirs)
    assert parted < 60


def test_a_token_that_reaches_into_an_answer_is_cut_where_the_prompt_ends(tmp_path: Path) -> None:
    template = loaded("byte_level", "chatml")
    chat = [U, {"role": "assistant", "content": "\n\nyo"}, U, A]
    whole = template.tokenizer.encode(template.renderer.draft(chat, None, False, ControlStrings.quarantine).text).ids
    encoded = template.encode(chat, None, LossOn.assistant)
    assert encoded.ids.tolist() != whole and text(template, encoded.ids) == text(template, whole)
    assert learned(template, encoded) == ["\n\nyo<|im_end|>", "yo<|im_end|>"]
    for number in (1, 3):
        prompt = template.prompt_ids(chat[:number])
        assert encoded.ids[: len(prompt)].tolist() == prompt
    assert encoded.sizes[encoded.labelled].sum() == len("\n\nyo") + len("yo")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_what_is_learned_are_those_of_the_answers(kind: str) -> None:
    template = loaded(kind, "chatml")
    chat = [U, {"role": "assistant", "content": "café 你好 🙂 is it"}]
    encoded = template.encode(chat, None, LossOn.assistant)
    assert encoded.sizes[encoded.labelled].sum() == len("café 你好 🙂 is it".encode())
    assert encoded.sizes[encoded.labelled][-1] == 0


def test_many_chats_at_once_are_what_each_is_alone_and_stay_as_they_were() -> None:
    template = loaded("byte_level", "qwen3")
    rows = [(chat, None) for chat in chats("qwen3", 10)] + [tool_chat(), ([S], None)]
    before = copy.deepcopy(rows)
    together = template.encode_batch(rows, LossOn.assistant)
    assert rows == before
    for row, encoded in zip(rows, together, strict=True):
        alone = template.encode(*row, LossOn.assistant)
        assert alone.ids.tolist() == encoded.ids.tolist() and alone.reason == encoded.reason
        assert alone.labelled.tolist() == encoded.labelled.tolist() and alone.sizes.tolist() == encoded.sizes.tolist()
    assert together[-1].reason == "no_answer" and not len(together[-1].ids)


# Marks


def test_marks_in_the_template_and_none_give_one_mask() -> None:
    marked, plain = loaded("byte_level", "chatml", "chatml"), loaded("byte_level", "chatml")
    for chat in chats("chatml", 10):
        one, other = (template.encode(chat, None, LossOn.assistant) for template in (marked, plain))
        assert one.ids.tolist() == other.ids.tolist() and one.labelled.tolist() == other.labelled.tolist()


MARKED = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}MARKED{%- else %}
{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_the_end_of_a_turn_is_learned_when_the_marks_leave_it_out(tmp_path: Path) -> None:
    body = "{%- generation %}{{- m.content }}{%- endgeneration %}{{- '<|im_end|>' }}"
    template = custom(tmp_path, MARKED.replace("MARKED", body))
    assert learned(template, template.encode([U, A, U, A], None, LossOn.assistant)) == ["yo<|im_end|>"] * 2


def test_marks_narrow_down_what_is_learned(tmp_path: Path) -> None:
    body = "{{- 'Note: ' }}{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}"
    template = custom(tmp_path, MARKED.replace("MARKED", body))
    assert learned(template, template.encode([U, A], None, LossOn.assistant)) == ["yo<|im_end|>"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{%- generation %}{{- m.content[1:] }}{%- endgeneration %}{{- '<|im_end|>' }}", "answer_altered"),
        (
            "{{- m.content + '<|im_end|>' }}{%- if false %}{%- generation %}{%- endgeneration %}{%- endif %}",
            "answer_unmarked",
        ),
        (
            "{%- generation %}{{- (m.content | replace('y', 'Y')) + '<|im_end|>' }}{%- endgeneration %}",
            "answer_altered",
        ),
    ],
)
def test_marks_that_do_not_hold_the_answer_are_refused(tmp_path: Path, body: str, reason: str) -> None:
    template = custom(tmp_path, MARKED.replace("MARKED", body))
    assert template.encode([U, A], None, LossOn.assistant).reason == reason
    with pytest.raises(StageError, match=f"{reason}|does not write what the assistant says"):
        template.check([([U, A], None)], LossOn.assistant)


# The begin token


@pytest.mark.parametrize("written", [True, False], ids=["template writes it", "template does not"])
@pytest.mark.parametrize("family", ["llama31", "zephyr"], ids=["tokenizer adds it", "tokenizer does not"])
def test_the_begin_token_stands_once(tmp_path: Path, family: str, written: bool) -> None:
    template = custom(tmp_path, ("{{ bos_token }}" if written else "") + TEMPLATES["zephyr"], family)
    begin = template.renderer.control.ids[FAMILIES[family][2] or ""]
    wanted = int(written or FAMILIES[family][4])
    assert template.encode([U, A], None, LossOn.last).ids.tolist().count(begin) == wanted
    assert template.prompt_ids([U]).count(begin) == wanted
    assert not template.encode([U, A], None, LossOn.last).labelled[0]


def test_a_template_that_writes_the_begin_token_twice_is_refused(tmp_path: Path) -> None:
    template = custom(tmp_path, "{{ bos_token + bos_token }}" + TEMPLATES["zephyr"], "zephyr")
    with pytest.raises(StageError, match="begin token twice"):
        template.check([([U, A], None)], LossOn.last)


# Tools


@pytest.mark.parametrize(
    ("family", "shown"),
    [
        ("qwen25", '{"name": "get_city", "arguments": {"city": "X"}}'),
        ("qwen3", '{"name": "get_city", "arguments": {"city": "X"}}'),
        ("mistral_v3", '{"name": "get_city", "arguments": {"city": "X"}, "id": "abcdefghi"}'),
        ("llama31", '{"name": "get_city", "parameters": {"city": "X"}}'),
        ("deepseek_r1", 'get_city\n```json\n{"city": "X"}\n```'),
    ],
)
@pytest.mark.parametrize("as_text", [True, False], ids=["arguments as text", "arguments as an object"])
def test_a_call_shows_its_own_arguments_encoded_once(family: str, shown: str, as_text: bool) -> None:
    template = loaded("byte_level", family)
    messages, tools = tool_chat()
    function = messages[1]["tool_calls"][0]["function"]
    function["arguments"] = '{"city":"X"}' if as_text else {"city": "X"}
    messages[1]["content"] = None  # as exports have it
    turns = learned(
        template, template.encode(messages, tools if template.renderer.traits.tools else None, LossOn.assistant)
    )
    assert shown in turns[0] and "None" not in turns[0] and "null" not in turns[0]
    assert len(turns) == 2 and "It is seven." in turns[1]


def test_two_calls_in_one_turn_are_learned_to_its_end() -> None:
    template = loaded("byte_level", "qwen3")
    messages, tools = tool_chat()
    messages[1]["tool_calls"] *= 2
    first = learned(template, template.encode(messages, tools, LossOn.assistant))[0]
    assert first.count("</tool_call>") == 2 and first.endswith("</tool_call><|im_end|>")


def test_tools_and_system_turns_that_a_template_leaves_out_are_refused() -> None:
    messages, tools = tool_chat()
    for family in ("chatml", "zephyr", "gemma3"):
        template = loaded("byte_level", family)
        assert template.encode([U, A], tools, LossOn.last).reason == "tools_unsupported"
        assert template.encode(messages, None, LossOn.last).reason == "tools_unsupported"
        with pytest.raises(StageError, match="the template has no tools"):
            template.check([([U, A], tools)], LossOn.last)
    assert loaded("byte_level", "gemma2").encode([S, U, A], None, LossOn.last).reason == "system_unsupported"
    silent = loaded("byte_level", "mistral_v3").encode([S, U, A], None, LossOn.last)
    assert silent.reason == "content_lost"  # its template writes a system turn only while the user's is the last


# Refusals


def test_without_a_template_both_ways_out_are_named(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, "byte_level", "chatml")
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(
        StageError, match=r"chat_template to a file or to one of chatml.* or bring prompt/completion data"
    ):
        Template.load(directory, None)
    assert Template.of_model(directory) is None
    with pytest.raises(StageError, match=r"chat_template=nope.*built-in templates are chatml"):
        Template.load(directory, "nope")
    assert Template.load(directory, "zephyr").encode([U, A], None, LossOn.last).reason is None


def test_a_template_that_does_not_compile_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}\n{% for m in messages %}")
    with pytest.raises(StageError, match=r"mine\.jinja:\d+: the chat template does not compile"):
        Template.load(folder("byte_level", "chatml"), str(tmp_path / "mine.jinja"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("llama3", r"'<\|eot_id\|>', which is no control token of this tokenizer"),
        ("gemma", "'<end_of_turn>', which is no control token"),
    ],
)
def test_a_turn_that_ends_with_words_is_refused(override: str, said: str) -> None:
    template = Template.load(folder("byte_level", "chatml"), override)
    assert template.encode([U, A], None, LossOn.last).reason == "turn_without_end"
    with pytest.raises(StageError, match=said):
        template.check([([U, A], None)], LossOn.last)


def test_a_turn_that_does_not_end_is_refused(tmp_path: Path) -> None:
    template = custom(tmp_path, "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}")
    with pytest.raises(StageError, match="a model would never learn to stop"):
        template.check([([U, A], None)], LossOn.assistant)
    assert template.encode([U, A], None, LossOn.all).reason is None  # then nobody is promised an end


def test_turns_that_later_ones_rewrite_are_learned_last_or_not_at_all() -> None:
    template = loaded("byte_level", "qwen3")
    messages, tools = tool_chat()
    messages[1]["reasoning_content"] = "let me see"
    more = [*messages, U, A]  # now the template drops the reasoning that the model had before it when it answered
    assert template.encode(messages, tools, LossOn.assistant).reason is None
    assert template.encode(more, tools, LossOn.assistant).reason == "history_rewritten"
    assert learned(template, template.encode(more, tools, LossOn.last)) == ["<think>\n\n</think>\n\nyo<|im_end|>"]


def test_reasoning_is_learned_where_the_template_writes_it() -> None:
    template = loaded("byte_level", "qwen3")
    for answer in ({"content": "<think>\nhm\n</think>\n\nyo"}, {"content": "yo", "reasoning_content": "hm"}):
        encoded = template.encode([U, {"role": "assistant", **answer}], None, LossOn.assistant)
        assert learned(template, encoded) == ["<think>\nhm\n</think>\n\nyo<|im_end|>"]


def test_a_prompt_that_opens_what_no_answer_has_is_refused(tmp_path: Path) -> None:
    opened = text_template("deepseek_r1").replace("{{'<｜Assistant｜>'}}", "{{'<｜Assistant｜><think>\\n'}}")
    template = custom(tmp_path, opened, "deepseek_r1")
    assert template.encode([U, A], None, LossOn.last).reason == "prompt_differs"


def test_a_chat_that_the_assistant_opens_is_learned_from_there() -> None:
    for family in ("chatml", "qwen25", "qwen3"):
        template = loaded("byte_level", family)
        turns = learned(template, template.encode([A, U, A], None, LossOn.assistant))
        assert [turn.removeprefix("<think>\n\n</think>\n\n") for turn in turns] == ["yo<|im_end|>"] * 2
    assert loaded("byte_level", "gemma2").encode([A, U, A], None, LossOn.assistant).reason == "template_refused"


@pytest.mark.parametrize("family", ["chatml", "qwen3", "zephyr"])
def test_a_chat_too_long_to_render_once_for_each_answer_gets_the_same_mask(family: str) -> None:
    template = loaded("byte_level", family)
    short, long = ([*[U, A] * count, U, {"role": "assistant", "content": " is it?"}] for count in (3, 400))
    turns = learned(template, template.encode(long, None, LossOn.assistant))
    assert turns[-4:] == learned(template, template.encode(short, None, LossOn.assistant)) and len(turns) == 401
    encoded = template.encode(long, None, LossOn.last)
    assert encoded.ids[: int(encoded.labelled.argmax())].tolist() == template.prompt_ids(long[:-1])


def test_messages_of_other_shapes_are_read_as_what_they_mean() -> None:
    template = loaded("byte_level", "chatml")
    plain = template.encode([S, U, A], None, LossOn.last).ids.tolist()
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    shapes: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": None},
        A,
    ]
    assert template.encode(shapes, None, LossOn.last).ids.tolist() == plain
    assert template.encode([], None, LossOn.last).reason == "no_messages"
    assert template.encode([{"role": "user", "content": "a\ud800"}, A], None, LossOn.last).reason == "not_unicode"


# The same tomorrow


def test_a_template_that_asks_for_the_date_is_given_one_that_stays(tmp_path: Path) -> None:
    template = loaded("byte_level", "llama31")
    assert "Today Date: 26 Jul 2024\n" in text(template, template.prompt_ids([U]))
    directory = save_tokenizer(tmp_path, "byte_level", "llama31")
    template.save(directory)
    served = Template.of_model(directory)
    assert served is not None and served.prompt_ids([S, U]) == template.prompt_ids([S, U])
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs.apply_chat_template([S, U], add_generation_prompt=True)["input_ids"] == template.prompt_ids([S, U])
    assert Template.load(directory, None).renderer.text == template.renderer.text


@pytest.mark.parametrize(
    "line", ["{{ ['a', 'b'] | random }}", "{{ strftime_now(messages[0].content) }}", "{{ lipsum() }}"]
)
def test_a_template_that_nobody_can_render_again_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(StageError, match="chat template"):
        custom(tmp_path, line + TEMPLATES["chatml"])


def test_a_saved_template_is_the_one_that_is_rendered(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, "byte_level", "chatml")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "old"}))
    Template.load(directory, "zephyr").save(directory)
    assert (directory / "chat_template.jinja").read_bytes().decode() == TEMPLATES["zephyr"]
    assert "chat_template" not in json.loads((directory / "tokenizer_config.json").read_text())
    assert AutoTokenizer.from_pretrained(directory).chat_template == TEMPLATES["zephyr"]


def test_templates_of_a_tokenizer_that_has_one_for_tools_become_one(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, "byte_level", "qwen25")
    (directory / "chat_template.jinja").unlink()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    both = {"default": text_template("chatml"), "tool_use": text_template("qwen25")}
    config["chat_template"] = [{"name": name, "template": template} for name, template in both.items()]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, template = AutoTokenizer.from_pretrained(directory), Template.load(directory, None)
    messages, tools = tool_chat()
    for chat, functions in ([S, U, A], None), (messages, tools):
        theirs = tokenizer.apply_chat_template(chat, tools=functions, return_dict=True)["input_ids"]
        assert template.encode(chat, functions, LossOn.last).ids.tolist() == theirs


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_built_in_templates_fit_the_tokenizers_they_are_for(name: str) -> None:
    family = {"chatml": "qwen25", "llama3": "llama31", "gemma": "gemma2", "zephyr": "chatml", "inst": "mistral_v3"}[
        name
    ]
    template = loaded("byte_level", family, name)
    samples = [(chat, None) for chat in chats("gemma2", 20)]
    facts = template.check(samples, LossOn.assistant)
    assert facts["refused"] == {} and len(facts["terminators"]) == 1
    marks = "{%- generation %}", "{%- endgeneration %}"
    bare = functools.reduce(lambda text, mark: text.replace(mark, ""), marks, TEMPLATES[name])
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(bare)
        file.flush()
        without = Template.load(folder("byte_level", family), file.name)
    for chat, _ in samples:
        one, other = (each.encode(chat, None, LossOn.assistant) for each in (template, without))
        assert one.ids.tolist() == other.ids.tolist() and one.labelled.tolist() == other.labelled.tolist()


def test_every_reason_has_its_way_out() -> None:
    root = Path(__file__).parents[2]
    modules = ("masks", "rendering", "templates")
    source = "".join((root / "stages" / "text" / f"{name}.py").read_text("utf-8") for name in modules)
    raised = [call for call in re.findall(r"raise (?:ChatRefused|Unmaskable)\((.*)\)", source) if '"' in call]
    reasons = {word for call in raised for word in re.findall(r'"(\w+)"', call)}
    assert len(reasons) >= 17 and reasons == set(FIXES)
    described = (root / "docs" / "data.md").read_text("utf-8")
    assert not [reason for reason in reasons if f"`{reason}`" not in described]


def test_the_self_test_names_what_ends_turns() -> None:
    facts = loaded("byte_level", "qwen3").check([(chat, None) for chat in chats("qwen3", 20)], LossOn.assistant)
    assert facts["endings"] == ["<|im_end|>"] and facts["refused"] == {}
    assert facts["terminators"] == [loaded("byte_level", "qwen3").tokenizer.token_to_id("<|im_end|>")]
