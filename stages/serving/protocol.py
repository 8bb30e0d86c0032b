"""What a client may ask and how it is refused: OpenAI's request fields and its one error shape. Apart from the app, so
that every rule about a field stands in one place and is tested without a server.

A known parameter that this engine does not honour is refused by name, never ignored; an unknown field is accepted.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
"""Answers of one request (prompts times `n`)."""
MAX_TOP_LOGPROBS = 20
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

    include_usage: bool | None = False


Penalty = Annotated[float, Field(ge=-2, le=2)]


class Request(BaseModel):
    """Fields that both endpoints take. Null means the default."""

    model_config = ConfigDict(strict=True)

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "web_search_options": (),
    }
    """Known parameters that are not implemented -> values (besides null) that ask for nothing."""

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
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Token id, as text -> what is added to its logit."""
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

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias is not None and not all(name.isascii() and name.isdecimal() and len(name) < 10 for name in bias):
            raise PydanticCustomError("logit_bias", "its keys must be token ids, such as 42")
        return bias

    @field_validator("stream_options")
    @classmethod
    def _only_when_streaming(cls, options: StreamOptions | None, info: Any) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        return options

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if "max_tokens" in self.model_fields_set and len(given) > 1:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ: give one")
        return self

    def length(self) -> int | None:
        """Tokens asked for, or None: as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def told(self) -> int | None:
        """How many of the likeliest tokens are told with each token; None: no log-probabilities are wanted."""
        raise NotImplementedError

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Request):
    """POST /v1/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Request.neutral, "best_of": (1,), "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"),
        "top_logprobs": (0,),
    }  # fmt: skip

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    """Absent: 16, as OpenAI. Null: what the context leaves, within the server's cap. 0: the prompt alone, with `echo`."""
    echo: bool | None = None
    """The answer begins with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

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

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        if self.length() == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens must be at least 1 (0 is allowed with echo)")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def told(self) -> int | None:
        return self.logprobs


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str | dict[str, Any] = ""
    """JSON of an object; some clients send the object."""


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "content is missing")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "only the assistant calls tools")
        return self

    def canonical(self) -> dict[str, Any]:
        """As chat templates and training have it: text joined, arguments an object."""
        made: dict[str, Any] = {"role": self.role, "content": self.text()}
        if self.tool_calls:
            made["tool_calls"] = [
                {
                    **({"id": call.id} if call.id is not None else {}),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function)},
                }
                for call in self.tool_calls
            ]
        for field, value in (("name", self.name), ("tool_call_id", self.tool_call_id)):
            if value is not None and self.role == "tool":
                made[field] = value
        return made

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionTool(BaseModel):
    """A tool as OpenAI describes it; what stands in it besides is handed to the template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: dict[str, Any]

    @field_validator("function")
    @classmethod
    def _named(cls, function: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise PydanticCustomError("function", "a function needs a name")
        return function


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Request.neutral, "best_of": (1,), "echo": (False,), "suffix": ("",), "tool_choice": ("none", "auto"),
    }  # fmt: skip

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[FunctionTool] | None = None
    tool_choice: str | None = None
    """`none`: the template is not shown the tools. A call that must be made cannot be forced here."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _logprobs_are_wanted(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self

    def told(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


R = TypeVar("R", bound=Request)


def parse(kind: type[R], body: bytes) -> R:
    """A checked request, or ApiError 400 that names the parameter."""
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8, NaN, a number of 5,000 digits
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    for name, neutral in kind.neutral.items():
        value = fields.get(name)
        if value is not None and not any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
        ):
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    for name in ("messages", "tools"):
        if not _is_unicode(fields.get(name)):
            raise ApiError(400, f"{name}: text holds a lone surrogate, which is not valid Unicode", param=name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        custom = first["type"] if first["type"] in kind.model_fields else "max_tokens"
        param = str(first["loc"][0]) if first["loc"] else custom
        raise ApiError(400, f"{param}: {first['msg']}", param=param) from None
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deep", code="invalid_json") from error


def _arguments(function: Function) -> dict[str, Any]:
    """ApiError 400 when the arguments are no JSON object."""
    if isinstance(function.arguments, dict):
        return function.arguments
    try:
        found = json.loads(function.arguments or "{}", parse_constant=_no_constant)
        assert isinstance(found, dict)
    except (ValueError, RecursionError, AssertionError) as error:
        message = f"messages: the arguments of {function.name[:100]!r} are not a JSON object"
        raise ApiError(400, message, param="messages") from error
    if not _is_unicode(found):
        raise ApiError(400, "messages: text holds a lone surrogate, which is not valid Unicode", param="messages")
    return found


def _is_unicode(value: Any) -> bool:
    """No text in it, however deep, holds half of a pair."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            if not part.isascii() and any("\ud800" <= letter <= "\udfff" for letter in part):
                return False
        elif isinstance(part, dict):
            left += part.keys()
            left += part.values()
        elif isinstance(part, list):
            left += part
    return True


def _unicode(text: str) -> str:
    if not _is_unicode(text):
        raise PydanticCustomError("unicode", "text holds a lone surrogate, which is not valid Unicode")
    return text


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
