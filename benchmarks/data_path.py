"""Our data path as a process that is measured: ingest, clean and tokenize, one after the other, without the orchestrator. Apart, because
several benches measure it: `python -m benchmarks.data_path SOURCE BASE WORK` prints its findings as one line of JSON.

`SOURCE` is a directory of JSON Lines, `BASE` holds the tokenizer, `WORK` is empty. Ray is started, and made warm by a hundred rows
that go the same way, before the clock runs; what that took is reported apart.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks import bare

SEQUENCE_LENGTH = 2_048
VALIDATION = 0.05
LETTERS = 0.35
"""Share of words with a letter: the published 0.8 is for web pages, and of technical text little would be left to tokenize."""
WARM_ROWS = 100


def quality() -> Any:
    """The rules that every arm asks for: Gopher's on quality and repetition, published thresholds but for LETTERS."""
    from stages.text.curation import Gopher, Quality

    return Quality(gopher=Gopher(min_alphabetic_words=LETTERS), c4=None, fineweb=None)


def carry_out(
    source: Path, base: Path | None, work: Path, executor: str, blocks: int, near: bool = False
) -> dict[str, Any]:
    """The three stages, or without a base the first two; seconds of each, and what came out."""
    from stages.artifacts import Checkpoint
    from stages.clean import CleanConfig, CleanResources, clean
    from stages.contract import Executor
    from stages.ingest import IngestConfig, IngestResources, SourceConfig, ingest
    from stages.text.curation import NearDuplicates
    from stages.tokenize import TokenizeConfig, TokenizeResources, tokenize

    how = Executor(executor)
    began = time.perf_counter()
    rows = ingest(
        IngestConfig(source=SourceConfig(path=str(source)), resources=IngestResources(executor=how, blocks=blocks)),
        _context(work, "ingest"),
    )
    ingested = time.perf_counter()
    corpus = clean(
        CleanConfig(
            quality=quality() if base is not None else None,
            near_duplicates=NearDuplicates() if near else None,
            validation_fraction=VALIDATION,
            resources=CleanResources(executor=how, blocks=blocks),
        ),
        _context(work, "clean"),
        rows,
    )
    cleaned = time.perf_counter()
    summary = corpus.summary()
    steps = {step["step"]: step["rows"] for step in summary["waterfall"]}
    found = {
        "ingest": ingested - began,
        "clean": cleaned - ingested,
        "documents": rows.summary()["rows"],
        "kept": summary["rows"],
        "duplicates": steps["exact_duplicate"] + steps["duplicate"],
        "near_duplicates": steps.get("near_duplicate", 0),
    }
    if base is None:
        return {"seconds": cleaned - began, **found}
    tokens = tokenize(
        TokenizeConfig(sequence_length=SEQUENCE_LENGTH, resources=TokenizeResources(executor=how, blocks=blocks)),
        _context(work, "tokenize"),
        corpus,
        Checkpoint(uri=base.resolve().as_uri()),
    )
    done = time.perf_counter()
    summary = tokens.summary()
    return {
        "seconds": done - began,
        **found,
        "tokenize": done - cleaned,
        "tokens": sum(summary[split]["tokens"] for split in ("train", "validation")),
        "utilisation": summary["train"]["utilisation"],
    }


def _context(work: Path, stage: str) -> Any:
    output, scratch = work / stage, work / f"{stage}-work"
    output.mkdir(parents=True)
    scratch.mkdir()
    return bare.context(output, scratch)


def start_ray(source: Path, base: Path | None, work: Path, blocks: int, near: bool = False) -> float:
    """Seconds until Ray is up and its workers have done these stages once."""
    import ray

    began = time.perf_counter()
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
    few = work / "few"
    few.mkdir(parents=True)
    with sorted(source.glob("*.jsonl"))[0].open("rb") as lines:
        (few / "few.jsonl").write_bytes(b"".join(itertools.islice(lines, WARM_ROWS)))
    carry_out(few, base, work / "warm", "ray", blocks, near)
    shutil.rmtree(work / "warm")
    return time.perf_counter() - began


def cpu_seconds() -> dict[str, float]:
    """User and system seconds of this process and all below it so far: of the workers that carry out tasks (Ray names them so), and
    of all that stands around them (this process, Ray's daemons and Ray Data's actors)."""
    import psutil  # not in the environments of other arms, which import this module

    from benchmarks.machine import Processes

    processes = Processes()
    processes.add(os.getpid())
    found = {"workers": 0.0, "around": 0.0}
    for process in processes.alive():
        with contextlib.suppress(psutil.Error):
            title, times = " ".join(process.cmdline()), process.cpu_times()
            kind = "workers" if title.startswith(("ray::IDLE", "ray::Map")) else "around"
            found[kind] += times.user + times.system
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "base", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--executor", choices=("ray", "inline"), default="inline")
    parser.add_argument("--blocks", type=int, default=2, help="parts that are worked on at once (default: 2)")
    parser.add_argument("--near", action="store_true", help="look for near-duplicates as well")
    how = parser.parse_args()
    started = 0.0
    if how.executor == "ray":
        started = start_ray(how.source, how.base, how.work / "start", how.blocks, how.near)
    else:  # imports are no part of the work in any arm
        import tokenizers  # noqa: F401

        import stages.text.cleaning
        import stages.text.ingesting
        import stages.text.tokenising  # noqa: F401
    before = cpu_seconds()
    found = carry_out(how.source, how.base, how.work / "out", how.executor, how.blocks, how.near)
    spent = {kind: round(seconds - before[kind], 1) for kind, seconds in cpu_seconds().items()}
    print(json.dumps({**found, "start_s": round(started, 2), "cpu_s": spent}))


if __name__ == "__main__":
    main()
