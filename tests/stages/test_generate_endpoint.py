"""Generation through a real HTTP server: retries, failures that are counted, an endpoint that is gone, a kill in the middle."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import Checkpoint
from stages.contract import Executor, ResourcesUnavailable, StageError
from stages.generate import GenerateConfig, GenerateResources, generate
from stages.serving.options import ServingOptions
from stages.text.journal import Journal
from stages.text.record import Record, canonical
from stages.text.synthesis import Ask, AskAs, Decoding, Endpoint, Kind, Output, Score, ScoreBy
from tests.stages.test_generate import rows_of, texts, tree, write
from tests.stages.test_serving_app import NAME, serve
from tests.stages.tiny_model import CHAT_TEMPLATE, save_tiny_model


class Model:
    """An OpenAI-compatible server whose answers follow from the request alone, and which fails as it is told."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.keys: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.fail = lambda text, times: None
        self.delay_s = 0.0
        self.most = self.now = 0
        model, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
                with lock:
                    model.requests.append(body | {"path": self.path})
                    model.keys.add(self.headers["Authorization"])
                    model.seen[text] += 1
                    times = model.seen[text]
                    model.now += 1
                    model.most = max(model.most, model.now)
                time.sleep(model.delay_s)
                status, reply = 200, model.reply(body, text)
                if failure := model.fail(text, times):
                    status, reply = failure
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                with lock:
                    model.now -= 1
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if data.startswith(b"<") else "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 429:
                    self.send_header("Retry-After", "0.01")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda request, address: None  # a client that has stopped asking hangs up
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    @staticmethod
    def answer(text: str, seed: int) -> str:
        return "about " + hashlib.sha256(f"{text}{seed}".encode()).hexdigest()[:8]

    def reply(self, body: dict, text: str) -> dict:
        said = self.answer(text, body["seed"])
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": "stop"} | ({"text": said} if "prompt" in body else {"message": message})
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return {"id": "1", "object": "x", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture
def model():
    made = Model()
    yield made
    made.server.shutdown()
    made.server.server_close()


def config(model, *, concurrency: int = 4, request_retries: int = 2, request_timeout_s: float = 20, **values):
    resources = GenerateResources(
        executor=Executor.inline, concurrency=concurrency, request_retries=request_retries,
        request_timeout_s=request_timeout_s,
    )  # fmt: skip
    endpoint = Endpoint(base_url=model.base_url, model="m", revision="1")
    return GenerateConfig(**({"endpoint": endpoint, "resources": resources} | values))


def error(kind: str, code: str | None = None) -> dict:
    return {"error": {"message": "no", "type": kind, "code": code, "param": None}}


def test_each_row_is_asked_once_in_chats_with_its_own_seed_and_few_at_a_time(tmp_path, make_context, model) -> None:
    model.delay_s = 0.01
    given, ctx = texts(40), make_context(seed=5)
    cfg = config(model, ask=Ask(template="Ask: {text}", system="be brief"), output=Output(kind=Kind.chat))
    generate(cfg, ctx, rows=write(tmp_path / "rows", given))
    seeds = {body["messages"][1]["content"]: body["seed"] for body in model.requests}
    assert len(model.requests) == len(set(seeds.values())) == 40
    assert 1 < model.most <= 4 and model.keys == {"Bearer none"}
    for row, record in zip(rows_of(ctx.output), given, strict=True):
        asked = f"Ask: {record.text}"
        assert json.loads(row["messages"]) == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": model.answer(asked, seeds[asked])},
        ]
    summary = json.loads((ctx.output / "summary.json").read_text())
    assert summary["model"] == {"base_url": model.base_url, "model": "m", "revision": "1"}
    assert (summary["prompt_tokens"], summary["tokens"]) == (120, 80)


def test_what_passes_is_tried_again_and_what_does_not_is_quarantined_within_the_limit(
    tmp_path, make_context, model
) -> None:
    given = texts(12)
    bad, slow, page = given[3].text, given[5].text, given[7].text

    def fail(text, times):
        if text == bad:
            return 400, error("invalid_request_error", "context_length_exceeded")
        if text == page:
            return 200, b"<html>"
        if text == slow:
            return 503, error("server_error")
        return (429, error("rate_limit_error")) if times == 1 else None

    model.fail = fail
    ctx = make_context()
    generate(config(model, max_bad_fraction=0.3), ctx, rows=write(tmp_path / "rows", given))
    assert len(rows_of(ctx.output)) == 9
    found = [json.loads(line) for line in (ctx.output / "quarantine.jsonl").read_text().splitlines()]
    assert [(each["id"], each["reason"], each["detail"]) for each in found] == [
        (given[3].id, "request_refused", "HTTP 400, context_length_exceeded"),
        (given[5].id, "request_failed", "HTTP 503"),
        (given[7].id, "no_answer", "the reply has no choices"),
    ]
    assert model.seen[slow] == 3 and model.seen[bad] == 1 and model.seen[given[0].text] == 2


def odd_replies(good: dict) -> list[tuple[Any, str]]:
    """Replies that servers and proxies give, and the detail under which each is no answer; empty: it is one."""
    choice = good["choices"][0]

    def saying(message: Any) -> dict:
        return good | {"choices": [choice | {"message": message}]}

    return [
        (good | {"usage": {"prompt_tokens": 3}}, ""),
        (good | {"usage": {"prompt_tokens": None, "completion_tokens": None}}, ""),
        (good | {"usage": {"prompt_tokens": "3", "completion_tokens": {}}}, ""),
        (good | {"usage": "none"}, ""),
        (good | {"usage": [1]}, ""),
        ({name: value for name, value in good.items() if name != "usage"}, ""),
        (saying({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}), ""),
        (saying({"role": "assistant", "content": [{"type": "image_url"}]}), "an answer that is no text"),
        (saying({"role": "assistant", "content": [{"type": "text", "text": None}]}), "an answer that is no text"),
        (saying({"role": "assistant", "content": [{"type": "reasoning", "text": "hm"}]}), "an answer that is no text"),
        (saying({"role": "assistant", "content": 3}), "an answer that is no text"),
        (saying({"role": "assistant", "content": {"a": 1}}), "an answer that is no text"),
        (saying(None), "the reply has no message"),
        (saying("hello"), "the reply has no message"),
        (good | {"choices": [{name: value for name, value in choice.items() if name != "message"}]}, "the reply has no message"),
        (good | {"choices": [None]}, "the reply has no message"),
        (good | {"choices": 3}, "the reply has no choices"),
        (good | {"choices": {"a": 1}}, "the reply has no choices"),
        (good | {"choices": []}, "the reply has no choices"),
        ([], "the reply has no choices"),
        (3, "the reply has no choices"),
        (b'{"choices": [{"mess', "JSONDecodeError"),
    ]  # fmt: skip


def test_a_reply_in_another_form_is_an_answer_or_a_row_without_one_and_never_a_crash(
    tmp_path, make_context, model
) -> None:
    given = texts(len(odd_replies(model.reply({"seed": 0}, ""))))
    index = {record.text: number for number, record in enumerate(given)}

    def fail(text, times):
        good = model.reply({"seed": 0}, text)
        return 200, odd_replies(good)[index[text]][0]

    model.fail = fail
    ctx = make_context()
    generate(
        config(model, max_bad_fraction=1, output=Output(kind=Kind.text)), ctx, rows=write(tmp_path / "rows", given)
    )
    details = [detail for _, detail in odd_replies(model.reply({"seed": 0}, ""))]
    found = [json.loads(line) for line in (ctx.output / "quarantine.jsonl").read_text().splitlines()]
    assert [(each["id"], each["reason"], each["detail"]) for each in found] == [
        (record.id, "no_answer", detail) for record, detail in zip(given, details, strict=True) if detail
    ]
    answers = {row["id"]: row["text"] for row in rows_of(ctx.output)}
    assert len(answers) == details.count("") and answers[given[6].id] == "ab"
    summary = json.loads((ctx.output / "summary.json").read_text())
    assert (summary["prompt_tokens"], summary["tokens"]) == (3 + 3, 2)


def test_answers_whose_tokens_nobody_told_are_counted_and_kept_when_a_run_goes_on(
    tmp_path, make_context, model
) -> None:
    given, ctx = texts(6), make_context()
    (ctx.work / "answers").mkdir()
    kept = {"text": "kept", "finished": True}
    Journal(ctx.work / "answers").add(
        0,
        [
            (0, kept | {"prompt_tokens": None, "tokens": None}),  # as an earlier version wrote what it was told
            (1, kept | {"prompt_tokens": "3", "tokens": {}}),
            (2, kept | {"prompt_tokens": 5, "tokens": None}),
            (3, kept),
        ],
    )
    model.fail = lambda text, times: (200, model.reply({"seed": 0}, text) | {"usage": None}) if "_4(" in text else None
    generate(config(model, output=Output(kind=Kind.text)), ctx, rows=write(tmp_path / "rows", given))
    assert len(model.requests) == 2
    assert [row["text"] for row in rows_of(ctx.output)][:4] == ["kept"] * 4
    summary = json.loads((ctx.output / "summary.json").read_text())
    assert (summary["prompt_tokens"], summary["tokens"]) == (5 + 3, 2)
    assert summary["answers_without_token_counts"] == 5


def test_above_the_limit_the_stage_stops_early_and_a_second_run_asks_only_what_failed(
    tmp_path, make_context, model
) -> None:
    given = write(tmp_path / "rows", texts(60))
    model.fail = lambda text, times: (500, error("server_error")) if int(text.split("_")[1].split("(")[0]) % 2 else None
    ctx = make_context(fingerprint="a" * 64)
    with pytest.raises(StageError, match=r"rows were not answered by http://127.* request_failed HTTP 500"):
        generate(config(model, request_retries=0, max_bad_fraction=0.1), ctx, rows=given)
    asked = set(model.seen)
    assert len(asked) < 40
    model.fail = lambda text, times: None
    before = {text for text in asked if int(text.split("_")[1].split("(")[0]) % 2 == 0}
    model.seen.clear()
    ctx = make_context(fingerprint="a" * 64)
    generate(config(model, request_retries=0, max_bad_fraction=0.1), ctx, rows=given)
    assert len(rows_of(ctx.output)) == 60
    assert len(before & set(model.seen)) <= 8  # under way when it stopped
    fresh = make_context()
    generate(config(model), fresh, rows=given)
    assert tree(fresh.output) == tree(ctx.output)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "invalid_api_key", r"refuses model m \(HTTP 401"),
        (404, "model_not_found", r"refuses model m \(HTTP 404"),
        (400, "no_chat_template", r"set stages\.generate\.ask\.form=text"),
    ],
)
def test_what_no_row_could_mend_stops_at_once(tmp_path, make_context, model, status, code, message) -> None:
    model.fail = lambda text, times: (status, error("invalid_request_error", code))
    with pytest.raises(StageError, match=message):
        generate(config(model), make_context(), rows=write(tmp_path / "rows", texts(50)))
    assert len(model.requests) <= 12


def test_an_endpoint_that_is_gone_is_said_to_be_gone(tmp_path, make_context, model) -> None:
    model.server.shutdown()
    model.server.server_close()
    with pytest.raises(ResourcesUnavailable, match=r"does not answer at http.*run again to go on"):
        generate(config(model, request_retries=0), make_context(), rows=write(tmp_path / "rows", texts(5)))


def test_a_request_that_takes_too_long_is_a_row_that_failed(tmp_path, make_context, model) -> None:
    model.delay_s = 1.0
    cfg = config(model, request_timeout_s=0.2, request_retries=0, max_bad_fraction=0.5)
    with pytest.raises(StageError, match="request_timed_out"):
        generate(cfg, make_context(), rows=write(tmp_path / "rows", texts(3)))


def test_text_form_asks_for_a_continuation_and_tool_calls_go_as_the_protocol_has_them(
    tmp_path, make_context, model
) -> None:
    given = write(tmp_path / "rows", texts(2))
    cfg = config(
        model, ask=Ask(form=AskAs.text), decoding=Decoding(stop=["\n"], max_tokens=9, temperature=0.5, top_p=0.9)
    )
    generate(cfg, make_context(), rows=given)
    assert {body["path"] for body in model.requests} == {"/v1/completions"}
    wanted = {"stop": ["\n"], "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "model": "m"}
    assert all(body[name] == value for body in model.requests for name, value in wanted.items())
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"}, {"role": "user", "content": "and?"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    record = Record("c:000000001", "tiny", "chat", messages=canonical(messages), tools=canonical(tools))
    model.requests.clear()
    generate(config(model), make_context(), rows=write(tmp_path / "chat", [record]))
    [body] = model.requests
    assert body["tools"] == tools
    assert json.loads(body["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"x": "é"}


def test_a_score_is_read_and_weak_rows_leave(tmp_path, make_context, model) -> None:
    model.answer = lambda text, seed: f"I give it {text.split('_')[1].split('(')[0]}/9."
    ctx = make_context()
    cfg = config(model, score=Score(pattern=r"(\d+)/9", minimum=0, maximum=9, keep_from=4), max_bad_fraction=0.5)
    generate(cfg, ctx, rows=write(tmp_path / "rows", texts(14)))
    assert [row["id"][-2:] for row in rows_of(ctx.output)] == ["05", "06", "07", "08", "09", "10"]
    summary = json.loads((ctx.output / "summary.json").read_text())
    assert summary["dropped"] == {"below_threshold": 4} and summary["reasons"] == {"number_out_of_range": 4}


def test_the_key_comes_from_the_environment_and_stays_out_of_every_file(
    tmp_path, make_context, model, monkeypatch
) -> None:
    given, ctx = write(tmp_path / "rows", texts(3)), make_context()
    cfg = config(model)
    cfg.endpoint.api_key_env = "KEY_OF_A_TEST"
    with pytest.raises(StageError, match="api_key_env=KEY_OF_A_TEST"):
        generate(cfg, ctx, rows=given)
    monkeypatch.setenv("KEY_OF_A_TEST", "sesame-123")
    generate(cfg, ctx, rows=given)
    assert model.keys == {"Bearer sesame-123"}
    assert not any(b"sesame" in data for data in [*tree(ctx.output).values(), *tree(ctx.work).values()])


def test_endpoint_values_and_edges_are_checked(model) -> None:
    with pytest.raises(ValueError, match="base_url") as problem:
        Endpoint(base_url="http://bob:secret@h:1/v1", model="m", revision="1")
    assert "secret" not in str(problem.value)
    with pytest.raises(ValueError, match="revision"):
        Endpoint(base_url="http://h:1/v1", model="m", revision=" ")
    with pytest.raises(ValueError, match="one model must answer"):
        config(model).check(frozenset({"rows", "checkpoint"}))
    with pytest.raises(ValueError, match="log_probability needs a checkpoint"):
        config(model, score=Score(by=ScoreBy.log_probability)).check(frozenset({"rows"}))
    config(model).check(frozenset({"rows"}))


def run_killed_once(tmp_path: Path, job: dict[str, str], lines: int) -> Path:
    """Run the job, kill it with SIGKILL when that many rows are finished, run it again. Its output."""
    work, output = tmp_path / "work", tmp_path / "output"
    work.mkdir()
    (tmp_path / "job.json").write_text(json.dumps(job | {"work": str(work), "output": str(output)}))
    command = [sys.executable, "-m", "tests.stages.generating_job", str(tmp_path / "job.json")]

    def start() -> subprocess.Popen[bytes]:
        output.mkdir()
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)

    def finished() -> int:
        return sum(path.read_bytes().count(b"\n") for path in work.glob("answers/*"))

    first = start()
    deadline = time.monotonic() + 120
    while finished() < lines and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, first.stderr.read()
    kept = finished()
    assert lines <= kept
    output.rename(tmp_path / "killed")
    second = start()
    assert second.wait(120) == 0, second.stderr.read()
    return output


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_bytes_of_an_undisturbed_one(tmp_path, make_context, model) -> None:
    model.delay_s = 0.005
    given = write(tmp_path / "rows", texts(120))
    output = run_killed_once(
        tmp_path, {"rows": str(given.local()), "digest": given.digest, "base_url": model.base_url}, 120
    )
    assert len(model.requests) <= 120 + 8
    whole = make_context(seed=3)
    decoding = Decoding(max_tokens=24, temperature=0.8, keep_unfinished=True)
    generate(config(model, decoding=decoding, batch_rows=4), whole, rows=given)
    assert tree(output) == tree(whole.output)


@pytest.mark.slow
def test_a_run_killed_while_a_checkpoint_answers_ends_with_the_same_bytes(tmp_path, make_context) -> None:
    directory = save_tiny_model(tmp_path / "model", golden=False)
    given = write(tmp_path / "rows", texts(120))
    job = {"rows": str(given.local()), "digest": given.digest, "checkpoint": str(directory)}
    output = run_killed_once(tmp_path, job, 30)
    assert len({path.name.split(".")[1] for path in (tmp_path / "work" / "answers").iterdir()}) == 2
    whole = make_context(seed=3)
    cfg = GenerateConfig(
        decoding=Decoding(max_tokens=24, temperature=0.8, keep_unfinished=True),
        resources=GenerateResources(executor=Executor.inline),
        batch_rows=4,
    )
    generate(cfg, whole, rows=given, checkpoint=Checkpoint(uri=directory.as_uri(), digest=given.digest))
    assert tree(output) == tree(whole.output)


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
def test_a_checkpoint_and_the_server_of_it_make_the_same_rows(tmp_path, make_context, template) -> None:
    directory = save_tiny_model(tmp_path / "model", chat_template=template)
    given, form = write(tmp_path / "rows", texts(12)), AskAs.chat if template else AskAs.text
    values = {"ask": Ask(form=form), "decoding": Decoding(max_tokens=8, temperature=0.7, keep_unfinished=True)}
    resources = GenerateResources(executor=Executor.inline, concurrency=3)
    here, there = make_context(seed=4), make_context(seed=4)
    checkpoint = Checkpoint(uri=directory.as_uri())
    generate(GenerateConfig(resources=resources, **values), here, rows=given, checkpoint=checkpoint)
    for server in serve(directory, ServingOptions()):
        endpoint = Endpoint(base_url=f"http://127.0.0.1:{server.port}/v1", model=NAME, revision="7")
        generate(GenerateConfig(resources=resources, endpoint=endpoint, **values), there, rows=given)
    assert rows_of(there.output) == rows_of(here.output)
