"""A chat as its template writes it, and where in that text the assistant speaks. Apart from tokens: everything here is text.

Rendering is transformers' own (sandboxed). A template may refuse a chat by raising, or leave out what it does not know without
a word (system turns, tools, messages); both are refusals here.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers.utils.chat_template_utils import (
    _alias_reasoning_fields,
    _compile_jinja_template,
    _render_with_assistant_indices,
)

from stages.text import template_traits
from stages.text.choices import ControlStrings
from stages.text.control_tokens import ControlTokens, Span, touches
from stages.text.masks import Answer
from stages.text.template_traits import Messages, Traits

Tools = list[Any] | None
MESSAGES_RENDERED = 40_000
"""Most messages that are rendered to find where each answer of one chat begins exactly (0.1 s): some 280 exchanges."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatRefused(Exception):
    """This template does not render this chat. `reason` is a code, as in `Encoded`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Draft:
    """A rendered chat before it is tokens."""

    text: str
    as_text: list[Span]
    """Typed control strings, to be encoded as text, and places where tokens must not join."""
    controls: list[Span]
    """Control tokens that the template wrote, in order."""
    answers: list[Answer]
    """The assistant's turns."""
    generated: list[Span] | None
    """What the template marks as written by the assistant; None: it has no marks."""


@dataclass(frozen=True)
class Renderer:
    """A chat template with the special tokens that it may write."""

    text: str
    special_tokens: dict[str, str]
    control: ControlTokens

    @cached_property
    def traits(self) -> Traits:
        """What the template can do."""
        return template_traits.find(self._render, self.control.anywhere)

    def draft(self, messages: Messages, tools: Tools, opened: bool, policy: ControlStrings) -> Draft:
        """Render the chat, and what a server would render for each of the assistant's turns."""
        tools = tools or None
        messages = self._prepared(messages)
        self._require_support(messages, tools)
        marked = None
        if self.control.typed(messages, tools):
            if policy is ControlStrings.quarantine:
                raise ChatRefused("control_strings")
            marked = self.control.mark(messages, tools)
        shown, shown_tools = (messages, tools) if marked is None else (marked.messages, marked.tools)
        rendered, generated = self._rendered(shown, shown_tools, opened)
        as_text: list[Span] = []
        if marked is not None:
            if generated is not None:
                generated = marked.moved(rendered, generated)
            rendered, as_text = marked.unmarked(rendered)
            if rendered != self._rendered(messages, tools, opened)[0]:
                raise ChatRefused("control_strings")
        if not _is_unicode(rendered):
            raise ChatRefused("not_unicode")
        _require_contents(rendered, messages)
        controls = [found.span() for found in self.control.anywhere.finditer(rendered)]
        if as_text:
            controls = [span for span in controls if not touches(as_text, span)]

        def start(number: int) -> int | None:
            before = self._prompt(shown[:number], shown_tools)
            if before is not None and marked is not None:
                before = marked.unmarked(before)[0]
            return self._start(rendered, before, messages[:number])

        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if sum(turns) <= MESSAGES_RENDERED:
            starts = [start(number) for number in turns]
        else:
            starts = self._found(rendered, [messages[number]["content"].strip() for number in turns[:-1]])
            starts.append(start(turns[-1]))  # templates write the last one otherwise
            if any(start(turns[n]) != starts[n] for n in (0, len(turns) // 2, len(turns) - 2)):
                raise ChatRefused("too_many_turns")
        answers = [Answer(messages[number], at) for number, at in zip(turns, starts, strict=True)]
        return Draft(rendered, as_text, controls, answers, generated)

    def _start(self, rendered: str, before: str | None, earlier: Messages) -> int | None:
        """Where an answer begins: behind what a server renders before it. For a chat that the assistant opens, most templates
        render nothing before it: then behind the words that open his first turn."""
        if before is not None:
            return len(before) if rendered.startswith(before) else None
        opening = self._opening
        if any(message["role"] != "system" for message in earlier) or not self.control.anywhere.search(opening):
            return None
        return at + len(opening) if (at := rendered.find(opening)) >= 0 else None

    def _found(self, rendered: str, answers: list[str]) -> list[int | None]:
        """Where answers begin, found by the words that open a turn: in a chat so long that rendering it once for each would
        take time that grows with its square."""
        starts: list[int | None] = []
        at = 0
        for answer in answers:
            start = rendered.find(self._opening, at) + len(self._opening)
            words = start
            while words < len(rendered) and rendered[words].isspace():
                words += 1
            if not self._opening or start < at + len(self._opening) or not rendered.startswith(answer, words):
                raise ChatRefused("too_many_turns")
            starts.append(start)
            at = words + len(answer)
        return starts

    @cached_property
    def _opening(self) -> str:
        """What opens a turn of the assistant."""
        closed, opened = (self._prompt([template_traits.USER], None, opened) or "" for opened in (False, True))
        return opened.removeprefix(closed) if opened.startswith(closed) else ""

    def _prepared(self, messages: Messages) -> Messages:
        """As the template wants them: content is text, a developer is a system, arguments are an object (or text)."""
        known = "developer" in self.text
        prepared = []
        for message in messages:
            shown = {key: value for key, value in message.items() if value is not None}
            content = shown.get("content", "")
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
            shown["content"] = content
            if shown["role"] == "developer" and not known:
                shown["role"] = "system"
            if shown.get("tool_calls"):
                shown["tool_calls"] = [self._call(call) for call in shown["tool_calls"]]
            prepared.append(shown)
        return prepared

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise ChatRefused("arguments_not_json") from error
        if not isinstance(arguments, dict):
            raise ChatRefused("arguments_not_json")
        if self.traits.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {"type": "function", **call, "function": {**function, "arguments": arguments}}

    def _require_support(self, messages: Messages, tools: Tools) -> None:
        """Templates that know no system turns or no tools leave them out without a word."""
        if not messages:
            raise ChatRefused("no_messages")
        if tools and not self.traits.tools:
            raise ChatRefused("tools_unsupported")
        for message in messages:
            if message["role"] == "system" and not self.traits.system:
                raise ChatRefused("system_unsupported")
            if (message["role"] == "tool" or message.get("tool_calls")) and not self.traits.calls:
                raise ChatRefused("tools_unsupported")

    def _prompt(self, messages: Messages, tools: Tools, opened: bool = True) -> str | None:
        """What a server renders before the assistant's turn; None: it would refuse."""
        try:
            return self._render(messages, tools, opened)
        except Exception:
            return None

    def _render(self, messages: Messages, tools: Tools, opened: bool) -> str:
        """Raises whatever a template raises."""
        context = self._compiled.new_context(self._globals | self._names(messages, tools, opened), shared=True)
        return "".join(self._compiled.root_render_func(context))

    def _rendered(self, messages: Messages, tools: Tools, opened: bool) -> tuple[str, list[Span] | None]:
        """With the spans that the template marks as the assistant's, if it has marks."""
        try:
            if not self._has_marks:
                return self._render(messages, tools, opened), None
            names = self._names(messages, tools, opened)
            text, spans = _render_with_assistant_indices(
                self._compiled,
                names.pop("messages"),
                names.pop("tools"),
                names.pop("documents"),
                opened,
                **self.special_tokens,
            )
        except Exception as error:  # templates refuse an order of roles by raising from inside jinja
            raise ChatRefused("template_refused") from error
        return text, spans

    def _names(self, messages: Messages, tools: Tools, opened: bool) -> dict[str, Any]:
        """What a template sees, as `apply_chat_template` gives it. (Not by `render_jinja_template`, which copies all of it for
        each of the renderings of one chat; what comes from JSON needs no copy to be plain.)"""
        if any("reasoning_content" in message for message in messages):
            messages = _alias_reasoning_fields(messages)
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": opened}
        return {**given, **self.special_tokens}

    @cached_property
    def _compiled(self) -> Any:
        return _compile_jinja_template(self.text)

    @cached_property
    def _globals(self) -> dict[str, Any]:
        """As a dict: jinja would copy them from a chain of two, which takes a sixth of the time of a chat."""
        return dict(self._compiled.globals)

    @cached_property
    def _has_marks(self) -> bool:
        return GENERATION.search(self.text) is not None


def _is_unicode(text: str) -> bool:
    """Without lone surrogates, which JSON can write and no tokenizer reads."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _require_contents(text: str, messages: Messages) -> None:
    """What was said to the assistant must be there, as it is or as JSON; mostly in order, so that a long chat is read once."""
    at = 0
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "assistant" or not content:
            continue
        found = text.find(content, at)
        if found >= 0:
            at = found
        elif content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            raise ChatRefused("content_lost")
