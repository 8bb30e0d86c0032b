"""One Ray-free stage whose curve and final number follow from its values, for tests of sweeps."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from stages.artifacts import Corpus, Rows
from stages.contract import Context, ResourcesUnavailable, StageConfig, StageError, stage

PIPELINE = """# @package _global_
defaults: [/make: schema, /fit: schema, _self_]
name: stub
stages:
  fit: {inputs: {rows: make}}
"""


@dataclass(kw_only=True)
class FitConfig(StageConfig):
    x: float = 0.0
    count: int = 1
    kind: str = "plain"
    steps: int = 5
    pause: float = 0.0
    """Seconds between steps."""
    trouble: str = ""
    """Directory: while it holds a file of this point's `kind`, the stage fails; `kill-<kind>` there ends the driver,
    `away-<kind>` and `full-<kind>` are the cluster's and the disk's trouble."""


@stage()
def fit(cfg: FitConfig, ctx: Context, rows: Rows) -> Corpus:
    with (ctx.state / "executions.log").open("a") as log:
        log.write(f"fit {cfg.x:g} {cfg.count} {cfg.kind}\n")
    if cfg.trouble and (Path(cfg.trouble) / cfg.kind).exists():
        raise StageError(f"{cfg.kind} does not fit")
    if cfg.trouble and (Path(cfg.trouble) / f"away-{cfg.kind}").exists():
        raise ResourcesUnavailable("the cluster does not answer")
    if cfg.trouble and (Path(cfg.trouble) / f"full-{cfg.kind}").exists():
        Path("/dev/full").write_text("the kernel's own word for a full disk")
    if cfg.trouble and (Path(cfg.trouble) / f"kill-{cfg.kind}").exists():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    final = (cfg.x - 3.0) ** 2 + cfg.count
    for step in range(cfg.steps):
        ctx.tracker.log_metrics({"loss": final + cfg.steps - 1 - step}, step=step)
        time.sleep(cfg.pause)
    (ctx.output / "rows").mkdir()
    (ctx.output / "rows" / "part-00000.parquet").write_text(str(final))
    return Corpus.write(ctx.output, {"value": final})
