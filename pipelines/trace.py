"""`make trace ID=<response id>`: from an answer back to its origin. Apart, because it goes the whole way in the other direction: response,
weights, version, run, data, and the training rows that share the longest runs of words with what the model said.

The id names the weights for good. The text of the answer comes from the endpoint's memory of its last answers, or from TEXT=.
"""

import io
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import stages
from pipelines import cluster, registered
from pipelines.config import AppConfig, compose
from pipelines.console import Console
from pipelines.inventory import Inventory
from pipelines.mistakes import ConfigError
from pipelines.registered import Registered
from pipelines.registry import RegistryReader, tracking_uri
from pipelines.store import Record, Store
from stages.artifacts import Artifact, Checkpoint, Corpus, PairDataset, TokenDataset
from stages.contract import STAGES, ResourcesUnavailable
from stages.serving.endpoint import client_key

if TYPE_CHECKING:
    from stages.text.shared_words import Match

ID = re.compile(r"(?:chatcmpl|cmpl)-([0-9a-f]{12})[0-9a-f]{20}")
"""Of a response of a server of this project: it begins with the digest of the weights that answered."""
REPLICAS_TRIED = 8
"""Only the replica that gave an answer remembers it, and whichever is free is asked."""
ROWS_SHOWN = 5
ROWS_HELD = 50
"""More than are shown, because some may turn out to be left out of the tokens."""
QUOTED = 400
"""Letters of a shared part that are shown; the middle of a longer one is left out."""
HOW = 'make trace ID=<response id>, or make trace MODEL=models:/quickstart@champion TEXT="<the answer>"'


@dataclass(frozen=True)
class Made:
    """A result that went into the model, and what kind of artifact it is (None: of a stage that is not here)."""

    record: Record
    kind: type[Artifact] | None


def trace(console: Console, overrides: list[str], conf: str | None) -> int:
    asked, text, model = (os.environ.get(name, "").strip() for name in ("ID", "TEXT", "MODEL"))
    app = compose(overrides, conf)
    store, registry = Store.open(app), registered.read(app)
    everything = Inventory.of(store)
    digest = _weights(app, everything, registry, asked, model)
    lineage = list(_lineage(everything, digest))
    console.table([*([("answer", asked)] if asked else []), *_facts(registry, digest, lineage)])
    texts = [text] if text else _remembered(app, asked)
    if texts is None:
        console.line(
            f'rows: the answer is no longer in the memory of an endpoint; give its text: {_again(asked, model)} TEXT="..."'
        )
    elif not any(texts):
        console.line("rows: the answer has no text")
    else:
        for line in _rows(store, lineage, texts):
            console.line(line)
    return 0


def _again(asked: str, model: str) -> str:
    return f"make trace ID={asked}" if asked else f"make trace MODEL={model}"


def _weights(app: AppConfig, everything: Inventory, registry: Registered, asked: str, model: str) -> str:
    """Content digest of the weights that gave the answer."""
    if model:
        return RegistryReader(tracking_uri(app.tracking.uri, app.state_root), app.tracking.timeout_s).resolve(model)[1]
    if not asked:
        raise ConfigError(f"nothing to trace: {HOW}")
    match = ID.fullmatch(asked)
    if match is None:
        raise ConfigError(f"ID={asked[:80]}: no response of a server of this project has such an id; {HOW}")
    known = {version.digest for version in registry.versions.values() if version.digest} | set(everything.objects)
    found = sorted(digest for digest in known if digest.startswith(match[1]))
    if len(found) != 1:
        raise ResourcesUnavailable(
            f"ID={asked}: {'no' if not found else 'more than one'} model whose files have a digest that begins with {match[1]} is "
            "registered or stored here: the answer came from another project (state=... store.root=... tracking.uri=...), or the "
            "model was removed"
        )
    return found[0]


def _lineage(everything: Inventory, digest: str) -> Iterator[Made]:
    """The weights, then all that they were made from down to the corpora: what a corpus was made from taught nothing itself."""
    stages.import_verbs()
    kinds = {stage.name: stage.output for stage in STAGES.values()}
    waiting, seen = [digest], set()
    while waiting:
        current = waiting.pop(0)
        if current in seen:
            continue
        seen.add(current)
        for record in everything.naming.get(current, [])[:1]:
            payload = record.payload
            made = Made(record, kinds.get(str(payload.get("stage"))))
            yield made
            if made.kind is not Corpus:
                # Sources too: a model that was fetched from the registry here is an object with a past of its own.
                waiting += [*payload.get("inputs", {}).values(), *payload.get("sources", {}).values()]


def _facts(registry: Registered, digest: str, lineage: list[Made]) -> Iterator[tuple[str, str]]:
    versions = [version for version in registry.versions.values() if version.digest == digest]
    for version in versions:
        aliases = ", ".join(registry.of(version.model, version.number))
        yield "model", f"{version} ({aliases})" if aliases else str(version)
    if not versions:
        yield "model", "not registered here"
    yield "checkpoint", digest
    for number, made in enumerate(lineage):
        record, meta = made.record, made.record.meta
        if number == 0:
            yield "made by", f"{record.payload.get('stage')}, {meta.get('started_at')}{_code(meta)}"
            yield "run", f"MLflow run {meta['run_id']}" if meta.get("run_id") else "not recorded in MLflow"
        elif made.kind in (TokenDataset, PairDataset):
            yield "data", f"{record.digest} ({record.payload.get('stage')})"
        elif made.kind is Corpus:
            yield "corpus", f"{record.digest} ({record.payload.get('stage')})"
        elif made.kind is Checkpoint:
            yield "base", f"{record.digest} ({record.payload.get('stage')})"
    if not lineage:
        yield "made by", "unknown: this store has no record of it"


def _code(meta: dict[str, Any]) -> str:
    git = meta.get("git") or {}
    dirty = " with changes that were not committed" if git.get("dirty") else ""
    return f", commit {git['commit'][:12]}{dirty}" if git.get("commit") else ""


def _remembered(app: AppConfig, response_id: str) -> list[str] | None:
    """What this project's endpoint remembers of a response: the text of each choice. None when it does not."""
    endpoint = cluster.endpoint_record(app.state_root)
    if endpoint is None or not response_id:
        return None
    request = urllib.request.Request(f"{endpoint['base_url']}/answers/{response_id}")
    request.add_header("Authorization", f"Bearer {client_key(endpoint.get('api_key_env'))}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through the environment's proxy
    for _ in range(REPLICAS_TRIED):
        try:
            with opener.open(request, timeout=5) as response:
                return [str(text) for text in json.load(response)["texts"]]
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return None
        except (OSError, ValueError, KeyError):
            return None
    return None


def _rows(store: Store, lineage: list[Made], texts: list[str]) -> Iterator[str]:
    from stages.text.corpus import TRAIN, records
    from stages.text.shared_words import LEAST, search

    corpora = [made.record.digest for made in lineage if made.kind is Corpus]
    if not corpora:
        yield "rows: no corpus of this project went into the model"
    for digest in corpora:
        unused = _left_out(store, lineage, digest)
        directory = Corpus(uri=store.object_uri(digest), digest=digest).local()
        found = search(texts, records(directory, TRAIN), ROWS_HELD)
        matches = [match for match in found.matches if match.record.id not in unused][:ROWS_SHOWN]
        where = f"{found.rows:,} training rows of corpus {digest[:12]}"
        if not matches:
            yield f"rows: none of the {where} shares {LEAST} words in a row with the answer"
            continue
        yield f"rows: {found.sharing:,} of the {where} share {LEAST} words in a row or more with the answer; the longest runs:"
        for match in matches:
            yield from _match(match)


def _left_out(store: Store, lineage: list[Made], corpus: str) -> set[str]:
    """Ids of the corpus' rows that became tokens in none of the data sets made of it, so that no weight knows them."""
    import pyarrow.parquet

    left = []
    for made in lineage:
        if made.kind not in (TokenDataset, PairDataset) or corpus not in made.record.payload["inputs"].values():
            continue
        ids: set[str] = set()
        for name in store.manifest(made.record.digest):
            if name.startswith("dropped/") and name.endswith(".parquet"):
                data = store.bucket.get(f"objects/{made.record.digest}/{name}") or b""
                ids.update(pyarrow.parquet.read_table(io.BytesIO(data), columns=["id"]).column("id").to_pylist())
        left.append(ids)
    return set.intersection(*left) if left else set()


def _match(match: "Match") -> Iterator[str]:
    from pipelines.token_view import visible

    quote = match.shared
    if len(quote) > QUOTED:
        quote = f"{quote[: QUOTED // 2]} … {quote[-QUOTED // 2 :]}"
    yield f"  {match.words} words  {visible(match.record.id)}  (source {visible(match.record.source)})"
    yield f"      {visible(quote)}"
