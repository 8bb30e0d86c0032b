"""Our loop on the chats of `benchmarks.chats`, as one process or as a rank under torchrun:
`python -m benchmarks.train_chats DATASET BASE WORK STEPS THREADS`. What it measured stands in WORK/metrics.jsonl."""

import sys
from pathlib import Path

from benchmarks import chats
from stages.training.loop import run

if __name__ == "__main__":
    dataset, base, work = map(Path, sys.argv[1:4])
    run(chats.job(dataset, base, work, *map(int, sys.argv[4:])))
