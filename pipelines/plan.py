"""From a composed config to ordered steps, each with run, reuse or unknown, and why. Apart, because planning starts nothing.

Reads the store and asks light questions only (one GET of an endpoint, one row of the registry); loads no ray, mlflow or torch.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines import fingerprint as fp
from pipelines.config import AppConfig
from pipelines.mistakes import ConfigError, did_you_mean
from pipelines.store import Record, Store
from stages.artifacts import Artifact
from stages.contract import STAGES, Resolver, Stage, StageConfig, StageError


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
    changes: list[str] = field(default_factory=list)
    """Field-level difference to `last`."""
    forced: str | None = None
    """Why it runs although its result may be known: `run.rerun` or `run.rerun_from`."""

    @property
    def cost_s(self) -> float | None:
        """Seconds of its last execution."""
        return self.last["meta"].get("seconds") if self.last else None


def build(app: AppConfig) -> list[Step]:
    """Typed, ordered steps. Raises ConfigError for unknown stages, missing or mistyped edges, cycles and bad bounds."""
    if not app.stages:
        raise ConfigError("the pipeline has no stages: name some in its defaults list, for example `- /ingest: files`")
    steps = {name: Step(name, STAGES[type(cfg)], cfg) for name, cfg in app.stages.items()}
    for step in steps.values():
        _check_edges(step, steps)
    ordered = [steps[name] for name in _topological(steps)]
    for step in ordered:
        try:
            step.cfg.check(frozenset(step.cfg.inputs))
        except ValueError as error:
            raise ConfigError(f"stages.{step.name}: {error}") from error
    _apply_limit(app, ordered)
    if app.run.until is not None:
        _known_stage("run.until", app.run.until, steps)
        wanted = _ancestors(app.run.until, steps)
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
            step.action, step.reason = "unknown", f"until {', '.join(sorted(set(waiting)))} is made"
            continue
        identify(app, step, known, resolver)
        decide_one(app, step, store, registry)
        if step.record:
            known[step.name] = step.record.digest


def decide_one(app: AppConfig, step: Step, store: Store, registry: Any) -> None:
    """Run or reuse, for a step whose fingerprint is known."""
    assert step.fingerprint is not None
    if step.forced:
        step.action, step.reason = "run", step.forced
        return
    record, broken = store.find(step.fingerprint)
    moved = world_moved(step, record, store, registry, app.state_root) if record else None
    if record and moved is None:
        step.action, step.reason, step.record = "reuse", _since(record), record
    else:
        step.action, step.reason = "run", broken or moved or why(step)


def identify(app: AppConfig, step: Step, known: dict[str, str], resolver: Resolver) -> None:
    """Compute payload and fingerprint of a step whose inputs' digests are known."""
    try:
        sources = step.stage.sources(step.cfg, resolver) if step.stage.sources else {}
    except StageError as error:
        raise ConfigError(f"stages.{step.name}: {error}") from error
    inputs = {parameter: known[upstream] for parameter, upstream in step.cfg.inputs.items()}
    step.payload = fp.payload(step.stage, step.cfg, app.seed, inputs, sources)
    step.fingerprint = fp.digest(step.payload)
    if step.last:
        step.changes = fp.difference(step.last["payload"], step.payload)


def artifact(step: Step, record: Record, store: Store) -> Artifact:
    """The typed face of a published record."""
    return step.stage.output(uri=store.object(record.digest).as_uri(), digest=record.digest)


def world_moved(step: Step, record: Record, store: Store, registry: Any, state: Path) -> str | None:
    """For a record of a state of the world (a registry version, an endpoint): why it no longer holds, or None."""
    if step.stage.holds is None:
        return None
    return step.stage.holds(artifact(step, record, store), registry, state)


def announcements(steps: Iterable[Step], state: Path) -> list[str]:
    """What a reader must know before it happens: "deploy replaces quickstart@3"."""
    lines = []
    for step in steps:
        module = importlib.import_module(step.stage.function.__module__)
        replaces: Callable[[StageConfig, Path], str | None] | None = getattr(module, "replaces", None)
        if replaces and step.action != "reuse" and (served := replaces(step.cfg, state)):
            lines.append(f"{step.name} replaces {served}, which keeps serving until the new version answers")
    return lines


def as_json(app: AppConfig, steps: list[Step]) -> dict[str, Any]:
    """The plan for machines, and for the MLflow parent run."""
    return {
        "pipeline": app.name,
        "seed": app.seed,
        "steps": [
            {
                "name": s.name,
                "stage": s.stage.name,
                "action": s.action,
                "reason": s.reason,
                "changes": s.changes,
                "fingerprint": s.fingerprint,
                "inputs": s.cfg.inputs,
                "digest": s.record.digest if s.record else None,
                "source_run": s.record.meta.get("run_id") if s.record else None,
                "last_seconds": s.cost_s,
            }
            for s in steps
        ],
    }


def _check_edges(step: Step, steps: dict[str, Step]) -> None:
    wanted = step.stage.inputs
    for parameter, upstream in step.cfg.inputs.items():
        where = f"stages.{step.name}.inputs.{parameter}"
        if parameter not in wanted:
            raise ConfigError(
                f"{where}: {step.stage.name} has no such input{did_you_mean(parameter, list(wanted) or ['none'])}"
            )
        if upstream not in steps:
            raise ConfigError(
                f"{where}: no stage named '{upstream}' in this pipeline{did_you_mean(upstream, list(steps))}"
            )
        kind, made = wanted[parameter][0], steps[upstream].stage.output
        if not issubclass(made, kind):
            raise ConfigError(f"{where} wants {kind.__name__}, but {upstream} makes {made.__name__}")
    for parameter, (kind, required) in wanted.items():
        if required and parameter not in step.cfg.inputs:
            raise ConfigError(
                f"stages.{step.name}.inputs misses '{parameter}' ({kind.__name__}): "
                f"add `inputs: {{{parameter}: <a stage that makes {kind.__name__}>}}`"
            )


def _topological(steps: dict[str, Step]) -> list[str]:
    """Upstream first; among equals the order of the pipeline file."""
    done: list[str] = []
    on_path: list[str] = []

    def visit(name: str) -> None:
        if name in on_path:
            raise ConfigError(f"the stages form a cycle: {' -> '.join([*on_path[on_path.index(name) :], name])}")
        if name not in done:
            on_path.append(name)
            for upstream in steps[name].cfg.inputs.values():
                visit(upstream)
            on_path.pop()
            done.append(name)

    for name in steps:
        visit(name)
    return done


def _ancestors(name: str, steps: dict[str, Step]) -> set[str]:
    found = {name}
    for upstream in steps[name].cfg.inputs.values():
        found |= _ancestors(upstream, steps)
    return found


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
            if app.run.rerun_from in _ancestors(step.name, by_name):
                step.forced = f"asked for by run.rerun_from={app.run.rerun_from}"


def _known_stage(field_name: str, name: str, steps: dict[str, Step]) -> None:
    if name not in steps:
        raise ConfigError(f"{field_name}={name}: no stage of that name in this run{did_you_mean(name, list(steps))}")


def why(step: Step) -> str:
    """In one line, why a step has to run."""
    if step.last is None:
        return "never made"
    if not step.changes:
        return "its record is gone"
    return "; ".join(step.changes[:3]) + (
        f"; and {len(step.changes) - 3} more (make why)" if len(step.changes) > 3 else ""
    )


def _since(record: Record) -> str:
    return f"made {record.meta.get('started_at', 'earlier')}"
