"""Three small real stages that need no Ray: they count their executions in files, so that tests can see what ran."""

import json
import os
import signal
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
    seconds: float = 0.0


@dataclass(kw_only=True)
class JudgeConfig(StageConfig):
    at_least: int = 0


def _count(ctx: Context, name: str) -> None:
    with (ctx.state / "executions.log").open("a") as log:
        log.write(f"{name}\n")


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
    if cfg.trouble == "user":
        raise StageError("rows.jsonl:3: broken")
    if cfg.trouble == "gate":
        raise GateRefused("not good enough")
    if cfg.trouble == "crash":
        raise KeyError("a bug")
    if cfg.trouble == "full":
        Path("/dev/full").write_text("the kernel's own word for a full disk")
    if cfg.trouble == "kill":
        (ctx.output / "half-written").write_text("x")
        (ctx.work / "resumable").write_text("kept")
        os.kill(os.getppid(), signal.SIGKILL)  # the driver
        time.sleep(60)
    deadline = time.monotonic() + cfg.seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)
    value = rows.summary()["value"] * cfg.factor
    for step in range(3):
        ctx.tracker.log_metrics({"loss": 3.0 - step}, step=step)
    _rows(ctx.output, value)
    return Corpus.write(ctx.output, {"value": value})


@stage()
def judge(cfg: JudgeConfig, ctx: Context, corpus: Corpus) -> EvalReport:
    _count(ctx, "judge")
    return EvalReport.write(ctx.output, {"value": corpus.summary()["value"], "metrics": {"value": 1.0}})


def executions(state: Path) -> list[str]:
    log = state / "executions.log"
    return log.read_text().split() if log.exists() else []


def published(state: Path) -> dict[str, str]:
    """stage -> digest of every record."""
    ended = [json.loads(p.read_text()) for p in sorted((state / "store" / "results").glob("*/??????.json"))]
    return {r["payload"]["stage"]: r["digest"] for r in ended if "sealed" not in r}
