"""`make debug STAGE=train`: one stage in this process under pdb, without Ray, on the results that its upstream stages published.
Apart, because nothing here is ever published: not the output, not a metric, not a model version.
"""

import bdb
import dataclasses
import os
import pdb
import shlex
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from pipelines import cluster, session
from pipelines.config import AppConfig, compose
from pipelines.console import Console
from pipelines.mistakes import ConfigError, did_you_mean
from pipelines.plan import Step, artifact
from pipelines.registry import RegistryReader, tracking_uri
from pipelines.store import Store
from pipelines.worker import Job, context, validate

EXECUTORS = ("executor", "launcher")
"""Fields of a stage's resources that may have the choice `inline`."""


def debug(console: Console, overrides: list[str], conf: str | None) -> int:
    """Stop before the stage's first line, and where it fails."""
    app = compose(overrides, conf)
    steps, store = session.planned(app)
    step = _chosen(steps, os.environ.get("STAGE", ""))
    _inline(step)  # refuses before anything is asked for
    _require_upstream(step, overrides)
    cluster.quiet()
    job = _job(app, step, store)
    console.line(
        f"{step.name} in this process, without Ray; whatever it makes stays in {job.staged} and is never published"
    )
    console.line(
        "pdb: n next line, s step into, c go on, p <name> show, q leave; it stops again where an error is raised"
    )
    try:
        debugger = _Debugger()
        made: Any = debugger.runcall(step.stage.function, job.cfg, context(job, _Ears(console, app)), **job.inputs)
        if debugger.left:
            console.line(f"left; what it wrote until then is in {job.staged}")
            return 0
        validate(job, made)
    except Exception as error:
        traceback.print_exception(error)
        pdb.post_mortem(_inside(error.__traceback__))
        raise
    console.line(f"done: {job.staged}")
    return 0


def _chosen(steps: list[Step], name: str) -> Step:
    by_name = {step.name: step for step in steps}
    if name not in by_name:
        said = (
            f"STAGE={name}: no stage of that name in this pipeline" if name else "which stage? make debug STAGE=<name>"
        )
        raise ConfigError(said + (did_you_mean(name, list(by_name)) if name else f"; there are: {', '.join(by_name)}"))
    return by_name[name]


def _require_upstream(step: Step, overrides: list[str]) -> None:
    missing = [up.name for up in step.upstream if up.record is None]
    if missing:
        typed = " ".join(shlex.quote(o) for o in overrides if not o.startswith("run.until="))
        commands = " and ".join(
            " ".join(["make run", *([typed] if typed else []), f"run.until={name}"]) for name in missing
        )
        raise ConfigError(f"{step.name} needs the results of {', '.join(missing)}, which are not made yet: {commands}")


def _job(app: AppConfig, step: Step, store: Store) -> Job:
    assert step.fingerprint is not None
    place = app.state_root / "debug" / f"{step.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for name in ("output", "work"):
        (place / name).mkdir(parents=True)
    inputs = {
        parameter: artifact(up, up.record, store)
        for parameter, up in zip(step.cfg.inputs, step.upstream, strict=True)
        if up.record is not None
    }
    return Job(
        name=step.name,
        cfg=dataclasses.replace(step.cfg, resources=_inline(step)),
        inputs=inputs,
        app=dataclasses.replace(app, stages={}),
        fingerprint=step.fingerprint,
        staged=place / "output",
        work=place / "work",
        ray=None,
    )


def _inline(step: Step) -> Any:
    """Its resources, with the choice that needs no Ray. Raises ConfigError for a stage that is nothing without Ray."""
    resources = step.cfg.resources
    if not step.stage.ray:
        return resources
    for name in EXECUTORS:
        if (chosen := getattr(resources, name, None)) is not None:
            return dataclasses.replace(resources, **{name: type(chosen).inline})
    raise ConfigError(
        f"{step.name} only hands work to Ray, so without Ray there is nothing to step through; "
        f"make run run.until={step.name} runs it, and its processes write to the logs under the state directory"
    )


class _Debugger(pdb.Pdb):
    """pdb that knows whether it was left with q (which ends the stage) or the stage came to its end."""

    left = False

    def set_quit(self) -> None:
        self.left = True
        super().set_quit()


class _Ears:
    """What the stage says goes to the console; the registry is read and never written."""

    def __init__(self, console: Console, app: AppConfig) -> None:
        self._console = console
        self._registry = RegistryReader(tracking_uri(app.tracking.uri, app.state_root), app.tracking.timeout_s)
        self._pretended: dict[str, tuple[str, str]] = {}
        """Versions that the stage believes it registered."""

    def __call__(self, kind: str, *arguments: Any) -> Any:
        if kind == "headline":
            self._console.line(arguments[0])
        if kind != "registry":
            return None
        method, *rest = arguments
        if method == "register":
            self._console.line(f"not registered: a version of {rest[0]}")
            version = (self._registry.alias(rest[0], "candidate") or 0) + 1
            self._pretended[f"models:/{rest[0]}/{version}"] = (rest[1].uri, rest[1].digest)
            return version
        if method == "resolve" and rest[0] in self._pretended:
            return self._pretended[rest[0]]
        if method == "set_alias":
            self._console.line(f"not moved: {rest[0]}@{rest[1]} to version {rest[2]}")
            return None
        return getattr(self._registry, method)(*rest)


def _inside(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the stage's own first frame on."""
    ours = {Path(__file__).name, Path(bdb.__file__).name, Path(pdb.__file__).name}
    while trace is not None and trace.tb_next is not None and Path(trace.tb_frame.f_code.co_filename).name in ours:
        trace = trace.tb_next
    return trace
