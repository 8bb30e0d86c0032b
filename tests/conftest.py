"""Shared fixtures: a stage context with in-memory records, a real Ray for the session, small models on disk."""

import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stages.artifacts import Artifact
from stages.contract import Context, StageError
from tests import services

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["RAYKEEL_SCRIBE_IDLE_S"] = (
    "3"  # the processes that keep MLflow open end soon after the test that needed them
)
for leaked in ("RAYKEEL_OVERRIDES", "TEXT", "CONF"):  # `make test` hands make's own words to the tests
    os.environ.pop(leaked, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="rewrite tests/golden from what is composed now")
    parser.addoption(
        "--share", type=float, default=1.0, metavar="PART", help="run this part of the files, others with each commit"
    )
    parser.addoption("--minutes", type=float, metavar="N", help="begin no further file after so many minutes")


BEGUN, LEFT = set[Path](), set[Path]()
"""Files of which a test ran, and which `--share` and `--minutes` left out."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--share`: which files are in it depends on the commit alone, so that a few commits run them all."""
    share = config.getoption("--share")
    if share >= 1:
        return
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=config.rootpath, capture_output=True, text=True)
    for path in {item.path for item in items}:
        name = f"{asked.stdout.strip()} {path.relative_to(config.rootpath)}"
        if int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) >= share * 2**32:
            LEFT.add(path)
    config.hook.pytest_deselected(items=[item for item in items if item.path in LEFT])
    items[:] = [item for item in items if item.path not in LEFT]


STARTED = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and item.path not in BEGUN and time.monotonic() - STARTED > 60 * minutes:
        LEFT.add(item.path)
        pytest.skip(f"begun after {minutes:g} minutes")
    BEGUN.add(item.path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LEFT:
        names = ", ".join(sorted(path.name for path in LEFT))
        terminalreporter.write_line(f"{len(LEFT)} files were left out (make test-slow runs all): {names}")


@dataclass
class MemoryTracker:
    """A Tracker that keeps what it was told."""

    metrics: list[tuple[str, float, int | None]] = field(default_factory=list)
    datasets: list[tuple[str, str, str]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None, at: float | None = None) -> None:
        self.metrics += [(name, value, step) for name, value in metrics.items()]

    def log_dataset(self, name: str, artifact: Artifact, context: str, profile: Mapping[str, float]) -> None:
        self.datasets.append((name, artifact.digest, context))

    def log_text(self, text: str, path: str) -> None:
        self.texts[path] = text


@dataclass
class MemoryRegistry:
    """A Registry that lives as long as the test."""

    versions: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    aliases: dict[tuple[str, str], int] = field(default_factory=dict)
    tags: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)

    def find(self, name: str, digest: str) -> int | None:
        found = [i for i, (_, known) in enumerate(self.versions.get(name, []), 1) if known == digest]
        return found[-1] if found else None

    def register(self, name: str, model: Artifact, tags: Mapping[str, str], metrics: Mapping[str, float]) -> int:
        self.versions.setdefault(name, []).append((model.uri, model.digest))
        version = len(self.versions[name])
        self.tags[name, version] = dict(tags)
        return version

    def alias(self, name: str, alias: str) -> int | None:
        return self.aliases.get((name, alias))

    def set_alias(self, name: str, alias: str, version: int) -> None:
        self.aliases[name, alias] = version

    def resolve(self, model: str) -> tuple[str, str]:
        name, _, alias = model.removeprefix("models:/").partition("@")
        version = self.aliases.get((name, alias)) if alias else int(name.partition("/")[2])
        try:
            return self.versions[name.partition("/")[0]][(version or 0) - 1]
        except (KeyError, IndexError):
            raise StageError(f"{model}: no such version") from None


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., Context]:
    """`make_context("clean")` -> a Context with its own output, work and state directories; `.tracker` keeps what was logged."""
    registry = MemoryRegistry()
    count = 0

    def make(name: str = "stage", *, seed: int = 0, fingerprint: str | None = None) -> Context:
        nonlocal count
        count += 1
        fingerprint = fingerprint or f"{count:064x}"
        output = tmp_path / f"{count:02d}-{name}"
        work = tmp_path / "work" / fingerprint
        state = tmp_path / "state"
        for directory in (output, work, state):
            directory.mkdir(parents=True, exist_ok=True)
        return Context(
            output=output,
            work=work,
            state=state,
            fingerprint=fingerprint,
            seed=seed,
            tracker=MemoryTracker(),
            registry=registry,
            progress=lambda fraction, text: None,
            headline=lambda text: None,
        )

    return make


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One in-process Ray for the whole test session: 4 logical CPUs, no dashboard, its own address, quiet."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def postgres() -> Iterator[services.Service]:
    """A PostgreSQL cluster for the session; `services.new_database(postgres)` gives each test its own."""
    with services.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[services.Service]:
    """An S3-compatible server with the buckets `store` and `mlflow`; `s3.env` is what a client's environment needs."""
    with services.s3() as server:
        yield server


@pytest.fixture(scope="session")
def mlflow_server(postgres: services.Service, s3: services.Service) -> Iterator[services.Service]:
    """An MLflow server on PostgreSQL with its artifacts on S3. Tests that stop a server start their own."""
    server = services.start_mlflow(services.new_database(postgres), "s3://mlflow/artifacts", s3.env)
    yield server
    server.stop()
