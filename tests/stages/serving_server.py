"""A server of a tiny model on plain uvicorn, asked over real HTTP. Apart, because several test modules ask one."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import uvicorn

from stages.serving.app import App, build_app
from stages.serving.options import ServingOptions

NAME = "tiny"
CONTEXT = 256
DIGEST = "d" * 64


@dataclass
class Running:
    port: int
    app: App
    directory: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=30)

    def raw(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, fields or {"content-type": "application/json"} if body else fields)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, data

    def post(self, path: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
        status, headers, data = self.raw("POST", path, json.dumps({"model": NAME, **fields}).encode())
        return status, headers, json.loads(data) if headers["content-type"] == "application/json" else data.decode()

    def complete(self, **fields: Any) -> tuple[int, dict[str, str], Any]:
        return self.post("/v1/completions", **fields)


def serve(directory: Path, options: ServingOptions) -> Iterator[Running]:
    app = build_app(directory, name=NAME, version=7, digest=DIGEST, options=options)
    app.engine.wait_ready(60)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Running(listener.getsockname()[1], app, directory)
    server.should_exit = True
    thread.join(10)
    listener.close()


def sse(text: str) -> list[Any]:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def assert_error(
    answer: tuple[int, dict[str, str], Any], status: int, param: str | None, code: str | None = None
) -> None:
    assert answer[0] == status, answer
    assert set(answer[2]) == {"error"}
    error = answer[2]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert error["param"] == param
    if code:
        assert error["code"] == code
    assert not any(leak in error["message"] for leak in ("Traceback", "/tmp", ".py", "stages"))


def start_stream(running: Running, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    body = {"model": NAME, "prompt": "a", "stream": True, "max_tokens": 100_000, "ignore_eos": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    response.readline()
    return connection, response


def wait_until(condition: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def leave(connection: http.client.HTTPConnection) -> None:
    """Close a connection in the middle of an answer."""
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
