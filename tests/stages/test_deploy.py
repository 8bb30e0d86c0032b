"""Deploy, probe and ask on a real Ray Serve: what serves, keeps serving; what is wrong, never takes a request."""

import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from stages.artifacts import Checkpoint, Endpoint, ModelVersion
from stages.contract import Context, ResourcesUnavailable, StageError
from stages.deploy import DeployConfig, DeployResources, deploy, holds, replaces
from stages.probe import ProbeConfig, probe
from stages.serving.ask import Asker
from stages.serving.endpoint import Deployed, ask_ready, read_record
from stages.serving.golden import check_golden
from stages.serving.model import load_model
from tests.stages.tiny_model import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NAME = "quickstart"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@dataclass
class House:
    """One Serve with its state root and registry, shared by the tests of this file, which run in order."""

    port: int
    root: Path
    state: Path
    registry: Any = None
    directories: dict[int, Path] = field(default_factory=dict)

    def cfg(self, **values: Any) -> DeployConfig:
        # Other work on this machine must undo no roll-out of a test.
        resources = DeployResources(rollout_timeout_s=120, max_latency_ratio=values.pop("max_latency_ratio", None))
        return DeployConfig(port=self.port, resources=resources, **values)

    def context(self, made: Context) -> Context:
        self.registry = self.registry or made.registry
        return replace(made, state=self.state, registry=self.registry)

    def version(self, number: int) -> ModelVersion:
        """The receipt of version `number`: a model of its own, seeded by the number."""
        if number not in self.directories:
            self.directories[number] = save_tiny_model(self.root / f"v{number}", seed=number)
        receipt = self.root / f"receipt-{number}"
        receipt.mkdir(exist_ok=True)
        uri = self.directories[number].as_uri()
        facts = {"name": NAME, "version": number, "digest": f"{number:064x}", "uri": uri}
        return ModelVersion(uri=ModelVersion.write(receipt, facts).uri)


@pytest.fixture(scope="module")
def house(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    from ray import serve

    root = tmp_path_factory.mktemp("deploy")
    (root / "state").mkdir()
    taken = free_port()
    yield House(port=taken, root=root, state=root / "state")
    serve.shutdown()


@pytest.fixture
def serving(house: House, make_context: Callable[..., Context]) -> Deployed:
    """What serves now; version 2 when no test of this file deployed anything yet."""
    if read_record(house.state) is None:
        deploy(house.cfg(), house.context(make_context("deploy")), house.version(2))
    record = read_record(house.state)
    assert record is not None
    return record


class Traffic:
    """Continuous greedy requests from two threads; keeps (status, version, seconds, text) of each."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.seen: list[tuple[int, str | None, float, str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 4, "temperature": 0}).encode()
        while not self._stop.is_set():
            began = time.monotonic()
            request = urllib.request.Request(
                f"{self.base_url}/v1/completions", body, {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    text = json.load(response)["choices"][0]["text"]
                    entry = (response.status, response.headers["x-model-version"], time.monotonic() - began, text)
            except OSError as error:
                entry = (getattr(error, "code", 0), None, time.monotonic() - began, str(error))
            self.seen.append(entry)
            time.sleep(0.02)


def test_the_first_version_serves_on_the_next_port_when_the_wanted_one_is_taken(
    house: House, make_context: Callable[..., Context]
) -> None:
    said: list[str] = []
    ctx = replace(house.context(make_context("deploy")), headline=said.append)
    with socket.create_server(("127.0.0.1", house.port)):
        endpoint = deploy(house.cfg(), ctx, house.version(1))
    facts = endpoint.summary()
    port = int(facts["base_url"].rpartition(":")[2])
    assert house.port < port < house.port + 20
    assert said == [f"{NAME}@1 at {facts['base_url']} (port {house.port} is taken)"]
    assert ask_ready(facts["base_url"]) == {
        name: value for name, value in facts.items() if name not in ("base_url", "api_key_env")
    }
    assert house.registry.alias(NAME, "champion") == 1 and house.registry.alias(NAME, "previous") is None
    assert holds(endpoint, None, house.state) is None
    assert replaces(house.cfg(), house.state) == f"{NAME}@1"
    assert replaces(house.cfg(endpoint="other"), house.state) is None


def test_deploying_what_serves_already_changes_nothing(house: House, make_context: Callable[..., Context]) -> None:
    before = read_record(house.state)
    assert before is not None
    began = time.monotonic()
    endpoint = deploy(house.cfg(), house.context(make_context("deploy")), house.version(1))
    assert time.monotonic() - began < 2
    assert endpoint.summary()["instance"] == before.instance
    assert read_record(house.state) == before


def test_a_roll_out_under_traffic_loses_no_request(house: House, make_context: Callable[..., Context]) -> None:
    before = read_record(house.state)
    assert before is not None
    with Traffic(before.base_url) as traffic:
        time.sleep(0.5)
        endpoint = deploy(house.cfg(), house.context(make_context("deploy")), house.version(2))
        time.sleep(0.5)
    assert {status for status, *_ in traffic.seen} == {200}
    assert {version for _, version, *_ in traffic.seen} == {"1", "2"}
    assert traffic.seen[-1][1] == "2"
    assert max(seconds for *_, seconds, _ in traffic.seen) < 5
    assert endpoint.summary()["version"] == 2
    assert (house.registry.alias(NAME, "previous"), house.registry.alias(NAME, "champion")) == (1, 2)


def broken(house: House, number: int, break_it: Callable[[Path], None]) -> ModelVersion:
    house.directories[number] = house.root / f"v{number}"
    shutil.copytree(house.directories[2], house.directories[number], dirs_exist_ok=True)
    break_it(house.directories[number])
    return house.version(number)


def forget_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def answer_wrongly(directory: Path) -> None:
    golden = json.loads((directory / "golden.json").read_text())
    golden["answers"][0]["greedy_ids"][0] = (golden["answers"][0]["greedy_ids"][0] + 1) % 257
    (directory / "golden.json").write_text(json.dumps(golden))


@pytest.mark.parametrize(
    ("number", "break_it", "reason"),
    [
        (3, forget_weights, r"v3/\*\.safetensors: the model's directory misses this file"),
        (4, answer_wrongly, "golden question 0: the answer differs from token 0 on"),
    ],
)
def test_a_broken_version_is_refused_and_the_old_one_serves_on(
    house: House, make_context: Callable[..., Context], number: int, break_it: Callable[[Path], None], reason: str
) -> None:
    before = read_record(house.state)
    assert before is not None
    receipt = broken(house, number, break_it)
    with Traffic(before.base_url) as traffic, pytest.raises(StageError, match=reason):
        deploy(house.cfg(), house.context(make_context("deploy")), receipt)
    assert {(status, version) for status, version, *_ in traffic.seen} == {(200, "2")}
    assert read_record(house.state) == before
    assert house.registry.alias(NAME, "champion") == 2


def sabotaged(house: House, made: Context, number: int, sabotage: Callable[[], None]) -> tuple[Context, ModelVersion]:
    """A version that passes its trial and is sabotaged when the roll-out begins."""
    receipt = broken(house, number, lambda directory: None)
    done: list[str] = []

    def progress(fraction: float, text: str) -> None:
        if text == "starting the new version" and not done:
            done.append(text)
            sabotage()

    return replace(house.context(made), progress=progress), receipt


def test_a_version_that_fails_after_its_trial_is_rolled_back(
    house: House, serving: Deployed, make_context: Callable[..., Context]
) -> None:
    before = serving
    ctx, receipt = sabotaged(house, make_context("deploy"), 5, lambda: forget_weights(house.root / "v5"))
    with Traffic(before.base_url) as traffic, pytest.raises(StageError) as caught:
        deploy(house.cfg(), ctx, receipt)
    assert "this file; train or register it again" in str(caught.value)
    assert f"{NAME}@2 still serves at {before.base_url}" in str(caught.value)
    assert {(status, version) for status, version, *_ in traffic.seen} == {(200, "2")}
    assert (read_record(house.state), house.registry.alias(NAME, "champion")) == (before, 2)
    answer = ask_ready(before.base_url)
    assert answer is not None and answer["instance"] == before.instance


def test_a_version_that_is_much_slower_is_rolled_back(
    house: House, serving: Deployed, make_context: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.deploy._seconds", lambda before, questions: 1e-4)
    monkeypatch.setattr("stages.deploy.SLACK_S", 0.0)
    receipt = broken(house, 8, lambda directory: None)
    with Traffic(serving.base_url) as traffic, pytest.raises(StageError, match="times as long as what it replaces"):
        deploy(house.cfg(max_latency_ratio=3.0), house.context(make_context("deploy")), receipt)
    assert {status for status, *_ in traffic.seen} == {200} and traffic.seen[-1][1] == "2"
    assert (read_record(house.state), house.registry.alias(NAME, "champion")) == (serving, 2)


def test_an_endpoint_with_a_key_lets_in_who_has_it_and_notices_a_new_one(
    house: House, serving: Deployed, make_context: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = house.cfg(api_key_env="TEST_ENDPOINT_KEY")
    with pytest.raises(StageError, match="the environment variable TEST_ENDPOINT_KEY is not set"):
        replaces(cfg, house.state)
    monkeypatch.setenv("TEST_ENDPOINT_KEY", "first, second")
    endpoint = deploy(cfg, house.context(make_context("deploy")), house.version(2))
    assert "first" not in json.dumps(endpoint.summary()) + (house.state / "endpoint.json").read_text()
    client = openai.OpenAI(base_url=f"{serving.base_url}/v1", api_key="second", max_retries=0)
    assert [model.id for model in client.models.list().data] == [NAME]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="third").models.list()
    assert holds(endpoint, None, house.state) is None
    monkeypatch.setenv("TEST_ENDPOINT_KEY", "another")
    assert holds(endpoint, None, house.state) == "TEST_ENDPOINT_KEY holds another key than the endpoint asks for"
    deploy(house.cfg(), house.context(make_context("deploy")), house.version(2))
    assert client.with_options(api_key="none").models.list().data


def test_an_interrupt_during_the_roll_out_leaves_the_old_version(
    house: House, serving: Deployed, make_context: Callable[..., Context]
) -> None:
    before = serving
    receipt = broken(house, 6, lambda directory: None)

    def progress(fraction: float, text: str) -> None:
        if text == "waiting for the new version" and fraction > 0.301:
            raise KeyboardInterrupt

    with Traffic(before.base_url) as traffic:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            deploy(house.cfg(), replace(house.context(make_context("deploy")), progress=progress), receipt)
        assert time.monotonic() - began < 15
        time.sleep(20)
    assert {(status, version) for status, version, *_ in traffic.seen} == {(200, "2")}
    assert (read_record(house.state), house.registry.alias(NAME, "champion")) == (before, 2)


def test_a_replica_whose_model_failed_says_so_to_serve(house: House) -> None:
    from stages.serving.deployment import Replica

    record = read_record(house.state)
    assert record is not None
    replica = Replica(record, 60.0)
    replica.check_health()
    engine = replica._app.engine
    engine.close()
    with pytest.raises(RuntimeError, match="dead or stuck"):
        replica.check_health()


def test_a_client_that_leaves_frees_the_model_behind_serve(house: House) -> None:
    record = read_record(house.state)
    assert record is not None
    port = int(record.base_url.rpartition(":")[2])
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True}).encode()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            client.recv(64)
    began = time.monotonic()
    text = "".join(Asker(record.base_url, max_tokens=16).stream([{"role": "user", "content": "os.path.join("}]))
    assert time.monotonic() - began < 2
    directory = Checkpoint(uri=record.uri).local()
    assert text == check_golden(load_model(directory), directory)[0].text != ""


def test_errors_keep_their_shape_and_status_behind_serve(house: House) -> None:
    record = read_record(house.state)
    assert record is not None
    legal = {"model": NAME, "prompt": "a", "max_tokens": 1}
    for path, body, status, param in (
        ("/v1/completions", json.dumps({**legal, "temperature": -1}).encode(), 400, "temperature"),
        ("/v1/completions", json.dumps({**legal, "max_tokens": 10**6}).encode(), 400, "prompt"),
        ("/v1/completions", b"junk " * 20_000, 400, None),
        ("/v1/completions", b"x" * 1_000_001, 413, None),
        ("/v1/completions", json.dumps({**legal, "model": "x"}).encode(), 404, "model"),
        ("/v1/chat/completions", json.dumps({"model": NAME, "messages": [{"role": "user", "content": "x"}]}).encode(), 400, "messages"),
        ("/v1/nothing", b"{}", 404, None),
        ("/v1/models", b"{}", 405, None),
    ):  # fmt: skip
        request = urllib.request.Request(record.base_url + path, body, {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        error = json.load(caught.value)["error"]
        assert (caught.value.code, error["param"], set(error)) == (status, param, {"message", "type", "param", "code"})
        assert caught.value.headers["x-model-version"] == str(record.version)


@pytest.mark.timeout(600)
def test_a_long_answer_in_flight_is_finished_by_the_old_version(
    house: House, serving: Deployed, make_context: Callable[..., Context]
) -> None:
    before = serving
    house.directories[7] = save_tiny_model(house.root / "v7", seed=7, context=400_000)
    deploy(house.cfg(request_timeout_s=300), house.context(make_context("deploy")), house.version(7))
    client = openai.OpenAI(base_url=f"{before.base_url}/v1", api_key="none", max_retries=0)
    seen: list[Any] = []
    began = time.monotonic()
    client.completions.create(model=NAME, prompt="a", max_tokens=2_000, extra_body={"ignore_eos": True})
    tokens = int(2_000 / (time.monotonic() - began) * 75)  # longer than any roll-out here takes

    def read() -> None:
        stream = client.completions.create(
            model=NAME, prompt="a", max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )  # fmt: skip
        seen.extend(stream)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(1)
    deploy(house.cfg(), house.context(make_context("deploy")), house.version(2))
    assert reader.is_alive(), "the answer was too short to be in flight during the roll-out"
    reader.join(280)
    assert seen[-1].usage.completion_tokens == tokens
    assert {chunk.system_fingerprint.partition("-")[0] for chunk in seen} == {f"{NAME}@7"}


def test_the_probe_measures_the_endpoint_and_notices_another_version(
    house: House, make_context: Callable[..., Context]
) -> None:
    record = read_record(house.state)
    assert record is not None
    ctx = house.context(make_context("probe"))
    ctx.output.joinpath("endpoint").mkdir()
    endpoint = Endpoint(uri=Endpoint.write(ctx.output / "endpoint", record.summary()).uri)
    report = probe(ProbeConfig(prompt="a", max_tokens=16, requests=3), ctx, endpoint).summary()
    assert report["checks"] == ["digest", "error_shape", "streamed_equals_whole"]
    metrics = report["metrics"]
    assert 0 < metrics["ttft_p50_ms"] <= metrics["total_p50_ms"] < 5000
    assert metrics["tokens_per_second"] > 10
    assert ("tokens_per_second", metrics["tokens_per_second"], None) in ctx.tracker.metrics  # type: ignore[attr-defined]
    other = Endpoint.write(ctx.output / "endpoint", {**record.summary(), "digest": "f" * 64})
    with pytest.raises(StageError, match="the endpoint's digest is"):
        probe(ProbeConfig(), ctx, Endpoint(uri=other.uri))


def test_a_version_that_no_cpu_is_left_for_is_refused_in_seconds(
    house: House, make_context: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.deploy.CPU_WAIT_S", 0.5)
    cfg = house.cfg()
    cfg.resources.num_cpus = 100
    with pytest.raises(ResourcesUnavailable, match="needs 100 CPU beside what runs"):
        deploy(cfg, house.context(make_context("deploy")), house.version(1))
    assert replaces(house.cfg(), house.state) == f"{NAME}@2"


def test_another_endpoint_on_the_same_cluster_is_refused(house: House, make_context: Callable[..., Context]) -> None:
    with pytest.raises(StageError, match="endpoint 'raykeel' is served by this cluster already, wanted 'second'"):
        deploy(house.cfg(endpoint="second"), house.context(make_context("deploy")), house.version(1))


def test_a_stopped_endpoint_is_noticed(house: House, make_context: Callable[..., Context]) -> None:
    ctx = make_context("deploy")
    record = read_record(house.state)
    assert record is not None
    gone = replace(record, base_url=f"http://127.0.0.1:{free_port()}")
    endpoint = Endpoint(uri=Endpoint.write(ctx.output, gone.summary()).uri)
    assert holds(endpoint, None, ctx.state) == "nothing is deployed from here"
    with pytest.raises(ResourcesUnavailable, match="make run"):
        probe(ProbeConfig(), ctx, endpoint)
    with pytest.raises(ResourcesUnavailable, match="nothing answers at"):
        list(Asker(gone.base_url).stream([{"role": "user", "content": "x"}]))
