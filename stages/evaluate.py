"""Measures a checkpoint on the validation split: loss, perplexity, bits per byte, baselines on the same bytes, samples; or, on
preference pairs, how often and by how much it prefers the chosen answer more than its reference does.

The measuring is `stages.training.scoring` and `preference_scoring`, plain functions; here they run as one Ray task, for which
Ray finds room among what else runs, or in this process (`resources.executor=inline`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.artifacts import Artifact, Checkpoint, Corpus, EvalReport, PairDataset, TokenDataset
from stages.contract import Context, StageConfig, StageError, TaskResources, stage
from stages.training.preflight import require

TEXT_COLUMNS = {"bits_per_byte": "bits per byte", "perplexity": "perplexity", "validation_loss": "loss"}
PAIR_COLUMNS = {
    "reward_accuracy": "prefers the chosen answer more than before",
    "reward_margin": "margin",
    "ranking_accuracy": "chosen answer likelier",
    "validation_loss": "loss",
}


@dataclass(kw_only=True)
class EvaluateResources(TaskResources):
    """How the evaluation is computed; none of it changes the result beyond rounding."""

    cpus: float = 1.0
    """Logical CPUs that Ray reserves for the evaluation."""
    threads: int = 1
    """Threads of its tensor operations."""
    batch_rows: int = 16
    """Packed rows in one forward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cpus", "threads", "batch_rows"):
            if getattr(self, name) <= 0:
                raise ValueError(f"resources.{name} must be above 0, got {getattr(self, name)}")

    def cpus_wanted(self) -> float:
        return self.cpus


@dataclass(kw_only=True)
class EvaluateConfig(StageConfig):
    """Options in `conf/evaluate/`."""

    samples: int = 10
    """Continuations of validation documents in the report."""
    prompt_characters: int = 48
    """Characters of a document that a sample continues; prompt/completion rows give their own prompt."""
    sample_tokens: int = 64
    """Most tokens of one sample."""
    temperature: float = 0.0
    """0: the likeliest token each time. Above: sampled, from a generator seeded with the run's seed."""
    primer_megabytes: int = 64
    """Training text, in MB, that the compressor of the baseline reads at most (about 1 MB a second)."""
    beta: float = 0.1
    """Scale of rewards on preference pairs, where the checkpoint does not say with which it was trained."""
    resources: EvaluateResources = field(default_factory=EvaluateResources)
    """How it is computed."""

    def __post_init__(self) -> None:
        for name in ("samples", "temperature"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.beta <= 0:
            raise ValueError(f"beta must be above 0, got {self.beta}")
        for name in ("prompt_characters", "sample_tokens", "primer_megabytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def check(self, connected: frozenset[str]) -> None:
        """Text with its tokens, or pairs with their reference."""
        found = connected & {"dataset", "corpus", "pairs"}
        if found not in ({"dataset", "corpus"}, {"pairs"}):
            raise ValueError(
                f"connect dataset and corpus, or pairs, to evaluate; got {', '.join(sorted(found)) or 'none'}"
            )
        if "pairs" in connected and "base" not in connected:
            raise ValueError("connect base to evaluate too: preference is measured against the model before training")


@stage(libraries=("torch", "transformers", "tokenizers", "jinja2", "numpy", "peft"), ray=True)
def evaluate(
    cfg: EvaluateConfig,
    ctx: Context,
    checkpoint: Checkpoint,
    dataset: TokenDataset | None = None,
    corpus: Corpus | None = None,
    base: Checkpoint | None = None,
    pairs: PairDataset | None = None,
) -> EvalReport:
    """One report about one checkpoint. With `base`, before and after are compared; without, the untrained model."""
    inputs = {"dataset": dataset, "corpus": corpus, "base": base, "pairs": pairs}
    cfg.check(frozenset(name for name, given in inputs.items() if given is not None))
    if pairs is not None:
        ctx.tracker.log_dataset("validation", pairs, "validation", {})
    else:
        assert dataset is not None
        ctx.tracker.log_dataset("validation", dataset, "validation", {})
    ctx.progress(0.0, "measuring on the validation split")
    report = _measure(cfg, ctx, checkpoint, inputs)
    metrics = report["metrics"]
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise StageError(
            f"{', '.join(bad)} of the checkpoint is not a finite number; train again with a lower learning_rate"
        )
    ctx.tracker.log_metrics(metrics)
    for name, values in report["baselines"].items():
        ctx.tracker.log_metrics({f"{name}_{key}": value for key, value in values.items()})
    for source, values in report["sources"].items():
        name = re.sub(r"[^\w./ -]", "_", source)  # what MLflow takes as the name of a metric
        ctx.tracker.log_metrics({f"{key}_of_{name}": value for key, value in values.items()})
    ctx.tracker.log_text(table(report), "evaluation.md")
    ctx.headline(headline(report))
    report["checkpoint_digest"] = checkpoint.digest
    report |= {
        f"{name}_digest": given.digest if given else None for name, given in inputs.items() if given or name == "base"
    }
    EvalReport.write(ctx.output, report)
    return EvalReport(uri=ctx.output.resolve().as_uri())


def _measure(
    cfg: EvaluateConfig, ctx: Context, checkpoint: Checkpoint, inputs: Mapping[str, Artifact | None]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {name: given.local() if given else None for name, given in inputs.items()}
    arguments |= {"checkpoint": checkpoint.local(), "seed": ctx.seed}
    arguments |= {name: getattr(cfg, name) for name in ("samples", "sample_tokens", "temperature")}
    arguments |= {name: getattr(cfg.resources, name) for name in ("batch_rows", "threads")}
    if inputs["pairs"] is not None:
        del arguments["dataset"], arguments["corpus"]
        arguments["beta"] = checkpoint.summary().get("beta", cfg.beta)
    else:
        del arguments["pairs"]
        arguments |= {"prompt_characters": cfg.prompt_characters, "primer_bytes": cfg.primer_megabytes * 2**20}
    if cfg.resources.inline():
        return _score(arguments)
    return _in_a_task(arguments, cfg.resources.cpus)


def _in_a_task(arguments: dict[str, Any], cpus: float) -> dict[str, Any]:
    import ray

    from stages.storage.node import facts, here

    field_name = "stages.evaluate.resources.cpus"
    require(
        "CPU",
        workers=1,
        each=cpus,
        nodes=facts(),
        free=ray.available_resources,
        fields=(field_name, field_name),
    )
    task = ray.remote(num_cpus=cpus, max_retries=2, max_calls=1, scheduling_strategy=here())(_score).remote(arguments)
    try:
        result: dict[str, Any] = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, StageError) else StageError(f"evaluation failed: {cause}") from error
    except BaseException:
        if not ray.wait([task], timeout=0.0)[0]:  # see train: never a task that has ended
            ray.cancel(task, force=True)
        raise
    return result


def _score(arguments: dict[str, Any]) -> dict[str, Any]:
    if "pairs" in arguments:
        from stages.training.preference_scoring import PairQuestion
        from stages.training.preference_scoring import score as score_pairs

        return score_pairs(PairQuestion(**arguments))
    from stages.training.scoring import Question, score

    return score(Question(**arguments))


def headline(report: dict[str, Any]) -> str:
    """The numbers that the console prints."""
    metrics, baselines = report["metrics"], report["baselines"]
    if "reward_accuracy" in metrics:
        return (
            f"prefers {metrics['reward_accuracy']:.0%} of {report['validation']['pairs']} chosen answers more than before, margin "
            f"{metrics['reward_margin']:.3f}, loss {metrics['validation_loss']:.4f} (before {math.log(2):.4f})"
        )
    others = ", ".join(f"{name} {values['bits_per_byte']:.2f}" for name, values in baselines.items())
    return f"{metrics['bits_per_byte']:.2f} bits per byte ({others})"


def table(report: dict[str, Any]) -> str:
    """The report's numbers and findings as markdown."""
    by_source = {f"this model on {name}": values for name, values in report["sources"].items()}
    rows = {"this model": report["metrics"], **by_source, **report["baselines"]}
    columns = PAIR_COLUMNS if "reward_accuracy" in report["metrics"] else TEXT_COLUMNS
    lines = [f"| | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for name, values in rows.items():
        cells = (f"{values[key]:.3f}" if key in values else "" for key in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in report["findings"])]) + "\n"
