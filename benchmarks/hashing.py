"""What it costs to publish and to verify a large checkpoint: every byte is hashed, at the speed of SHA-256 itself, and once.

Two questions. Speed: `Store.deposit` and `Store.verify(deep=True)` against `hashlib.file_digest` on the same file, from the page
cache. Count: bytes that a whole run reads (all its processes), less what the same run reads for a tiny file, over the file's size.
"""

import hashlib
import shutil
import subprocess
import time
from pathlib import Path

from benchmarks import links, machine
from benchmarks.harness import Bench, Check, Result, medians
from stages.artifacts import SUMMARY

FILE = "model.safetensors"
SETTLED_S = 2.1
"""The digest of a file is remembered only when it has not changed for two seconds."""


def run(bench: Bench) -> list[Result]:
    megabytes = 64 if bench.quick else bench.megabytes
    with machine.scratch() as directory:
        return [*_speed(bench, directory, megabytes), *_count(bench, directory, megabytes)]


def _speed(bench: Bench, directory: Path, megabytes: int) -> list[Result]:
    from pipelines.config import AppConfig
    from pipelines.store import Store
    from stages.storage.bucket import fsync

    store = Store.open(AppConfig(name="bench", state=str(directory / "hashing")))
    store.prepare()
    source = directory / FILE
    with source.open("wb") as file:
        for _ in range(megabytes):
            file.write(links.BLOCK)
    fsync(source)
    expected = _hash(source)[1]

    def deposit() -> float:
        staged = store.staging_directory("0" * 64)
        staged.mkdir(parents=True)
        (staged / SUMMARY).write_text("{}\n")
        source.rename(staged / FILE)
        began = time.perf_counter()
        digest = store.deposit(staged).digest
        seconds = time.perf_counter() - began
        published = store.object_directory(digest)
        assert published is not None
        listed.append(store.manifest(digest)[FILE][1])
        (published / FILE).rename(source)
        shutil.rmtree(published)
        return seconds

    def verify() -> float:
        began = time.perf_counter()
        store.verify(digest, deep=True)
        return time.perf_counter() - began

    listed: list[str] = []
    deposit()
    publishing = bench.alternate(bench.pairs(6), lambda: _hash(source)[0], deposit, "publish")
    staged = store.staging_directory("1" * 64)
    staged.mkdir(parents=True)
    shutil.copyfile(source, staged / FILE)
    digest = store.deposit(staged).digest
    verifying = bench.alternate(bench.pairs(6), lambda: _hash(source)[0], verify, "verify")
    outside = [_sha256sum(source) for _ in range(1 if bench.quick else 3)]
    shutil.rmtree(directory / "hashing")
    source.unlink()
    gate = [Check("both arms found the same digest", set(listed) == {expected}, f"{len(listed)} times")]
    size = {"megabytes": megabytes, "sha256sum_s": outside}
    results = []
    for name, doing, pairs in (
        ("hash_publish_seconds", "publishing", publishing),
        ("hash_verify_seconds", "verifying", verifying),
    ):
        speed = {"megabytes_per_s": round(megabytes / medians(pairs)["median_b"], 1)}
        results.append(
            bench.compare(
                name,
                f"How long does {doing} a large checkpoint take, against hashing it?",
                unit="s",
                better="lower",
                arms={"A": "hashlib.file_digest", "B": f"store, {doing}"},
                pairs=pairs,
                margin=0.05,
                limit=1.1,
                gate=gate,
                details={**size, **medians(pairs), **speed},
            )
        )
    return results


def _count(bench: Bench, directory: Path, megabytes: int) -> list[Result]:
    conf, environ = directory / "conf", machine.clean_environment()
    links.pipeline(conf, "weights", ["weights", "link"])

    def read(size: int, state: str) -> int:
        words = links.command(conf, directory / state, "weights", f"stages.s0.megabytes={size}")
        return machine.timed(words, directory / "count.log", environ, timeout_s=600).read_bytes

    first_small, first = read(1, "small"), read(megabytes, "large")
    ran = "2 of 2 stages ran" in (directory / "count.log").read_text()
    time.sleep(SETTLED_S)
    again_small, again = read(1, "small"), read(megabytes, "large")
    reused = "0 of 2 stages to run" in (directory / "count.log").read_text()
    bench.say(f"read {(first - first_small) / 2**20:.0f} MiB, then {(again - again_small) / 2**20:.0f} MiB")
    size = (megabytes - 1) * 2**20
    return [
        bench.value(
            "checkpoint_reads",
            "How often does a run that makes a large checkpoint read it?",
            unit="times",
            values=[(first - first_small) / size],
            limit=1.02,
            needs_quiet=False,
            gate=[Check("the run made it", ran, f"{megabytes} MiB")],
            details={"megabytes": megabytes, "read_by_all_processes": first, "the_same_for_a_small_file": first_small},
        ),
        bench.value(
            "checkpoint_reads_again",
            "How often does a run that reuses it read it?",
            unit="times",
            values=[max(0.0, (again - again_small) / size)],
            limit=0.02,
            needs_quiet=False,
            gate=[Check("the run reused it", reused, f"{megabytes} MiB")],
            details={"megabytes": megabytes, "read_by_all_processes": again, "the_same_for_a_small_file": again_small},
        ),
    ]


def _hash(path: Path) -> tuple[float, str]:
    began = time.perf_counter()
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return time.perf_counter() - began, found


def _sha256sum(path: Path) -> float:
    """Seconds of the tool that everyone has, for a reader who trusts neither arm."""
    began = time.perf_counter()
    subprocess.run(["sha256sum", str(path)], check=True, capture_output=True)
    return round(time.perf_counter() - began, 4)
