"""From YAML and overrides to typed dataclasses. Apart, because Hydra and OmegaConf end here: beyond `compose` there are none.

Every stage's config class is registered in Hydra's ConfigStore as `<verb>/schema`; a YAML option extends it, so a typo or a
wrong type dies at composition. What Hydra lets pass (`+key=`, the word None) is refused here, before anything starts.
"""

import dataclasses
import enum
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines import composed, groups
from pipelines.axes import SweepConfig
from pipelines.mistakes import ConfigError, did_you_mean, explain, refuse_the_word_none, reject_unknown_keys
from stages.contract import STAGES, StageConfig
from stages.storage.bucket import local_path

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
COMPOSED = ROOT / ".raykeel" / "composed"


WAIVABLE = ("code", "env")
"""Facets that `run.accept` may name: those that change without anybody asking for another result."""


class ClusterMode(enum.Enum):
    """Where Ray comes from."""

    local = "local"
    ephemeral = "ephemeral"
    attach = "attach"


OnFailure = enum.Enum("OnFailure", ["stop", "continue"])
"""What a failed stage means for the stages that do not depend on it. (`continue` is a word of Python's own.)"""


@dataclass(kw_only=True)
class RunConfig:
    """What this invocation is to do. Never part of a fingerprint."""

    until: str | None = None
    """Last stage to run; the stages that do not lead to it are left out."""
    rerun: list[str] = field(default_factory=list)
    """Stages to execute although their result is known."""
    rerun_from: str | None = None
    """This stage and everything below it are executed although their results are known."""
    accept: list[str] = field(default_factory=list)
    """Facets whose change is waived for this one run, as `<stage>.code` or `<stage>.env`: a stored result that differs in
    nothing else is reused. Written into what is made from it."""
    limit: int | None = None
    """Take only the first N rows of the source (sets `limit` of the ingest stage, so it does enter its fingerprint)."""
    lease_timeout_s: float = 3600.0
    """Seconds to wait for another run that is making the same result, before giving up."""
    max_parallel: int = 4
    """Stages that may run side by side, as far as they do not depend on each other and CPUs are free."""
    on_failure: OnFailure = OnFailure.stop
    """stop: after a failure nothing new starts, what runs is finished; continue: stages that do not depend on it go on."""
    quiet_after_s: float = 60.0
    """Seconds without a sign of a running stage after which the console says what is waited for."""
    stall_limit_s: float = 3600.0
    """Seconds without a sign of a running stage after which the attempt is ended."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"run.limit must be >= 1, got {self.limit}")
        if self.max_parallel < 1:
            raise ValueError(f"run.max_parallel must be >= 1, got {self.max_parallel}")
        for name in ("lease_timeout_s", "quiet_after_s", "stall_limit_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"run.{name} must be above 0, got {getattr(self, name)}")
        for waiver in self.accept:
            stage, _, facet = waiver.partition(".")
            if not stage or facet not in WAIVABLE:
                asked = "that facet says what was asked for" if facet in ("config", "seed", "inputs", "sources") else ""
                known = [f"{stage or '<stage>'}.{name}" for name in WAIVABLE]
                raise ValueError(
                    f"run.accept={waiver}: only a stage's code and env (library versions) can be waived"
                    + (f"; {asked}" if asked else did_you_mean(waiver, known))
                )


@dataclass(kw_only=True)
class ClusterConfig:
    """The Ray cluster that stages run on. Never part of a fingerprint."""

    mode: ClusterMode = ClusterMode.local
    """local: this project's own head, started on demand; ephemeral: one of this run alone; attach: the address below."""
    address: str | None = None
    """host:port of a running cluster, for mode attach. Never guessed from the environment."""
    num_cpus: int | None = None
    """Logical CPUs of a local head; default: the cores, but at least 4, so that data tasks never starve on a small machine."""
    object_store_mb: int = 512
    """Shared memory of a local head's object store, in MiB."""
    connect_timeout_s: float = 30.0
    """Seconds to wait for an attached cluster."""

    def __post_init__(self) -> None:
        for name in ("num_cpus", "object_store_mb", "connect_timeout_s"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"cluster.{name} must be above 0, got {value}")
        if self.mode is ClusterMode.attach and self.address is None:
            raise ValueError(
                "cluster.address has no value: cluster=attach needs cluster.address=<host:port of the Ray head>"
            )
        if self.mode is not ClusterMode.attach and self.address is not None:
            raise ValueError(
                f"cluster.address={self.address} needs cluster=attach; cluster={self.mode.name} starts its own Ray"
            )


class TrackingMode(enum.Enum):
    """Where MLflow records runs."""

    local = "local"
    server = "server"


@dataclass(kw_only=True)
class TrackingConfig:
    """The MLflow store that runs are recorded in. Never part of a fingerprint."""

    mode: TrackingMode = TrackingMode.local
    """local: a SQLite store under the state directory; server: the MLflow server at `uri`."""
    uri: str | None = None
    """http://host:port of the MLflow server, for mode server."""
    experiment: str | None = None
    """MLflow experiment; default: the pipeline's name."""
    timeout_s: float = 10.0
    """Seconds within which a tracking server must answer at the start of a run."""

    def __post_init__(self) -> None:
        if self.mode is TrackingMode.server and self.uri is None:
            raise ValueError(
                "tracking.uri has no value: tracking=server needs tracking.uri=<http://host:port of the MLflow server>"
            )
        if self.mode is TrackingMode.local and self.uri is not None:
            raise ValueError(f"tracking.uri={redacted(self.uri)} needs tracking=server")


@dataclass(kw_only=True)
class StoreConfig:
    """Where artifacts live. Never part of a fingerprint."""

    root: str | None = None
    """Root of the content-addressed store: a directory, or s3://bucket/prefix (gs://, az://) with credentials from the environment;
    default: `store` under the state directory."""
    single_writer: bool = False
    """Declares that never more than one run writes to `root`: for backends without create-if-absent, which are refused otherwise."""
    keep_runs: int = 5
    """Runs of each pipeline whose results `make gc` keeps, the last ones; a sweep counts as one."""
    keep_quarantine_days: float = 14.0
    """Days for which `make gc` keeps what was set aside as broken."""

    def __post_init__(self) -> None:
        for name in ("keep_runs", "keep_quarantine_days"):
            if getattr(self, name) < 0:
                raise ValueError(f"store.{name} must be 0 or more, got {getattr(self, name)}")


@dataclass(kw_only=True)
class AppConfig:
    """One composed invocation: a pipeline's stages with their values, and how to run them."""

    name: str
    """Name of the pipeline; also the MLflow experiment."""
    seed: int = 0
    """Seeds every random choice; part of every fingerprint."""
    state: str = ".raykeel"
    """Root of all state on this machine (relative paths are relative to the repository)."""
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """Stage name -> its config. The config's class decides which function runs."""
    run: RunConfig = field(default_factory=RunConfig)
    """What this invocation is to do."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The Ray that stages run on."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """The MLflow store that runs are recorded in."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """Where artifacts live."""
    sweep: SweepConfig = field(default_factory=SweepConfig)
    """How `make sweep` chooses points and compares them."""

    def __post_init__(self) -> None:
        if not self.state.strip():
            raise ValueError(
                "state must name a directory, got nothing (it would be the repository itself); leave it out, or name one"
            )

    @property
    def state_root(self) -> Path:
        return (ROOT / Path(self.state).expanduser()).resolve()

    @property
    def store_root(self) -> str:
        """URI of the store: file:///... or an object store's."""
        if self.store.root and "://" in self.store.root:
            return self.store.root.rstrip("/")
        directory = (
            (ROOT / Path(self.store.root).expanduser()).resolve() if self.store.root else self.state_root / "store"
        )
        return directory.as_uri()

    @property
    def scratch_root(self) -> Path:
        """Directory of this machine for what is being made: on the file system of the store when that is a directory."""
        return local_path(self.store_root) or self.state_root / "scratch"


def redacted(text: str) -> str:
    """The text with user name and password taken out of every URI in it: for whatever is printed or recorded."""
    return re.sub(r"(\w+://)[^/\s'\"]*@", r"\1", text)


def register_schemas() -> None:
    """Give Hydra the dataclasses that YAML files extend."""
    from hydra.core.config_store import ConfigStore

    import stages

    stages.import_verbs()
    store = ConfigStore.instance()
    store.store(name="app_schema", node=AppConfig)
    for config_class, stage in STAGES.items():
        store.store(group=stage.name, name="schema", node=config_class, package=f"stages.{stage.name}")


def compose(overrides: list[str], conf: str | None = None) -> AppConfig:
    """Compose `conf/config.yaml` with the overrides into dataclasses. Raises ConfigError with one message."""
    import stages

    overrides = _model_shorthand(overrides, conf)
    name = composed.key(ROOT, Path(conf).resolve() if conf else None, overrides)
    stages.import_verbs()
    app: AppConfig | None = composed.load(COMPOSED, name) if name else None
    if app is None:
        app = to_objects(compose_node(overrides, conf))
        if name:
            composed.keep(COMPOSED, name, app)
    return app


def compose_node(overrides: list[str], conf: str | None = None) -> Any:
    """The composed OmegaConf node, checked for keys that no dataclass knows; for printing (`make config`)."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register_schemas()
    overrides = _model_shorthand(overrides, conf)
    if conf:
        if not Path(conf).is_dir():
            raise ConfigError(
                f"CONF={conf}: no such directory; it should hold pipeline/ and option folders like conf/ does"
            )
        overrides = [*overrides, f"hydra.searchpath=['file://{Path(conf).resolve()}']"]
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            plain_overrides, inside = groups.split(overrides)
            node = hydra.compose("config", overrides=plain_overrides)
            groups.apply(node, inside)
        reject_unknown_keys(node, "")
        return node
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides)) from error


def to_objects(node: Any) -> AppConfig:
    """OmegaConf node -> AppConfig; runs every `__post_init__`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(node))
        if missing:
            raise ConfigError("; ".join(f"{key} has no value: add {key}=<value>" for key in missing))
        app = OmegaConf.to_object(node)
        assert isinstance(app, AppConfig)
    except (OmegaConfBaseException, MissingMandatoryValue) as error:
        raise ConfigError(explain(error, [])) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    refuse_the_word_none(app, "")
    return app


def plain(value: Any) -> Any:
    """A dataclass tree as JSON-ready values (Enums by name)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _model_shorthand(overrides: list[str], conf: str | None) -> list[str]:
    """`model=` picks an option of conf/model, or one of conf/fetch; a path or a registry URI is the source of the `fetch`
    stage instead, which then has nothing else of the option that the pipeline would take."""
    written: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if key == "model" and any((Path(root) / "fetch" / f"{value}.yaml").is_file() for root in (CONF, conf) if root):
            written.append(f"fetch={value}")
        elif key == "model" and equals and ("/" in value or value.startswith("models:") or Path(value).is_dir()):
            quoted = value if value[:1] in "'\"" else f"'{value}'"
            chosen = any(other.startswith("fetch=") for other in overrides)
            written += [*([] if chosen else ["fetch=model"]), f"stages.fetch.source={quoted}"]
        else:
            written.append(override)
    return written
