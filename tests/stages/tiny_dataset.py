"""A token data set and its corpus, small and learnable, written by plain pyarrow in the documented format. Apart, because
the tests of training must not depend on the stages that usually make their input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers
import transformers

from stages.artifacts import Corpus, TokenDataset
from stages.text.record import FIELDS, Record

EOS = "<|endoftext|>"
LENGTH = 64
LIST = pyarrow.list_(pyarrow.int32())


def texts(count: int, seed: int = 0) -> list[str]:
    """Sentences of a tiny grammar, of uneven length."""
    draw = np.random.default_rng(seed)
    words = ["path", "join", "open", "read", "list", "dict", "value", "name"]
    return [
        f"def {draw.choice(words)}({draw.choice(words)}):\n    return "
        + " + ".join(draw.choice(words, size=draw.integers(1, 9)))
        for _ in range(count)
    ]


def tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Byte-level, 257 ids, saved as transformers saves it."""
    directory.mkdir(parents=True)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=257, special_tokens=[EOS], initial_alphabet=alphabet)
    made.train_from_iterator([], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS)
    fast.save_pretrained(directory)
    return made


def dataset(root: Path, *, rows: int = 24, prompts: bool = False) -> tuple[TokenDataset, Corpus]:
    """`root/dataset` and `root/corpus` with `rows` packed training rows (about three documents each)."""
    made = tokenizer(root / "dataset" / "tokenizer")
    eos = made.token_to_id(EOS)
    columns: dict[str, list[str]] = {name: [] for name in (*FIELDS, "split")}
    summary: dict[str, Any] = {"sequence_length": LENGTH, "vocab_size": made.get_vocab_size(), "eos_token_id": eos}
    for split, count, seed in (("train", rows * 3, 1), ("validation", 18, 2)):
        documents = []
        for index, text in enumerate(texts(count, seed)):
            prompt, text = (text.split(":")[0] + ":", text.split(":")[1]) if prompts else ("", text)
            record = Record(f"{split}-{index:04d}", "tiny", "prompt_completion" if prompt else "text", prompt, text)
            for name, value in zip(columns, (*record.values(), split), strict=True):
                columns[name].append(value)
            documents.append((made.encode(prompt).ids if prompt else [], [*made.encode(text).ids, eos]))
        summary[split] = _write(root / "dataset" / split, _pack(documents, eos))
        first = _first_tokens(documents)  # of one byte each; all but EOS are text
        text_bytes = sum(len(text) - 1 for _, text in documents)
        summary[split] |= {"documents": count, "first_tokens": first, "unsupervised_bytes": first}
        tokens = sum(len(prompt) + len(text) for prompt, text in documents)
        summary[split] |= {"supervised_bytes": text_bytes - first, "tokens": tokens}
    order = sorted(range(len(columns["id"])), key=lambda i: columns["id"][i])
    (root / "corpus" / "rows").mkdir(parents=True)
    table = pyarrow.table({name: [values[i] for i in order] for name, values in columns.items()})
    pyarrow.parquet.write_table(table, root / "corpus" / "rows" / "part-00000.parquet")
    corpus = Corpus.write(root / "corpus", {"rows": table.num_rows})
    return (
        TokenDataset(uri=TokenDataset.write(root / "dataset", summary).uri, digest="d" * 64),
        Corpus(uri=corpus.uri, digest="c" * 64),
    )


def _pack(documents: list[tuple[list[int], list[int]]], eos: int) -> list[tuple[list[int], list[int], list[int]]]:
    rows, ids, labels, starts = [], [], [], []
    pieces = []
    for prompt, text in documents:
        whole, mask = prompt + text, [-100] * len(prompt) + text
        for first in range(0, len(whole), LENGTH):
            pieces.append((whole[first : first + LENGTH], [-100, *mask[first + 1 : first + LENGTH]]))
    for piece, mask in [*pieces, ([eos] * LENGTH, [-100] * LENGTH)]:
        if len(ids) + len(piece) > LENGTH:
            if len(ids) < LENGTH:
                starts.append(len(ids))
                labels += [-100] * (LENGTH - len(ids))
                ids += [eos] * (LENGTH - len(ids))
            rows.append((ids, labels, starts))
            ids, labels, starts = [], [], []
        starts.append(len(ids))
        ids, labels = ids + piece, labels + mask
    return rows


def _first_tokens(documents: list[tuple[list[int], list[int]]]) -> int:
    """Tokens of text that begin a piece and have others behind them."""
    cuts = [
        (len(prompt), first, len(prompt) + len(text)) for prompt, text in documents for first in range(0, 999, LENGTH)
    ]
    return sum(first >= prompt and first + 1 < end for prompt, first, end in cuts)


def _write(directory: Path, rows: list[tuple[list[int], list[int], list[int]]]) -> dict[str, int]:
    directory.mkdir(parents=True)
    names = ("input_ids", "labels", "document_starts")
    table = pyarrow.table({n: pyarrow.array(c, LIST) for n, c in zip(names, zip(*rows, strict=True), strict=True)})
    table = table.append_column("source", pyarrow.array(["tiny"] * len(rows)))
    pyarrow.parquet.write_table(table, directory / "part-00000.parquet")
    return {"rows": len(rows), "supervised_tokens": sum(label != -100 for _, labels, _ in rows for label in labels)}


def tree(directory: Path) -> dict[str, bytes]:
    """Every file of a directory with its bytes."""
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def lines(path: Path) -> list[dict[str, object]]:
    """The parsed lines of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
