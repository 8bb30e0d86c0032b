"""Three small real stages that need no Ray: they count their executions in files, so that tests can see what ran."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from stages.artifacts import Corpus, EvalReport, Rows
from stages.contract import Context, GateRefused, StageConfig, StageError, StageResources, location, stage


@dataclass(kw_only=True)
class StubResources(StageResources):
    workers: int = 1


@dataclass(kw_only=True)
class MakeConfig(StageConfig):
    value: int = 1
    source: str | None = location(None)
    edit: bool = False
    limit: int | None = None
    resources: StubResources = field(default_factory=StubResources)


@dataclass(kw_only=True)
class DoubleConfig(StageConfig):
    factor: int = 2
    trouble: str = ""
    troubled: int = 99
    """How many of its executions have the trouble."""
    seconds: float = 0.0


@dataclass(kw_only=True)
class JudgeConfig(StageConfig):
    at_least: int = 0


def _count(ctx: Context, name: str) -> None:
    with (ctx.state / "executions.log").open("a") as log:
        log.write(f"{name}\n")


def _note(ctx: Context, name: str, event: str) -> None:
    """A line (name, event, seconds of a clock that all processes share, process)."""
    with (ctx.state / "events.log").open("a") as log:
        log.write(f"{name} {event} {time.monotonic()} {os.getpid()}\n")


def _rows(directory: Path, value: int) -> None:
    (directory / "rows").mkdir()
    (directory / "rows" / "part-00000.parquet").write_text(str(value))


def _identity(cfg: MakeConfig, resolver: object) -> dict[str, str]:
    return {"source": resolver.path(Path(cfg.source))} if cfg.source else {}  # type: ignore[attr-defined]


@stage(libraries=("pyarrow",), sources=_identity)
def make(cfg: MakeConfig, ctx: Context) -> Rows:
    _count(ctx, "make")
    if cfg.edit and cfg.source:
        Path(cfg.source).write_text("edited while it was read")
    _rows(ctx.output, cfg.value)
    ctx.headline(f"made {cfg.value}")
    return Rows.write(ctx.output, {"value": cfg.value, "rows": 1})


@stage()
def double(cfg: DoubleConfig, ctx: Context, rows: Rows) -> Corpus:
    _count(ctx, "double")
    _note(ctx, f"x{cfg.factor}", "begin")
    if executions(ctx.state).count("double") <= cfg.troubled:
        _trouble(cfg, ctx)
    _wait(0.0 if cfg.trouble == "talk" else cfg.seconds)
    _note(ctx, f"x{cfg.factor}", "end")
    value = rows.summary()["value"] * cfg.factor
    for step in range(3):
        ctx.tracker.log_metrics({"loss": 3.0 - step}, step=step)
    if cfg.trouble != "empty":
        _rows(ctx.output, value)
    return Corpus.write(ctx.output, {"value": value})


def _trouble(cfg: DoubleConfig, ctx: Context) -> None:
    if cfg.trouble == "user":
        raise StageError("rows.jsonl:3: broken")
    if cfg.trouble == "gate":
        raise GateRefused("not good enough")
    if cfg.trouble == "crash":
        raise KeyError("a bug")
    if cfg.trouble == "passing":
        raise OSError("the network was away")
    if cfg.trouble == "full":
        Path("/dev/full").write_text("the kernel's own word for a full disk")
    if cfg.trouble in ("kill", "die"):
        (ctx.output / "half-written").write_text("x")
        (ctx.work / "resumable").write_text("kept")
        os.kill(os.getppid() if cfg.trouble == "kill" else os.getpid(), signal.SIGKILL)
        time.sleep(60)
    if cfg.trouble == "leftover":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (ctx.state / "child").write_text(str(child.pid))
        raise StageError("failed, and left a process")
    if cfg.trouble == "resume":
        done = ctx.work / "checkpoints" / "step-00000005" / "complete.json"
        if done.exists():
            ctx.headline(f"goes on from {(done.parent / 'state.pt').read_text()}")
            return
        done.parent.mkdir(parents=True)
        (done.parent / "state.pt").write_text(f"step 5 of {os.getpid()}")
        done.write_text("{}")
        _wait(60)
    if cfg.trouble == "talk":
        end = time.monotonic() + cfg.seconds
        while time.monotonic() < end:
            ctx.progress(0.5, "training")
            time.sleep(0.1)
    if cfg.trouble == "modules":
        (ctx.state / "modules").write_text(" ".join(sys.modules))
    if cfg.trouble == "careful":
        try:
            _wait(60)
        finally:
            (ctx.state / "cleaned-up").write_text("yes")
    if cfg.trouble == "stubborn":
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(KeyboardInterrupt):
                _wait(end - time.monotonic())


def _wait(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)


@dataclass(kw_only=True)
class AskConfig(StageConfig):
    cpus: int = 1
    """CPUs that its one Ray task asks for."""


@stage(ray=True)
def ask(cfg: AskConfig, ctx: Context) -> Rows:
    import ray

    _count(ctx, "ask")
    _note(ctx, f"x{cfg.cpus}", "begin")
    value = ray.get(ray.remote(num_cpus=cfg.cpus)(lambda: os.getpid()).remote())
    assert value != os.getpid()
    _rows(ctx.output, cfg.cpus)
    return Rows.write(ctx.output, {"value": cfg.cpus, "rows": 1})


@stage()
def judge(cfg: JudgeConfig, ctx: Context, corpus: Corpus) -> EvalReport:
    _count(ctx, "judge")
    return EvalReport.write(ctx.output, {"value": corpus.summary()["value"], "metrics": {"value": 1.0}})


def events(state: Path) -> list[tuple[str, str, float, int]]:
    """What `double` noted: ("x2", "begin" or "end", seconds, process)."""
    log = state / "events.log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(name, event, float(at), int(pid)) for name, event, at, pid in lines]


def executions(state: Path) -> list[str]:
    log = state / "executions.log"
    return log.read_text().split() if log.exists() else []


def published(state: Path) -> dict[str, str]:
    """stage -> digest of every record."""
    ended = [json.loads(p.read_text()) for p in sorted((state / "store" / "results").glob("*/??????.json"))]
    return {r["payload"]["stage"]: r["digest"] for r in ended if "sealed" not in r}
