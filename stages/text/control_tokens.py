"""Control tokens in text: which strings become one, where a template wrote them, and what of it somebody typed. Apart,
because training and serving must agree on it.

A user who types `<|im_end|>` must not end his turn. Such words are marked before the template sees them, so that in the
rendered text they can be told from those that the template wrote; the marks go, and what they enclosed is encoded as text.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

PRIVATE_USE = range(0xF0000, 0xFFFFD, 2)
"""Marks are the first two neighbours of these characters that a chat does not hold."""

STRANGE = "\U0010fffd ꙮ 𓂀 ᚙ"
"""Hardly in a vocabulary: the special token that they become, if any, is the one for the unknown, which any text may hold."""

Span = tuple[int, int]
"""First character and the one behind the last."""
Segments = list[tuple[str, bool]]
"""Text in order; True: encode it as plain text, whatever it looks like."""


@dataclass(frozen=True)
class ControlTokens:
    """Those of one tokenizer under one template: its special tokens, and the added ones that the template names."""

    anywhere: re.Pattern[str]
    """All of them, the longest at a place."""
    special: re.Pattern[str]
    """Special ones alone: what an assistant turn must not hold. `<think>` may stand there, in a user's turn not."""
    is_control: npt.NDArray[np.bool_]
    """By id."""
    ids: dict[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str) -> "ControlTokens":
        special, named = {}, {}
        unknown = tokenizer.encode(STRANGE, add_special_tokens=False).ids
        for index, added in tokenizer.get_added_tokens_decoder().items():
            if index in unknown:
                continue
            if added.special:
                special[added.content] = index
            elif added.content in template and not added.content.isspace():
                named[added.content] = index
        is_control = np.zeros(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1, np.bool_)
        is_control[[*special.values(), *named.values()]] = True
        return cls(_any_of([*special, *named]), _any_of(special), is_control, special | named)

    def typed(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> bool:
        """Whether a chat's own strings hold words of a control token."""
        for message in messages:
            pattern = self._forbidden(message)
            content = message["content"]
            if pattern.search(content) or (
                len(message) > 2 and any(pattern.search(part) for part in strings(message) if part is not content)
            ):
                return True
        return tools is not None and any(self.anywhere.search(part) for part in strings(tools))

    def mark(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> "Marked":
        """The chat with its typed control strings between marks."""
        held = {letter for part in strings([messages, tools]) for letter in part if letter >= "\U000f0000"}
        code = next(code for code in PRIVATE_USE if held.isdisjoint({chr(code), chr(code + 1)}))
        opening, closing = chr(code), chr(code + 1)
        marked = [_replaced(message, self._forbidden(message), opening, closing) for message in messages]
        pattern = re.compile(f"{opening}({self.anywhere.pattern}){closing}|[{opening}{closing}]")
        return Marked(marked, _replaced(tools, self.anywhere, opening, closing), pattern)

    def _forbidden(self, message: dict[str, Any]) -> re.Pattern[str]:
        return self.special if message["role"] == "assistant" else self.anywhere


@dataclass(frozen=True)
class Marked:
    """A chat in which typed control strings are enclosed by marks."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    pattern: re.Pattern[str]

    def unmarked(self, text: str) -> tuple[str, list[Span]]:
        """Rendered text without marks, and the spans to encode as text. A mark whose partner a template cut off leaves an
        empty span: what stands around it may not join."""
        parts, spans, length, at = [], [], 0, 0
        for found in self.pattern.finditer(text):
            parts += [text[at : found.start()], typed := found[1] or ""]
            length += found.start() - at
            spans.append((length, length + len(typed)))
            length, at = length + len(typed), found.end()
        return "".join([*parts, text[at:]]), spans

    def moved(self, text: str, spans: list[Span]) -> list[Span]:
        """Spans of rendered text as spans of the text without marks."""
        marks = sorted({at for found in self.pattern.finditer(text) for at in (found.start(), found.end() - 1)})
        return [(start - bisect_left(marks, start), end - bisect_left(marks, end)) for start, end in spans]


def strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, names of keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from strings(key)
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def touches(spans: list[Span], span: Span) -> bool:
    """Whether one of `spans`, which are in order and apart, reaches into `span`, or cuts it."""
    behind = bisect_left(spans, (span[1], span[1]))
    return behind > 0 and (spans[behind - 1][1] > span[0])


def segments(text: str, spans: list[Span]) -> Segments:
    """`text` cut at `spans`, which are in order, and are encoded as text."""
    found, at = [], 0
    for start, end in spans:
        found += [(text[at:start], False), (text[start:end], True)]
        at = end
    return [(part, plain) for part, plain in [*found, (text[at:], False)] if part]


def encode_segments(tokenizer: Tokenizer, parts: Segments) -> list[int]:
    """Ids of text in parts. Each is encoded as it stands in the middle of a text: behind another sign, which is taken away
    again, because tokenizers of the SentencePiece kind put a space before what stands first."""
    return [token for token, _ in _tokens(tokenizer, parts)]


def ends_of_segments(tokenizer: Tokenizer, parts: Segments) -> list[int]:
    """For each of these ids the character behind its last, in the whole text."""
    return [end for _, end in _tokens(tokenizer, parts)]


def _tokens(tokenizer: Tokenizer, parts: Segments) -> Iterator[tuple[int, int]]:
    at = 0
    typed: dict[str, list[tuple[int, int]]] = {}
    for number, (part, plain) in enumerate(parts):
        if not number:
            made = (_as_text if plain else _normally)(tokenizer, part)
        elif plain:  # one of few words, however often somebody typed it
            if part not in typed:
                typed[part] = _behind(tokenizer, part, _as_text)
            made = typed[part]
        else:
            made = _behind(tokenizer, part, _normally)
        yield from ((token, at + end) for token, end in made)
        at += len(part)


def _behind(
    tokenizer: Tokenizer, part: str, encode: Callable[[Tokenizer, str], list[tuple[int, int]]]
) -> list[tuple[int, int]]:
    sign = "." if part.startswith("\n") else "\n"  # two newlines may be one token
    head, made = encode(tokenizer, sign), encode(tokenizer, sign + part)
    if [token for token, _ in made[: len(head)]] != [token for token, _ in head]:
        return encode(tokenizer, part)
    return [(token, max(end - 1, 0)) for token, end in made[len(head) :]]


def _normally(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [(token, end) for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True)]


def _as_text(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Without any added token. (`encode_special_tokens` would still match those that are not special.) The last id stands
    for the whole text."""
    whole = text
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    words = [text]
    if tokenizer.pre_tokenizer is not None:
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    ids = [token.id for word in words for token in tokenizer.model.tokenize(word)]
    return [(token, 0) for token in ids[:-1]] + [(token, len(whole)) for token in ids[-1:]]


def _replaced(value: Any, pattern: re.Pattern[str], opening: str, closing: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: f"{opening}{found[0]}{closing}", value)
    if isinstance(value, dict):
        keys = (_replaced(key, pattern, opening, closing) for key in value)
        return dict(zip(keys, (_replaced(part, pattern, opening, closing) for part in value.values()), strict=True))
    if isinstance(value, list):
        return [_replaced(part, pattern, opening, closing) for part in value]
    return value


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `words` at a place. As a tree: some tokenizers have 6,000 of them, and tried one by one they cost
    60 us at each `<`."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_pattern(tree) if tree else r"(?!)")


def _pattern(node: dict[str, Any]) -> str:
    branches = [re.escape(letter) + _pattern(below) for letter, below in sorted(node.items()) if letter]
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{body})?" if "" in node else body
