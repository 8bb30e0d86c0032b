"""Questions to the live endpoint, answered as they are generated. Apart, because a person asks them (`make ask`, `make chat`), not a
stage."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from stages.contract import ResourcesUnavailable, StageError
from stages.serving.endpoint import client_key

Turn = dict[str, str]
"""{"role": ..., "content": ...}"""


@dataclass
class Said:
    """What is known of an answer when it has ended."""

    id: str = ""
    model: str = ""
    """`name@version` as the answer itself says, or the name alone where the server tells no version."""
    prompt_tokens: int | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    chat: bool = True
    """False: the model has no chat template, so the last turn was continued as text."""


@dataclass
class Asker:
    """A client of one endpoint. `base_url` is scheme, host and port; `api_key_env` names the variable with its key."""

    base_url: str
    api_key_env: str | None = None
    temperature: float = 0.0
    max_tokens: int | None = 64
    """None: what the model's context leaves."""
    timeout_s: float = 120.0
    said: Said = field(default_factory=Said)
    """Of the newest answer."""

    def __post_init__(self) -> None:
        self._client = openai.OpenAI(
            base_url=f"{self.base_url}/v1",
            api_key=client_key(self.api_key_env),
            max_retries=0,
            timeout=self.timeout_s,
        )
        self._model: str | None = None

    def stream(self, turns: Sequence[Turn]) -> Iterator[str]:
        """The answer to a conversation piece by piece: a turn of a chat, or where the model has no chat template what continues the last
        turn's text. ResourcesUnavailable when nothing serves there, StageError when it refuses."""
        self.said = Said()
        try:
            yield from self._pieces(turns)
        except openai.APITimeoutError as error:
            raise ResourcesUnavailable(f"{self.base_url} said nothing for {self.timeout_s:g} s") from error
        except openai.APIConnectionError as error:
            raise ResourcesUnavailable(f"nothing answers at {self.base_url}: make run starts an endpoint") from error
        except openai.AuthenticationError as error:
            raise StageError(self._about_keys()) from error
        except openai.APIError as error:
            raise StageError(f"the endpoint at {self.base_url} refuses: {error.message}") from error

    def _pieces(self, turns: Sequence[Turn]) -> Iterator[str]:
        self._model = self._model or self._client.models.list().data[0].id
        asked: dict[str, Any] = {
            "model": self._model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            parts: Any = self._client.chat.completions.create(messages=list(turns), **asked)  # type: ignore[arg-type]
        except openai.BadRequestError as error:
            if error.code != "no_chat_template":
                raise
            self.said.chat = False
            parts = self._client.completions.create(prompt=turns[-1]["content"], **asked)
        with parts:
            for part in parts:
                self._hear(part)
                for choice in part.choices:
                    self.said.finish_reason = choice.finish_reason or self.said.finish_reason
                    if text := (choice.delta.content if self.said.chat else choice.text):
                        yield text

    def _hear(self, part: Any) -> None:
        self.said.id, self.said.model = part.id, part.model
        if "@" in (part.system_fingerprint or ""):
            self.said.model = part.system_fingerprint.rpartition("-")[0]
        if part.usage is not None:
            self.said.prompt_tokens, self.said.tokens = part.usage.prompt_tokens, part.usage.completion_tokens

    def _about_keys(self) -> str:
        name = self.api_key_env
        if name is None:
            return f"the endpoint at {self.base_url} asks for a key, and none is on record: deploy it again from here"
        state = "holds another key" if os.environ.get(name) else "is not set"
        return f"the endpoint at {self.base_url} asks for a key, and the environment variable {name} {state}"
