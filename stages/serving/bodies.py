"""Answers in OpenAI's shapes: one object, or the chunks of a stream. Apart from the app, which moves them, and from the engine, which
knows nothing of them."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.serving import asgi
from stages.serving.options import Identity
from stages.serving.protocol import ChatRequest, Request
from stages.serving.rows import Delta, Done, Read, TokenLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
ID_DIGITS = 12
"""So many of the artifact's digest begin an answer's id, so that it tells what made it."""


@dataclass
class Choice:
    """What is known of one choice so far."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    behind: bytes = b""
    """Bytes of the tokens that were told: where the next one begins."""


class Body:
    """The answer to one request, while it comes."""

    def __init__(
        self, request: Request, identity: Identity, prompts: Sequence[Sequence[int]], echoed: list[str]
    ) -> None:
        self.request, self._echoed = request, echoed
        self.chat = isinstance(request, ChatRequest)
        self._told = request.told() is not None
        self._prompt_tokens = sum(map(len, prompts))
        self._n = request.n or 1
        self.choices = [Choice() for _ in range(len(prompts) * self._n)]
        prefix = "chatcmpl" if self.chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{identity.digest[:ID_DIGITS]}{uuid.uuid4().hex[ID_DIGITS:]}",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": identity.fingerprint,
        }

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def begin(self) -> list[bytes]:
        """Chunks that are sent before the first token: of a chat the role, of a completion the prompt when it is echoed."""
        if self.chat:
            return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self.choices))]
        if self._told:  # comes with its log-probabilities
            return []
        return [
            self._chunk(index, {"content": text})
            for index in range(len(self.choices))
            if (text := self._echoed[index // self._n])
        ]

    def add(self, event: Delta | Read | Done) -> list[bytes]:
        """Take in what the engine tells; the chunks of a stream that it makes."""
        if isinstance(event, Read):
            chunks = []
            for index in event.choices:
                chunks.append(self._chunk(index, {"content": self._echoed[index // self._n]}, logprobs=event.logprobs))
                self._note(index, "", event.logprobs)
            return chunks
        choice = self.choices[event.choice]
        if isinstance(event, Done):
            choice.tokens, choice.finish_reason = event.tokens, event.finish_reason
            return [self._chunk(event.choice, {}, event.finish_reason)]
        made = self._chunk(event.choice, {"content": event.text}, logprobs=event.logprobs)
        self._note(event.choice, event.text, event.logprobs)
        return [made]

    def end(self) -> list[bytes]:
        """The last chunks of a stream that ended well."""
        usage = self._event([], self.usage()) if self.request.usage_in_stream else b""
        return [part for part in (usage, b"data: [DONE]\n\n") if part]

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        choices = []
        for index, choice in enumerate(self.choices):
            told, choice.behind = choice.logprobs, b""
            if self.chat:
                content: dict[str, Any] = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            else:
                content = {"text": self._echoed[index // self._n] + choice.text}
            choices.append(
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(choice, told),
                    "finish_reason": choice.finish_reason,
                }
            )
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        made = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self._prompt_tokens + made,
        }

    def _note(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        self.choices[index].text += text
        if not self.request.stream:
            self.choices[index].logprobs += logprobs

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> bytes:
        if not self.request.stream:
            return b""
        content: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        told = self._logprobs(self.choices[index], logprobs) if logprobs else None
        return self._event([{"index": index, **content, "logprobs": told, "finish_reason": finish_reason}])

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        tail = {"usage": usage} if self.request.usage_in_stream else {}
        return asgi.event({**self._head, "object": kind, "choices": choices, **tail})

    def _logprobs(self, choice: Choice, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._told:
            return None
        return {"content": [_of_chat(one) for one in told], "refusal": None} if self.chat else _of_text(choice, told)


def _of_chat(told: TokenLogprob) -> dict[str, Any]:
    def one(piece: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}

    return {
        **one(told.piece, told.logprob),
        "top_logprobs": [one(piece, logprob) for _, piece, logprob in told.top],
    }


def _of_text(choice: Choice, told: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The older shape, of parallel lists. The likeliest tokens are joined by the chosen one, as with OpenAI."""
    made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in told:
        made["tokens"].append(_name(one.piece))
        made["token_logprobs"].append(None if one.logprob is None else _finite(one.logprob))
        best = {_name(piece): _finite(logprob) for _, piece, logprob in reversed(one.top)}
        if one.logprob is not None:
            best[_name(one.piece)] = _finite(one.logprob)
        made["top_logprobs"].append(best or None)
        made["text_offset"].append(len(choice.behind.decode("utf-8", "ignore")))
        choice.behind += one.piece
    return made


def _name(piece: bytes) -> str:
    """A token as text. Of a part of a character its bytes, since two of them must not have one name."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)
