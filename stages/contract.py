"""What a stage is, and what it is given. Apart, because every stage and the orchestrator meet here and nowhere else.

A stage is a plain function `(cfg, ctx, <typed inputs>) -> one artifact`; its annotations are the whole declaration:

    @stage(libraries=("pyarrow",))
    def clean(cfg: CleanConfig, ctx: Context, rows: Rows) -> Corpus: ...

The config class is the switch: a YAML node typed `CleanConfig` runs this function. Stages never import the orchestrator,
Hydra or MLflow; what they need of those is handed in through `Context`.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stages.artifacts import Artifact


class StageError(Exception):
    """The user's data, model or machine stopped a stage. The message names what was found, what was wanted and the fix."""


class GateRefused(StageError):
    """A gate's thresholds were not met. Nothing was registered or deployed."""


class ResourcesUnavailable(StageError):
    """The cluster, endpoint or port that a stage needs is not there."""


@dataclass(kw_only=True)
class StageResources:
    """How a stage is executed. Nothing here changes the result; a stage with more to say extends it."""

    retries: int = 0
    """Further attempts after a failure that may pass by itself (a dead process, a timeout); a user's mistake is never retried."""
    retry_wait_s: float = 1.0
    """Seconds before the second attempt; doubled before each further one, up to 60."""
    timeout_s: float = 86400.0
    """Seconds that one attempt may take before it is ended."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"resources.retries must be 0 or more, got {self.retries}")
        for name in ("retry_wait_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"resources.{name} must be above 0, got {getattr(self, name)}")

    def cpus_wanted(self) -> float:
        """Logical CPUs that the stage keeps busy: what is not free yet makes it wait for its siblings."""
        return 1.0

    def inline(self) -> bool:
        """Whether a stage that otherwise runs on Ray does without it."""
        return False


class Executor(Enum):
    """Who carries out the parts of a stage's work."""

    ray = "ray"
    inline = "inline"


@dataclass(kw_only=True)
class TaskResources(StageResources):
    """Of a stage that gives its work to Ray tasks, or does it itself."""

    executor: Executor = Executor.ray
    """`ray`: tasks on the cluster. `inline`: one part after the other in the stage's own process, without Ray; for debugging."""

    def inline(self) -> bool:
        return self.executor is Executor.inline


@dataclass(kw_only=True)
class StageConfig:
    """Base of every stage's config. What changes the result is a field; what only changes how it is computed stands in
    a nested field named `resources`, which never enters a fingerprint."""

    inputs: dict[str, str] = field(default_factory=dict)
    """Edges: parameter of the stage function -> name of the upstream stage. Drawn by the pipeline file."""
    resources: StageResources = field(default_factory=StageResources)
    """How it is executed."""

    def inline(self) -> bool:
        """Whether a stage that otherwise runs on Ray does without it."""
        return self.resources.inline()

    def check(self, connected: frozenset[str]) -> None:
        """Raise ValueError when these values do not fit the edges that the pipeline draws (names of connected inputs)."""


def location(default: Any = MISSING) -> Any:
    """A config field that says where something is; what it is must come from the stage's `sources`, which the fingerprint
    holds instead. Moving the file re-runs nothing."""
    if default is MISSING:
        return field(metadata={"identity": False})
    return field(default=default, metadata={"identity": False})


class Tracker(Protocol):
    """The record of one stage attempt. Calls never raise because a tracking server is slow or gone."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None, at: float | None = None) -> None:
        """Numbers at a step; `at` is Unix time in seconds (default: now)."""

    def log_dataset(self, name: str, artifact: Artifact, context: str, profile: Mapping[str, float]) -> None:
        """An input data set: shown by MLflow with its digest, columns and profile (empty: its own).
        `context` is "training", "validation", ... What a stage makes is told without its doing."""

    def log_text(self, text: str, path: str) -> None:
        """A small text file among the attempt's artifacts."""


class Registry(Protocol):
    """Named model versions and aliases (`candidate`, `champion`, `previous`). Raises ResourcesUnavailable when out of reach."""

    def find(self, name: str, digest: str) -> int | None:
        """The newest version of `name` whose weights have this digest, or None."""

    def register(self, name: str, model: Artifact, tags: Mapping[str, str], metrics: Mapping[str, float]) -> int:
        """Add a version that points at the model's directory; the tag `digest` is its content digest."""

    def alias(self, name: str, alias: str) -> int | None:
        """The version an alias points at, or None."""

    def set_alias(self, name: str, alias: str, version: int) -> None: ...

    def resolve(self, model: str) -> tuple[str, str]:
        """`models:/name@alias` or `models:/name/3` -> (uri of the directory, content digest). StageError when there is none."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything a stage may touch besides its config and its inputs."""

    output: Path
    """Empty directory of this attempt. What stands here when the function returns is validated and published."""
    work: Path
    """Resumable state of this fingerprint (training checkpoints, Ray Train storage): same fingerprint, same directory.
    Never an artifact; collected after publication."""
    state: Path
    """Root of this project's state on this machine (`.raykeel/`): the endpoint record and log files live here."""
    fingerprint: str
    """64 hex characters: identity of this result. The name of the Ray Train run, so that Ray never resumes another recipe's weights."""
    seed: int
    tracker: Tracker
    registry: Registry
    progress: Callable[[float, str], None]
    """(fraction done in 0..1, short text): moves the console's progress line."""
    headline: Callable[[str], None]
    """The one number or sentence that the console prints when the stage is done."""


class Resolver(Protocol):
    """Turns what a config names into what it is, at plan time and offline."""

    def path(self, path: Path) -> str:
        """Content digest of a file or directory, memoised by path, size, mtime and inode. StageError when unreadable."""

    def model(self, model: str) -> str:
        """Content digest behind `models:/name@alias` or `models:/name/3`. StageError when there is no such version."""


@dataclass(frozen=True)
class Stage:
    """A registered stage: its function, what it takes, what it makes and what its identity depends on."""

    name: str
    function: Callable[..., Artifact]
    config: type[StageConfig]
    inputs: Mapping[str, tuple[type[Artifact], bool]]
    """Parameter -> (artifact type, required)."""
    output: type[Artifact]
    libraries: tuple[str, ...]
    """Distributions whose version changes the result; part of the fingerprint."""
    ray: bool
    """Needs a running Ray cluster."""
    sources: Callable[[Any, Resolver], Mapping[str, str]] | None
    """(cfg, resolver) -> immutable identity of what the stage reads from outside the store. Called at plan time, offline."""
    holds: Callable[[Artifact, Registry | None, Path], str | None] | None
    """For a state of the world (registry, endpoint): (its record, a light registry, state root) -> None when the world
    still agrees with the record, else the reason in words. Called at plan time; must not import heavy libraries."""


STAGES: dict[type[StageConfig], Stage] = {}
"""Config class -> stage. Filled by `@stage` when `stages.import_verbs()` imports the verb modules."""

F = TypeVar("F", bound=Callable[..., Artifact])


def stage(
    *,
    libraries: tuple[str, ...] = (),
    ray: bool = False,
    sources: Callable[[Any, Resolver], Mapping[str, str]] | None = None,
    holds: Callable[[Any, Any, Path], str | None] | None = None,
) -> Callable[[F], F]:
    """Register a function as a stage from its annotations: `cfg`, `ctx`, then named inputs; `T | None` is optional."""

    def register(function: F) -> F:
        hints = typing.get_type_hints(function)
        parameters = list(inspect.signature(function).parameters)
        config = hints[parameters[0]]
        assert issubclass(config, StageConfig), f"{function.__name__}: the first parameter is not a StageConfig"
        assert hints[parameters[1]] is Context, f"{function.__name__}: the second parameter is not a Context"
        STAGES[config] = Stage(
            name=function.__name__,
            function=function,
            config=config,
            inputs={name: _artifact_type(hints[name]) for name in parameters[2:]},
            output=hints["return"],
            libraries=libraries,
            ray=ray,
            sources=sources,
            holds=holds,
        )
        return function

    return register


def _artifact_type(hint: Any) -> tuple[type[Artifact], bool]:
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in hint.__args__ if kind is not type(None)]
        assert len(kinds) == 1, f"an input is one artifact type or `T | None`, got {hint}"
        return kinds[0], False
    return hint, True
