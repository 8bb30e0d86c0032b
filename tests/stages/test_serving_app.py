"""What clients see, asked with the real `openai` client and raw HTTP over plain uvicorn: no Ray, a tiny model, exact values."""

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.contract import StageError
from stages.serving.app import build_app
from stages.serving.model import load_model
from stages.serving.options import ServingOptions
from stages.serving.protocol import ChatRequest, CompletionRequest
from tests.stages.serving_server import (
    CONTEXT,
    DIGEST,
    NAME,
    Running,
    assert_error,
    serve,
    sse,
    start_stream,
    wait_until,
)
from tests.stages.tiny_model import CHAT_TEMPLATE, save_tiny_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model without a chat template."""
    directory = save_tiny_model(tmp_path_factory.mktemp("models") / "plain", context=CONTEXT)
    yield from serve(directory, ServingOptions(max_queue=8))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(
        tmp_path_factory.mktemp("models") / "chat", context=CONTEXT, chat_template=CHAT_TEMPLATE
    )
    yield from serve(directory, ServingOptions(max_tokens=32))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A context long enough that an answer takes seconds, one answer at a time, a queue of one, a short deadline."""
    directory = save_tiny_model(tmp_path_factory.mktemp("models") / "slow", context=200_000)
    yield from serve(directory, ServingOptions(max_batch=1, max_queue=1, request_timeout_s=1.5))


def reference(directory: Path, prompt: str, tokens: int) -> list[int]:
    """What transformers' own generate gives."""
    loaded = load_model(directory)
    ids = torch.tensor([loaded.tokenizer(prompt).input_ids])
    made = loaded.model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in made[0, ids.shape[1] :]]


def test_models_are_listed_and_found_by_name(plain: Running) -> None:
    listed = plain.client.models.list().data
    assert [model.id for model in listed] == [NAME]
    assert plain.client.models.retrieve(NAME) == listed[0]
    assert isinstance(listed[0].created, int) and listed[0].object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        plain.client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_ready_reports_what_serves(plain: Running) -> None:
    status, headers, data = plain.raw("GET", "/ready")
    identity = json.loads(data)
    assert status == 200 and headers["x-model-version"] == "7"
    assert (identity["model"], identity["version"], identity["digest"]) == (NAME, 7, DIGEST)
    assert identity["config_digest"] == ServingOptions(max_queue=8).digest()
    assert plain.raw("GET", "/health")[0] == 200


def test_a_greedy_answer_is_what_generate_gives(plain: Running) -> None:
    wanted = reference(plain.directory, "os.path.join(", 40)
    answer = plain.client.completions.create(model=NAME, prompt="os.path.join(", max_tokens=40, temperature=0)
    tokenizer = load_model(plain.directory).tokenizer
    text = tokenizer.decode(wanted, skip_special_tokens=True)
    choice = answer.choices[0]
    assert text.startswith(choice.text) and len(text) - len(choice.text) <= 3  # an unfinished character is dropped
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and choice.index == 0
    ended = wanted[-1] == tokenizer.eos_token_id
    assert choice.finish_reason == ("stop" if ended else "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("os.path.join("), len(wanted))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint == f"{NAME}@7-{ServingOptions(max_queue=8).digest()[:8]}"


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 1.5, "seed": 2, "top_p": 0.9}]
)
def test_streamed_and_whole_answers_are_equal(plain: Running, sampling: dict[str, Any]) -> None:
    for prompt in ("a", "naïve 🙂", "x = "):
        asked = {"prompt": prompt, "max_tokens": 50, **sampling}
        whole = plain.complete(**asked)[2]
        events = sse(plain.complete(**asked, stream=True)[2])
        assert events.pop() == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
        assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == [
            whole["choices"][0]["finish_reason"]
        ]
        assert len({event["id"] for event in events}) == 1
        assert not any("usage" in event for event in events)


def test_usage_is_streamed_only_when_asked_for(plain: Running) -> None:
    _, headers, text = plain.complete(prompt="a", max_tokens=5, stream=True, stream_options={"include_usage": True})
    events = sse(text)
    assert headers["content-type"].startswith("text/event-stream") and headers["cache-control"] == "no-cache"
    assert text.endswith("data: [DONE]\n\n")
    assert events[-2]["choices"] == [] and events[-2]["usage"]["prompt_tokens"] == 1
    assert all(event["usage"] is None for event in events[:-2])
    assert_error(plain.complete(prompt="a", stream_options={"include_usage": True}), 400, "stream_options")


def test_seeded_answers_repeat_and_unseeded_ones_differ(plain: Running) -> None:
    def text(**fields: Any) -> list[str]:
        return [c["text"] for c in plain.complete(prompt="a", max_tokens=40, **fields)[2]["choices"]]

    assert text(seed=11) == text(seed=11) != text(seed=12)
    assert text() != text()
    three = text(seed=11, n=3)
    assert three == text(seed=11, n=3) and len(set(three)) == 3 and three[0] == text(seed=11)[0]


def test_prompts_come_as_text_or_ids_alone_or_in_lists(plain: Running) -> None:
    def texts(prompt: Any, **fields: Any) -> list[str]:
        choices = plain.complete(prompt=prompt, max_tokens=8, temperature=0, **fields)[2]["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["text"] for choice in choices]

    ids = load_model(plain.directory).tokenizer("ab").input_ids
    assert texts("ab") == texts(ids) == texts(["ab"]) == texts([ids])
    assert texts(["ab", "c"], n=2) == texts("ab") * 2 + texts("c") * 2
    assert texts("")  # the start of a document
    for wrong in ([], [[]], [99999], [-1], [1.5], 5, None, {"a": 1}, [None]):
        assert_error(plain.complete(prompt=wrong), 400, "prompt")
    assert_error(plain.complete(prompt=["a"] * 65, n=2), 400, "n")


def test_a_stop_string_ends_the_text_before_it_in_both_modes(plain: Running) -> None:
    free = plain.complete(prompt="a", max_tokens=60, temperature=0)[2]["choices"][0]["text"]
    stop = free[10:13]
    wanted = free[: free.find(stop)]
    for fields in ({"stop": stop}, {"stop": ["zzzz", stop]}):
        whole = plain.complete(prompt="a", max_tokens=60, temperature=0, **fields)[2]
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (wanted, "stop")
        assert whole["usage"]["completion_tokens"] < 60
        events = sse(plain.complete(prompt="a", max_tokens=60, temperature=0, stream=True, **fields)[2])[:-1]
        assert "".join(event["choices"][0]["text"] for event in events) == wanted
    for wrong in ("", ["a", ""], ["a"] * 5, 5, [1]):
        assert_error(plain.complete(prompt="a", stop=wrong), 400, "stop")


def test_a_stop_string_that_is_a_special_token_ends_the_answer(plain: Running) -> None:
    asked = {"prompt": "a", "max_tokens": 250, "seed": 3, "ignore_eos": True}
    free = plain.complete(**asked)[2]
    assert free["usage"]["completion_tokens"] == 250
    stopped = next(
        answer
        for seed in range(20)
        if (answer := plain.complete(**{**asked, "seed": seed}, stop="<|endoftext|>")[2])["usage"]["completion_tokens"]
        < 250
    )
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert "<|endoftext|>" not in stopped["choices"][0]["text"]


def test_lengths_are_exact_or_refused(plain: Running) -> None:
    assert plain.complete(prompt="a", max_tokens=3, temperature=0)[2]["usage"]["completion_tokens"] == 3
    assert plain.complete(prompt="a", max_completion_tokens=4, temperature=0)[2]["usage"]["completion_tokens"] == 4
    assert plain.complete(prompt="a", temperature=0, ignore_eos=True)[2]["usage"]["completion_tokens"] == 16
    all_that_fits = plain.complete(prompt="a", max_tokens=None, ignore_eos=True)[2]
    assert all_that_fits["usage"]["total_tokens"] == CONTEXT
    assert plain.complete(prompt="a" * (CONTEXT - 1), max_tokens=1)[0] == 200
    for fields in ({"prompt": "a" * CONTEXT, "max_tokens": 1}, {"prompt": "aa", "max_tokens": CONTEXT - 1}):
        answer = plain.complete(**fields)
        assert_error(answer, 400, "prompt", "context_length_exceeded")
        assert f"maximum context length is {CONTEXT} tokens" in answer[2]["error"]["message"]
        assert answer[2]["error"]["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        plain.client.completions.create(model=NAME, prompt="a" * 100_000)
    assert plain.complete(prompt="a", max_tokens=1)[0] == 200


WRONG = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("n", 0),
    ("n", 1_000_000),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stream", "yes"),
    ("model", None),
    ("model", 5),
    ("prompt", "\ud800"),
    ("stop", "\udfff"),
    ("logprobs", 21),
    ("logprobs", True),
    ("echo", "yes"),
    ("best_of", 2),
    ("suffix", "x"),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -3),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"x": 5}),
    ("logit_bias", {"99999": 5}),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_object"}),
    ("top_k", -2),
    ("min_p", 2),
    ("repetition_penalty", 0),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_or_unsupported_parameter_is_refused_by_name(plain: Running, name: str, value: Any) -> None:
    began = time.monotonic()
    assert_error(plain.complete(**{"prompt": "a", name: value}), 400, name)
    assert time.monotonic() - began < 1


def test_neutral_null_and_unknown_fields_are_accepted(plain: Running) -> None:
    neutral = {"echo": False, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    nulls = dict.fromkeys(
        ("temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "logprobs", "tools")
    )
    unknown = {"user": "u", "foo": {"bar": 1}, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.1, "min_tokens": 2}
    status, _, answer = plain.complete(prompt="a", max_tokens=4, **neutral, **nulls, **unknown)
    assert status == 200 and answer["usage"]["completion_tokens"] >= 3


def test_tiny_temperatures_and_top_p_are_greedy(plain: Running) -> None:
    def text(**fields: Any) -> str:
        answer: str = plain.complete(prompt="a", max_tokens=20, **fields)[2]["choices"][0]["text"]
        return answer

    assert text(temperature=0) == text(temperature=1e-6) == text(top_p=1e-9) == text(top_k=1) == text(min_p=1.0)


JUNK = [
    b"",
    b"{",
    b"[]",
    b"nul",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"model":"tiny","prompt":"a","temperature":NaN}',
    b'{"model":"tiny","prompt":"a","seed":' + b"9" * 50_000 + b"}",
    b"junk " * 20_000,
]


@pytest.mark.parametrize("body", JUNK, ids=range(len(JUNK)))
def test_a_body_that_is_no_request_earns_400(plain: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, headers, data = plain.raw("POST", path, body, content_type="application/json")
        assert_error((status, headers, json.loads(data)), 400, None)


def test_wrong_routes_methods_and_types_have_the_same_error_shape(plain: Running) -> None:
    def error(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, dict[str, str], Any]:
        return answer[0], answer[1], json.loads(answer[2])

    assert_error(error(plain.raw("GET", "/v1/nothing")), 404, None)
    assert_error(error(plain.raw("GET", "/v1")), 404, None)
    wrong = error(plain.raw("GET", "/v1/completions"))
    assert_error(wrong, 405, None)
    assert wrong[1]["allow"] == "POST"
    assert_error(error(plain.raw("POST", "/v1/models", b"{}")), 405, None)
    assert_error(error(plain.raw("POST", "/v1/completions", b"a=1", content_type="text/plain")), 415, None)
    assert_error(plain.post("/v1/completions", model="nobody", prompt="a"), 404, "model", "model_not_found")
    assert_error(plain.post("/v1/completions"), 400, "prompt")
    assert_error(plain.post("/v1/chat/completions"), 400, "messages")


def test_a_body_beyond_a_megabyte_is_refused_declared_or_chunked(plain: Running) -> None:
    status, headers, data = plain.raw("POST", "/v1/completions", b"x" * 1_000_001, content_type="application/json")
    assert_error((status, headers, json.loads(data)), 413, None)
    connection = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=30)
    connection.request(
        "POST", "/v1/completions", iter([b"x" * 600_000] * 2), {"content-type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()
    assert plain.complete(prompt="a", max_tokens=1)[0] == 200


def test_chat_without_a_template_is_refused_with_the_way_out(plain: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        plain.client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "no_chat_template"
    assert "this model has no chat template: use /v1/completions" in str(caught.value)


def test_chat_answers_are_the_completion_of_the_rendered_template(chat: Running) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    answer = chat.client.chat.completions.create(model=NAME, messages=messages, max_tokens=20, temperature=0)
    rendered = "system:be brief\nuser:hi\nassistant:"
    plain = chat.client.completions.create(model=NAME, prompt=rendered, max_tokens=20, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", plain.choices[0].text)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(rendered)
    streamed = list(
        chat.client.chat.completions.create(model=NAME, messages=messages, max_tokens=20, temperature=0, stream=True)
    )
    first = streamed[0].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content
    assert [c.choices[0].finish_reason for c in streamed if c.choices[0].finish_reason] == [choice.finish_reason]
    assert streamed[-1].choices[0].delta.content is None


def test_chat_lengths_default_to_the_cap_and_never_pass_it(chat: Running) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    path = "/v1/chat/completions"
    assert chat.post(path, **asked)[2]["usage"]["completion_tokens"] == 32
    assert chat.post(path, **asked, max_tokens=None)[2]["usage"]["completion_tokens"] == 32
    assert chat.post(path, **asked, max_tokens=5, max_completion_tokens=5)[2]["usage"]["completion_tokens"] == 5
    assert_error(chat.post(path, **asked, max_tokens=5, max_completion_tokens=6), 400, "max_tokens")
    assert_error(chat.post(path, **asked, max_tokens=33), 400, "max_tokens")
    too_long = {"messages": [{"role": "user", "content": "x" * CONTEXT}]}
    assert_error(chat.post(path, **too_long), 400, "messages", "context_length_exceeded")


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
WRONG_MESSAGES: list[Any] = [
    [],
    "hi",
    [{"role": "user"}],
    [{"role": "robot", "content": "x"}],
    [{"role": "user", "content": [IMAGE]}],
    [{"role": "user", "content": "\ud800"}],
]


@pytest.mark.parametrize("messages", WRONG_MESSAGES, ids=range(6))
def test_wrong_messages_are_refused(chat: Running, messages: Any) -> None:
    assert_error(chat.post("/v1/chat/completions", messages=messages), 400, "messages")


def test_a_client_that_leaves_frees_the_model(slow: Running) -> None:
    for stream in (True, False):
        if stream:
            connection, response = start_stream(slow)
            assert response.status == 200
        else:
            connection = http.client.HTTPConnection("127.0.0.1", slow.port)
            body = {"model": NAME, "prompt": "a", "max_tokens": 100_000, "ignore_eos": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = None
        wait_until(lambda: slow.app.engine.busy, 5)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        if response:
            response.close()
        wait_until(lambda: not slow.app.engine.busy, 2)
        before = slow.app.engine.stats().generated_tokens
        time.sleep(0.2)
        assert slow.app.engine.stats().generated_tokens == before
    assert slow.complete(prompt="a", max_tokens=2)[0] == 200


def test_a_full_queue_answers_429_and_then_serves_on(slow: Running) -> None:
    connections = [start_stream(slow)[0]]
    wait_until(lambda: slow.app.engine.busy, 2)
    waiting = threading.Thread(target=lambda: slow.complete(prompt="a", max_tokens=1))
    waiting.start()
    wait_until(lambda: slow.app.engine.stats().waiting == 1, 2)
    answer = slow.complete(prompt="a", max_tokens=1)
    assert_error(answer, 429, None, "queue_full")
    assert answer[1]["retry-after"] == "1"
    for connection in connections:
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    waiting.join(5)
    assert slow.complete(prompt="a", max_tokens=1)[0] == 200


def test_a_request_beyond_the_deadline_ends_in_the_way_its_mode_allows(slow: Running) -> None:
    began = time.monotonic()
    asked = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True}
    assert_error(slow.complete(**asked), 408, None, "request_timeout")
    assert 1.4 < time.monotonic() - began < 4
    with pytest.raises(openai.APIError, match="longer than this server allows"):
        for _ in slow.client.completions.create(
            model=NAME, prompt="a", max_tokens=100_000, stream=True, extra_body={"ignore_eos": True}
        ):
            pass
    assert "[DONE]" not in slow.complete(**asked, stream=True)[2]


def test_a_model_that_fails_ends_the_engine_and_says_so_everywhere(tmp_path: Path) -> None:
    servers = serve(save_tiny_model(tmp_path / "m"), ServingOptions())
    running = next(servers)
    assert running.app.engine._loaded is not None
    running.app.engine._loaded.model.forward = None
    assert_error(running.complete(prompt="a"), 503, None, "unavailable")
    wait_until(lambda: not running.app.engine.alive, 2)
    for path in ("/health", "/ready", "/v1/models"):
        status, headers, data = running.raw("GET", path)
        assert_error((status, headers, json.loads(data)), 503, None)
    answer = running.complete(prompt="a")
    assert_error(answer, 503, None)
    assert answer[1]["retry-after"] == "1"
    next(servers, None)


def test_answers_do_not_depend_on_what_else_is_asked(plain: Running) -> None:
    asked = [{"prompt": f"p{i}", "max_tokens": 20, "seed": i} for i in range(8)]
    alone = [plain.complete(**fields)[2]["choices"][0]["text"] for fields in asked]
    together: dict[int, str] = {}

    def ask(i: int) -> None:
        together[i] = plain.complete(**asked[i])[2]["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(asked))] == alone


def test_two_hundred_wild_requests_never_earn_a_server_error(plain: Running) -> None:
    """Seeded: legal and illegal values for every field, mixed. The model answers as before afterwards."""
    draw = random.Random(7)
    values: list[Any] = [
        None, True, False, 0, 1, -1, 2, 0.5, 1e9, 1e308, 10**30, "", "a", "a" * 3000, "\ud800", "🙂", [], [0], ["a"], [[1, 2]],
        {}, {"include_usage": True}, ["a"] * 9, [{"role": "user", "content": "x"}], {"type": "text"},
    ]  # fmt: skip
    kinds = (CompletionRequest, ChatRequest)
    names = [*(name for kind in kinds for name in (*kind.model_fields, *kind.neutral)), "foo"]
    before = plain.complete(prompt="golden", max_tokens=8, temperature=0)[2]["choices"]
    for _ in range(200):
        fields = {name: draw.choice(values) for name in draw.sample(names, draw.randint(1, 4))}
        base = {"prompt": "a", "max_tokens": 2} if draw.random() < 0.8 else {}
        status, headers, answer = plain.post(
            draw.choice(("/v1/completions", "/v1/chat/completions")), **{"model": NAME, **base, **fields}
        )
        assert status in (200, 400, 404), (fields, answer)
        if status != 200:
            assert set(answer["error"]) == {"message", "type", "param", "code"} and headers["x-model-version"] == "7"
    assert plain.complete(prompt="golden", max_tokens=8, temperature=0)[2]["choices"] == before


def test_a_silent_stream_is_kept_open_by_comments(slow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.serving.app.PING_S", 0.1)
    connection, _ = start_stream(slow)
    waiting, response = start_stream(slow)
    assert response.status == 200
    assert response.readline() in (b"\n", b": ping\n")
    for open_connection in (connection, waiting):
        assert open_connection.sock is not None
        open_connection.sock.shutdown(socket.SHUT_RDWR)
        open_connection.close()
    wait_until(lambda: not slow.app.engine.busy and slow.app.engine.stats().waiting == 0, 3)


def test_a_server_is_not_ready_before_its_model_answered(tmp_path: Path) -> None:
    """The app answers from its first moment: alive, not ready, then ready."""
    app = build_app(save_tiny_model(tmp_path / "m"), name=NAME, version=1, digest=DIGEST, options=ServingOptions())
    statuses = {}

    async def ask(path: str) -> int:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app({"type": "http", "method": "GET", "path": path, "headers": []}, None, send)  # type: ignore[arg-type]
        status: int = sent[0]["status"]
        return status

    for path in ("/health", "/ready", "/v1/models"):
        statuses[path] = asyncio.run(ask(path))
    app.engine.wait_ready(60)
    assert statuses == {"/health": 200, "/ready": 503, "/v1/models": 503}
    assert asyncio.run(ask("/ready")) == 200
    app.engine.close()
    assert asyncio.run(ask("/health")) == 503


def test_a_directory_that_cannot_be_served_fails_with_its_reason(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "m")
    (directory / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:1000])
    app = build_app(directory, name=NAME, version=1, digest=DIGEST, options=ServingOptions())
    with pytest.raises(StageError, match="the model does not load"):
        app.engine.wait_ready(60)
    tensors = load_file(save_tiny_model(tmp_path / "n") / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "n" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageError, match=r"the weights miss model\.norm\.weight"):
        load_model(tmp_path / "n")
