"""The chats that training is compared on, the model that is trained on them, and how. Apart, because every arm of `train_trl` must
have the very same; the library that we compare with imports this file too, so that its top needs nothing but Python.

Run as a script it makes them, with the stages that usually do: `python -m benchmarks.chats DIRECTORY CHATS`.

    DIRECTORY/base        a model with random weights, its tokenizer and its chat template, in Hugging Face layout
    DIRECTORY/packed      rows of LENGTH tokens, several chats in each (best-fit decreasing)
    DIRECTORY/alone       the same chats, each a row of its own
    DIRECTORY/chats.jsonl one {"messages": ...} a line, in the order in which training takes the rows of `alone`
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

LENGTH, VOCABULARY = 512, 8_192
ROWS = 8
"""Rows in a step, and in a forward pass: what the other library takes when nothing is said."""
LEARNING_RATE, BETAS, MAX_NORM = 1e-3, (0.9, 0.95), 1.0
"""Of AdamW without weight decay, at a constant rate: both sides have these numbers in their settings."""
THREADS = 2
SEED = 0
CONTROL = ["<|im_start|>", "<|im_end|>"]
SHAPE = {
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
"""11 million numbers, of which the embedding has 2.6."""


def make(directory: Path, chats: int) -> None:
    """Documentation of the standard library as chats, tokens of them both ways, and the model."""
    from stages.training import model as models
    from stages.training.config import ModelConfig

    corpus, sets = _tokenized(directory, chats)
    facts = sets["alone"].summary()
    built = models.build(
        ModelConfig(**SHAPE), vocab_size=facts["vocab_size"], eos_token_id=facts["eos_token_id"], seed=SEED
    )
    built.save_pretrained(directory / "base")
    for file in (directory / "alone" / "tokenizer").iterdir():
        shutil.copy(file, directory / "base")
    (directory / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": said}) + "\n" for said in _in_order(corpus, directory / "alone"))
    )


def _tokenized(directory: Path, chats: int) -> tuple[Path, dict[str, Any]]:
    from benchmarks import bare
    from stages.clean import CleanConfig, CleanResources, clean
    from stages.contract import Executor
    from stages.ingest import IngestConfig, IngestResources, SourceConfig, ingest
    from stages.text.choices import Documentation, OverLong, Packing
    from stages.tokenize import TokenizeConfig, TokenizeResources, tokenize

    def context(name: str) -> Any:
        for place in (directory / name, directory / f"{name}-work"):
            place.mkdir(parents=True)
        return bare.context(directory / name, directory / f"{name}-work")

    here = Executor.inline
    source = SourceConfig(documentation=Documentation.chat)
    rows = ingest(IngestConfig(source=source, limit=chats, resources=IngestResources(executor=here)), context("ingest"))
    corpus = clean(
        CleanConfig(normalise=False, validation_fraction=0.02, resources=CleanResources(executor=here)),
        context("clean"),
        rows,
    )
    sets = {}
    for name, packing in (("packed", Packing.best_fit_decreasing), ("alone", Packing.none)):
        settings = TokenizeConfig(
            vocab_size=VOCABULARY,
            add_control_tokens=CONTROL,
            chat_template="chatml",
            sequence_length=LENGTH,
            over_long=OverLong.drop,
            packing=packing,
            resources=TokenizeResources(executor=here),
        )
        sets[name] = tokenize(settings, context(name), corpus)
    return corpus.local(), sets


def _in_order(corpus: Path, dataset: Path) -> list[Any]:
    """The messages of each row, in the order of the first epoch."""
    from stages.text.choices import LossOn
    from stages.text.corpus import TRAIN, records
    from stages.text.packed import PackedSplit
    from stages.text.templates import Template
    from stages.text.turns import chat_of

    chats = [chat for record in records(corpus, TRAIN) if (chat := chat_of(record, False))]
    encoded = Template.load(dataset / "tokenizer", None).encode_batch(chats, LossOn.assistant)
    said = {one.ids.tobytes(): messages for one, (messages, _) in zip(encoded, chats, strict=True)}
    split = PackedSplit.read(dataset, TRAIN)
    rows = [row for step in range(len(split) // ROWS) for row in _sampler(split, len(split) // ROWS).step(step)]
    return [said[split.input_ids[row, : split.lengths[row]].tobytes()] for row in rows]


def _sampler(split: Any, steps: int) -> Any:
    from stages.training.sampler import RowSampler

    return RowSampler(rows=len(split), rows_per_step=ROWS, total_rows=ROWS * steps, seed=SEED)


def tokens_of_steps(dataset: Path, steps: int) -> list[int]:
    """How many tokens of chats, prompts included and padding not, each step takes."""
    from stages.text.packed import PackedSplit

    split = PackedSplit.read(dataset, "train")
    return [int(split.lengths[_sampler(split, steps).step(step)].sum()) for step in range(steps)]


def job(dataset: Path, base: Path, work: Path, steps: int, threads: int) -> Any:
    """What the train stage would hand to the loop: no pass over the validation split and no checkpoint before the last step."""
    from stages.training.config import Job, Optimizer, Schedule, Shape, TokenRecipe

    recipe = TokenRecipe(
        learning_rate=LEARNING_RATE,
        schedule=Schedule(shape=Shape.constant, warmup_ratio=0.0),
        optimizer=Optimizer(weight_decay=0.0, beta1=BETAS[0], beta2=BETAS[1]),
        max_grad_norm=MAX_NORM,
        max_steps=steps,
        tokens_per_step=ROWS * LENGTH,
        validate_every=0,
    )
    return Job(
        recipe=recipe,
        model=None,
        base=base,
        dataset=dataset,
        work=work,
        seed=SEED,
        golden_prompts=("What",),
        micro_batch_rows=ROWS,
        checkpoint_every=10**6,
        threads=threads,
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
