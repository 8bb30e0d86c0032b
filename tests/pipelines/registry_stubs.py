"""A Ray-free stage that registers what it was given, in the order of `stages/register.py`: find, register, alias last."""

from dataclasses import dataclass

from stages.artifacts import EvalReport, Rows
from stages.contract import Context, StageConfig, stage

PIPELINE = """# @package _global_
defaults: [/make: schema, /enlist: schema, _self_]
name: stub
stages:
  enlist: {inputs: {rows: make}}
"""


@dataclass(kw_only=True)
class EnlistConfig(StageConfig):
    name: str = "m"


@stage()
def enlist(cfg: EnlistConfig, ctx: Context, rows: Rows) -> EvalReport:
    version = ctx.registry.find(cfg.name, rows.digest)
    if version is None:
        version = ctx.registry.register(cfg.name, rows, {}, {"rows": 1.0})
    ctx.registry.set_alias(cfg.name, "candidate", version)
    return EvalReport.write(ctx.output, {"version": version, "metrics": {}})
