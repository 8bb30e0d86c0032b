"""Data sets of a hub, at one commit. Apart, because only files come from there (JSON, Parquet, CSV, text), never the code that a
data set may bring.
"""

import fnmatch
import re
from pathlib import Path
from typing import Any

from stages.contract import ResourcesUnavailable, StageError
from stages.storage import hub
from stages.text.files import OTHER_SPLITS, Container, Found, chosen, listed, words

_SHARD = re.compile(r"(.*-)(\d{2,6})-of-(\d{2,6})(.*)")


def resolve_commit(repository: str, revision: str) -> str:
    """The commit that the data set is at."""
    called = f"stages.ingest.source.hub={repository}"
    return hub.resolve_commit(repository, revision, "dataset", called, "its files as path")


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
            f"local cache {hub.cache()} and the hub does not answer (first: {missing[0]})"
        )
    candidates = [listed(folder / name, folder) for name in wanted]
    return chosen(f"{repository} (hub)", candidates, container, single=False)


def _snapshot(repository: str, commit: str, patterns: list[str]) -> Path:
    """The directory of a commit in the local cache with these files; offline with what is there."""
    escaped = [glob_escaped(pattern) for pattern in patterns]
    for offline in (False, True):
        try:
            return Path(
                hub.library().snapshot_download(
                    repository,
                    repo_type="dataset",
                    revision=commit,
                    allow_patterns=escaped,
                    local_files_only=offline,
                    cache_dir=hub.cache(),
                )
            )
        except Exception as error:
            if offline:
                raise ResourcesUnavailable(
                    f"stages.ingest.source.hub={repository} at {commit[:10]}: not in the local cache {hub.cache()} and not to "
                    f"be had from the hub ({type(error).__name__})"
                ) from error
    raise AssertionError("unreachable")


def glob_escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _names(repository: str, commit: str, folder: Path) -> list[str]:
    """All files of the commit; without the hub, those that the cache holds or should hold."""
    try:
        names: list[str] = hub.library().HfApi().list_repo_files(repository, revision=commit, repo_type="dataset")
    except Exception:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        names += _missing_shards(names)
    return sorted(names)


def _missing_shards(names: list[str]) -> list[str]:
    """Of files that say how many they are, those that are not there: a cache may hold a part of a data set."""
    numbers: dict[tuple[str, str], set[str]] = {}
    endings: dict[tuple[str, str], str] = {}
    for name in names:
        if found := _SHARD.fullmatch(name):
            numbers.setdefault((found[1], found[3]), set()).add(found[2])
            endings[found[1], found[3]] = Path(name).suffix
    return [
        f"{head}{number}-of-{total}{endings[head, total]}"
        for (head, total), there in numbers.items()
        for number in (f"{n:0{len(total)}d}" for n in range(int(total)))
        if number not in there
    ]


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
            found = [name for name in data if not words(name) & (OTHER_SPLITS - words(subset or ""))]
    if not found:
        raise StageError(
            f"{where}: no file of split {split!r}{f' of subset {subset!r}' if subset else ''} among {len(names)}; "
            "stages.ingest.source.split= names another"
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
