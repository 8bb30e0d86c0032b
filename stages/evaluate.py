"""Measures a checkpoint on the validation split: loss, perplexity, bits per byte, baselines on the same bytes, samples.

The measuring is `stages.training.scoring`, a plain function; here it runs as one Ray task, for which Ray finds room among what
else runs, or in this process (`resources.executor=inline`).
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from stages.artifacts import Checkpoint, Corpus, EvalReport, TokenDataset
from stages.contract import Context, StageConfig, StageError, TaskResources, stage
from stages.training.preflight import require_cpus


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
    resources: EvaluateResources = field(default_factory=EvaluateResources)
    """How it is computed."""

    def __post_init__(self) -> None:
        for name in ("samples", "temperature"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("prompt_characters", "sample_tokens", "primer_megabytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@stage(libraries=("torch", "transformers", "tokenizers", "jinja2", "numpy"), ray=True)
def evaluate(
    cfg: EvaluateConfig,
    ctx: Context,
    checkpoint: Checkpoint,
    dataset: TokenDataset,
    corpus: Corpus,
    base: Checkpoint | None = None,
) -> EvalReport:
    """One report about one checkpoint. With `base`, before and after are compared; without, the untrained model."""
    ctx.tracker.log_dataset("validation", dataset, "validation", {})
    ctx.progress(0.0, "measuring on the validation split")
    report = _measure(cfg, ctx, checkpoint, dataset, corpus, base)
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
    others = ", ".join(f"{name} {values['bits_per_byte']:.2f}" for name, values in report["baselines"].items())
    ctx.headline(f"{metrics['bits_per_byte']:.2f} bits per byte ({others})")
    report |= {
        "checkpoint_digest": checkpoint.digest,
        "dataset_digest": dataset.digest,
        "corpus_digest": corpus.digest,
        "base_digest": base.digest if base else None,
    }
    EvalReport.write(ctx.output, report)
    return EvalReport(uri=ctx.output.resolve().as_uri())


def _measure(
    cfg: EvaluateConfig,
    ctx: Context,
    checkpoint: Checkpoint,
    dataset: TokenDataset,
    corpus: Corpus,
    base: Checkpoint | None,
) -> dict[str, Any]:
    arguments = {
        "checkpoint": checkpoint.local(),
        "base": base.local() if base else None,
        "dataset": dataset.local(),
        "corpus": corpus.local(),
        "seed": ctx.seed,
        "samples": cfg.samples,
        "prompt_characters": cfg.prompt_characters,
        "sample_tokens": cfg.sample_tokens,
        "temperature": cfg.temperature,
        "primer_bytes": cfg.primer_megabytes * 2**20,
        "batch_rows": cfg.resources.batch_rows,
        "threads": cfg.resources.threads,
    }
    if cfg.resources.inline():
        return _score(arguments)
    return _in_a_task(arguments, cfg.resources.cpus)


def _in_a_task(arguments: dict[str, Any], cpus: float) -> dict[str, Any]:
    import ray

    from stages.storage.node import facts, here

    field_name = "stages.evaluate.resources.cpus"
    require_cpus(
        workers=1,
        cpus=cpus,
        nodes=facts(),
        free=lambda: ray.available_resources().get("CPU", 0.0),
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
    from stages.training.scoring import Question, score

    return score(Question(**arguments))


def table(report: dict[str, Any]) -> str:
    """The report's numbers and findings as markdown."""
    by_source = {f"this model on {name}": values for name, values in report["sources"].items()}
    rows = {"this model": report["metrics"], **by_source, **report["baselines"]}
    lines = ["| | bits per byte | perplexity | loss |", "|---|---|---|---|"]
    for name, values in rows.items():
        cells = (
            f"{values[key]:.3f}" if key in values else "" for key in ("bits_per_byte", "perplexity", "validation_loss")
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in report["findings"])]) + "\n"
