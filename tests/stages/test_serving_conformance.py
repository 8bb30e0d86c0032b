"""The rest of what OpenAI's clients rely on: log-probabilities, penalties, echo, tools, keys, origins, ids, metrics, loads. Over plain
uvicorn, with the real client."""

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from stages.serving import asgi
from stages.serving.model import LoadedModel, load_model
from stages.serving.options import ServingOptions, key_digest
from stages.serving.protocol import ChatRequest, parse
from tests.stages.serving_server import (
    CONTEXT,
    DIGEST,
    NAME,
    Running,
    assert_error,
    leave,
    serve,
    sse,
    start_stream,
    wait_until,
)
from tests.stages.tiny_model import CHAT_TEMPLATE, save_tiny_model

TOOL_TEMPLATE = (Path(__file__).parents[1] / "data" / "chat_templates" / "qwen25.jinja").read_text("utf-8")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serve(save_tiny_model(tmp_path_factory.mktemp("m") / "plain", context=CONTEXT), ServingOptions())


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(tmp_path_factory.mktemp("m") / "chat", context=1_024, chat_template=CHAT_TEMPLATE)
    yield from serve(directory, ServingOptions(max_tokens=32))


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(tmp_path_factory.mktemp("m") / "tools", context=4_096, chat_template=TOOL_TEMPLATE)
    yield from serve(directory, ServingOptions(max_tokens=8))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two keys are let in, one origin may read."""
    options = ServingOptions(
        key_digests=(key_digest("first-key"), key_digest("second-key")), cors_origins=("https://app.example.com",)
    )
    yield from serve(save_tiny_model(tmp_path_factory.mktemp("m") / "guarded"), options)


def scores(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [len(ids), vocab_size] by one plain pass."""
    with torch.inference_mode():
        made: torch.Tensor = loaded.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return made


def test_echoed_log_probabilities_are_those_of_a_plain_pass(plain: Running) -> None:
    """What evaluation harnesses read: prompt and one token, the first without a value, likeliest tokens by name."""
    loaded = load_model(plain.directory)
    ids = loaded.tokenizer("naïve 🙂 text").input_ids
    wanted = scores(loaded, ids)
    asked = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answer = plain.complete(**asked)[2]
    told = answer["choices"][0]["logprobs"]
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        len(ids) + 1
    ] * 4
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        assert told["token_logprobs"][place] == pytest.approx(float(wanted[place - 1, ids[place]]), abs=1e-4)
        assert max(told["top_logprobs"][place].values()) == pytest.approx(float(wanted[place - 1].max()), abs=1e-4)
    assert told["token_logprobs"][-1] == pytest.approx(float(wanted[-1].max()), abs=1e-4)
    assert told["text_offset"] == sorted(told["text_offset"]) and told["text_offset"][0] == 0
    assert answer["choices"][0]["text"].startswith("naïve 🙂 text")
    assert told["tokens"][:2] == ["n", "a"] and told["tokens"][2:4] == ["bytes:\\xc3", "bytes:\\xaf"]
    events = sse(plain.complete(**asked, stream=True)[2])[:-1]
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    for name in told:
        assert [value for part in streamed for value in part[name]] == told[name]


def test_the_prompt_alone_is_scored_with_echo_and_no_tokens(plain: Running) -> None:
    answer = plain.complete(prompt=["abc", "de"], echo=True, logprobs=0, max_tokens=0)[2]
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "de"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 2]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert plain.complete(prompt="a" * CONTEXT, echo=True, max_tokens=0)[0] == 200
    assert_error(plain.complete(prompt="a", max_tokens=0), 400, "max_tokens")


def test_echo_puts_the_prompt_before_the_answer_in_both_modes(plain: Running) -> None:
    asked = {"prompt": "héé", "max_tokens": 12, "temperature": 0}
    bare = plain.complete(**asked)[2]["choices"][0]["text"]
    assert plain.complete(**asked, echo=True)[2]["choices"][0]["text"] == "héé" + bare
    events = sse(plain.complete(**asked, echo=True, stream=True)[2])[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == "héé" + bare


def test_chat_log_probabilities_are_exact_and_their_bytes_are_the_text(chat: Running) -> None:
    loaded = load_model(chat.directory)
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "temperature": 0, "logprobs": True,
        "top_logprobs": 3,
    }  # fmt: skip
    choice = chat.post(CHAT_PATH, **asked)[2]["choices"][0]
    told = choice["logprobs"]["content"]
    text = b"".join(bytes(one["bytes"]) for one in told).decode("utf-8", "replace")
    assert text.startswith(choice["message"]["content"]) and len(text) - len(choice["message"]["content"]) <= 3
    ids = loaded.tokenizer("user:hi\nassistant:").input_ids
    for one in told:
        row = scores(loaded, ids)[-1]
        assert len(one["top_logprobs"]) == 3 and one["top_logprobs"][0]["bytes"] == one["bytes"]
        assert one["logprob"] == pytest.approx(float(row.max()), abs=1e-4)
        assert sum(math.exp(top["logprob"]) for top in one["top_logprobs"]) <= 1 + 1e-6
        ids.append(int(row.argmax()))
    events = sse(chat.post(CHAT_PATH, **asked, stream=True)[2])[:-1]
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [one for part in parts if part for one in part["content"]] == told
    for wrong in ({"logprobs": False}, {"logprobs": None}, {"top_logprobs": 21}, {"logprobs": 2}):
        answer = chat.post(CHAT_PATH, **{**asked, **wrong})
        assert_error(answer, 400, "logprobs" if wrong == {"logprobs": 2} else "top_logprobs")
    without = chat.post(CHAT_PATH, **{**asked, "logprobs": False, "top_logprobs": 0})[2]
    assert without["choices"][0]["logprobs"] is None


def test_a_bias_forces_and_bans_and_penalties_are_taken_off_what_was_said(plain: Running) -> None:
    loaded = load_model(plain.directory)
    letter = loaded.tokenizer("q").input_ids[0]
    asked = {"prompt": "ab", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    forced = plain.complete(**asked, logit_bias={str(letter): 100})[2]["choices"][0]["text"]
    assert forced == "qqqqqq"
    every = {str(token): 100 for token in loaded.tokenizer("xyz").input_ids}
    once = plain.complete(**asked, logit_bias=every, presence_penalty=2, frequency_penalty=2)[2]["choices"][0]["text"]
    # By hand: the same formula on the logits of plain passes.
    ids, made = loaded.tokenizer("ab").input_ids, list[int]()
    for _ in range(6):
        with torch.no_grad():
            logits = loaded.model(input_ids=torch.tensor([[*ids, *made]])).logits[0, -1].float().clone()
        for token in every:
            logits[int(token)] += 100
        for token in set(made):
            logits[token] -= 2 + 2 * made.count(token)
        made.append(int(logits.argmax()))
    assert once == loaded.tokenizer.decode(made)
    free = plain.complete(**asked)[2]["choices"][0]["text"]
    first = loaded.tokenizer(free).input_ids[0]
    banned = plain.complete(**asked, logit_bias={str(first): -100}, logprobs=0)[2]["choices"][0]["logprobs"]
    assert free[0] not in banned["tokens"] and len(banned["tokens"]) == 6


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-30, 10])
def test_numbers_at_the_edge_are_answered(plain: Running, penalty: float) -> None:
    for more in ({"temperature": 1e-4}, {"temperature": 2}, {"temperature": 0}, {"top_p": 1e-300, "min_p": 1}):
        status, _, answer = plain.complete(prompt="aba", max_tokens=4, repetition_penalty=penalty, **more)
        assert status == 200, answer


def test_the_template_is_shown_the_tools(tooled: Running) -> None:
    messages: list[Any] = [{"role": "user", "content": "rain?"}]
    tools: Any = [WEATHER]
    shown = tooled.client.chat.completions.create(
        model=NAME, messages=messages, tools=tools, temperature=0, max_tokens=8
    )
    template = load_model(tooled.directory).template
    assert template is not None
    ids = template.prompt_ids(messages, tools)
    assert shown.usage is not None and shown.usage.prompt_tokens == len(ids) > len(template.prompt_ids(messages))
    same = tooled.complete(prompt=ids, max_tokens=8, temperature=0)[2]["choices"][0]["text"]
    assert shown.choices[0].message.content == same
    hidden = tooled.post(CHAT_PATH, messages=messages[:1], tools=[WEATHER], tool_choice="none")[2]["usage"]
    assert hidden["prompt_tokens"] == tooled.post(CHAT_PATH, messages=messages[:1])[2]["usage"]["prompt_tokens"]
    for wrong in ("required", {"type": "function", "function": {"name": "weather"}}):
        assert_error(
            tooled.post(CHAT_PATH, messages=messages[:1], tools=[WEATHER], tool_choice=wrong), 400, "tool_choice"
        )
    for tools in ([{"type": "function"}], [{"type": "function", "function": {}}], "weather"):
        assert_error(tooled.post(CHAT_PATH, messages=messages[:1], tools=tools), 400, "tools")


def test_calls_and_their_results_are_handed_on_in_canonical_form() -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    body = {
        "model": NAME,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "dry"},
        ],
    }
    request = parse(ChatRequest, json.dumps(body).encode())
    assert [message.canonical() for message in request.messages] == [
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
            ],
        },
        {"role": "tool", "content": "dry", "tool_call_id": "c1"},
    ]


def test_a_template_without_tools_refuses_them(chat: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "max_tokens": 2}
    assert_error(chat.post(CHAT_PATH, **asked), 400, "tools")


DEEP: Any = json.loads('{"a":' * 900 + "1" + "}" * 900)


@pytest.mark.parametrize(
    "call",
    [
        {"name": "weather", "arguments": "{"},
        {"name": "weather", "arguments": "[1]"},
        {"name": "weather", "arguments": '{"a": NaN}'},
        {"name": "weather", "arguments": '{"a":' * 5_000 + "1" + "}" * 5_000},
        {"name": "weather", "arguments": '{"a": "\\ud800"}'},
        {"name": 5},
        {"name": "weather", "arguments": DEEP},
    ],
    ids=range(7),
)
def test_wrong_tool_calls_are_the_clients_mistake(tooled: Running, call: dict[str, Any]) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}]
    assert_error(tooled.post(CHAT_PATH, messages=messages), 400, "messages")
    assert tooled.complete(prompt="a", max_tokens=1)[0] == 200


def test_sixteen_greedy_requests_at_once_are_the_sixteen_alone(plain: Running) -> None:
    asked = [{"prompt": f"{'x' * (n * 7 % 40)}p{n}", "max_tokens": 20, "temperature": 0} for n in range(16)]
    alone = [plain.complete(**one)[2]["choices"][0]["text"] for one in asked]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda one: plain.complete(**one)[2]["choices"][0]["text"], asked))
    assert together == alone


def test_several_choices_are_streamed_each_with_one_role_and_one_end(chat: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "n": 3, "seed": 4}
    events = sse(chat.post(CHAT_PATH, **asked, stream=True)[2])
    assert events.pop() == "[DONE]"
    whole = chat.post(CHAT_PATH, **asked)[2]["choices"]
    for index in range(3):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in choice["delta"] for choice in mine) == 1
        assert [choice["finish_reason"] is not None for choice in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1]["delta"] == {}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == whole[index]["message"]["content"]
    assert [event["choices"][0]["delta"].get("role") for event in events[:3]] == ["assistant"] * 3
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1


def test_every_answer_says_what_made_it(plain: Running) -> None:
    for method, path, body in (
        ("GET", "/health", None), ("GET", "/nowhere", None), ("POST", "/v1/completions", b"{"),
        ("POST", "/v1/completions", json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1}).encode()),
    ):  # fmt: skip
        _, headers, _ = plain.raw(method, path, body, content_type="application/json", x_request_id="mine-1")
        assert (headers["x-model-version"], headers["x-model-digest"]) == ("7", DIGEST)
        assert headers["x-request-id"] == "mine-1"
    for stream in (False, True):
        status, headers, answer = plain.complete(prompt="a", max_tokens=1, stream=stream)
        identity = answer["id"] if not stream else sse(answer)[0]["id"]
        assert status == 200 and headers["x-model-digest"] == DIGEST
        assert identity.startswith(f"cmpl-{DIGEST[:12]}") and len(identity) == len("cmpl-") + 32
    made = {plain.raw("GET", "/health")[1]["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    forged = plain.raw("GET", "/health", x_request_id="a" * 129)[1]["x-request-id"]
    assert forged != "a" * 129


def test_a_key_is_asked_for_where_keys_are_set(guarded: Running) -> None:
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1}).encode()

    def ask(
        path: str = "/v1/completions", data: bytes | None = body, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        status, found, answer = guarded.raw(
            "POST" if data else "GET", path, data, content_type="application/json", **headers
        )
        return status, found, json.loads(answer)

    for headers in (
        {}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong"},
        {"authorization": "Basic first-key"}, {"authorization": "first-key"}, {"authorization": "Bearer \xff"},
        {"authorization": f"Bearer {key_digest('first-key')}"},
    ):  # fmt: skip
        refused = ask(**headers)
        assert_error(refused, 401, None, "invalid_api_key")
        assert refused[2]["error"]["type"] == "invalid_request_error" and refused[1]["www-authenticate"] == "Bearer"
        assert ask("/v1/models", None, **headers)[0] == 401
    for key in ("first-key", "second-key"):
        assert ask(authorization=f"Bearer {key}")[0] == 200
    assert ask(authorization="bearer first-key")[0] == 200
    for path in ("/health", "/ready"):
        assert ask(path, None)[0] == 200
    assert guarded.raw("GET", "/metrics")[0] == 401
    with pytest.raises(openai.AuthenticationError):
        guarded.client.models.list()
    assert "first-key" not in json.dumps(ask("/ready", None)[2])


def test_a_page_of_a_named_origin_may_read_and_no_other(guarded: Running, plain: Running) -> None:
    def headers(running: Running, method: str, origin: str) -> tuple[int, dict[str, str]]:
        status, found, _ = running.raw(method, "/v1/models", origin=origin, authorization="Bearer first-key")
        return status, found

    ours = "https://app.example.com"
    status, found = headers(guarded, "GET", ours)
    assert status == 200 and found["access-control-allow-origin"] == ours and found["vary"] == "Origin"
    assert "access-control-allow-credentials" not in found
    status, found = headers(guarded, "OPTIONS", ours)
    assert status == 204 and "authorization" in found["access-control-allow-headers"]
    status, found = headers(guarded, "OPTIONS", "https://evil.example.com")
    assert status == 403 and "access-control-allow-origin" not in found
    assert "access-control-allow-origin" not in headers(guarded, "GET", "https://evil.example.com")[1]
    status, found = headers(plain, "OPTIONS", ours)
    assert status == 405 and not any(name.startswith("access-control") for name in found)


def test_a_client_may_ask_for_an_earlier_end(plain: Running) -> None:
    directory_body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 200, "ignore_eos": True}).encode()

    def ask(seconds: str) -> tuple[int, dict[str, str], Any]:
        status, found, answer = plain.raw(
            "POST",
            "/v1/completions",
            directory_body,
            content_type="application/json",
            x_request_timeout_seconds=seconds,
        )
        return status, found, json.loads(answer)

    assert_error(ask("0.02"), 408, None, "request_timeout")
    assert ask("60")[0] == 200
    for wrong in ("0", "-1", "soon", "nan", "1e3", ""):
        assert_error(ask(wrong), 400, "x-request-timeout-seconds")


def test_metrics_count_what_was_sent(tmp_path_factory: pytest.TempPathFactory) -> None:
    servers = serve(save_tiny_model(tmp_path_factory.mktemp("m") / "counted"), ServingOptions())
    running = next(servers)

    def values() -> dict[tuple[str, ...], float]:
        status, headers, text = running.raw("GET", "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain")
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }

    before = values()
    for _ in range(3):
        running.complete(prompt="abcd", max_tokens=5, temperature=0, ignore_eos=True)
    running.complete(prompt="abcd", max_tokens=5, stream=True, ignore_eos=True)
    running.complete(prompt="abcd", max_tokens=-1)
    running.raw("GET", "/somewhere/else")
    running.raw("GET", "/v1/models/other")
    after = values()
    assert after["llm_requests_total", "/v1/completions", "200"] == 4
    assert after["llm_requests_total", "/v1/completions", "400"] == 1
    assert (
        after["llm_requests_total", "other", "404"] == 1 and after["llm_requests_total", "/v1/models/...", "404"] == 1
    )
    assert after["llm_rejected_total", "model_not_found"] == 1
    assert after["llm_generation_tokens_total",] - before["llm_generation_tokens_total",] == 20
    assert after["llm_prompt_tokens_total",] - before["llm_prompt_tokens_total",] == 16
    assert after["llm_time_to_first_token_seconds_count",] == 4 == after["llm_request_seconds_count",]
    assert after["llm_inter_token_seconds_count",] > 0
    assert (after["llm_running",], after["llm_waiting",]) == (0, 0)
    next(servers, None)


def test_the_api_describes_itself(plain: Running) -> None:
    status, _, text = plain.raw("GET", "/openapi.json")
    found = json.loads(text)
    assert status == 200 and found["openapi"].startswith("3.1")
    assert {"/v1/completions", CHAT_PATH, "/v1/models", "/health", "/ready", "/metrics"} <= found["paths"].keys()
    fields = found["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "top_logprobs", "tools"} <= fields.keys()


@pytest.mark.slow
def test_a_sender_that_dawdles_and_a_reader_that_takes_nothing_are_cut_off(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "RECEIVE_S", 0.3)
    with socket.create_connection(("127.0.0.1", plain.port), timeout=10) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        began = time.monotonic()
        answer = slow.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer and time.monotonic() - began < 5
    monkeypatch.setattr(asgi, "SEND_S", 0.3)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_024)
        deaf.connect(("127.0.0.1", plain.port))
        body = json.dumps(
            {
                "model": NAME,
                "prompt": ["a" * 40] * 128,
                "stream": True,
                "max_tokens": 200,
                "logprobs": 20,
                "ignore_eos": True,
            }
        ).encode()
        deaf.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_until(lambda: plain.app.engine.busy, 5)
        wait_until(lambda: not plain.app.engine.busy, 30)  # without the cut: 25,600 tokens
        assert plain.app.engine.stats().cancelled > 0
    assert plain.complete(prompt="a", max_tokens=1)[0] == 200


@pytest.mark.slow
def test_a_burst_beyond_the_queue_is_refused_early_and_all_others_are_answered(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Sixty requests at once, places for two and a queue of eight: each is answered or refused with 429, none hangs or fails."""
    directory = save_tiny_model(tmp_path_factory.mktemp("m") / "small", context=2_048)
    servers = serve(directory, ServingOptions(max_batch=2, max_queue=8))
    running = next(servers)
    times: list[float] = []

    def ask(number: int) -> int:
        began = time.monotonic()
        status, headers, answer = running.complete(prompt=f"p{number}", max_tokens=60, temperature=0, ignore_eos=True)
        if status == 429:
            times.append(time.monotonic() - began)
            assert headers["retry-after"] == "1" and answer["error"]["code"] == "queue_full"
        return status

    blocked = start_stream(running, max_tokens=2_000)[0], start_stream(running, max_tokens=2_000)[0]
    wait_until(lambda: running.app.engine.stats().running == 2, 5)
    with ThreadPoolExecutor(60) as pool:
        asked = [pool.submit(ask, number) for number in range(60)]
        wait_until(lambda: len(times) == 52, 20)
        for connection in blocked:
            leave(connection)
        statuses = [one.result() for one in asked]
    assert sorted(statuses) == [200] * 8 + [429] * 52
    assert running.complete(prompt="a", max_tokens=1)[0] == 200
    next(servers, None)


@pytest.mark.slow
def test_a_dead_thread_is_told_by_health_and_by_every_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    servers = serve(save_tiny_model(tmp_path_factory.mktemp("m") / "closed"), ServingOptions())
    running = next(servers)
    running.app.engine.close()
    for path in ("/health", "/ready"):
        status, headers, data = running.raw("GET", path)
        assert_error((status, headers, json.loads(data)), 503, None)
    answer = running.complete(prompt="a")
    assert_error(answer, 503, None, "unavailable")
    assert answer[1]["retry-after"] == "1"
    next(servers, None)


def test_no_text_of_a_prompt_or_key_reaches_a_log(
    guarded: Running, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    secret = "a-very-secret-sentence"
    for key, more in (
        ("first-key", {}),
        ("wrong-key", {}),
        ("first-key", {"max_tokens": -1}),
        ("first-key", {"stop": 5}),
    ):
        body = json.dumps({"model": NAME, "prompt": secret, "max_tokens": 2, **more}).encode()
        guarded.raw("POST", "/v1/completions", body, content_type="application/json", authorization=f"Bearer {key}")
    said = caplog.text + "".join(capfd.readouterr())
    assert secret not in said and "first-key" not in said and "wrong-key" not in said


def test_a_connection_that_breaks_frees_its_place_within_a_second(plain: Running) -> None:
    connections = [start_stream(plain, max_tokens=250)[0] for _ in range(4)]
    for connection in connections:
        leave(connection)
    began = time.monotonic()
    wait_until(lambda: not plain.app.engine.busy, 1)
    assert time.monotonic() - began < 1


def test_the_same_connection_serves_many_requests(plain: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=30)
    for number in range(5):
        body = {"model": NAME, "prompt": f"{number}", "max_tokens": 1, **({"n": 0} if number % 2 else {})}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        assert response.status == (400 if number % 2 else 200)
    connection.close()


def test_the_async_client_streams_and_is_refused_alike(plain: Running) -> None:
    import asyncio

    async def ask() -> tuple[str, str, int]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{plain.port}/v1", api_key="none", max_retries=0
        ) as client:
            asked: dict[str, Any] = {"model": NAME, "prompt": "ab", "max_tokens": 12, "temperature": 0}
            whole = (await client.completions.create(**asked)).choices[0].text
            parts = [part.choices[0].text async for part in await client.completions.create(**asked, stream=True)]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(**{**asked, "temperature": 3})
            return whole, "".join(parts), caught.value.status_code

    whole, streamed, status = asyncio.run(ask())
    assert whole == streamed and status == 400


@pytest.mark.slow
def test_requests_from_many_threads_never_mix(plain: Running) -> None:
    wanted: dict[int, str] = {}
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(4):
            text = plain.complete(prompt=f"thread {number}", max_tokens=8, temperature=0)[2]["choices"][0]["text"]
            if wanted.setdefault(number, text) != text:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(set(wanted.values())) > 1
