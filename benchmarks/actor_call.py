"""What one use of Ray's two basic means costs beside the means that training uses anyway: an actor call beside a gloo
all-reduce, the object store beside a gloo broadcast; and what an idle head holds. One host: nothing here speaks of networks.

The gloo peer is a process of its own (`python -m benchmarks.actor_call <port>`), so that both arms hand the same 64 MiB to
another process, which sums them and answers.
"""

import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from benchmarks import machine
from benchmarks.harness import Bench, Check, Result

MIB = 64
STOP, REDUCE, RECEIVE = 0, 1, 2
TIMEOUT_S = 120


class Reader:
    """The other side of Ray's arm."""

    def ping(self) -> None:
        """Nothing: the price of the call alone."""

    def total(self, values: Any) -> float:
        """The sum, so that every page was read."""
        return float(values.sum())


def run(bench: Bench) -> list[Result]:
    import numpy

    from pipelines import cluster
    from pipelines.config import ClusterConfig

    values = numpy.random.default_rng(0).integers(0, 255, MIB * 2**20, dtype=numpy.uint8)
    expected = float(values.sum())
    with machine.scratch() as directory, machine.local_head(directory / "state") as keeper:
        idle = _idle(bench, keeper)
        with cluster.connect(ClusterConfig(), directory / "state"), Gloo(directory) as gloo:
            import ray  # after connect, which sets what Ray reads at its import

            reader = ray.remote(num_cpus=0)(Reader).remote()
            ray.get(reader.ping.remote())
            bench.say("actor and gloo peer are up")
            count = 200 if bench.quick else 3000
            call_ms = _each(count, lambda: ray.get(reader.ping.remote()))
            reduce_ms = gloo.all_reduces(count)
            bench.say(f"call p50 {call_ms['p50']:.3f} ms, all-reduce p50 {reduce_ms['p50']:.3f} ms")
            sums: list[float] = []

            def through_store() -> float:
                began = time.perf_counter()
                sums.append(ray.get(reader.total.remote(ray.put(values))))
                return time.perf_counter() - began

            def through_gloo() -> float:
                began = time.perf_counter()
                sums.append(gloo.send_for_total(values))
                return time.perf_counter() - began

            through_store(), through_gloo()
            pairs = bench.alternate(bench.pairs(20, quick=4), through_gloo, through_store)
            floor = bench.alternate(bench.pairs(20, quick=4), through_gloo, through_gloo, "A/A pair")
    whole = Check("every transfer arrived whole", set(sums) == {expected}, f"{len(sums)} transfers summed")
    return [
        bench.value(
            "actor_call_ms",
            "What does one call of a Ray actor cost, there and back?",
            unit="ms",
            values=[call_ms["p50"]],
            details={"calls": count, **call_ms},
        ),
        bench.value(
            "all_reduce_ms",
            "What does a 4-byte gloo all-reduce of two processes cost, beside it?",
            unit="ms",
            values=[reduce_ms["p50"]],
            details={"calls": count, **reduce_ms},
        ),
        bench.compare(
            "object_store_seconds",
            f"Is the object store slower than a broadcast for handing {MIB} MiB to another process of this host?",
            unit="s",
            better="lower",
            arms={"A": "gloo broadcast", "B": "ray.put and a call that reads it"},
            pairs=pairs,
            floor_pairs=floor,
            margin=0.1,
            gate=[whole],
            details={"mebibytes": MIB, "median_a_s": statistics.median(p.a for p in pairs),
                     "median_b_s": statistics.median(p.b for p in pairs)},
        ),
        *idle,
    ]  # fmt: skip


def _idle(bench: Bench, keeper: int) -> list[Result]:
    """Memory and CPU of a head on which nothing runs."""
    seconds = 3 if bench.quick else 10
    processes = machine.Processes()
    processes.add(keeper)
    time.sleep(5.0)  # its start-up ends
    before = processes.cpu_s()
    time.sleep(seconds)
    share = (processes.cpu_s() - before) / seconds / (machine.environment()["cores"])
    count, memory = len(processes.alive()), processes.pss_mb()
    bench.say(f"idle head: {count} processes, {memory:.0f} MB, {share:.1%} of the cores")
    details = {"processes": count, "seconds": seconds}
    return [
        bench.value(
            "idle_head_mb",
            "How much memory does an idle Ray head hold (summed PSS)?",
            unit="MB",
            values=[memory],
            details=details,
        ),
        bench.value(
            "idle_head_cpu_percent",
            "What share of all cores does an idle Ray head use?",
            unit="%",
            values=[100 * share],
            details=details,
        ),
    ]


def _each(count: int, call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of one call: median, 95th percentile, least."""
    for _ in range(count // 10):
        call()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    return {"p50": statistics.median(times), "p95": statistics.quantiles(times, n=20)[-1], "min": min(times)}


class Gloo:
    """Rank 0 of a process group of two, in this process; each request is announced to the peer by one broadcast."""

    def __init__(self, directory: Any) -> None:
        self._port = machine.free_port()
        command = machine.python("-m", "benchmarks.actor_call", str(self._port))
        self._peer = machine.started(command, directory / "peer.log", machine.clean_environment(OMP_NUM_THREADS="1"))

    def __enter__(self) -> "Gloo":
        self._peer.__enter__()
        _join(0, self._port)
        return self

    def __exit__(self, *error: Any) -> None:
        import torch.distributed

        if not any(error):
            self._announce(STOP)
            torch.distributed.destroy_process_group()
        self._peer.__exit__(*error)

    def _announce(self, what: int, times: int = 1) -> None:
        import torch

        torch.distributed.broadcast(torch.tensor([what, times]), 0)

    def all_reduces(self, count: int) -> dict[str, float]:
        """Milliseconds of `count` all-reduces of one float."""
        import torch

        self._announce(REDUCE, count + count // 10)
        return _each(count, lambda: torch.distributed.all_reduce(torch.zeros(1)))

    def send_for_total(self, values: Any) -> float:
        import torch

        self._announce(RECEIVE)
        torch.distributed.broadcast(torch.from_numpy(values), 0)
        answer = torch.zeros(1, dtype=torch.float64)
        torch.distributed.recv(answer, 1)
        return float(answer)


def _join(rank: int, port: int) -> None:
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )


def peer(port: int) -> None:
    """Rank 1: do what is announced."""
    import torch

    _join(1, port)
    buffer = torch.empty(MIB * 2**20, dtype=torch.uint8)
    request = torch.zeros(2, dtype=torch.int64)
    while True:
        torch.distributed.broadcast(request, 0)
        what, times = request.tolist()
        if what == STOP:
            break
        if what == REDUCE:
            for _ in range(times):
                torch.distributed.all_reduce(torch.zeros(1))
        else:
            torch.distributed.broadcast(buffer, 0)
            torch.distributed.send(torch.tensor([buffer.numpy().sum()], dtype=torch.float64), 0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    peer(int(sys.argv[1]))
