"""The work of `benchmarks.data_path` done with Hugging Face datasets, in its own environment:
`python data_with_datasets.py SOURCE BASE WORK`.

What is equal: the files, normalisation, rules, split, tokenizer and packing (this project's own functions, imported), so that the
frameworks are compared and not the rules; and a table of what left, with the reason. What it does not do: keep the rows between the
steps under names of their own, or say where in the source a row stood.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from tokenizers import Tokenizer

from benchmarks.data_path import SEQUENCE_LENGTH, VALIDATION, quality
from stages.text.choices import OverLong
from stages.text.normalise import content_key, in_validation, normalise_row
from stages.text.packing import assemble, fitted, pack
from stages.text.quality import Rules

PROCESSES = 2
EOS = "<|endoftext|>"
RULES = Rules(quality())
TOKENIZERS: dict[str, Tokenizer] = {}


def judge(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    texts = [normalise_row("", text)[1] for text in batch["text"]]
    keys = [content_key("", text) for text in texts]
    return {
        "text": texts,
        "key": keys,
        "validation": [in_validation(key, VALIDATION) for key in keys],
        "reason": [RULES.reason(text) or "" for text in texts],
    }


def tokenise(batch: dict[str, list[Any]], path: str) -> dict[str, list[Any]]:
    tokenizer = TOKENIZERS.get(path) or TOKENIZERS.setdefault(path, Tokenizer.from_file(path))
    eos = tokenizer.token_to_id(EOS)
    found = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"ids": [np.array([*one.ids, eos], np.int32) for one in found]}


def packed(batch: dict[str, list[Any]], pad: int) -> dict[str, list[Any]]:
    pieces = [
        document[start:end]
        for document in map(np.asarray, batch["ids"])
        for start, end in fitted(len(document), SEQUENCE_LENGTH, OverLong.split)
        if end - start > 1
    ]
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    labelled = np.ones(int(lengths.sum()), bool)
    labelled[np.cumsum(lengths) - lengths] = False
    rows = pack(lengths.tolist(), SEQUENCE_LENGTH)
    inputs, labels, starts, counts = assemble(
        np.concatenate(pieces).astype(np.int32), labelled, lengths, rows, SEQUENCE_LENGTH, pad
    )
    return {
        "input_ids": list(inputs),
        "labels": list(labels),
        "document_starts": np.split(starts, np.cumsum(counts)[:-1]),
        "tokens": np.bincount(
            np.repeat(np.arange(len(rows)), [len(r) for r in rows]), lengths[[m for r in rows for m in r]]
        ).astype(np.int64),
    }


def main() -> None:
    source, base, work = map(Path, sys.argv[1:])
    datasets.disable_progress_bars()
    began = time.perf_counter()
    files = sorted(map(str, source.glob("*.jsonl")))
    rows = datasets.load_dataset(
        "json", data_files=files, split="train", cache_dir=str(work / "cache"), num_proc=PROCESSES
    )
    judged = rows.map(judge, batched=True, num_proc=PROCESSES)
    first = np.zeros(len(judged), bool)
    table = judged.data
    seen: set[bytes] = set()
    for place, key in enumerate(table.column("key").to_pylist()):
        if key not in seen:
            seen.add(key)
            first[place] = True
    reasons = np.array(table.column("reason").to_pylist())
    stays = (reasons == "") & first
    left = judged.select(np.flatnonzero(~stays)).select_columns(["key", "reason"])
    left.to_parquet(str(work / "dropped.parquet"))
    validation = table.column("validation").to_numpy()
    kept = tokens = 0
    used = 0.0
    for split, mine in (("train", stays & ~validation), ("validation", stays & validation)):
        part = judged.select(np.flatnonzero(mine)).select_columns(["text"])
        ids = part.map(
            tokenise,
            batched=True,
            num_proc=PROCESSES,
            remove_columns=["text"],
            fn_kwargs={"path": str(base / "tokenizer.json")},
        )
        done = ids.map(
            packed, batched=True, batch_size=2_048, num_proc=PROCESSES, remove_columns=["ids"], fn_kwargs={"pad": 0}
        )
        done.remove_columns(["tokens"]).to_parquet(str(work / f"{split}.parquet"))
        kept += len(part)
        tokens += int(sum(done.data.column("tokens").to_pylist()))
        used = used or tokens / (len(done) * SEQUENCE_LENGTH)
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {
                "seconds": seconds,
                "documents": len(rows),
                "kept": kept,
                "tokens": tokens,
                "utilisation": used,
                "duplicates": int((~first).sum()),
            }
        )
    )


if __name__ == "__main__":
    main()
