"""Data sets of a hub, at one commit. Apart, because only files come from there (JSON, Parquet, CSV, text), never the code that a
data set may bring.
"""

import fnmatch
import os
import re
from pathlib import Path
from typing import Any

from stages.contract import ResourcesUnavailable, StageError
from stages.text.files import Container, Found, chosen, listed

COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_S = 10


def resolve_commit(repository: str, revision: str) -> str:
    """The 40-hex commit of a revision: itself, or what the local cache remembers, or what the hub says."""
    if COMMIT.fullmatch(revision):
        return revision
    reference = _cache() / f"datasets--{repository.replace('/', '--')}" / "refs" / revision
    if reference.is_file():
        return reference.read_text("utf-8").strip()
    api = _library().HfApi()
    try:
        commit = api.dataset_info(repository, revision=revision, timeout=TIMEOUT_S).sha
    except Exception as error:
        raise ResourcesUnavailable(
            f"stages.ingest.source.hub={repository} at {revision}: not in the local cache {_cache()} and the hub does not "
            f"answer ({type(error).__name__}); give its files as path, or the 40-hex commit of what the cache holds"
        ) from error
    if not commit or not COMMIT.fullmatch(commit):
        raise StageError(f"stages.ingest.source.hub={repository} at {revision}: the hub names no commit")
    return commit


def find(repository: str, commit: str, subset: str | None, split: str, container: Container) -> Found:
    """The files of one split at a commit, downloaded if the cache has not got them."""
    folder = _snapshot(repository, commit, ["README.md"])
    names = _names(repository, commit, folder)
    wanted = _of_split(repository, names, _configs(folder), subset, split)
    folder = _snapshot(repository, commit, wanted)
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise ResourcesUnavailable(
            f"stages.ingest.source.hub={repository} at {commit[:10]}: {len(missing)} of {len(wanted)} files are not in the "
            f"local cache {_cache()} and the hub does not answer (first: {missing[0]})"
        )
    candidates = [listed(folder / name, folder) for name in wanted]
    return chosen(f"{repository} (hub)", candidates, container, single=False)


def _library() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub

    return huggingface_hub


def _cache() -> Path:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def _snapshot(repository: str, commit: str, patterns: list[str]) -> Path:
    """The directory of a commit in the local cache with these files; offline with what is there."""
    escaped = [glob_escaped(pattern) for pattern in patterns]
    for offline in (False, True):
        try:
            return Path(
                _library().snapshot_download(
                    repository,
                    repo_type="dataset",
                    revision=commit,
                    allow_patterns=escaped,
                    local_files_only=offline,
                    cache_dir=_cache(),
                )
            )
        except Exception as error:
            if offline:
                raise ResourcesUnavailable(
                    f"stages.ingest.source.hub={repository} at {commit[:10]}: not in the local cache {_cache()} and not to "
                    f"be had from the hub ({type(error).__name__})"
                ) from error
    raise AssertionError("unreachable")


def glob_escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _names(repository: str, commit: str, folder: Path) -> list[str]:
    """All files of the commit; without the hub, those that the cache holds."""
    try:
        names: list[str] = _library().HfApi().list_repo_files(repository, revision=commit, repo_type="dataset")
    except Exception:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(names)


def _configs(folder: Path) -> list[dict[str, Any]]:
    """What the data set's README says about its subsets."""
    readme = folder / "README.md"
    if not readme.is_file():
        return []
    import yaml  # type: ignore[import-untyped]

    head = re.match(r"\A---\r?\n(.*?)\r?\n---\s*(?:\n|\Z)", readme.read_text("utf-8"), re.DOTALL)
    try:
        facts = yaml.safe_load(head[1]) if head else {}
    except yaml.YAMLError:
        return []
    configs = facts.get("configs") if isinstance(facts, dict) else None
    return [config for config in configs or [] if isinstance(config, dict) and config.get("data_files")]


def _of_split(
    repository: str, names: list[str], configs: list[dict[str, Any]], subset: str | None, split: str
) -> list[str]:
    where = f"stages.ingest.source.hub={repository}"
    if configs:
        by_name = {str(config.get("config_name", "default")): config for config in configs}
        default = next((name for name, config in by_name.items() if config.get("default")), None)
        name = subset or default or ("default" if "default" in by_name else next(iter(by_name)))
        if name not in by_name or (subset is None and default is None and name != "default" and len(by_name) > 1):
            raise StageError(
                f"{where}: it has the subsets {', '.join(by_name)}; name one: stages.ingest.source.subset="
            )
        by_split = _patterns(by_name[name]["data_files"])
        if split not in by_split:
            raise StageError(f"{where}: its splits are {', '.join(by_split)}; name one: stages.ingest.source.split=")
        found = [n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in by_split[split])]
    else:
        data = [name for name in names if not name.startswith(".") and "/." not in name and name != "README.md"]
        if subset is not None:
            data = [
                name
                for name in data
                if subset in Path(name).parts or subset in Path(name).name.split(".")[0].split("-")
            ]
        word = re.compile(rf"(?:^|[^a-z0-9]){re.escape(split.lower())}(?:[^a-z0-9]|$)")
        found = [name for name in data if word.search(name.lower())]
        if not found and split == "train":
            found = data
    if not found:
        raise StageError(
            f"{where}: no file of split {split!r}{f' of subset {subset!r}' if subset else ''} among {len(names)}"
        )
    return found


def _patterns(data_files: Any) -> dict[str, list[str]]:
    if isinstance(data_files, str):
        return {"train": [data_files]}
    if isinstance(data_files, list) and all(isinstance(each, str) for each in data_files):
        return {"train": data_files}
    found: dict[str, list[str]] = {}
    for each in data_files if isinstance(data_files, list) else []:
        if isinstance(each, dict) and "split" in each and "path" in each:
            paths = each["path"] if isinstance(each["path"], list) else [each["path"]]
            found.setdefault(str(each["split"]), []).extend(map(str, paths))
    return found
