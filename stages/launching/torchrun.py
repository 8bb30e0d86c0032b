"""Runs a training job under torchrun's own agent (`torch.distributed.elastic`), without Ray:

    stage --(process)--> agent --> one worker a rank, each calling `loop.run`

The agent has a process of its own, because it takes the signals of the one that it runs in, and blocks it. It is called as a
function: the command `torchrun` does the same with what stands on its command line.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from stages.contract import Context, StageError
from stages.launching import rank
from stages.training.config import Job
from stages.training.preflight import require
from stages.training.report import Report
from stages.training.resources import TrainResources

LOGS = "torchrun"
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torch 2.13 keeps one store over all restarts: a worker that is up before rank 0 reads the address of the dead one there, and
the restart fails, one time in three (pytorch/pytorch#135712)."""
POLL_S = 0.25
END_S = 4.0
"""An agent that is told to end kills its workers and needs a fraction of a second."""


def under_torchrun(resources: TrainResources, ctx: Context, job: Job, report: Report) -> None:
    """Train to the end. StageError with what a worker refused, or which workers kept dying."""
    cpus = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    require(
        "CPU",
        workers=resources.workers,
        each=resources.threads_per_worker,
        nodes=[{"Alive": True, "Resources": {"CPU": cpus}}],
        free=lambda: {"CPU": cpus},
        fields=(f"stages.{job.verb}.resources.workers", f"stages.{job.verb}.resources.threads_per_worker"),
    )
    ctx.progress(0.0, f"starting {resources.workers} workers")
    context = multiprocessing.get_context("spawn")
    outcome, answers = context.Pipe(duplex=False)
    agent = context.Process(target=_agent, args=(answers, job, resources, ctx.fingerprint), name="torchrun")
    agent.start()
    answers.close()
    try:
        while not outcome.poll(POLL_S):
            report.poll()
            rank.stop_if_refused(job)
        error = outcome.recv()
        agent.join(END_S)
    except EOFError:
        agent.join(END_S)
        error = f"torchrun's agent ended with {agent.exitcode}"
    finally:
        _end(agent)
        outcome.close()
    report.poll()
    rank.stop_if_refused(job)
    if error:
        raise StageError(f"{error}; the workers' tracebacks are in {job.work / rank.TRACES}")


def _end(agent: BaseProcess) -> None:
    """No process is left: the agent kills its workers, and they end by themselves when it is gone."""
    if agent.is_alive():
        agent.terminate()
        agent.join(END_S)
    if agent.is_alive():
        agent.kill()
        agent.join()


def _agent(answers: Connection, job: Job, resources: TrainResources, fingerprint: str) -> None:
    """In a process of its own: sends None, or the error in one line."""
    os.environ.update(rank.environment(resources))
    os.environ.update(OWN_STORE)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=resources.workers,
        run_id=fingerprint,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # any free port, as `torchrun --standalone`
        local_addr="127.0.0.1",
        max_restarts=resources.max_failures,
        monitor_interval=POLL_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(job.work / LOGS)),
        shutdown_timeout=2,
    )
    try:
        elastic_launch(config, rank.train)(job)
    except ChildFailedError as error:
        causes = [f"rank {r}: {_cause(failure)}" for r, failure in sorted(error.failures.items())]
        answers.send("training workers failed: " + "; ".join(causes))
    else:
        answers.send(None)


def _cause(failure: Any) -> str:
    if failure.exitcode < 0:
        return f"ended by {signal.Signals(-failure.exitcode).name}"
    message = failure.message.get("message", "") if isinstance(failure.message, dict) else failure.message
    return str(message).strip().splitlines()[-1] if str(message).strip() else f"exit code {failure.exitcode}"


def _end_with_parent() -> None:
    """A stage that was killed cannot end its agent: it sees that itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
