"""The training job that both launchers run, and its data: real text (Python's own library) in the documented format, made
without Ray and without the stages that usually make it. Apart, because a comparison is fair only if both arms import it.

Run as a script it makes the data: `python -m benchmarks.workload <directory>`.
"""

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stages.artifacts import TokenDataset
from stages.train import TrainConfig
from stages.training.config import Job, ModelConfig, TokenRecipe
from stages.training.resources import TrainResources

EOS = "<|endoftext|>"
LENGTH, VOCABULARY = 256, 2048
ROWS = {"train": 1024, "validation": 16}
WORKERS, THREADS = 2, 1
ROWS_PER_STEP = 8
WARMUP_STEPS = 8
"""Steps of each run that no speed is taken from: allocator, page cache, DDP's bucket order."""
MODEL = ModelConfig(
    hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
)


def config(steps: int, workers: int = WORKERS, checkpoint_every: int = 10**6, max_failures: int = 0) -> TrainConfig:
    """`steps` optimizer steps; validation, and unless told otherwise checkpoints, at the end alone, so that a step is a step."""
    return TrainConfig(
        model=MODEL,
        learning_rate=3e-3,
        max_steps=steps,
        tokens_per_step=ROWS_PER_STEP * LENGTH,
        validate_every=0,
        resources=TrainResources(
            workers=workers,
            threads_per_worker=THREADS,
            micro_batch_rows=4,
            checkpoint_every=checkpoint_every,
            max_failures=max_failures,
        ),
    )


def job(dataset: Path, work: Path, steps: int, **how: int) -> Job:
    """What the stage would hand to the loop of a `config`."""
    cfg = config(steps, **how)
    return Job(
        recipe=TokenRecipe(**{name: getattr(cfg, name) for name in TokenRecipe.__dataclass_fields__}),
        model=cfg.model,
        base=None,
        dataset=dataset,
        work=work,
        seed=0,
        golden_prompts=tuple(cfg.golden_prompts),
        **cfg.resources.of_job(),
    )


def words(**how: int) -> list[str]:
    """The options of a `config` on a command line, for `how_of`."""
    return [f"{name}={value}" for name, value in how.items()]


def how_of(given: list[str]) -> dict[str, int]:
    """Those options again."""
    return {name: int(value) for name, _, value in (word.partition("=") for word in given)}


def make_dataset(directory: Path) -> TokenDataset:
    """ROWS packed sequences of the standard library's source, one document a row."""
    import pyarrow
    import pyarrow.parquet
    import tokenizers
    import transformers

    texts = list(_sources(characters=5_000_000))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[EOS], initial_alphabet=alphabet)
    made.train_from_iterator(texts[:20], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS)
    fast.save_pretrained(directory / "tokenizer")
    ids = [token for text in texts for token in made.encode(text).ids]
    summary: dict[str, object] = {
        "sequence_length": LENGTH,
        "vocab_size": made.get_vocab_size(),
        "eos_token_id": made.token_to_id(EOS),
    }
    first = 0
    integers = pyarrow.list_(pyarrow.int32())
    for split, rows in ROWS.items():
        cut = [ids[at : at + LENGTH] for at in range(first, first + rows * LENGTH, LENGTH)]
        assert len(cut[-1]) == LENGTH, "the standard library is smaller than expected"
        first += rows * LENGTH
        columns = {"input_ids": cut, "labels": [[-100, *row[1:]] for row in cut], "document_starts": [[0]] * rows}
        table = pyarrow.table({name: pyarrow.array(column, integers) for name, column in columns.items()})
        table = table.append_column("source", pyarrow.array(["stdlib"] * rows))
        (directory / split).mkdir(parents=True)
        pyarrow.parquet.write_table(table, directory / split / "part-00000.parquet")
        summary[split] = {"rows": rows, "documents": rows, "tokens": rows * LENGTH}
    return TokenDataset.write(directory, summary)


def make_checkpoint(directory: Path) -> Path:
    """A Checkpoint of the same small model after two steps, in this process; its directory."""
    from stages.training.loop import run

    make_dataset(directory / "data")
    run(replace(job(directory / "data", directory / "work", steps=2), threads=1))
    return directory / "work" / "export"


def _sources(characters: int) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text("utf-8", errors="replace")
        characters -= len(text)
        yield text
        if characters < 0:
            return


if __name__ == "__main__":
    make_dataset(Path(sys.argv[1]))
