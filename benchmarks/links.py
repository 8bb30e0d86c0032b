"""Stages that do next to nothing, for measuring what is around a stage. Apart, because a worker process imports them by this
module's name; `command` is the command line of the project with these stages known to it."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from stages.artifacts import Rows
from stages.contract import Context, StageConfig, stage

COMMAND = "import sys; import benchmarks.links; from pipelines.__main__ import main; sys.exit(main(sys.argv[1:]))"
BLOCK = bytes(range(256)) * 4096


@dataclass(kw_only=True)
class LinkConfig(StageConfig):
    """One link of a chain."""

    value: int = 1
    """Added to what the link before has handed over."""


@dataclass(kw_only=True)
class RayLinkConfig(LinkConfig):
    """One link that asks for Ray, as ingest, clean, tokenize, train and evaluate do."""


@dataclass(kw_only=True)
class WeightsConfig(StageConfig):
    """A large file."""

    megabytes: int = 1
    """Its size, in MiB."""


@stage()
def link(cfg: LinkConfig, ctx: Context, rows: Rows | None = None) -> Rows:
    """Reads one number and writes one."""
    return _link(cfg, ctx, rows)


@stage(ray=True)
def ray_link(cfg: RayLinkConfig, ctx: Context, rows: Rows | None = None) -> Rows:
    """The same in a process that is connected to Ray."""
    return _link(cfg, ctx, rows)


@stage()
def weights(cfg: WeightsConfig, ctx: Context) -> Rows:
    """Writes and never reads."""
    rows = ctx.output / "rows"
    rows.mkdir()
    with (rows / "part-00000.parquet").open("wb") as file:
        for _ in range(cfg.megabytes):
            file.write(BLOCK)
    return Rows.write(ctx.output, {"value": cfg.megabytes})


def _link(cfg: LinkConfig, ctx: Context, rows: Rows | None) -> Rows:
    value = cfg.value + (rows.summary()["value"] if rows else 0)
    (ctx.output / "rows").mkdir()
    (ctx.output / "rows" / "part-00000.parquet").write_text(str(value))
    ctx.headline(f"value {value}")
    return Rows.write(ctx.output, {"value": value})


def pipeline(conf: Path, name: str, verbs: list[str]) -> None:
    """A pipeline file that chains these stages, each fed by the one before."""
    lines = ["# @package _global_", "defaults:"]
    lines += [f"  - /{verb}@stages.s{n}: schema" for n, verb in enumerate(verbs)]
    lines += ["  - _self_", f"name: {name}", "stages:"]
    lines += [f"  s{n}: {{inputs: {{{f'rows: s{n - 1}' if n else ''}}}}}" for n in range(len(verbs))]
    (conf / "pipeline").mkdir(parents=True, exist_ok=True)
    (conf / "pipeline" / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def command(conf: Path, state: Path, pipeline: str, *overrides: str) -> list[str]:
    """`make run pipeline=...` in a process, with these stages registered first."""
    words = ["run", "--conf", str(conf), f"pipeline={pipeline}", f"state={state}", *overrides]
    return machine.python("-c", COMMAND, *words)
