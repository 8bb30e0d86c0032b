"""A chat as the tokens that a model sees: rendered by its chat template, with a mask of what to learn. Training and serving
both come here, so that a model is asked in the very tokens that it was trained on.

    template = Template.load(tokenizer_directory, override=None)
    template.check(samples, LossOn.assistant)               # StageError when no chat can be trained on
    template.encode(messages, tools, LossOn.assistant)      # Encoded: ids, labelled, sizes, or a reason
    template.prompt_ids(messages, tools)                    # what a server feeds

Where an answer begins is what a server renders for the messages before it; where it ends is the first control token that
ends turns, which is learned too. Both hold with and without generation marks in the template (which narrow the mask down
further). Whatever cannot be shown to hold for a row leaves a reason instead of a mask.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from stages.text import template_source, template_traits
from stages.text.choices import ControlStrings, LossOn
from stages.text.control_tokens import ControlTokens, Marked, Span, encode_segments, ends_of_segments, segments
from stages.text.masks import Answer, Places, Unmaskable, mask
from stages.text.template_check import check
from stages.text.template_traits import Messages, Traits
from stages.text.tokenizer import _bytes_of_id

Int32 = npt.NDArray[np.int32]
Tools = list[Any] | None
Chat = tuple[Messages, Tools]

EMPTY = np.zeros(0, np.int32)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """A chat in tokens; or the reason why not, and no tokens."""

    ids: Int32
    labelled: npt.NDArray[np.bool_]
    """What the model learns to write."""
    sizes: Int32
    """UTF-8 bytes that each token stands for; control tokens stand for none."""
    reason: str | None = None


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
class Template:
    """A chat template with its tokenizer. Make it with `load`, or for a server with `of_model`."""

    text: str
    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    control: ControlTokens
    begin: Int32
    """What the tokenizer puts before a text (a begin token), usually nothing."""
    bytes_of_id: Int32 | None
    control_strings: ControlStrings

    @classmethod
    def load(
        cls, directory: Path, override: str | None, control_strings: ControlStrings = ControlStrings.quarantine
    ) -> "Template":
        """The template of the tokenizer in `directory`, or `override` (a file, or the name of a built-in one), such that it
        renders the same on every day. StageError when there is none or it is not one."""
        text = template_source.required(directory, override)
        return cls._of(directory, template_source.settled(text, override or template_source.FILE), control_strings)

    @classmethod
    def of_model(cls, directory: Path) -> "Template | None":
        """As it stands beside a model's weights; None without one."""
        text = template_source.find(directory, None)
        return None if text is None else cls._of(directory, text, ControlStrings.neutralise)

    @classmethod
    def _of(cls, directory: Path, text: str, control_strings: ControlStrings) -> "Template":
        fast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        around, bare = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
        begin = next(n for n in range(len(around)) if around[n : n + len(bare)] == bare)
        return cls(
            text=text,
            tokenizer=tokenizer,
            special_tokens=dict(fast.special_tokens_map),
            control=ControlTokens.of(tokenizer, text),
            begin=np.array(around[:begin], np.int32),
            bytes_of_id=_bytes_of_id(tokenizer),
            control_strings=control_strings,
        )

    @cached_property
    def traits(self) -> Traits:
        """What the template can do."""
        return template_traits.find(self._render, self.control.anywhere)

    @property
    def terminators(self) -> list[int]:
        """Ids that end an assistant's turn: a model that is trained on them must stop at each."""
        return [self.control.ids[ending] for ending in self.traits.endings]

    def save(self, directory: Path) -> None:
        """Let the template travel with the tokenizer in `directory`: a server renders with it, byte for byte."""
        template_source.write(self.text, directory)

    def encode(self, messages: Messages, tools: Tools, loss_on: LossOn) -> Encoded:
        """One chat. For many, `encode_batch` is faster."""
        return self.encode_batch([(messages, tools)], loss_on)[0]

    def encode_batch(self, chats: Sequence[Chat], loss_on: LossOn) -> list[Encoded]:
        """For each chat (messages, tools) its tokens, or the reason why it has none."""
        drafts = [self._try_draft(*chat) for chat in chats]
        plain = [draft.text for draft in drafts if isinstance(draft, Draft) and not draft.as_text]
        encodings = iter(self.tokenizer.encode_batch_fast(plain, add_special_tokens=False))
        results = []
        for draft in drafts:
            try:
                if isinstance(draft, str):
                    raise ChatRefused(draft)
                ids = self._ids(draft.text, draft.as_text) if draft.as_text else np.array(next(encodings).ids, np.int32)
                results.append(self._encoded(draft, ids, loss_on))
            except (ChatRefused, Unmaskable) as refusal:
                results.append(Encoded(EMPTY, EMPTY.astype(np.bool_), EMPTY, refusal.reason))
        return results

    def prompt_ids(self, messages: Messages, tools: Tools = None) -> list[int]:
        """What a server feeds for a chat whose next turn is the assistant's. Control strings in it are text. ChatRefused: the
        template does not take this chat."""
        draft = self._draft(messages, tools, True, ControlStrings.neutralise)
        places = self._places(draft, self._ids(draft.text, draft.as_text))
        return [*self._begin(places.ids), *places.ids.tolist()]

    def check(self, chats: Sequence[Chat], loss_on: LossOn) -> dict[str, Any]:
        """Facts about the template on a sample of chats. StageError: none of them can be trained on, or a mask is wrong."""
        return check(self, chats, loss_on)

    def _encoded(self, draft: Draft, ids: Int32, loss_on: LossOn) -> Encoded:
        places = self._places(draft, ids)
        if loss_on is LossOn.all:
            labelled = np.ones(len(places.ids), np.bool_)
        else:
            if not self.traits.endings:
                raise Unmaskable("turn_without_end")
            wanted = draft.answers if loss_on is LossOn.assistant else draft.answers[-1:]
            if not wanted:
                raise Unmaskable("no_answer")
            labelled = mask(places, wanted, frozenset(self.traits.endings), draft.generated)
        sizes = self._sizes(draft, places.ids)
        begin = self._begin(places.ids)
        if len(begin):
            zeros = np.zeros(len(begin), np.int32)
            return Encoded(
                np.concatenate([begin, places.ids]),
                np.concatenate([zeros.astype(np.bool_), labelled]),
                np.concatenate([zeros, sizes]),
            )
        return Encoded(places.ids, labelled, sizes)

    def _try_draft(self, messages: Messages, tools: Tools) -> Draft | str:
        try:
            return self._draft(messages, tools, False, self.control_strings)
        except ChatRefused as refusal:
            return refusal.reason

    def _draft(self, messages: Messages, tools: Tools, opened: bool, policy: ControlStrings) -> Draft:
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
                generated = [(_length(marked, rendered[:a]), _length(marked, rendered[:b])) for a, b in generated]
            rendered, as_text = marked.unmarked(rendered)
            if rendered != self._rendered(messages, tools, opened)[0]:
                raise ChatRefused("control_strings")
        _require_contents(rendered, messages)
        controls = [found.span() for found in self.control.anywhere.finditer(rendered)]
        if as_text:
            controls = [(a, b) for a, b in controls if not any(a < end and b > start for start, end in as_text)]
        answers = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._prompt(shown[:number], shown_tools)
                if before is not None and marked is not None:
                    before = marked.unmarked(before)[0]
                found = before is not None and rendered.startswith(before)
                answers.append(Answer(message, len(before) if found and before is not None else None))
        return Draft(rendered, as_text, controls, answers, generated)

    def _places(self, draft: Draft, ids: Int32) -> Places:
        """The ids, cut where a token reaches over the beginning of an answer: there a server's prompt ends."""
        starts = [answer.start for answer in draft.answers if answer.start is not None]
        for _ in range(2):
            at = np.flatnonzero(self.control.is_control[ids])
            if len(at) != len(draft.controls):  # a normaliser made a control token of something else
                raise ChatRefused("control_strings")
            places = Places(draft.text, draft.as_text, draft.controls, ids, at, self._head)
            cuts = [(start, start) for start in starts if places.of(start) is None]
            if not cuts:
                return places
            draft.as_text += cuts
            ids = self._ids(draft.text, draft.as_text)
        raise ChatRefused("answer_within_token")

    def _ids(self, text: str, as_text: list[Span]) -> Int32:
        return np.array(encode_segments(self.tokenizer, segments(text, as_text)), np.int32)

    def _head(self, text: str, as_text: list[Span]) -> Int32:
        if as_text:
            return self._ids(text, as_text)
        if text not in self._heads:
            if len(self._heads) > 10_000:
                self._heads.clear()
            self._heads[text] = self._ids(text, [])
        return self._heads[text]

    @cached_property
    def _heads(self) -> dict[str, Int32]:
        """What stands between a control token and an answer is nearly always the same."""
        return {}

    def _begin(self, ids: Int32) -> Int32:
        """The tokenizer's begin tokens, unless the template wrote them."""
        return self.begin[:0] if np.array_equal(ids[: len(self.begin)], self.begin) else self.begin

    def _sizes(self, draft: Draft, ids: Int32) -> Int32:
        """Bytes of a byte-level token are those of its letters; of another kind, from where the one before it ended."""
        control = self.control.is_control[ids]
        if self.bytes_of_id is not None:
            sizes = self.bytes_of_id[ids]
            sizes[control] = 0
            if self.tokenizer.normalizer is None:
                return sizes
        ends = ends_of_segments(self.tokenizer, segments(draft.text, draft.as_text))
        code = np.frombuffer(draft.text.encode("utf-32-le"), np.uint32)
        before = np.append(0, np.cumsum(1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF)))
        sizes = np.diff(before[np.maximum.accumulate(np.array(ends, np.int64))], prepend=0).astype(np.int32)
        sizes[control] = 0
        return sizes

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
        if isinstance(arguments, str) and not self.traits.arguments_as_text:
            arguments = json.loads(arguments or "{}")
        elif not isinstance(arguments, str) and self.traits.arguments_as_text:
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

    def _prompt(self, messages: Messages, tools: Tools) -> str | None:
        """What a server renders before the assistant's turn; None: it would refuse."""
        try:
            return self._render(messages, tools, True)
        except Exception:
            return None

    def _render(self, messages: Messages, tools: Tools, opened: bool) -> str:
        """By transformers' own code, in its sandbox. Raises whatever a template raises."""
        texts, _ = render_jinja_template(
            [messages], tools, chat_template=self.text, add_generation_prompt=opened, **self.special_tokens
        )
        text: str = texts[0]
        return text

    def _rendered(self, messages: Messages, tools: Tools, opened: bool) -> tuple[str, list[Span] | None]:
        marks = GENERATION.search(self.text) is not None
        try:
            texts, generated = render_jinja_template(
                [messages],
                tools,
                chat_template=self.text,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=opened,
                **self.special_tokens,
            )
        except Exception as error:  # templates refuse an order of roles by raising from inside jinja
            raise ChatRefused("template_refused") from error
        return texts[0], generated[0] if marks else None


def _require_contents(text: str, messages: Messages) -> None:
    """What was said to the assistant must be there, as it is or as JSON."""
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "assistant" or content in text:
            continue
        if json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            raise ChatRefused("content_lost")


def _length(marked: Marked, text: str) -> int:
    return len(marked.unmarked(text)[0])
