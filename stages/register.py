"""Register: an approved checkpoint becomes a version in the model registry. Apart from deploy, because a version may be
registered and never served, or served again later.

A state of the world: what is already there is found by content digest, so a repeated run never makes a second version."""

from dataclasses import dataclass, field
from pathlib import Path

from stages.artifacts import Approval, Checkpoint, EvalReport, ModelVersion, PairDataset, TokenDataset
from stages.contract import Context, Registry, StageConfig, StageError, StageResources, stage

CANDIDATE = "candidate"


@dataclass(kw_only=True)
class RegisterResources(StageResources):
    """What does not change the result."""

    load_timeout_s: float = 300.0
    """Seconds that the model may take to load and answer in a process of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_timeout_s <= 0:
            raise ValueError(f"resources.load_timeout_s must be above 0, got {self.load_timeout_s}")


@dataclass(kw_only=True)
class RegisterConfig(StageConfig):
    """Options in `conf/register/`."""

    name: str
    """Name of the registered model; the endpoint serves it under this name."""
    resources: RegisterResources = field(default_factory=RegisterResources)
    """How it is computed."""

    def __post_init__(self) -> None:
        if not self.name or set("/:@% \t\n") & set(self.name):
            raise ValueError(f"name must be one word without / : @ %, got {self.name!r}")

    def check(self, connected: frozenset[str]) -> None:
        """A version says what it was trained on."""
        if len(connected & {"dataset", "pairs"}) != 1:
            raise ValueError("connect what the model was trained on to register: dataset (tokens) or pairs")


def holds(receipt: ModelVersion, registry: Registry | None, state: Path) -> str | None:
    """Why the registry no longer agrees with the receipt, or None."""
    facts = receipt.summary()
    if registry is None:
        return "there is no registry to ask"
    found = registry.find(facts["name"], facts["digest"])
    if found == facts["version"]:
        return None
    return f"the registry has no {facts['name']}@{facts['version']} with digest {facts['digest'][:12]}"


@stage(holds=holds)
def register(
    cfg: RegisterConfig,
    ctx: Context,
    approval: Approval,
    checkpoint: Checkpoint,
    report: EvalReport,
    dataset: TokenDataset | None = None,
    pairs: PairDataset | None = None,
) -> ModelVersion:
    """Approved, recorded, proved to load back; the alias `candidate` moves last. What it was trained on is tokens or pairs."""
    trained_on = dataset or pairs
    cfg.check(frozenset(name for name, given in (("dataset", dataset), ("pairs", pairs)) if given is not None))
    assert trained_on is not None
    _require_approved(approval, checkpoint, report)
    version = ctx.registry.find(cfg.name, checkpoint.digest)
    if version is None:
        tags = {
            "digest": checkpoint.digest,
            "data_fingerprint": trained_on.digest,
            "report_digest": report.digest,
            "fingerprint": ctx.fingerprint,
        }
        version = ctx.registry.register(cfg.name, checkpoint, tags, _metrics(report))
    uri = _require_loads_back(cfg, ctx, checkpoint, version)
    ctx.registry.set_alias(cfg.name, CANDIDATE, version)
    ctx.headline(f"{cfg.name}@{version}")
    facts = {"name": cfg.name, "version": version, "digest": checkpoint.digest, "uri": uri}
    return ModelVersion(uri=ModelVersion.write(ctx.output, facts).uri)


def _require_approved(approval: Approval, checkpoint: Checkpoint, report: EvalReport) -> None:
    facts = approval.summary()
    for what, approved, given in (
        ("checkpoint", facts.get("checkpoint_digest"), checkpoint.digest),
        ("report", facts.get("report_digest"), report.digest),
    ):
        if not given or approved != given:
            raise StageError(
                f"register: the approval is for {what} {str(approved)[:12]}, got {what} {given[:12] or '(unpublished)'}: "
                "connect gate and register to the same checkpoint and report"
            )


def _metrics(report: EvalReport) -> dict[str, float]:
    metrics = report.summary().get("metrics", {})
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _require_loads_back(cfg: RegisterConfig, ctx: Context, checkpoint: Checkpoint, version: int) -> str:
    """The directory the registry names for this version holds the model that was made: equal golden answers in a process
    that shares nothing with this one. Returns its uri."""
    from stages.serving.golden import check_in_clean_process

    uri, digest = ctx.registry.resolve(f"models:/{cfg.name}/{version}")
    if digest != checkpoint.digest:
        raise StageError(
            f"models:/{cfg.name}/{version} has digest {digest[:12]}, wanted {checkpoint.digest[:12]}: "
            "the registry was changed by hand; delete that version and run again"
        )
    ctx.progress(0.5, "loading it back")
    check_in_clean_process(Checkpoint(uri=uri, digest=digest).local(), cfg.resources.load_timeout_s)
    return uri
