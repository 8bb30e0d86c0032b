"""A server that is there already: adopted when it serves this very model, refused in words when it does not, never started or stopped."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from stages.artifacts import Endpoint, ModelVersion
from stages.contract import ResourcesUnavailable, StageError
from stages.deploy import DeployConfig, External, deploy, holds, replaces
from stages.probe import ProbeConfig, probe
from stages.serving.options import ServingOptions, key_digest
from tests.stages.serving_server import NAME, Running, serve
from tests.stages.tiny_model import save_tiny_model

DIGEST = "a" * 64


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serve(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"), ServingOptions())


def version(tmp_path: Path, directory: Path) -> ModelVersion:
    made = tmp_path / "version"
    made.mkdir()
    return ModelVersion.write(made, {"name": NAME, "version": 3, "digest": DIGEST, "uri": directory.as_uri()})


def config(port: int, **fields) -> DeployConfig:
    return DeployConfig(external=External(base_url=f"http://127.0.0.1:{port}/v1", **fields))


def test_a_server_that_gives_the_golden_answers_is_adopted_without_ray_record_or_alias(make_context, tmp_path, running):
    cfg, ctx = config(running.port), make_context("deploy")
    endpoint = deploy(cfg, ctx, version(tmp_path, running.directory))
    assert endpoint.summary() == {
        "base_url": f"http://127.0.0.1:{running.port}",
        "model": NAME,
        "version": 3,
        "digest": DIGEST,
        "config_digest": "",
        "instance": "",
        "api_key_env": None,
        "external": True,
    }
    assert cfg.inline() and not DeployConfig().inline()
    assert not (ctx.state / "endpoint.json").exists() and not ctx.registry.aliases
    assert replaces(cfg, ctx.state) is None
    assert holds(endpoint, None, ctx.state) is None


def test_probe_measures_it(make_context, tmp_path, running):
    endpoint = deploy(config(running.port), make_context("deploy"), version(tmp_path, running.directory))
    report = probe(ProbeConfig(requests=1, prompt="abc", max_tokens=4), make_context("probe"), endpoint).summary()
    assert report["digest"] == DIGEST and report["metrics"]["tokens_per_second"] > 0


def test_a_server_with_other_weights_is_refused(make_context, tmp_path, running):
    other = save_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(StageError, match=r"answers 0% of the golden questions .* wanted 100%"):
        deploy(config(running.port), make_context("deploy"), version(tmp_path, other))


def test_what_it_calls_the_model_is_said_where_it_is_not_the_registered_name(make_context, tmp_path, running):
    cfg = config(running.port, model="another")
    with pytest.raises(StageError, match=r"serves \['tiny'\], not 'another': set stages.deploy.external.model"):
        deploy(cfg, make_context("deploy"), version(tmp_path, running.directory))


def test_nothing_there_is_said_with_the_field_to_correct(make_context, tmp_path, running):
    with pytest.raises(ResourcesUnavailable, match=r"nothing answers at http://127.0.0.1:9/v1/models"):
        deploy(config(9), make_context("deploy"), version(tmp_path, running.directory))


def test_a_plan_sees_that_it_is_gone_or_serves_something_else(make_context, tmp_path, running):
    facts = {"base_url": "http://127.0.0.1:9", "model": NAME, "api_key_env": None, "external": True}
    state = tmp_path / "state"
    assert holds(Endpoint.write(tmp_path, facts), None, state) == "the endpoint does not answer at http://127.0.0.1:9"
    here = f"http://127.0.0.1:{running.port}"
    moved = Endpoint.write(tmp_path, {**facts, "base_url": here, "model": "another"})
    assert holds(moved, None, state) == f"{here} serves ['tiny'], not another"


def test_its_key_is_sent_and_a_wrong_one_is_told(make_context, tmp_path, monkeypatch):
    directory = save_tiny_model(tmp_path / "keyed")
    servers = serve(directory, ServingOptions(key_digests=(key_digest("right"),)))
    keyed = next(servers)
    external = External(base_url=f"http://127.0.0.1:{keyed.port}")
    cfg = DeployConfig(external=external, api_key_env="EXTERNAL_KEY")
    given = version(tmp_path, directory)
    monkeypatch.setenv("EXTERNAL_KEY", "wrong")
    with pytest.raises(StageError, match="/v1/models answers 401"):
        deploy(cfg, make_context("deploy"), given)
    monkeypatch.setenv("EXTERNAL_KEY", "right")
    summary = deploy(cfg, make_context("deploy"), given).summary()
    assert summary["api_key_env"] == "EXTERNAL_KEY" and "right" not in json.dumps(summary)
    next(servers, None)


class Sloppy(BaseHTTPRequestHandler):
    """Answers everything with the same text, temperature -1 too."""

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": NAME, "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        usage = {
            "prompt_tokens": len(asked["prompt"]),
            "completion_tokens": 1,
            "total_tokens": len(asked["prompt"]) + 1,
        }
        choice = {"index": 0, "text": "x", "finish_reason": "stop", "logprobs": None}
        answer = {"id": "1", "object": "text_completion", "created": 0, "model": NAME, "choices": [choice]}
        if asked.get("stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())
        else:
            self._send({**answer, "usage": usage})

    def _send(self, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_a_server_that_refuses_nothing_is_refused_itself(make_context, tmp_path, running):
    server = HTTPServer(("127.0.0.1", 0), Sloppy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(StageError, match="answers a temperature of -1, wanted 400"):
            cfg = config(server.server_port, min_golden=0.0)
            deploy(cfg, make_context("deploy"), version(tmp_path, running.directory))
    finally:
        server.shutdown()


@pytest.mark.parametrize("base_url", ["gpu-1:8000", "ftp://x", "http://user@gpu-1", "http://"])
def test_an_address_that_is_none_is_refused_before_anything_starts(base_url):
    with pytest.raises(ValueError, match=r"external.base_url must be an address such as http://gpu-1:8000"):
        External(base_url=base_url)
