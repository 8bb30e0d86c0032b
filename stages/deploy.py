"""Deploy: a registered version answers at an OpenAI-compatible address. Apart from register, because serving is a state of
the world of its own: it may be lost (`make down`) while the version stays.

One `endpoint` is one Serve application at `/`; another model there is a roll-out. The new version loads and answers its
golden questions before the old one ends, and the alias `champion` moves last."""

import contextlib
import fcntl
import ipaddress
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import Checkpoint, Endpoint, ModelVersion
from stages.contract import Context, Registry, StageConfig, StageError, StageResources, stage
from stages.serving.endpoint import (
    ASK_TIMEOUT_S,
    Deployed,
    ask_ready,
    client_key,
    key_digests,
    read_record,
    write_record,
)
from stages.serving.options import ServingOptions

if TYPE_CHECKING:
    from stages.serving.golden import Question
    from stages.serving.smoke import Smoke

CHAMPION, PREVIOUS = "champion", "previous"
CPU_WAIT_S = 15.0
SLACK_S = 0.2
"""By less nobody notices that an answer takes longer, and a busy machine's hiccup undoes no roll-out."""


@dataclass(kw_only=True)
class DeployResources(StageResources):
    """What does not change an answer."""

    num_cpus: float = 0.5
    """Logical CPUs of one replica. A roll-out needs room for two."""
    threads: int = 1
    """Threads of the model's matrix products."""
    rollout_timeout_s: float = 120.0
    """Seconds for the new version to load and answer; then the old one stays."""
    max_latency_ratio: float | None = 3.0
    """An answer of the new version may take so many times the seconds of the one it replaces; above, the old one comes back. Null: any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_cpus", "threads", "rollout_timeout_s", "max_latency_ratio"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"resources.{name} must be above 0, got {getattr(self, name)}")

    def cpus_wanted(self) -> float:
        return self.num_cpus


@dataclass(kw_only=True)
class External:
    """A server that is there already: it is asked whether it serves this model, and never started, changed or stopped."""

    base_url: str
    """Where it is, such as http://gpu-1:8000; /v1 is added where it is not there."""
    model: str | None = None
    """What it calls the model; null: the registered name."""
    min_golden: float = 1.0
    """Share of the golden questions that it must answer as recorded. Below 1 for a server in a coarser number format than float32."""

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/").removesuffix("/v1")
        if not re.fullmatch(r"https?://[^\s/@]+(/[^\s@]*)?", self.base_url):
            raise ValueError(f"external.base_url must be an address such as http://gpu-1:8000, got {self.base_url!r}")
        if not 0 <= self.min_golden <= 1:
            raise ValueError(f"external.min_golden must be from 0 to 1, got {self.min_golden}")


@dataclass(kw_only=True)
class DeployConfig(StageConfig):
    """Options in `conf/deploy/`."""

    endpoint: str = "raykeel"
    """Name of the Serve application. One cluster serves one endpoint, at `/`."""
    host: str = "127.0.0.1"
    """Address to bind: a loopback address, or with `api_key_env` another one of this machine's (0.0.0.0: all)."""
    port: int = 8000
    """Port to bind, or the next free one when it is taken. A running proxy keeps its port until `make down`."""
    max_tokens: int | None = None
    """Most tokens of one answer; null: what the model's context leaves after the prompt."""
    max_batch: int = 8
    """Answers that grow at once, one for each choice; each makes the others a little slower, and all of them together faster."""
    max_batch_tokens: int = 16_384
    """Tokens that the model's cache may come to hold: answers at once times the longest of them, prompt and `max_tokens` together. It
    bounds memory; one answer is always let in."""
    prefill_chunk: int = 64
    """Tokens of a new prompt that are read between two tokens of the answers that grow meanwhile: more, and a long prompt is answered
    sooner; fewer, and others wait less."""
    max_queue: int = 64
    """Requests that may wait for the model; one more is refused with 429."""
    request_timeout_s: float = 120.0
    """Seconds from a request's arrival to the end of its answer; then it is ended with an error."""
    api_key_env: str | None = None
    """Name of the environment variable with the key that clients must send as `Authorization: Bearer KEY` (several parted by commas).
    Null: no key is asked for. Only the name and the SHA-256 of each key are kept."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins whose pages may read answers in a browser, such as https://app.example.com. None by default; `*` is refused."""
    external: External | None = None
    """Not Ray Serve here but a server that is there already. What this file says of hosts, ports and batches is then its own matter."""
    resources: DeployResources = field(default_factory=DeployResources)
    """How it is computed."""

    def inline(self) -> bool:
        return self.external is not None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", self.endpoint):
            raise ValueError(f"endpoint must be letters, digits, - and _, got {self.endpoint!r}")
        address = _address(self.host)
        if address is None or not (address.is_loopback or self.api_key_env):
            raise ValueError(
                f"host must be a loopback address such as 127.0.0.1, got {self.host!r}; an endpoint without a key is not "
                "opened to a network: set api_key_env to the name of the variable that holds one"
            )
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise ValueError(
                "api_key_env must be the name of an environment variable, such as MODEL_API_KEY, not a key"
            )
        for origin in self.cors_origins:
            if not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?", origin):
                raise ValueError(f"cors_origins must be origins such as https://app.example.com, got {origin!r}")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port must be within 1..65535, got {self.port}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be null or at least 1, got {self.max_tokens}")
        for name in ("max_batch", "max_batch_tokens", "prefill_chunk", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.request_timeout_s <= 0:
            raise ValueError(f"request_timeout_s must be above 0, got {self.request_timeout_s}")

    def options(self) -> ServingOptions:
        """StageError when the variable of `api_key_env` is not set."""
        return ServingOptions(
            max_tokens=self.max_tokens,
            max_batch=self.max_batch,
            max_batch_tokens=self.max_batch_tokens,
            prefill_chunk=self.prefill_chunk,
            max_queue=self.max_queue,
            request_timeout_s=self.request_timeout_s,
            key_digests=key_digests(self.api_key_env),
            cors_origins=tuple(self.cors_origins),
            threads=self.resources.threads,
        )


def _address(host: str) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(host)
    except ValueError:
        return None


def holds(receipt: Endpoint, registry: Registry | None, state: Path) -> str | None:
    """Why the endpoint is not what the receipt says, or None. One GET of /ready; of a server that is not ours, of its models."""
    facts = receipt.summary()
    if facts.get("external"):
        return _external_holds(facts)
    record = read_record(state)
    if record is None:
        return "nothing is deployed from here"
    if (
        record.api_key_env
        and record.api_key_env in os.environ
        and key_digests(record.api_key_env) != record.options.key_digests
    ):
        return f"{record.api_key_env} holds another key than the endpoint asks for"
    ready = ask_ready(record.base_url)
    if ready is None:
        return f"the endpoint does not answer at {record.base_url}"
    if any(ready.get(name) != facts[name] for name in ("model", "version", "digest", "config_digest")):
        return f"the endpoint serves {ready.get('model')}@{ready.get('version')}, or with other options"
    return None


def replaces(cfg: DeployConfig, state: Path) -> str | None:
    """`name@version` that a roll-out to this endpoint would replace, or None when nothing serves there."""
    key_digests(cfg.api_key_env)  # a key that is missing is told before anything is trained
    if cfg.external is not None:
        return None
    record = read_record(state)
    if record is None or record.application != cfg.endpoint or not record.serves(ask_ready(record.base_url)):
        return None
    return f"{record.model}@{record.version}"


@stage(ray=True, holds=holds)
def deploy(cfg: DeployConfig, ctx: Context, model: ModelVersion) -> Endpoint:
    """Trial, switch, ask through the public address, record, move the aliases; any failure leaves what served before."""
    if cfg.external is not None:
        return _adopt(cfg, cfg.external, ctx, model)
    from stages.serving import deployment

    with _alone(ctx):
        before = read_record(ctx.state)
        running = deployment.running_port()
        if running is not None:
            deployment.require_route(cfg.endpoint)
        deployed = _wanted(cfg, model, running or cfg.port)
        ready = ask_ready(deployed.base_url) if running is not None else None
        if before is not None and ready is not None and deployed.serves(ready) and before.instance == ready["instance"]:
            deployed = before  # exactly this serves already
        else:
            deployed = _roll_out(cfg, ctx, deployed, before, something_serves=ready is not None)
        write_record(ctx.state, deployed)
        _move_aliases(ctx.registry, deployed.model, deployed.version)
    _announce(cfg, ctx, deployed, running)
    return Endpoint.write(ctx.output, deployed.summary())


def _adopt(cfg: DeployConfig, external: External, ctx: Context, model: ModelVersion) -> Endpoint:
    """No record, no alias: this project neither switched it nor can switch it back."""
    from stages.serving.external import check

    facts = model.summary()
    name, key = external.model or facts["name"], client_key(cfg.api_key_env)
    ctx.progress(0.1, "asking the golden questions")
    share = check(external.base_url, name, key, Checkpoint(uri=facts["uri"]).local(), external.min_golden)
    ctx.headline(f"{name} at {external.base_url} answers {share:.0%} of the golden questions")
    identity = {"base_url": external.base_url, "model": name, "api_key_env": cfg.api_key_env, "external": True}
    known = {"version": facts["version"], "digest": facts["digest"], "config_digest": "", "instance": ""}
    return Endpoint.write(ctx.output, {**identity, **known})


def _external_holds(facts: dict[str, Any]) -> str | None:
    from stages.serving.external import listed

    try:
        found = listed(facts["base_url"], client_key(facts["api_key_env"]), ASK_TIMEOUT_S)
    except StageError as error:
        return str(error)
    if found is None:
        return f"the endpoint does not answer at {facts['base_url']}"
    return None if facts["model"] in found else f"{facts['base_url']} serves {found}, not {facts['model']}"


@contextlib.contextmanager
def _alone(ctx: Context) -> Iterator[None]:
    """Two roll-outs on one endpoint would undo each other: the second waits. The kernel frees the lock of a killed one."""
    ctx.state.mkdir(parents=True, exist_ok=True)
    with (ctx.state / "deploy.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                ctx.progress(0.0, "another deployment is under way; waiting")
                time.sleep(0.5)
        yield


def _wanted(cfg: DeployConfig, model: ModelVersion, port: int) -> Deployed:
    facts = model.summary()
    options = cfg.options()
    return Deployed(
        application=cfg.endpoint,
        base_url=_base_url(cfg.host, port),
        model=facts["name"],
        version=facts["version"],
        digest=facts["digest"],
        config_digest=options.digest(),
        instance=uuid.uuid4().hex,
        uri=facts["uri"],
        num_cpus=cfg.resources.num_cpus,
        options=options,
        api_key_env=cfg.api_key_env,
    )


def _base_url(host: str, port: int) -> str:
    """Where this machine reaches the endpoint."""
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def _roll_out(
    cfg: DeployConfig, ctx: Context, deployed: Deployed, before: Deployed | None, something_serves: bool
) -> Deployed:
    from stages.serving import deployment

    timeout_s = cfg.resources.rollout_timeout_s
    ctx.progress(0.05, "loading the new version for a trial")
    deployment.require_cpus(deployed.num_cpus, CPU_WAIT_S)
    running_trial = deployment.start_trial(deployed)
    try:
        port = deployment.start_serve(cfg.host, cfg.port)  # while the trial loads
        questions = deployment.finish_trial(running_trial, deployed, timeout_s)
    except BaseException:
        deployment.cancel_trial(running_trial)
        raise
    deployed = replace(deployed, base_url=_base_url(cfg.host, port))
    deployment.require_cpus(deployed.num_cpus, CPU_WAIT_S)
    usual_s = _seconds(before, questions) if before is not None and something_serves else None
    ctx.progress(0.3, "starting the new version")
    try:
        deployment.begin(deployed, timeout_s)
        deployment.wait_serving(deployed, timeout_s, ctx.progress)
        ctx.progress(0.85, "asking the golden questions")
        _ask(deployed, questions)
        _smoke(deployed).check(questions[0].prompt_ids)
        if usual_s is not None:
            _require_speed(cfg, deployed, questions, usual_s)
    except BaseException as error:
        wait_s = timeout_s if isinstance(error, Exception) else 0.0
        kept = deployment.restore(deployed, before if something_serves else None, something_serves, wait_s)
        if isinstance(error, StageError):
            raise StageError(f"{error}; {kept}") from error
        raise
    return deployed


def _ask(deployed: Deployed, questions: "list[Question]") -> None:
    """The golden questions through the public address: what a client gets is what was recorded where the model was made."""
    import openai

    key = client_key(deployed.api_key_env)
    client = openai.OpenAI(base_url=f"{deployed.base_url}/v1", api_key=key, max_retries=2, timeout=60)
    for number, question in enumerate(questions):
        try:
            answer: Any = client.completions.create(
                model=deployed.model, prompt=question.prompt_ids, max_tokens=question.max_tokens, temperature=0
            )
        except openai.OpenAIError as error:
            raise StageError(f"golden question {number} failed at {deployed.base_url}: {error}") from error
        if answer.choices[0].text != question.text:
            raise StageError(
                f"golden question {number} is answered differently at {deployed.base_url} than where "
                f"{deployed.model}@{deployed.version} was made"
            )


def _smoke(deployed: Deployed) -> "Smoke":
    from stages.serving.smoke import Smoke

    return Smoke(deployed.base_url, deployed.model, client_key(deployed.api_key_env))


def _seconds(before: Deployed, questions: "list[Question]") -> float | None:
    """How long an answer of what serves takes, through the same address; None when it refuses (its context is shorter, say)."""
    import openai

    try:
        return _smoke(before).seconds(questions[0].prompt_ids)
    except openai.OpenAIError:
        return None


def _require_speed(cfg: DeployConfig, deployed: Deployed, questions: "list[Question]", usual_s: float) -> None:
    taken_s, most = _smoke(deployed).seconds(questions[0].prompt_ids), cfg.resources.max_latency_ratio
    if most is not None and taken_s > most * usual_s and taken_s - usual_s > SLACK_S:
        raise StageError(
            f"{deployed.model}@{deployed.version} takes {taken_s:.2f} s for an answer, {taken_s / usual_s:.1f} times as long as what it "
            f"replaces; at most {most:g} times is allowed (stages.deploy.resources.max_latency_ratio)"
        )


def _move_aliases(registry: Registry, name: str, version: int) -> None:
    old = registry.alias(name, CHAMPION)
    if old == version:
        return
    if old is not None:
        registry.set_alias(name, PREVIOUS, old)
    registry.set_alias(name, CHAMPION, version)


def _announce(cfg: DeployConfig, ctx: Context, deployed: Deployed, running: int | None) -> None:
    port = int(deployed.base_url.rpartition(":")[2])
    taken = f" (port {cfg.port} is taken)" if running is None else f" (Serve keeps port {port} until make down)"
    taken = "" if port == cfg.port else taken
    ctx.headline(f"{deployed.model}@{deployed.version} at {deployed.base_url}{taken}")
