"""Runs with a scribe of their own: commands in processes, what MLflow then shows, when a process has ended."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import psutil

from pipelines.config import ROOT, AppConfig
from pipelines.desk import Desk

RUN = "import sys; from tests.pipelines import stubs; from pipelines.__main__ import main; code = main(); "
PIPELINE = """# @package _global_
defaults: [/make: schema, /double: schema, _self_]
name: stub
stages:
  double: {inputs: {rows: make}}
"""


def desk_of(state: Path) -> Desk:
    return Desk.of(AppConfig(name="stub", state=str(state)))


def command(state: Path, *words: str, then: str = "sys.exit(code)", own_group: bool = False) -> "subprocess.Popen[str]":
    line = [sys.executable, "-c", RUN + then, *words, f"state={state}", "--conf", str(state.parent / "conf")]
    said = subprocess.PIPE
    return subprocess.Popen(
        line, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, text=True, start_new_session=own_group
    )


def client(state: Path) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(f"sqlite:///{state / 'mlflow' / 'mlflow.db'}")


def runs(state: Path) -> dict[str, Any]:
    """Name -> run; each is there once."""
    store = client(state)
    found = store.search_runs([e.experiment_id for e in store.search_experiments()])
    named = {run.data.tags["mlflow.runName"].split()[0]: run for run in found}
    assert len(named) == len(found), sorted(run.data.tags["mlflow.runName"] for run in found)
    return named


def await_(what: Callable[[], Any], within_s: float = 15.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
