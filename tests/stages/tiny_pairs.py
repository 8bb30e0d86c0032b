"""A preference data set, small and learnable, with the base that tokenized it, in the documented format. Apart, because the
tests of training must not depend on the stages that usually make their input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import transformers

from stages.artifacts import Checkpoint, PairDataset
from stages.text.pairs import PAIRS_SCHEMA, REFERENCE
from tests.stages import tiny_dataset as tiny

BASE_DIGEST = "ba" * 32


def base(root: Path, *, dropout: float = 0.0, seed: int = 3) -> Checkpoint:
    """A random model of the byte-level tokenizer, its logits far enough from flat that answers differ."""
    directory = root / "base"
    made = tiny.tokenizer(directory)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=made.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.1,
        attention_dropout=dropout, bos_token_id=None, eos_token_id=made.token_to_id(tiny.EOS), pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "golden.json").write_text(json.dumps({"max_new_tokens": 1, "answers": []}))
    return Checkpoint(uri=Checkpoint.write(directory, {}).uri, digest=BASE_DIGEST)


def rows(count: int, seed: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, chosen, rejected) ids: words in order are preferred to words in disorder, prompts and answers of any length."""
    draw, letters = np.random.default_rng(seed), list(range(66, 92))
    made = []
    for _ in range(count):
        prompt = draw.choice(letters, size=draw.integers(2, 20)).tolist()
        chosen = sorted(draw.choice(letters, size=draw.integers(1, 12)).tolist())
        rejected = sorted(draw.choice(letters, size=draw.integers(1, 12)).tolist(), reverse=True)
        made.append((prompt, [*chosen, 0], [*rejected, 0]))
    return made


def dataset(
    root: Path, model: Checkpoint, *, pairs: int = 24, validation: int = 7, stored: bool = False
) -> PairDataset:
    """`root/pairs` for the base; with the log-probabilities that the base gives when they are to be `stored`."""
    directory = root / "pairs"
    summary: dict[str, Any] = {"sequence_length": 64, "reference_logprobs": stored, "base_digest": model.digest}
    summary["stop_token_ids"] = [0]
    network = transformers.LlamaForCausalLM.from_pretrained(model.local()) if stored else None
    for split, count, seed in (("train", pairs, 1), ("validation", validation, 2)):
        made = rows(count, seed)
        columns: list[Any] = [[f"{split}-{index:04d}" for index in range(count)], ["tiny"] * count]
        table = pyarrow.table([*columns, *map(list, zip(*made, strict=True))], schema=PAIRS_SCHEMA)
        for place, name in enumerate(REFERENCE, 1):
            if network is not None:
                values = pyarrow.array([alone(network, row[0], row[place]) for row in made], pyarrow.float32())
                table = table.append_column(pyarrow.field(name, pyarrow.float32(), nullable=False), values)
        (directory / split).mkdir(parents=True)
        pyarrow.parquet.write_table(table, directory / split / "part-00000.parquet")
        summary[split] = {"pairs": count}
    tiny.tokenizer(directory / "tokenizer")
    return PairDataset(uri=PairDataset.write(directory, summary).uri, digest="d" * 64)


def alone(model: Any, prompt: list[int], answer: list[int]) -> float:
    """The summed log-probability of one answer, token by token, with nothing beside it."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(prompt) - 1 + place, token]) for place, token in enumerate(answer))
