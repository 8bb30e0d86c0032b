"""Decides whether a checkpoint may be registered. Its yes is an Approval, the only thing that `register` accepts."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from stages.artifacts import Approval, Checkpoint, EvalReport, LoadReport
from stages.contract import Context, GateRefused, StageConfig, StageError, stage

LIMITS = {
    "max_bits_per_byte": "bits_per_byte",
    "max_validation_loss": "validation_loss",
    "max_perplexity": "perplexity",
}
FLOORS = {"min_reward_accuracy": "reward_accuracy", "min_reward_margin": "reward_margin"}
LOAD_LIMITS = {
    "max_ttft_p95_ms": "ttft_p95_ms",
    "max_itl_p95_ms": "itl_p95_ms",
    "max_latency_p95_ms": "latency_p95_ms",
    "max_error_rate": "error_rate",
}
LOAD_FLOORS = {"min_goodput": "goodput", "min_output_tokens_per_second": "output_tokens_per_second"}


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
    max_ttft_p95_ms: float | None = None
    """Of a load report: milliseconds within which 95 % of the requests had their first token, at most."""
    max_itl_p95_ms: float | None = None
    """Of a load report: milliseconds from token to token that 95 % of the requests kept, at most."""
    max_latency_p95_ms: float | None = None
    """Of a load report: milliseconds within which 95 % of the requests were answered, at most."""
    max_error_rate: float | None = None
    """Of a load report: share of the requests that were not answered, at most; 0 allows none."""
    min_goodput: float | None = None
    """Of a load report: share of the requests that kept its objective, at least."""
    min_output_tokens_per_second: float | None = None
    """Of a load report: tokens a second of all answers together, at least."""
    must_beat: list[str] = field(default_factory=list)
    """Baselines of the report (untrained, before, unigram, lzma) whose bits per byte the model must undercut."""
    min_improvement: float = 0.0
    """Share by which each of them must be undercut: 0.05 = five percent fewer bits per byte."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_improvement < 1:
            raise ValueError(f"rules.min_improvement must be from 0 to below 1, got {self.min_improvement}")
        if not self.of_model() and not self.of_load():
            names = ", ".join((*LIMITS, *FLOORS, *LOAD_LIMITS, *LOAD_FLOORS))
            raise ValueError(f"rules must hold at least one of {names}, must_beat: a gate without rules is none")
        if self.min_improvement and not self.must_beat:
            raise ValueError("rules.min_improvement needs rules.must_beat: name the baselines it is measured against")

    def of_model(self) -> list[str]:
        """The rules that are set and ask the model's report."""
        set_ = [name for name in (*LIMITS, *FLOORS) if getattr(self, name) is not None]
        return set_ + ["must_beat"] * bool(self.must_beat)

    def of_load(self) -> list[str]:
        """The rules that are set and ask the load report."""
        return [name for name in (*LOAD_LIMITS, *LOAD_FLOORS) if getattr(self, name) is not None]


@dataclass(kw_only=True)
class GateConfig(StageConfig):
    """Options in `conf/gate/`."""

    rules: Rules
    """What must hold before anything is registered."""

    def check(self, connected: frozenset[str]) -> None:
        """Each rule has the report that it asks, and a report of a model says of which."""
        if self.rules.of_model() and not {"checkpoint", "report"} <= connected:
            raise ValueError(
                f"rules.{self.rules.of_model()[0]} asks the model's report: connect checkpoint and report to gate"
            )
        if self.rules.of_load() and "load" not in connected:
            raise ValueError(
                f"rules.{self.rules.of_load()[0]} asks what a crowd got: connect a load stage to gate (load: ...)"
            )


@dataclass(frozen=True)
class Verdict:
    """One rule: what it wanted, what the report says."""

    rule: str
    wanted: str
    found: float | None
    holds: bool


@stage()
def gate(
    cfg: GateConfig,
    ctx: Context,
    checkpoint: Checkpoint | None = None,
    report: EvalReport | None = None,
    load: LoadReport | None = None,
) -> Approval:
    """An Approval bound to this checkpoint and these reports. GateRefused, with every rule, when one does not hold."""
    given = (("checkpoint", checkpoint), ("report", report), ("load", load))
    cfg.check(frozenset(name for name, artifact in given if artifact is not None))
    judged, loaded = report.summary() if report else {}, load.summary() if load else {}
    digest = checkpoint.digest if checkpoint else str(loaded.get("digest"))
    for what, found in (("report", judged.get("checkpoint_digest")), ("load", loaded.get("digest"))):
        if (judged if what == "report" else loaded) and (found != digest or not digest):
            raise StageError(
                f"the {what} judges checkpoint {str(found)[:12]}, not {digest[:12]}: "
                f"connect {'evaluate' if what == 'report' else 'load'} and gate to the same checkpoint"
            )
    verdicts = [*judge(cfg.rules, judged), *judge_load(cfg.rules, loaded)]
    refused = [verdict for verdict in verdicts if not verdict.holds]
    ctx.tracker.log_text(table(verdicts), "gate.md")
    if refused:
        raise GateRefused(f"{len(refused)} of {len(verdicts)} rules do not hold\n{table(verdicts)}")
    ctx.headline(f"{len(verdicts)} of {len(verdicts)} rules hold")
    facts = {
        "checkpoint_digest": digest,
        "report_digest": report.digest if report else "",
        "load_digest": load.digest if load else "",
        "rules": [asdict(verdict) for verdict in verdicts],
        "metrics": judged.get("metrics") or loaded["metrics"],
    }
    Approval.write(ctx.output, facts)
    return Approval(uri=ctx.output.resolve().as_uri())


def judge(rules: Rules, summary: dict[str, Any]) -> Iterator[Verdict]:
    """A verdict for each rule that is set."""
    metrics, baselines = summary.get("metrics") or {}, summary.get("baselines") or {}
    yield from _bounds(rules, metrics, LIMITS, FLOORS)
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


def judge_load(rules: Rules, summary: dict[str, Any]) -> Iterator[Verdict]:
    """The same for the rules that ask a load report."""
    yield from _bounds(rules, summary.get("metrics") or {}, LOAD_LIMITS, LOAD_FLOORS)


def _bounds(rules: Rules, metrics: dict[str, Any], limits: dict[str, str], floors: dict[str, str]) -> Iterator[Verdict]:
    for rule, metric in limits.items():
        limit = getattr(rules, rule)
        if limit is not None:
            found = _number(metrics.get(metric))
            yield Verdict(rule, f"{metric} <= {limit:g}", found, found is not None and found <= limit)
    for rule, metric in floors.items():
        limit = getattr(rules, rule)
        if limit is not None:
            found = _number(metrics.get(metric))
            yield Verdict(rule, f"{metric} >= {limit:g}", found, found is not None and found >= limit)


def table(verdicts: list[Verdict]) -> str:
    """Every rule: wanted, found, verdict."""
    lines = ["| rule | wanted | found | verdict |", "|---|---|---|---|"]
    for v in verdicts:
        found = "missing or not a number" if v.found is None else f"{v.found:.4f}"
        lines.append(f"| {v.rule} | {v.wanted} | {found} | {'holds' if v.holds else 'REFUSED'} |")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
