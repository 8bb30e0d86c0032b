"""What running a stage through the orchestrator costs over calling its function: lease, staging directory, validation,
publication with hashes, one MLflow child run. Without Ray; tracking is open and its store was used before."""

import io
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import bare
from benchmarks.harness import Bench, Check, Result
from benchmarks.machine import scratch
from stages.artifacts import Rows
from stages.contract import Context, StageConfig, stage


@dataclass(kw_only=True)
class BenchStageConfig(StageConfig):
    """A stage that does next to nothing."""

    value: int = 1
    """Written to the one file that it makes."""


@stage()
def bench_stage(cfg: BenchStageConfig, ctx: Context, rows: Rows | None = None) -> Rows:
    """Reads its input's summary, writes a file and a summary, reports a metric."""
    value = cfg.value + (rows.summary()["value"] if rows else 0)
    (ctx.output / "rows").mkdir()
    (ctx.output / "rows" / "part-00000.parquet").write_text(str(value))
    ctx.tracker.log_metrics({"value": float(value)})
    ctx.headline(f"value {value}")
    return Rows.write(ctx.output, {"value": value})


def run(bench: Bench) -> list[Result]:
    from pipelines import runner
    from pipelines.config import AppConfig
    from pipelines.console import Console
    from pipelines.session import Session

    count, repetitions = (3, 2) if bench.quick else (10, 5)
    overheads, wholes, bares = [], [], []
    with scratch() as directory:
        state = directory / "state"

        def app(seed: int) -> AppConfig:
            stages: dict[str, StageConfig] = {
                f"s{i}": BenchStageConfig(value=i, inputs={"rows": f"s{i - 1}"} if i else {}) for i in range(count)
            }
            return AppConfig(name="bench", state=str(state), seed=seed, stages=stages)

        console = Console()
        console.out.file = io.StringIO()
        with Session(app(0), console) as session:
            runner.run(app(0), session, "warm-up")
            for seed in range(1, repetitions + 1):
                began = time.perf_counter()
                outcome = runner.run(app(seed), session, "bench")
                whole = time.perf_counter() - began
                assert outcome.executed == count
                bare = _bare(count, directory / f"bare-{seed}")
                wholes.append(whole)
                bares.append(bare)
                overheads.append((whole - bare) / count)
                bench.say(f"{count} stages: {whole:.2f} s, bare {bare:.3f} s")
            made = sum(range(count))
            last = outcome.steps[-1].record
            assert last is not None
            said = last.meta["headline"]
    return [
        bench.value(
            "orchestration_seconds_per_stage",
            "What does the orchestrator add to each executed stage, once the tracking store is open?",
            unit="s",
            values=overheads,
            limit=1.0,
            gate=[Check("the last stage saw all before it", said == f"value {made}", str(said))],
            details={"stages": count, "run_s": wholes, "bare_s": bares},
        )
    ]


def _bare(count: int, directory: Path) -> float:
    """Seconds of the same functions called one after another."""
    began = time.perf_counter()
    rows = None
    for index in range(count):
        output = directory / f"s{index}"
        output.mkdir(parents=True)
        rows = bench_stage(BenchStageConfig(value=index), bare.context(output, directory), rows)
    return time.perf_counter() - began
