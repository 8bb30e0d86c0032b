"""`python -m benchmarks.gpu [--output DIRECTORY] [--quick]`: the loop on one GPU, arm after arm, each in a process of its own.

What is asked of it: the steps of a processor in float32, the same bits when a run is cut and goes on, a loss in bfloat16 that falls as
in float32, less memory with gradient checkpointing, an export that is loaded anew. What is measured: tokens/s, MFU, peak memory.
`--quick` makes everything small and runs on a processor too: it proves that this program works, and measures nothing.

The answer is `gpu-<date>.json` and a table; exit code 1 when a check does not hold.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, workload
from benchmarks.gpu.arm import ARMS, Sizes

RESULTS = machine.ROOT / "benchmarks" / "results" / "gpu"
ARM_TIMEOUT_S = 150.0
SAME = 1e-3
"""Nats by which the first losses in float32 may differ between a GPU and a processor: sums are taken in other orders."""
NEAR = 0.1
"""Nats by which the last loss in bfloat16 may be above the one in float32."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the answer")
    parser.add_argument("--quick", action="store_true", help="small sizes, on a processor where there is no GPU")
    arguments = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available() and not arguments.quick:
        print("no GPU that this PyTorch can use: install with TORCH=cuda, or take --quick", file=sys.stderr)
        return 1
    began = time.monotonic()
    with machine.scratch() as directory:
        workload.make_dataset(directory / "data")
        found = {name: _arm(name, directory, arguments.quick) for name in ARMS}
    checks = judge(found)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a processor"
    answer = {
        "device": device,
        "driver": _driver(),
        "date": time.strftime("%Y-%m-%d"),
        "quick": arguments.quick,
        "seconds": round(time.monotonic() - began, 1),
        "checks": checks,
        "arms": found,
        "environment": machine.environment(),
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"gpu-{answer['date']}{'-quick' if arguments.quick else ''}.json"
    path.write_text(json.dumps(answer, indent=2, sort_keys=True) + "\n", "utf-8")
    print(f"{table(device, found, checks)}\n\n{path} after {answer['seconds']} s")
    return 0 if all(check["holds"] for check in checks) else 1


def _arm(name: str, directory: Path, quick: bool) -> dict[str, Any]:
    """What one arm found, or {"failed": its last lines}: another may still tell something."""
    work = directory / name
    work.mkdir()
    sizes = Sizes.quick if quick else Sizes.full
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if ARMS[name].on_processor:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    command = machine.python("-m", "benchmarks.gpu.arm", name, str(directory / "data"), str(work), sizes.name)
    print(f"  {name}", flush=True)
    try:
        done = subprocess.run(
            command, cwd=machine.ROOT, env=environ, capture_output=True, text=True, timeout=ARM_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end in {ARM_TIMEOUT_S:g} s"}
    if done.returncode:
        return {"failed": "\n".join((done.stdout + done.stderr).splitlines()[-8:])}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The checks, each with what was found; one whose arms failed does not hold."""
    checks = []

    def check(name: str, what: Any) -> None:
        try:
            holds, said = what()
        except KeyError:
            holds, said = False, "not measured: an arm failed"
        checks.append({"name": name, "holds": bool(holds), "found": said})

    def losses(arm: str) -> list[float]:
        return list(found[arm]["losses"])

    def largest(a: str, b: str) -> float:
        return max(abs(x - y) for x, y in zip(losses(a), losses(b), strict=True))

    def memory(arm: str) -> float:
        return float(found[arm]["training_memory_bytes"])

    check(
        f"float32 on the GPU takes the steps of a processor (losses within {SAME:g})",
        lambda: ((d := largest("float32", "processor")) < SAME, f"largest difference {d:.2g}"),
    )
    check(
        "a run that was cut goes on to the last bit",
        lambda: (losses("cut") == losses("float32"), f"{len(losses('cut'))} losses compared"),
    )
    check(
        f"bfloat16 learns as float32 does (last loss at most {NEAR} above)",
        lambda: (
            losses("large")[-1] < losses("large_float32")[-1] + NEAR,
            f"{losses('large')[-1]:.3f}, float32 {losses('large_float32')[-1]:.3f}",
        ),
    )
    check(
        "gradient checkpointing needs less memory and gives the same losses",
        lambda: (
            memory("checkpointed") < memory("large") and largest("checkpointed", "large") < SAME,
            f"{memory('checkpointed') / 1e9:.2f} GB, without {memory('large') / 1e9:.2f} GB",
        ),
    )
    check(
        "every export was loaded in a fresh process and answered as in memory",
        lambda: (all(one["reloaded"] for one in found.values()), f"{len(found)} exports"),
    )
    return checks


def table(device: str, found: dict[str, dict[str, Any]], checks: list[dict[str, Any]]) -> str:
    """What people read."""
    lines = [f"Training on {device}", ""]
    for name, one in found.items():
        if "failed" in one:
            lines.append(f"{name:16s} FAILED {one['failed'].splitlines()[-1]}")
            continue
        mfu = f"  MFU {one['mfu']:.3f}" if "mfu" in one else ""
        lines.append(
            f"{name:16s} {one['tokens_per_second_padded']:12,.0f} tokens/s  peak {one['peak_memory_bytes'] / 1e9:6.2f} GB"
            f"  loss {one['losses'][0]:.3f} -> {one['losses'][-1]:.3f}{mfu}"
        )
    lines.append("")
    lines += [f"{'holds' if check['holds'] else 'FAILS'}  {check['name']}: {check['found']}" for check in checks]
    return "\n".join(lines)


def _driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except OSError:
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
