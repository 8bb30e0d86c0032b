"""Four small stages without Ray, one after the other: gather -> expand -> weigh -> enlist. They count their executions, write their
outputs in parts, and let `tests.faults.inject` strike in between.
"""

from dataclasses import dataclass
from pathlib import Path

from stages.artifacts import Corpus, EvalReport, ModelVersion, Rows
from stages.contract import Context, StageConfig, stage
from stages.register import holds
from tests.faults import inject

PARTS = 5
STAGES = ("gather", "expand", "weigh", "enlist")
PIPELINE = """# @package _global_
defaults: [/gather: schema, /expand: schema, /weigh: schema, /enlist: schema, _self_]
name: faults
stages:
  expand: {inputs: {rows: gather}}
  weigh: {inputs: {corpus: expand}}
  enlist: {inputs: {corpus: expand, report: weigh}}
"""


@dataclass(kw_only=True)
class GatherConfig(StageConfig):
    value: int = 1


@dataclass(kw_only=True)
class ExpandConfig(StageConfig):
    factor: int = 2


@dataclass(kw_only=True)
class WeighConfig(StageConfig):
    scale: int = 1


@dataclass(kw_only=True)
class EnlistConfig(StageConfig):
    name: str = "faults"


def _begin(ctx: Context, name: str) -> None:
    with (ctx.state / "executions.log").open("a") as log:
        log.write(f"{name}\n")
    inject.begin(name, ctx.state)


def _write(directory: Path, value: int) -> None:
    (directory / "rows").mkdir()
    for number in range(PARTS):
        (directory / "rows" / f"part-{number:05d}.parquet").write_text(f"{value} {number}\n" * 100)
        inject.reached("part")


def _read(artifact: Rows | Corpus) -> int:
    """Every part, whole: a reader of half an artifact fails here."""
    parts = sorted((artifact.local() / "rows").glob("part-*.parquet"))
    values = {int(line.split()[0]) for part in parts for line in part.read_text().splitlines()}
    lines = sum(len(part.read_text().splitlines()) for part in parts)
    assert len(parts) == PARTS and lines == 100 * PARTS and len(values) == 1, (len(parts), lines, values)
    return values.pop()


@stage()
def gather(cfg: GatherConfig, ctx: Context) -> Rows:
    _begin(ctx, "gather")
    _write(ctx.output, cfg.value)
    return Rows.write(ctx.output, {"rows": 100 * PARTS})


@stage()
def expand(cfg: ExpandConfig, ctx: Context, rows: Rows) -> Corpus:
    _begin(ctx, "expand")
    for step in range(3):
        ctx.tracker.log_metrics({"loss": 3.0 - step}, step=step)
    _write(ctx.output, _read(rows) * cfg.factor)
    return Corpus.write(ctx.output, {"rows": 100 * PARTS})


@stage()
def weigh(cfg: WeighConfig, ctx: Context, corpus: Corpus) -> EvalReport:
    _begin(ctx, "weigh")
    value = _read(corpus) * cfg.scale
    _write(ctx.output, value)
    return EvalReport.write(ctx.output, {"metrics": {"value": value}})


@stage(holds=holds)
def enlist(cfg: EnlistConfig, ctx: Context, corpus: Corpus, report: EvalReport) -> ModelVersion:
    _begin(ctx, "enlist")
    version = ctx.registry.find(cfg.name, corpus.digest)
    if version is None:
        version = ctx.registry.register(cfg.name, corpus, {}, {})
    inject.reached("registered")
    ctx.registry.set_alias(cfg.name, "candidate", version)
    _write(ctx.output, version)
    return ModelVersion.write(ctx.output, {"name": cfg.name, "version": version, "digest": corpus.digest})
