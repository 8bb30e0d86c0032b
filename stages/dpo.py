"""Trains a model on pairs of answers, of which one is preferred (direct preference optimisation).

It raises what the model adds to the log-probability of the chosen answer, against a reference that is the model before
training. The loop is train's (`stages.training.loop`), with another objective (`stages.training.preferences`); where it runs
is the business of `stages.launching`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stages.artifacts import Checkpoint, PairDataset
from stages.contract import Context, StageError, stage
from stages.launching.launch import launch, log_datasets
from stages.training import outlook
from stages.training.config import GOLDEN_PROMPTS, Job, require_prompts
from stages.training.estimate import Estimate
from stages.training.outlook import Given
from stages.training.pair_recipe import PairRecipe, ReferenceFrom
from stages.training.resources import TrainResources


@dataclass(kw_only=True)
class DpoConfig(PairRecipe):
    """Options in `conf/dpo/`."""

    golden_prompts: list[str] = field(default_factory=lambda: list(GOLDEN_PROMPTS))
    """Prompts whose greedy continuations are stored in the checkpoint: a server must repeat them before it takes traffic."""
    resources: TrainResources = field(default_factory=lambda: TrainResources(micro_batch_rows=4))
    """How it is computed; a row is a pair, whose two answers go through the model together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_prompts(self.golden_prompts)


@stage(libraries=("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft"), ray=True)
def dpo(cfg: DpoConfig, ctx: Context, dataset: PairDataset, base: Checkpoint) -> Checkpoint:
    """Pairs and the model to improve in, a checkpoint out. Resumes by itself from what an earlier attempt left in `ctx.work`."""
    _require_fitting(cfg, dataset, base)
    log_datasets(ctx, dataset)
    job = Job(
        recipe=PairRecipe(**{name: getattr(cfg, name) for name in PairRecipe.__dataclass_fields__}),
        verb="dpo",
        model=None,
        base=base.local(),
        base_digest=base.digest,
        dataset=dataset.local(),
        work=ctx.work.resolve(),
        seed=ctx.seed,
        golden_prompts=tuple(cfg.golden_prompts),
        **cfg.resources.of_job(),
    )
    return launch(cfg.resources, ctx, job)


def foreseen(cfg: DpoConfig, inputs: Mapping[str, Given]) -> Estimate | None:
    """What the run will need, for a plan."""
    return outlook.foreseen(cfg, None, cfg.resources, inputs)


def _require_fitting(cfg: DpoConfig, dataset: PairDataset, base: Checkpoint) -> None:
    """Pairs hold ids, and perhaps what a reference thinks of them: both must be of this very base."""
    facts = dataset.summary()
    ours, theirs = dataset.local() / "tokenizer" / "tokenizer.json", base.local() / "tokenizer.json"
    if ours.read_bytes() != theirs.read_bytes():
        raise StageError(
            "the pairs were tokenized with another tokenizer than the base model's; connect the base to the pair stage too"
        )
    stored = facts.get("reference_logprobs") and cfg.reference in (None, ReferenceFrom.columns)
    if stored and facts["base_digest"] != base.digest:
        raise StageError(
            f"the stored log-probabilities are of model {facts['base_digest'][:12]}, the base is {base.digest[:12]}: "
            "connect one base to pair and dpo, or set stages.dpo.reference=copy"
        )
