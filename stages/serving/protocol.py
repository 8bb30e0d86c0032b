"""What a client may ask and how it is refused: OpenAI's request fields and its one error shape. Apart from the app, so
that every rule about a field stands in one place and is tested without a server.

A known parameter that this engine does not honour is refused by name, never ignored; an unknown field is accepted.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 16
"""Answers of one request (prompts times `n`): they are generated one after the other."""
MAX_STOP = 4


class ApiError(Exception):
    """An error a client sees: HTTP status and OpenAI's four fields. Messages hold no path, class name or traceback."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def unavailable(message: str) -> ApiError:
    """503: the server cannot answer now; asking again in a second may help."""
    return ApiError(503, message, kind="server_error", code="unavailable", headers={"Retry-After": "1"})


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class Request(BaseModel):
    """Fields that both endpoints take. Null means the default."""

    model_config = ConfigDict(strict=True)

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Absent or null: what the context leaves, within the server's cap."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions that other servers have too.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, stop: str | list[str] | None) -> list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop
        if strings is not None and len(strings) > MAX_STOP:
            raise PydanticCustomError("stop", f"at most {MAX_STOP} stop strings are allowed")
        if strings is not None and "" in strings:
            raise PydanticCustomError("stop", "a stop string must not be empty")
        return [_unicode(string) for string in strings] if strings is not None else None

    @model_validator(mode="after")
    def _one_length(self) -> "Request":
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if "max_tokens" in self.model_fields_set and len(given) > 1:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ: give one")
        return self

    def length(self) -> int | None:
        """Tokens asked for, or None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @field_validator("stream_options")
    @classmethod
    def _only_when_streaming(cls, options: StreamOptions | None, info: Any) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        return options


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    """Absent: 16, as OpenAI. Null: what the context leaves, within the server's cap."""

    @field_validator("prompt")
    @classmethod
    def _some_prompt(cls, prompt: str | list[Any]) -> str | list[Any]:
        if isinstance(prompt, list) and not prompt:
            raise PydanticCustomError("prompt", "prompt must not be an empty list")
        if isinstance(prompt, list) and any(isinstance(part, list) and not part for part in prompt):
            raise PydanticCustomError("prompt", "a prompt of token ids must not be empty")
        for text in [prompt] if isinstance(prompt, str) else prompt:
            if isinstance(text, str):
                _unicode(text)
        return prompt

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]

    @field_validator("messages")
    @classmethod
    def _text_is_unicode(cls, messages: list[Message]) -> list[Message]:
        for message in messages:
            _unicode(message.text())
        return messages


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
"""Known parameters that are not implemented -> values (besides null) that ask for nothing."""

R = TypeVar("R", bound=Request)


def parse(kind: type[R], body: bytes) -> R:
    """A checked request, or ApiError 400 that names the parameter."""
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8, NaN, a number of 5,000 digits
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
        ):
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else "max_tokens"
        raise ApiError(400, f"{param}: {first['msg']}", param=param) from None


def _unicode(text: str) -> str:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise PydanticCustomError("unicode", "text holds a lone surrogate, which is not valid Unicode")
    return text


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
