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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from stages.text import template_source
from stages.text.choices import ControlStrings, LossOn
from stages.text.control_tokens import ControlTokens, Span, encode_segments, ends_of_segments, segments
from stages.text.masks import Places, Unmaskable, mask
from stages.text.rendering import ChatRefused, Draft, Renderer, Tools
from stages.text.template_check import check
from stages.text.template_traits import Messages
from stages.text.tokenizer import _bytes_of_id

Int32 = npt.NDArray[np.int32]
Chat = tuple[Messages, Tools]

EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Encoded:
    """A chat in tokens; or the reason why not, and no tokens."""

    ids: Int32
    labelled: npt.NDArray[np.bool_]
    """What the model learns to write."""
    sizes: Int32
    """UTF-8 bytes that each token stands for; control tokens stand for none."""
    reason: str | None = None


@dataclass(frozen=True)
class Template:
    """A chat template with its tokenizer. Make it with `load`, or for a server with `of_model`."""

    renderer: Renderer
    tokenizer: Tokenizer
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
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        around, bare = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
        begin = next((n for n in range(len(around)) if around[n : n + len(bare)] == bare), 0)
        return cls(
            renderer=Renderer(text, template_source.special_tokens(directory), ControlTokens.of(tokenizer, text)),
            tokenizer=tokenizer,
            begin=np.array(around[:begin], np.int32),
            bytes_of_id=_bytes_of_id(tokenizer),
            control_strings=control_strings,
        )

    @property
    def terminators(self) -> list[int]:
        """Ids that end an assistant's turn: a model that is trained on them must stop at each."""
        return [self.renderer.control.ids[ending] for ending in self.renderer.traits.endings]

    def save(self, directory: Path) -> None:
        """Let the template travel with the tokenizer in `directory`: a server renders with it, byte for byte."""
        template_source.write(self.renderer.text, directory)

    def encode(self, messages: Messages, tools: Tools, loss_on: LossOn) -> Encoded:
        """One chat. For many, `encode_batch` is faster."""
        return self.encode_batch([(messages, tools)], loss_on)[0]

    def encode_batch(self, chats: Sequence[Chat], loss_on: LossOn) -> list[Encoded]:
        """For each chat (messages, tools) its tokens, or the reason why it has none."""
        drafts = [self._try_draft(*chat) for chat in chats]
        plain = [draft.text for draft in drafts if isinstance(draft, Draft) and not draft.as_text]
        encode = self.tokenizer.encode_batch if self._by_offsets else self.tokenizer.encode_batch_fast
        encodings = iter(encode(plain, add_special_tokens=False))
        results = []
        for draft in drafts:
            try:
                if isinstance(draft, str):
                    raise ChatRefused(draft)
                encoding = None if draft.as_text else next(encodings)
                ids = self._ids(draft.text, draft.as_text) if encoding is None else np.array(encoding.ids, np.int32)
                results.append(self._encoded(draft, ids, encoding, loss_on))
            except (ChatRefused, Unmaskable) as refusal:
                results.append(Encoded(EMPTY, EMPTY.astype(np.bool_), EMPTY, refusal.reason))
        return results

    def prompt_ids(self, messages: Messages, tools: Tools = None) -> list[int]:
        """What a server feeds for a chat whose next turn is the assistant's. Control strings in it are text. ChatRefused: the
        template does not take this chat."""
        draft = self.renderer.draft(messages, tools, True, ControlStrings.neutralise)
        places = self._places(draft, self._ids(draft.text, draft.as_text))
        return [*self._begin(places.ids), *places.ids.tolist()]

    def check(self, chats: Sequence[Chat], loss_on: LossOn) -> dict[str, Any]:
        """Facts about the template on a sample of chats. StageError: none of them can be trained on, or a mask is wrong."""
        return check(self, chats, loss_on)

    def _encoded(self, draft: Draft, ids: Int32, encoding: Encoding | None, loss_on: LossOn) -> Encoded:
        places = self._places(draft, ids)
        if loss_on is LossOn.all:
            labelled = np.ones(len(places.ids), np.bool_)
        else:
            if not self.renderer.traits.endings:
                raise Unmaskable("turn_without_end" if self.renderer.traits.behind is not None else "answer_altered")
            wanted = draft.answers if loss_on is LossOn.assistant else draft.answers[-1:]
            if not wanted:
                raise Unmaskable("no_answer")
            labelled = mask(places, wanted, frozenset(self.renderer.traits.endings), draft.generated)
        sizes = self._sizes(draft, places, encoding if places.ids is ids else None)
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
            return self.renderer.draft(messages, tools, False, self.control_strings)
        except ChatRefused as refusal:
            return refusal.reason

    def _places(self, draft: Draft, ids: Int32) -> Places:
        """The ids, cut where a token reaches over the beginning of an answer: there a server's prompt ends."""
        starts = [answer.start for answer in draft.answers if answer.start is not None]
        for _ in range(2):
            at = np.flatnonzero(self.renderer.control.is_control[ids])
            if len(at) != len(draft.controls):  # more: a normaliser made a control token of something else
                raise ChatRefused("control_strings" if len(at) > len(draft.controls) else "control_lost")
            places = Places(draft.text, draft.as_text, draft.controls, ids, at, self._head)
            cuts = [(start, start) for start in starts if places.of(start) is None]
            if not cuts:
                return places
            draft.as_text = sorted(draft.as_text + cuts)
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

    @cached_property
    def _by_offsets(self) -> bool:
        """Bytes of a byte-level token are those of its letters, unless the text is changed before it is cut."""
        return self.bytes_of_id is None or self.tokenizer.normalizer is not None

    def _sizes(self, draft: Draft, places: Places, encoding: Encoding | None) -> Int32:
        """A token's bytes reach from where the one before it ended; what no token covers goes to the next one, or before a
        border to the last. `encoding`: that of the whole text, if it is in one part."""
        if not self._by_offsets and self.bytes_of_id is not None:
            sizes = self.bytes_of_id[places.ids]
        else:
            if encoding is None:
                ends = ends_of_segments(self.tokenizer, segments(draft.text, draft.as_text))
            else:
                ends = [end for _, end in encoding.offsets]
            code = np.frombuffer(draft.text.encode("utf-32-le"), np.uint32)
            before = np.append(0, np.cumsum(1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF)))
            reached = before[np.maximum.accumulate(np.array([0, *ends], np.int64))]
            for place, token in places.known.items():
                reached[token] = before[place]
            reached[places.at] = before[[start for start, _ in draft.controls]]
            sizes = (reached[1:] - reached[:-1]).astype(np.int32)
        sizes[places.at] = 0
        return sizes
