"""Decides whether a checkpoint may be registered. Its yes is an Approval, the only thing that `register` accepts."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from stages.artifacts import Approval, Checkpoint, EvalReport
from stages.contract import Context, GateRefused, StageConfig, StageError, stage

LIMITS = {
    "max_bits_per_byte": "bits_per_byte",
    "max_validation_loss": "validation_loss",
    "max_perplexity": "perplexity",
}
FLOORS = {"min_reward_accuracy": "reward_accuracy", "min_reward_margin": "reward_margin"}


@dataclass(kw_only=True)
class Rules:
    """Every rule that is set must hold. A metric that is missing or not a finite number refuses."""

    max_bits_per_byte: float | None = None
    """Bits per byte of the model, at most."""
    max_validation_loss: float | None = None
    """Mean loss in nats a predicted token, at most; on preference pairs a pair, where ln 2 = 0.6931 is a model that learned nothing."""
    max_perplexity: float | None = None
    """Perplexity a predicted token, at most."""
    min_reward_accuracy: float | None = None
    """Share of preference pairs whose chosen answer the model raised more than the rejected one, at least."""
    min_reward_margin: float | None = None
    """By how much it did on average, in nats times beta, at least."""
    must_beat: list[str] = field(default_factory=list)
    """Baselines of the report (untrained, before, unigram, lzma) whose bits per byte the model must undercut."""
    min_improvement: float = 0.0
    """Share by which each of them must be undercut: 0.05 = five percent fewer bits per byte."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_improvement < 1:
            raise ValueError(f"rules.min_improvement must be from 0 to below 1, got {self.min_improvement}")
        if not self.must_beat and all(getattr(self, name) is None for name in (*LIMITS, *FLOORS)):
            raise ValueError(
                f"rules must hold at least one of {', '.join((*LIMITS, *FLOORS))}, must_beat: a gate without rules is none"
            )
        if self.min_improvement and not self.must_beat:
            raise ValueError("rules.min_improvement needs rules.must_beat: name the baselines it is measured against")


@dataclass(kw_only=True)
class GateConfig(StageConfig):
    """Options in `conf/gate/`."""

    rules: Rules
    """What must hold before anything is registered."""


@dataclass(frozen=True)
class Verdict:
    """One rule: what it wanted, what the report says."""

    rule: str
    wanted: str
    found: float | None
    holds: bool


@stage()
def gate(cfg: GateConfig, ctx: Context, checkpoint: Checkpoint, report: EvalReport) -> Approval:
    """An Approval bound to this checkpoint and this report. GateRefused, with every rule, when one does not hold."""
    summary = report.summary()
    if summary.get("checkpoint_digest") != checkpoint.digest or not checkpoint.digest:
        raise StageError(
            f"the report judges checkpoint {str(summary.get('checkpoint_digest'))[:12]}, not {checkpoint.digest[:12]}: "
            "connect evaluate and gate to the same checkpoint"
        )
    verdicts = list(judge(cfg.rules, summary))
    refused = [verdict for verdict in verdicts if not verdict.holds]
    ctx.tracker.log_text(table(verdicts), "gate.md")
    if refused:
        raise GateRefused(f"{len(refused)} of {len(verdicts)} rules do not hold\n{table(verdicts)}")
    ctx.headline(f"{len(verdicts)} of {len(verdicts)} rules hold")
    facts = {
        "checkpoint_digest": checkpoint.digest,
        "report_digest": report.digest,
        "rules": [asdict(verdict) for verdict in verdicts],
        "metrics": summary["metrics"],
    }
    Approval.write(ctx.output, facts)
    return Approval(uri=ctx.output.resolve().as_uri())


def judge(rules: Rules, summary: dict[str, Any]) -> Iterator[Verdict]:
    """A verdict for each rule that is set."""
    metrics, baselines = summary.get("metrics") or {}, summary.get("baselines") or {}
    for rule, metric in LIMITS.items():
        limit = getattr(rules, rule)
        if limit is not None:
            found = _number(metrics.get(metric))
            yield Verdict(rule, f"{metric} <= {limit:g}", found, found is not None and found <= limit)
    for rule, metric in FLOORS.items():
        limit = getattr(rules, rule)
        if limit is not None:
            found = _number(metrics.get(metric))
            yield Verdict(rule, f"{metric} >= {limit:g}", found, found is not None and found >= limit)
    found = _number(metrics.get("bits_per_byte"))
    for name in rules.must_beat:
        other = _number((baselines.get(name) or {}).get("bits_per_byte"))
        if other is None:
            known = ", ".join(sorted(baselines)) or "none"
            yield Verdict(f"must_beat {name}", f"a baseline {name} (the report has {known})", None, False)
        else:
            limit = other * (1 - rules.min_improvement)
            share = f" less {rules.min_improvement:.0%}" if rules.min_improvement else ""
            wanted = f"bits_per_byte < {limit:.4f} ({name} {other:.4f}{share})"
            yield Verdict(f"must_beat {name}", wanted, found, found is not None and found < limit)


def table(verdicts: list[Verdict]) -> str:
    """Every rule: wanted, found, verdict."""
    lines = ["| rule | wanted | found | verdict |", "|---|---|---|---|"]
    for v in verdicts:
        found = "missing or not a number" if v.found is None else f"{v.found:.4f}"
        lines.append(f"| {v.rule} | {v.wanted} | {found} | {'holds' if v.holds else 'REFUSED'} |")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
