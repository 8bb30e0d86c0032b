"""The OpenAI-compatible server as one plain ASGI app: routes, answers whole and streamed, health. Runs under uvicorn as
it is; the deployment wraps it for Serve.

    app = build_app(directory, name="quickstart", version=3, digest="...", options=ServingOptions())
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.serving import asgi
from stages.serving.admission import make_sampling, tokenize
from stages.serving.engine import Delta, Done, Ended, Engine, Event, Job, timed_out
from stages.serving.options import Identity, ServingOptions
from stages.serving.protocol import MAX_CHOICES, ApiError, ChatRequest, CompletionRequest, Request, parse, unavailable

PING_S = 15.0
"""A comment line is sent after this many silent seconds, so that proxies keep the connection open."""
PING = b": ping\n\n"


def build_app(
    directory: Path, *, name: str, version: int, digest: str, options: ServingOptions, instance: str | None = None
) -> "App":
    """Start loading the model and return the app that serves it."""
    engine = Engine(directory, threads=options.threads, max_queue=options.max_queue, stall_s=options.request_timeout_s)
    return App(engine, Identity(name, version, digest, options.digest(), instance or uuid.uuid4().hex), options)


@dataclass(frozen=True)
class Answer:
    """What an answer to one accepted request needs besides its events."""

    chat: bool
    request: Request
    job: Job
    events: "asyncio.Queue[Event]"
    head: dict[str, Any]
    """Fields that every chunk and the whole answer share: id, created, model, system_fingerprint."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.job.prompts)


class App:
    """ASGI application around one engine."""

    def __init__(self, engine: Engine, identity: Identity, options: ServingOptions) -> None:
        self.engine = engine
        self.identity = identity
        self.options = options
        self._created = int(time.time())

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        if scope["type"] != "http":
            return
        started = False

        async def tracked_send(message: dict[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._route(scope, receive, tracked_send)
        except asgi.ClientGone:
            return
        except ApiError as error:
            assert not started, "an error after the first byte belongs into the stream"
            await self._json(send, error.status, error.body, error.headers)
        except Exception:
            if not started:
                failure = ApiError(500, "the server failed to answer", kind="server_error", code="internal_error")
                await self._json(send, failure.status, failure.body, failure.headers)
            raise  # and the connection is torn down: half an answer must not look whole

    async def _lifespan(self, receive: asgi.Receive, send: asgi.Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await asyncio.to_thread(self.engine.close)
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _route(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        path, method = scope["path"], scope["method"]
        model_path = "/v1/models/"
        allowed = "POST" if path in ("/v1/completions", "/v1/chat/completions") else "GET"
        known = path in ("/health", "/ready", "/v1/models", "/v1/completions", "/v1/chat/completions")
        if not known and not path.startswith(model_path):
            raise ApiError(404, "there is no such path here; GET /v1/models says what is served", code="unknown_url")
        if method != allowed:
            raise ApiError(405, f"use {allowed} here", code="method_not_allowed", headers={"Allow": allowed})
        if path == "/health":
            return await self._health(send)
        if path == "/ready":
            return await self._ready(send)
        if path == "/v1/models":
            return await self._json(send, 200, {"object": "list", "data": [self._model()]})
        if path.startswith(model_path):
            self._check_model(path.removeprefix(model_path))
            return await self._json(send, 200, self._model())
        body = await asgi.read_json_body(scope, receive, self.options.max_body_bytes)
        await asgi.while_connected(receive, self._answer(path, body, send))

    async def _health(self, send: asgi.Send) -> None:
        if not self.engine.alive:
            raise unavailable("the model's thread is dead or stuck")
        await self._json(send, 200, {"status": "ok"})

    async def _ready(self, send: asgi.Send) -> None:
        _ = self.engine.loaded
        await self._json(send, 200, self.identity.fields())

    def _model(self) -> dict[str, Any]:
        loaded = self.engine.loaded
        return {
            "id": self.identity.model,
            "object": "model",
            "created": self._created,
            "owned_by": "local",
            "root": f"models:/{self.identity.model}/{self.identity.version}",
            "max_model_len": loaded.context_length,
        }

    def _check_model(self, name: str) -> None:
        if name != self.identity.model:
            raise ApiError(404, f"the model {name[:200]!r} does not exist here", param="model", code="model_not_found")

    async def _json(
        self, send: asgi.Send, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        await asgi.send_json(send, status, body, {"x-model-version": str(self.identity.version), **(headers or {})})

    async def _answer(self, path: str, body: bytes, send: asgi.Send) -> None:
        chat = path == "/v1/chat/completions"
        request = parse(ChatRequest if chat else CompletionRequest, body)
        self._check_model(request.model)
        answer = await self._accept(request, chat)
        try:
            self.engine.submit(answer.job)
            if request.stream:
                async with aclosing(self._stream(answer)) as events:
                    await asgi.send_events(send, events, {"x-model-version": str(self.identity.version)})
            else:
                await self._json(send, 200, await self._whole(answer))
        finally:
            answer.job.cancelled.set()

    async def _accept(self, request: Request, chat: bool) -> Answer:
        """Tokenize and check a request against the model; everything that can be refused is refused here."""
        loaded = self.engine.loaded
        deadline = time.monotonic() + self.options.request_timeout_s
        prompts = await asyncio.to_thread(tokenize, loaded, request)
        n = request.n or 1
        if len(prompts) * n > MAX_CHOICES:
            raise ApiError(400, f"prompts times n is {len(prompts) * n}, at most {MAX_CHOICES} are allowed", param="n")
        longest = max(len(prompt) for prompt in prompts)
        sampling = make_sampling(loaded, request, longest, self.options.max_tokens, "messages" if chat else "prompt")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.identity.model,
            "system_fingerprint": self.identity.fingerprint,
        }
        return Answer(chat, request, Job(prompts, n, sampling, emit, deadline), events, head)

    async def _whole(self, answer: Answer) -> dict[str, Any]:
        count = len(answer.job.prompts) * answer.job.n
        texts, reasons, tokens = [""] * count, [""] * count, 0
        async for event in _events(answer):
            if isinstance(event, Delta):
                texts[event.choice] += event.text
            elif isinstance(event, Done):
                reasons[event.choice] = event.finish_reason
                tokens += event.tokens
        choices: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            content = {"message": {"role": "assistant", "content": text}} if answer.chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason})
        kind = "chat.completion" if answer.chat else "text_completion"
        return {**answer.head, "object": kind, "choices": choices, "usage": _usage(answer, tokens)}

    async def _stream(self, answer: Answer) -> AsyncGenerator[bytes]:
        with_usage = bool(answer.request.stream_options and answer.request.stream_options.include_usage)
        kind = "chat.completion.chunk" if answer.chat else "text_completion"

        def chunk(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
            tail = {"usage": usage} if with_usage else {}
            return asgi.event({**answer.head, "object": kind, "choices": choices, **tail})

        def choice(index: int, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
            content: dict[str, Any] = {"delta": delta} if answer.chat else {"text": delta.get("content", "")}
            return chunk([{"index": index, **content, "logprobs": None, "finish_reason": finish_reason}])

        for index in range(answer.job.n if answer.chat else 0):
            yield choice(index, {"role": "assistant", "content": ""})
        started, tokens = answer.chat, 0
        try:
            async for event in _events(answer, ping=True):
                started = True
                if isinstance(event, Delta):
                    yield choice(event.choice, {"content": event.text})
                elif isinstance(event, Done):
                    tokens += event.tokens
                    yield choice(event.choice, {}, event.finish_reason)
                else:
                    yield PING
        except ApiError as error:
            if not started:
                raise
            # The status is sent: the error goes into the stream, which ends without [DONE].
            yield asgi.event(error.body)
            return
        if with_usage:
            yield chunk([], _usage(answer, tokens))
        yield b"data: [DONE]\n\n"


async def _events(answer: Answer, ping: bool = False) -> AsyncGenerator[Delta | Done | None]:
    """Events until the end; None (when `ping`) after silent seconds. ApiError: the request failed or ran too long."""
    while True:
        left = answer.job.deadline - time.monotonic()
        try:
            event = await asyncio.wait_for(answer.events.get(), min(left, PING_S) if ping else left)
        except TimeoutError:
            if time.monotonic() >= answer.job.deadline:
                raise timed_out() from None
            yield None
            continue
        if isinstance(event, Ended):
            if event.error is not None:
                raise event.error
            return
        yield event


def _usage(answer: Answer, completion_tokens: int) -> dict[str, int]:
    total = answer.prompt_tokens + completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
    }
