"""The few pieces of HTTP that the app needs: read a body within a limit, send JSON or events, notice that a client is
gone. Apart from the app, because they know nothing of models.

Plain ASGI on purpose: Starlette's BaseHTTPMiddleware turns a crash in the middle of a stream into a clean end of file.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from stages.serving.protocol import ApiError

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


RECEIVE_S = 30.0
"""A client that has not sent its whole body by then is cut off."""
SEND_S = 30.0
"""A client that takes nothing for so long is gone."""


class ClientGone(Exception):
    """The connection was closed before the answer was complete, or might as well have been."""


def header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_json_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body; ApiError 413 beyond `limit` bytes (declared or counted), 415 for another content type than JSON."""
    kind = (header(scope, b"content-type") or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        # Not wait_for: that swallows a cancellation which comes at the same moment as the message.
        async with asyncio.timeout(RECEIVE_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        slow = f"the body did not arrive within {RECEIVE_S:g} s"
        raise ApiError(408, slow, code="request_timeout", headers={"Connection": "close"}) from None


def patient(send: Send) -> Send:
    """`send` that raises ClientGone when the client takes nothing for SEND_S seconds: it would wait for ever."""

    async def sending(message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await send(message)
        except TimeoutError:
            raise ClientGone from None

    return sending


async def send_json(send: Send, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    await send_bytes(send, status, json.dumps(body).encode(), {"content-type": "application/json", **headers})


async def send_bytes(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    fields = {"content-length": str(len(body)), **headers} if status != 204 else headers
    await send({"type": "http.response.start", "status": status, "headers": encode(fields)})
    await send({"type": "http.response.body", "body": body})


async def send_events(
    send: Send, events: AsyncIterator[bytes], headers: Mapping[str, str], begun: Callable[[], None]
) -> None:
    """An event stream. The first item is awaited before the status is sent: an early error has its own status. `begun` is called
    when the status is about to be sent."""
    first = await anext(events)
    begun()
    fields = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        **headers,
    }
    await send({"type": "http.response.start", "status": 200, "headers": encode(fields)})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    async for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client closes the connection. Serve cancels the caller instead: same end."""
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientGone
        await running
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
