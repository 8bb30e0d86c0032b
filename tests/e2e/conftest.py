"""One quickstart for all tests of a session that only need it to have happened: its project, and a copy of what it left."""

import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.store import Store
from tests.e2e.project import SMALL, Project


@dataclass
class Quickstart:
    """A first run: its project, what it printed, and a copy from the moment after it."""

    project: Project
    printed: str
    copy: Project
    """MLflow's database, the reports and the store, which nobody changes; its Ray and its endpoint are not its own."""


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    """`tests/e2e/test_quickstart.py` goes on with the project itself; everybody else looks at the copy, whatever comes first."""
    project = Project(tmp_path_factory.mktemp("project") / "state")
    copy = Project(tmp_path_factory.mktemp("copied") / "state")
    try:
        printed = project.cli("run", *SMALL)
        shutil.copytree(project.state / "store", copy.state / "store")
        shutil.copytree(
            project.state / "mlflow", copy.state / "mlflow", ignore=shutil.ignore_patterns("mlflow.db*")
        )  # MLflow knows its artifacts by their first place, where they stay as well
        before = sqlite3.connect(project.state / "mlflow" / "mlflow.db")
        after = sqlite3.connect(copy.state / "mlflow" / "mlflow.db")
        before.backup(after)
        before.close()
        after.close()
        yield Quickstart(project, printed, copy)
    finally:
        project.cli("down", check=None)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path / "state")
    yield project
    project.cli("down", check=None)


@pytest.fixture
def trained(project: Project, first_run: Quickstart) -> Project:
    """Knows every result of the quickstart and nothing else of it: no MLflow run, no version, no Ray."""
    know(project.state / "store", first_run)
    return project


@pytest.fixture
def tokenized(project: Project, first_run: Quickstart) -> Project:
    """Knows what the quickstart made of its data."""
    know(project.state / "store", first_run, "ingest", "clean", "tokenize")
    return project


def know(store: Path, first_run: Quickstart, *stages: str) -> None:
    """A store with the results of these stages, or of all."""
    made = first_run.copy.state / "store"
    shutil.copytree(made, store, ignore=shutil.ignore_patterns("work", "staging"))
    for record in Store(made.as_uri(), made).records():
        if stages and record.payload["stage"] not in stages:
            shutil.rmtree(store / "results" / record.fingerprint)
    left = {record.payload["stage"] for record in Store(store.as_uri(), store).records()}
    assert left == set(stages) if stages else len(left) == 9
