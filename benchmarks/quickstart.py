"""The first thing a person sees: `make run` from installed dependencies, in a fresh state directory, until the endpoint
answers; and the second run, which has nothing to do. Absolute limits, no comparison."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.harness import Bench, Check, Result

TIMEOUT_S = 600.0
HEAVY = ("ray", "torch", "transformers", "mlflow", "pandas", "numpy", "pyarrow")
LISTED = (
    "import sys; from pipelines.__main__ import main; code = main(sys.argv[1:]); "
    f"print('HEAVY', *[m for m in {HEAVY!r} if m in sys.modules]); sys.exit(code)"
)


def run(bench: Bench) -> list[Result]:
    with machine.scratch() as directory:
        state = directory / "state"
        overrides = [f"state={state}", f"stages.deploy.port={machine.free_port()}"]
        if bench.quick:
            overrides += ["run.limit=300", "stages.train.max_steps=4", "stages.gate.rules.must_beat=[untrained]"]
            overrides += ["stages.gate.rules.min_improvement=0"]
        command = machine.python("-m", "pipelines", "run", *overrides)
        environ = machine.clean_environment()
        bench.say("first run")
        first = _first(bench, command, environ, directory)
        repetitions = 2 if bench.quick else 5
        seconds = [machine.timed(command, directory / "again.log", environ).cpu_s for _ in range(repetitions)]
        bench.say(f"second run: {seconds[0]:.2f} s of CPU")
        said = (directory / "again.log").read_text()
        heavy = _heavy_imports(overrides, environ)
        report = _report(state)
    idle = Check("the second run had nothing to do", "nothing changed" in said, said.strip().splitlines()[-1][:80])
    return [
        bench.value(
            "quickstart_seconds",
            "How long does make run take from installed dependencies to an endpoint that answers?",
            unit="s",
            values=[first["seconds"]],
            limit=240,
        ),
        bench.value(
            "quickstart_peak_memory_mb",
            "How much memory do all its processes hold at most (summed PSS, Ray's included)?",
            unit="MB",
            values=[first["peak_mb"]],
            limit=6000,
            needs_quiet=False,
            details={"processes_at_peak": first["processes"], "sampled_every_s": machine.PeakMemory.EVERY_S},
        ),
        bench.value(
            "quickstart_bits_per_byte",
            "How well does the model that it trains predict validation text?",
            unit="bits/byte",
            values=[report["metrics"]["bits_per_byte"]],
            limit=2.3,
            needs_quiet=False,
            details={"baselines": {name: b.get("bits_per_byte") for name, b in report["baselines"].items()}},
        ),
        bench.value(
            "second_run_cpu_seconds",
            "What does a run with nothing to do cost (CPU seconds of all its processes)?",
            unit="s",
            values=seconds,
            limit=1.5,
            gate=[idle],
        ),
        bench.value(
            "second_run_heavy_imports",
            "How many heavy libraries does it load?",
            unit="libraries",
            values=[len(heavy)],
            limit=0,
            needs_quiet=False,
            gate=[idle],
            details={"loaded": heavy, "looked_for": list(HEAVY)},
        ),
    ]


def _first(bench: Bench, command: list[str], environ: dict[str, str], directory: Path) -> dict[str, Any]:
    log, head = directory / "run.log", directory / "state" / "cluster" / "head.json"
    processes = machine.Processes()
    began = said = time.monotonic()
    with machine.started(command, log, environ) as process, machine.PeakMemory(processes) as memory:
        processes.add(process.pid)
        while (code := process.poll()) is None:
            time.sleep(0.1)
            now = time.monotonic()
            if now - said > 30:
                said = now
                bench.say(machine.tail(log, 1))
            if now - began > TIMEOUT_S:
                raise RuntimeError(f"the run took more than {TIMEOUT_S:.0f} s\n{machine.tail(log)}")
            if head.exists():  # the keeper is nobody's child
                processes.add(json.loads(head.read_text())["pid"])
        seconds = time.monotonic() - began
    if code:
        raise RuntimeError(f"the run ended with {code}\n{machine.tail(log)}")
    bench.say(f"{seconds:.0f} s, peak {memory.peak_mb:.0f} MB")
    return {"seconds": seconds, "peak_mb": memory.peak_mb, "processes": memory.at_peak}


def _heavy_imports(overrides: list[str], environ: dict[str, str]) -> list[str]:
    done = subprocess.run(
        machine.python("-c", LISTED, "run", *overrides), cwd=machine.ROOT, env=environ, capture_output=True, text=True
    )
    return next(line for line in done.stdout.splitlines() if line.startswith("HEAVY")).split()[1:]


def _report(state: Path) -> dict[str, Any]:
    """The published EvalReport."""
    from pipelines.config import AppConfig
    from pipelines.store import Store

    store = Store.open(AppConfig(name="quickstart", state=str(state)))
    for record in store.records():
        if record.meta["stage"] == "evaluate" and (directory := store.object_directory(record.digest)):
            found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
            return found
    raise RuntimeError("no evaluation was published")
