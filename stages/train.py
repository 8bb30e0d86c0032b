"""Trains a language model on packed sequences, from random weights or from a base checkpoint.

The loop is `stages.training.loop`, which knows no launcher; where it runs (Ray Train workers, or this process) is the
business of `stages.launching`. This file says what is trained, and on what.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from stages.artifacts import Checkpoint, TokenDataset
from stages.contract import Context, StageError, stage
from stages.launching.launch import launch, log_datasets
from stages.training import outlook
from stages.training.config import GOLDEN_PROMPTS, Job, ModelConfig, TokenRecipe, require_prompts
from stages.training.estimate import Estimate
from stages.training.outlook import Given
from stages.training.resources import TrainResources


@dataclass(kw_only=True)
class TrainConfig(TokenRecipe):
    """Options in `conf/train/`; model shapes in `conf/model/`."""

    model: ModelConfig | None = None
    """Shape of a model that starts from random weights. Needed without a `base` input, refused with one."""
    golden_prompts: list[str] = field(default_factory=lambda: list(GOLDEN_PROMPTS))
    """Prompts whose greedy continuations are stored in the checkpoint: a server must repeat them before it takes traffic."""
    resources: TrainResources = field(default_factory=TrainResources)
    """How it is computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_prompts(self.golden_prompts)

    def check(self, connected: frozenset[str]) -> None:
        """Either a shape or a base, never both and never none."""
        if "base" in connected and self.model is not None:
            raise ValueError("model must be null when the base input is connected: the base brings its own shape")
        if "base" not in connected and self.model is None:
            raise ValueError("model must be set (for instance model=llama_1m) when no base input is connected")
        if "base" not in connected and self.adapter is not None:
            raise ValueError(
                "adapter must be null when no base input is connected: corrections need something to correct"
            )


@stage(libraries=("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft"), ray=True)
def train(cfg: TrainConfig, ctx: Context, dataset: TokenDataset, base: Checkpoint | None = None) -> Checkpoint:
    """Packed sequences in, a checkpoint out. Resumes by itself from what an earlier attempt left in `ctx.work`."""
    cfg.check(frozenset({"base"} if base else ()))
    _require_same_tokenizer(dataset, base)
    log_datasets(ctx, dataset)
    job = Job(
        recipe=TokenRecipe(**{name: getattr(cfg, name) for name in TokenRecipe.__dataclass_fields__}),
        model=cfg.model,
        base=base.local() if base else None,
        base_digest=base.digest if base else "",
        dataset=dataset.local(),
        work=ctx.work.resolve(),
        seed=ctx.seed,
        golden_prompts=tuple(cfg.golden_prompts),
        **cfg.resources.of_job(),
    )
    made = launch(cfg.resources, ctx, job)
    for source, drawn in made.summary().get("sources", {}).items():
        name = re.sub(r"[^\w./ -]", "_", source)  # what MLflow takes as the name of a metric
        ctx.tracker.log_metrics({f"{fact}_{name}": float(number) for fact, number in drawn.items()})
    return made


def foreseen(cfg: TrainConfig, inputs: Mapping[str, Given]) -> Estimate | None:
    """What the run will need, for a plan."""
    return outlook.foreseen(cfg, cfg.model, cfg.resources, inputs)


def _require_same_tokenizer(dataset: TokenDataset, base: Checkpoint | None) -> None:
    """A base model reads ids: with another tokenizer each would mean another text. Tokens that tokenize added are told."""
    if base is None:
        return
    from tokenizers import Tokenizer

    ours, theirs = dataset.local() / "tokenizer" / "tokenizer.json", base.local() / "tokenizer.json"
    if ours.read_bytes() == theirs.read_bytes():
        return
    new = dict(Tokenizer.from_file(str(ours)).get_vocab())
    old = Tokenizer.from_file(str(theirs)).get_vocab()
    same = all(new.pop(token, None) == number for token, number in old.items())
    if not same or len(new) != dataset.summary().get("added_tokens", 0):
        raise StageError(
            "the data set was tokenized with another tokenizer than the base model's; connect the base to the "
            "tokenize stage too"
        )
