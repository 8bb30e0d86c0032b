"""Select: a version that the registry has already, to be served as it is. Apart from register, which makes one: to serve something
again, or to roll back, nothing is trained and no gate of metrics is passed; deploy asks its golden questions all the same."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.artifacts import ModelVersion
from stages.contract import Context, Registry, Resolver, StageConfig, StageError, location, stage

MODEL = re.compile(r"models:/([^/:@%\s]+)(?:@([^/:@%\s]+)|/(\d+))")


@dataclass(kw_only=True)
class SelectConfig(StageConfig):
    """Options in `conf/select/`."""

    model: str = location()
    """A registered model: `models:/name@alias` or `models:/name/3`. An alias is resolved once, when the run is planned."""

    def __post_init__(self) -> None:
        if not MODEL.fullmatch(self.model):
            raise ValueError(f"model must be models:/name@alias or models:/name/3, got {self.model!r}")


def sources(cfg: SelectConfig, resolver: Resolver) -> Mapping[str, str]:
    """Whose weights it is."""
    return {"name": _name(cfg), "model": resolver.model(cfg.model)}


def holds(receipt: ModelVersion, registry: Registry | None, state: Path) -> str | None:
    """Why the registry no longer agrees with the receipt, or None."""
    facts = receipt.summary()
    if registry is None:
        return "there is no registry to ask"
    if registry.find(facts["name"], facts["digest"]) is None:
        return f"the registry has no {facts['name']} with digest {facts['digest'][:12]}"
    return None


@stage(sources=sources, holds=holds)
def select(cfg: SelectConfig, ctx: Context) -> ModelVersion:
    """Name and number of the version, and where its files are."""
    uri, digest = ctx.registry.resolve(cfg.model)
    found = MODEL.fullmatch(cfg.model)
    assert found is not None
    name, alias, number = found.groups()
    version = int(number) if number else ctx.registry.alias(name, alias)
    if version is None:
        raise StageError(f"model={cfg.model}: the alias {alias} was taken away meanwhile; run again")
    ctx.headline(f"{name}@{version}")
    facts = {"name": name, "version": version, "digest": digest, "uri": uri}
    return ModelVersion(uri=ModelVersion.write(ctx.output, facts).uri)


def _name(cfg: SelectConfig) -> str:
    found = MODEL.fullmatch(cfg.model)
    assert found is not None
    return found[1]
