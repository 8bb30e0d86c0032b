"""From a composed config to ordered steps, each with run, reuse or unknown, and why. Apart, because planning starts nothing.

Reads the store and asks light questions only (one GET of an endpoint, one row of the registry); loads no ray, mlflow or torch.
"""

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines import cost, edges, reasons
from pipelines import fingerprint as fp
from pipelines.config import WAIVABLE, AppConfig, ClusterMode
from pipelines.mistakes import ConfigError, did_you_mean
from pipelines.store import Record, Store
from stages.artifacts import Artifact
from stages.contract import STAGES, Resolver, ResourcesUnavailable, Stage, StageConfig, StageError, StageResources
from stages.training.estimate import require_room
from stages.training.memory import total_memory
from stages.training.outlook import Given, on_gpu
from stages.training.resources import TrainResources

STOPPED = "stopped with the run"


@dataclass
class Step:
    """One stage of this pipeline, with what is known of its result."""

    name: str
    stage: Stage
    cfg: StageConfig
    action: str = "unknown"
    """run, reuse, or unknown (its inputs are not made yet)."""
    reason: str = ""
    fingerprint: str | None = None
    payload: dict[str, Any] | None = None
    record: Record | None = None
    last: dict[str, Any] | None = None
    """What this stage was last made with: payload and meta (seconds, bytes, run_id)."""
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Facet -> its differences to `last`, field by field; of an unknown step, all but its inputs."""
    forced: str | None = None
    """Why it runs although its result may be known: `run.rerun` or `run.rerun_from`."""
    upstream: list["Step"] = field(default_factory=list)
    """The steps whose results it takes."""
    accepted: list[str] = field(default_factory=list)
    """What `run.accept` waived so that it could be reused: `train.code: stages/train.py changed`."""
    inherited: list[str] = field(default_factory=list)
    """What was waived for the results that it takes, directly or not."""
    failure: str | None = None
    """Why its execution in this run gave no result."""
    expected: cost.Expected | None = None
    """What its execution should cost, from equal ones before; None when there were none."""
    foreseen: Any = None
    """`stages.training.estimate.Estimate` of a stage that trains and is not reused; None where too little is known."""

    @property
    def changes(self) -> list[str]:
        return [change for changes in self.changed.values() for change in changes]

    @property
    def needs_ray(self) -> bool:
        return self.stage.ray and not self.cfg.inline()

    @property
    def waivers(self) -> list[str]:
        """Everything that was waived for this result."""
        return list(dict.fromkeys(self.inherited + self.accepted))

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of an execution must say besides its timings; the history finds equal executions by it."""
        facts: dict[str, Any] = {"work": self.work, "input_bytes": self.input_bytes}
        return facts | ({"accepted": self.waivers} if self.waivers else {})

    @property
    def work(self) -> str:
        """Digest of what decides how much there is to do, except the inputs: config with resources, and sources."""
        config = {name: value for name, value in fp.identity(self.cfg).items() if name != "inputs"}
        patience = {f.name for f in dataclasses.fields(StageResources)}
        config["resources"] = {name: value for name, value in config["resources"].items() if name not in patience}
        return fp.digest({"config": config, "sources": self.payload["sources"] if self.payload else {}})[:16]

    @property
    def input_bytes(self) -> int | None:
        """Bytes of its inputs: as stored, or as expected while they are not made; None when nobody knows."""
        total = 0
        for up in self.upstream:
            size = up.record.meta.get("bytes") if up.record else up.expected.bytes if up.expected else None
            if size is None:
                return None
            total += int(size)
        return total


def build(app: AppConfig) -> list[Step]:
    """Typed, ordered steps. Raises ConfigError for unknown stages, missing or mistyped edges, cycles and bad bounds."""
    if not app.stages:
        raise ConfigError("the pipeline has no stages: name some in its defaults list, for example `- /ingest: files`")
    steps = {name: Step(name, STAGES[type(cfg)], cfg) for name, cfg in app.stages.items()}
    for step in steps.values():
        edges.check_edges(step, steps)
        step.upstream = [steps[name] for name in step.cfg.inputs.values()]
    ordered = [steps[name] for name in edges.topological(steps)]
    for step in ordered:
        try:
            step.cfg.check(frozenset(step.cfg.inputs))
        except ValueError as error:
            raise ConfigError(f"stages.{step.name}: {error}") from error
    _apply_limit(app, ordered)
    if app.run.until is not None:
        _known_stage("run.until", app.run.until, steps)
        wanted = edges.ancestors(app.run.until, steps)
        ordered = [step for step in ordered if step.name in wanted]
    return ordered


def decide(app: AppConfig, steps: list[Step], store: Store, resolver: Resolver, registry: Any) -> None:
    """Fill in action, reason, fingerprint and record of each step. Raises ConfigError when a source is missing."""
    force(app, steps)
    known: dict[str, str] = {}
    for step in steps:
        step.last = store.last(app.name, step.name)
        waiting = [up for up in step.cfg.inputs.values() if up not in known]
        if waiting:
            step.action, step.reason = "unknown", f"until {reasons.listed(sorted(set(waiting)))} made"
            foresee(app, step, resolver)
        else:
            identify(app, step, known, resolver)
            decide_one(app, step, store, registry)
        if step.record:
            known[step.name] = step.record.digest
        else:
            step.expected = cost.expect((step.last or {}).get("recent", []), step.work, step.input_bytes)
            step.foreseen = _foreseen(step, store)


def decide_one(app: AppConfig, step: Step, store: Store, registry: Any) -> None:
    """Run or reuse, for a step whose fingerprint is known."""
    assert step.fingerprint is not None
    if step.forced:
        step.action, step.reason = "run", step.forced
        return
    record, broken = store.find(step.fingerprint)
    step.accepted = []
    if record is None and broken is None:
        record = _accept(app, step, store)
    moved = world_moved(step, record, store, registry, app.state_root) if record else None
    if record is None or moved is not None:
        step.action, step.reason, step.accepted = "run", broken or moved or reasons.why(step), []
    elif step.accepted:
        step.action, step.record = "reuse", dataclasses.replace(record, meta={**record.meta, "accepted": step.waivers})
        changes = "; ".join(waiver.partition(".")[2].replace(":", "") for waiver in step.accepted)
        step.reason = f"reused although {changes}: accepted by run.accept"
    else:
        step.action, step.reason, step.record = "reuse", reasons.since(record), record


def _accept(app: AppConfig, step: Step, store: Store) -> Record | None:
    """The newest stored result that differs in nothing but what `run.accept` waives for this step; says so in `accepted`."""
    assert step.payload is not None
    waived = tuple(facet for facet in WAIVABLE if f"{step.name}.{facet}" in app.run.accept)
    if not waived:
        return None
    recipe = fp.recipe(step.payload)
    for execution in reversed((step.last or {}).get("recent", [])):
        record = store.find(execution["fingerprint"])[0] if execution.get("recipe") == recipe else None
        if record and fp.without(record.payload, waived) == fp.without(step.payload, waived):
            changes = fp.differences(record.payload, step.payload)
            step.accepted = [
                f"{step.name}.{facet}: {reasons.in_words(facet, found)}" for facet, found in changes.items()
            ]
            return record
    return None


def identify(app: AppConfig, step: Step, known: dict[str, str], resolver: Resolver) -> None:
    """Compute payload and fingerprint of a step whose inputs' digests are known."""
    inputs = {parameter: known[upstream] for parameter, upstream in step.cfg.inputs.items()}
    step.payload = _payload(app, step, inputs, resolver)
    step.fingerprint = fp.digest(step.payload)
    step.inherited = [waiver for up in step.upstream for waiver in up.waivers]
    if step.last:
        step.changed = fp.differences(step.last["payload"], step.payload)


def foresee(app: AppConfig, step: Step, resolver: Resolver) -> None:
    """Of a step whose inputs are not made yet: the differences that are certain already."""
    payload = _payload(app, step, {}, resolver)
    if step.last:
        step.changed = fp.differences(step.last["payload"], payload)
        step.changed.pop("inputs", None)
    if step.changed:
        step.reason += f"; {reasons.shortened(step.changes)}"


def _payload(app: AppConfig, step: Step, inputs: dict[str, str], resolver: Resolver) -> dict[str, Any]:
    try:
        sources = step.stage.sources(step.cfg, resolver) if step.stage.sources else {}
        payload = fp.payload(step.stage, step.cfg, app.seed, inputs, sources)
        fp.canonical(payload)
    except (StageError, TypeError, ValueError) as error:  # a missing source, or a value without a stable form
        said, stage = str(error), f"stages.{step.name}"
        raise ConfigError(said if said.startswith(f"{stage}.") else f"{stage}: {said}") from error
    return payload


def read_code(steps: list[Step]) -> None:
    """Take the code digests of all steps now, before any of it is loaded: an edit made later is noticed (`attempt`)."""
    for step in steps:
        fp.code_digests(step.stage.function.__module__)


def artifact(step: Step, record: Record, store: Store) -> Artifact:
    """The typed face of a published record."""
    return step.stage.output(uri=store.object_uri(record.digest), digest=record.digest)


def world_moved(step: Step, record: Record, store: Store, registry: Any, state: Path) -> str | None:
    """For a record of a state of the world (a registry version, an endpoint): why it no longer holds, or None."""
    if step.stage.holds is None:
        return None
    return step.stage.holds(artifact(step, record, store), registry, state)


def _foreseen(step: Step, store: Store) -> Any:
    foresee: Callable[..., Any] | None = getattr(_module(step), "foreseen", None)
    if foresee is None:
        return None
    upstream = {up.name: up for up in step.upstream}
    inputs = {parameter: _given(upstream[name], store) for parameter, name in step.cfg.inputs.items()}
    return foresee(step.cfg, inputs)


def _given(up: Step, store: Store) -> Given:
    def read(file: str) -> dict[str, Any] | None:
        text = store.bucket.get(f"objects/{up.record.digest}/{file}") if up.record else None
        return json.loads(text) if text else None

    return Given(up.cfg, read)


def require_memory(app: AppConfig, steps: Iterable[Step]) -> None:
    """ResourcesUnavailable for a stage that can never fit this machine, before anything starts."""
    for step in steps:
        if refusal := _refusal(app, step):
            raise ResourcesUnavailable(refusal)


def _refusal(app: AppConfig, step: Step) -> str | None:
    total = total_memory()
    resources = step.cfg.resources
    elsewhere = app.cluster.mode is ClusterMode.attach or (isinstance(resources, TrainResources) and on_gpu(resources))
    if step.foreseen is None or total is None or elsewhere:
        return None
    try:
        require_room(step.foreseen, total, step.foreseen.workers, whole=True)
    except ResourcesUnavailable as error:
        return f"{step.name} does not fit this machine: {error}"
    return None


def _module(step: Step) -> Any:
    return importlib.import_module(step.stage.function.__module__)


def announcements(app: AppConfig, steps: Iterable[Step]) -> list[str]:
    """What a reader must know before it happens: "deploy replaces quickstart@3"."""
    lines = []
    for step in steps:
        if step.foreseen is not None:
            lines.append(_refusal(app, step) or f"{step.name} should need {step.foreseen.text()}")
        replaces: Callable[[StageConfig, Path], str | None] | None = getattr(_module(step), "replaces", None)
        if replaces and step.action != "reuse" and (served := replaces(step.cfg, app.state_root)):
            lines.append(f"{step.name} replaces {served}, which keeps serving until the new version answers")
    return lines


def _apply_limit(app: AppConfig, steps: list[Step]) -> None:
    if app.run.limit is None:
        return
    limited = [step for step in steps if "limit" in {f.name for f in dataclasses.fields(step.cfg)}]
    if not limited:
        raise ConfigError("run.limit is set, but no stage of this pipeline reads a source (has a field `limit`)")
    for step in limited:
        step.cfg = dataclasses.replace(step.cfg, limit=app.run.limit)  # type: ignore[call-arg]


def force(app: AppConfig, steps: list[Step]) -> None:
    """Mark the steps that run although their results may be known."""
    by_name = {step.name: step for step in steps}
    for name in app.run.rerun:
        _known_stage("run.rerun", name, by_name)
        by_name[name].forced = "asked for by run.rerun"
    if app.run.rerun_from is not None:
        _known_stage("run.rerun_from", app.run.rerun_from, by_name)
        for step in steps:
            if app.run.rerun_from in edges.ancestors(step.name, by_name):
                step.forced = f"asked for by run.rerun_from={app.run.rerun_from}"
    for waiver in app.run.accept:
        name = waiver.partition(".")[0]
        _known_stage("run.accept", name, by_name)
        if by_name[name].forced:
            raise ConfigError(f"run.accept={waiver}: {name} is {by_name[name].forced}, so nothing of it can be reused")


def _known_stage(field_name: str, name: str, steps: dict[str, Step]) -> None:
    if name not in steps:
        raise ConfigError(f"{field_name}={name}: no stage of that name in this run{did_you_mean(name, list(steps))}")
