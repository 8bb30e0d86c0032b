"""The OpenAI-compatible server as one plain ASGI app: routes, answers whole and streamed, health. Runs under uvicorn as
it is; the deployment wraps it for Serve.

    app = build_app(directory, name="quickstart", version=3, digest="...", options=ServingOptions())
"""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.serving import asgi, door
from stages.serving.admission import echoed, make_sampling, tokenize
from stages.serving.bodies import Body
from stages.serving.engine import Engine, timed_out
from stages.serving.metrics import CONTENT_TYPE, Clock, Metrics
from stages.serving.openapi import document
from stages.serving.options import Identity, ServingOptions
from stages.serving.page import page
from stages.serving.protocol import MAX_CHOICES, ApiError, ChatRequest, CompletionRequest, Request, parse, unavailable
from stages.serving.rows import Delta, Done, Ended, Event, Job, Read

log = logging.getLogger(__name__)

PING_S = 15.0
"""A comment line is sent after this many silent seconds, so that proxies keep the connection open."""
PING = b": ping\n\n"
MODELS, COMPLETIONS, CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"
OPEN = ("/", "/health", "/ready")
"""Asked by browsers and machines that hold no key."""
ANSWERS = "/answers"
REMEMBERED, REMEMBERED_CHARACTERS = 1_000, 4_000_000
"""Answers whose text is kept, in memory alone, for who knows their id; and never more text than this."""
ROUTES = (*OPEN, "/metrics", "/openapi.json", MODELS, f"{MODELS}/...", f"{ANSWERS}/...", COMPLETIONS, CHAT)


def build_app(
    directory: Path, *, name: str, version: int, digest: str, options: ServingOptions, instance: str | None = None
) -> "App":
    """Start loading the model and return the app that serves it."""
    engine = Engine(
        directory,
        threads=options.threads,
        max_queue=options.max_queue,
        max_batch=options.max_batch,
        max_batch_tokens=options.max_batch_tokens,
        prefill_chunk=options.prefill_chunk,
        stall_s=options.request_timeout_s,
    )
    return App(engine, Identity(name, version, digest, options.digest(), instance or uuid.uuid4().hex), options)


@dataclass(frozen=True)
class Call:
    """One HTTP request, and what each answer to it carries."""

    scope: asgi.Scope
    receive: asgi.Receive
    send: asgi.Send
    route: str
    """The path, or what stands for all paths of its kind: a label of the metrics."""
    headers: dict[str, str]


@dataclass(frozen=True)
class Accepted:
    """A request that the engine may have."""

    body: Body
    job: Job
    events: "asyncio.Queue[Event]"
    clock: Clock


class App:
    """ASGI application around one engine."""

    def __init__(self, engine: Engine, identity: Identity, options: ServingOptions) -> None:
        self.engine, self.identity, self.options = engine, identity, options
        self.metrics = Metrics(engine)
        self._created = int(time.time())
        self._remembered: OrderedDict[str, list[str]] = OrderedDict()
        """Id of an answer -> the texts of its choices, the oldest first."""
        self._characters = 0
        """Of all of them."""

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

        path = scope["path"]
        route = next((f"{place}/..." for place in (MODELS, ANSWERS) if path.startswith(f"{place}/")), path)
        route = route if route in ROUTES else "other"
        headers = {
            "x-request-id": door.request_id(scope),
            "x-model-version": str(self.identity.version),
            "x-model-digest": self.identity.digest,
            **door.cors_headers(scope, self.options.cors_origins),
        }
        call = Call(scope, receive, asgi.patient(tracked_send), route, headers)
        try:
            await self._route(call)
        except asgi.ClientGone:
            return
        except ApiError as error:
            assert not started, "an error after the first byte belongs into the stream"
            await self._refuse(call, error)
        except Exception:
            log.exception("request %s failed", headers["x-request-id"])
            if not started:
                failure = ApiError(500, "the server failed to answer", kind="server_error", code="internal_error")
                await self._refuse(call, failure)
            raise  # and the connection is torn down: half an answer must not look whole

    async def _lifespan(self, receive: asgi.Receive, send: asgi.Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await asyncio.to_thread(self.engine.close)
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _route(self, call: Call) -> None:
        method = call.scope["method"]
        if method == "OPTIONS" and self.options.cors_origins:
            return await self._preflight(call)
        if call.route == "other":
            raise ApiError(404, "there is no such path here; GET /v1/models says what is served", code="unknown_url")
        allowed = "POST" if call.route in (COMPLETIONS, CHAT) else "GET"
        if method != allowed:
            raise ApiError(405, f"use {allowed} here", code="method_not_allowed", headers={"Allow": allowed})
        if call.route not in OPEN:
            door.require_key(call.scope, self.options.key_digests)
        if allowed == "POST":
            body = await asgi.read_json_body(call.scope, call.receive, self.options.max_body_bytes)
            return await asgi.while_connected(call.receive, self._answer(call, body))
        if call.route == "/metrics":
            return await self._send(call, 200, self.metrics.text(), {"content-type": CONTENT_TYPE})
        if call.route == "/":
            return await self._send(call, 200, *page())
        await self._json(call, 200, self._told(call))

    def _told(self, call: Call) -> dict[str, Any]:
        """The answer to a GET."""
        match call.route:
            case "/health":
                if not self.engine.alive:
                    raise unavailable("the model's thread is dead or stuck")
                return {"status": "ok"}
            case "/ready":
                _ = self.engine.loaded
                return dict(self.identity.fields())
            case "/openapi.json":
                return document(self.identity)
            case "/v1/models":
                return {"object": "list", "data": [self._model()]}
        last = call.scope["path"].rpartition("/")[2]
        if call.route == f"{ANSWERS}/...":
            return self._answered(last)
        self._check_model(call.scope["path"].removeprefix(f"{MODELS}/"))
        return self._model()

    def _answered(self, identifier: str) -> dict[str, Any]:
        """What an answer said and what made it; ApiError 404 when it is not remembered."""
        texts = self._remembered.get(identifier)
        if texts is None:
            raise ApiError(404, "no answer with this id is remembered here", code="answer_not_found")
        return {"id": identifier, "texts": texts, **self.identity.fields()}

    def _remember(self, body: Body) -> None:
        texts = self._remembered[body.id] = [choice.text for choice in body.choices]
        self._characters += sum(map(len, texts))
        while len(self._remembered) > REMEMBERED or self._characters > REMEMBERED_CHARACTERS:
            _, forgotten = self._remembered.popitem(last=False)
            self._characters -= sum(map(len, forgotten))

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

    async def _preflight(self, call: Call) -> None:
        if "access-control-allow-origin" not in call.headers:
            raise ApiError(403, "pages of this origin may not ask here", code="origin_not_allowed")
        await self._send(call, 204, b"", door.PREFLIGHT)

    async def _refuse(self, call: Call, error: ApiError) -> None:
        self.metrics.answered(call.route, error.status, error.body["error"]["code"])
        await asgi.send_json(call.send, error.status, error.body, {**call.headers, **error.headers})

    async def _json(self, call: Call, status: int, body: dict[str, Any]) -> None:
        self.metrics.answered(call.route, status, None)
        await asgi.send_json(call.send, status, body, call.headers)

    async def _send(self, call: Call, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.metrics.answered(call.route, status, None)
        await asgi.send_bytes(call.send, status, body, {**call.headers, **headers})

    async def _answer(self, call: Call, body: bytes) -> None:
        chat = call.route == CHAT
        request = parse(ChatRequest if chat else CompletionRequest, body)
        self._check_model(request.model)
        accepted = await self._accept(request, door.deadline(call.scope, self.options.request_timeout_s))
        try:
            self.engine.submit(accepted.job)
            if not request.stream:
                async with aclosing(_events(accepted)) as events:
                    async for event in events:
                        if event is not None:
                            accepted.body.add(event)
                return await self._json(call, 200, accepted.body.whole())
            async with aclosing(self._stream(accepted)) as chunks:
                await asgi.send_events(
                    call.send, chunks, call.headers, lambda: self.metrics.answered(call.route, 200, None)
                )
        finally:
            accepted.job.cancelled.set()
            accepted.clock.ended()
            self._remember(accepted.body)

    async def _accept(self, request: Request, deadline: float) -> Accepted:
        """Tokenize and check a request against the model; everything that can be refused is refused here."""
        loaded = self.engine.loaded
        prompts = await asyncio.to_thread(tokenize, loaded, request)
        n = request.n or 1
        if len(prompts) * n > MAX_CHOICES:
            raise ApiError(400, f"prompts times n is {len(prompts) * n}, at most {MAX_CHOICES} are allowed", param="n")
        longest = max(len(prompt) for prompt in prompts)
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        sampling = make_sampling(loaded, request, longest, self.options.max_tokens, param)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        body = Body(request, self.identity, prompts, echoed(loaded, request, prompts))
        return Accepted(body, Job(prompts, n, sampling, emit, deadline), events, self.metrics.clock())

    async def _stream(self, accepted: Accepted) -> AsyncGenerator[bytes]:
        started = False
        for chunk in accepted.body.begin():
            started = True
            yield chunk
        try:
            async for event in _events(accepted, ping=True):
                for chunk in accepted.body.add(event) if event is not None else [PING]:
                    started = True
                    yield chunk
        except ApiError as error:
            if not started:
                raise
            # The status is sent: the error goes into the stream, which ends without [DONE].
            yield asgi.event(error.body)
            return
        for chunk in accepted.body.end():
            yield chunk


async def _events(accepted: Accepted, ping: bool = False) -> AsyncGenerator[Delta | Read | Done | None]:
    """Events until the end; None (when `ping`) after silent seconds. ApiError: the request failed or ran too long."""
    while True:
        left = accepted.job.deadline - time.monotonic()
        try:
            async with asyncio.timeout(max(min(left, PING_S) if ping else left, 0)):
                event = await accepted.events.get()
        except TimeoutError:
            if time.monotonic() >= accepted.job.deadline:
                raise timed_out() from None
            yield None
            continue
        accepted.clock.saw(event)
        if isinstance(event, Ended):
            if event.error is not None:
                raise event.error
            return
        yield event
