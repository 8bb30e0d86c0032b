"""`make trace ID=<response id>`: from an answer back to what made it. Apart from the registry's and the store's own questions, because it
joins them: an id names the model's files, these name their version and the results they were made from, and the rows of these are read.

The endpoint remembers its last answers in memory and gives them to who knows their id; older ones are traced with TEXT="the answer".
"""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from pipelines import cluster, registered
from pipelines.config import AppConfig, compose
from pipelines.console import Console
from pipelines.inventory import Inventory
from pipelines.mistakes import ConfigError
from pipelines.store import Record, Store
from stages.artifacts import Corpus
from stages.contract import ResourcesUnavailable
from stages.serving.endpoint import client_key

ID = re.compile(r"(?:chatcmpl|cmpl)-([0-9a-f]{12})[0-9a-f]{20}")
SHOWN = 200
"""Characters of a shared part."""


def trace(console: Console, overrides: list[str], conf: str | None) -> int:
    app = compose(overrides, conf)
    identifier = os.environ.get("ID", "").strip()
    match = ID.fullmatch(identifier)
    if not match:
        raise ConfigError("name an answer by its id, which begins with chatcmpl- or cmpl-: make trace ID=chatcmpl-...")
    store = Store.open(app)
    everything = Inventory.of(store)
    digest = _digest(everything, match[1])
    for label, value in _origin(app, everything, digest):
        console.line(f"{label.ljust(12)} {value}")
    text = os.environ.get("TEXT") or _remembered(app, identifier)
    if text is None:
        console.line(
            "\nthe endpoint does not remember this answer (it keeps the last ones, until it ends): "
            'to look for it in the training rows, give it: make trace ID=... TEXT="the answer"'
        )
        return 0
    _say_rows(console, store, everything, digest, text)
    return 0


def _digest(everything: Inventory, begins: str) -> str:
    found = sorted(digest for digest in everything.objects if digest.startswith(begins))
    if not found:
        raise ResourcesUnavailable(
            f"no model whose files have a digest that begins with {begins} is in this project's store: "
            "the answer came from another endpoint, or the model was removed"
        )
    return found[0]


def _origin(app: AppConfig, everything: Inventory, digest: str) -> Iterator[tuple[str, str]]:
    """What is on record of a model's files."""
    versions = [version for version in registered.read(app).versions.values() if version.digest == digest]
    yield "model", ", ".join(sorted(map(str, versions))) or "registered nowhere now"
    yield "checkpoint", digest
    made = everything.naming.get(digest, [])
    if not made:
        return
    record = made[0]
    yield "made by", f"{record.payload.get('stage')}, {record.meta.get('started_at')}"
    if run := record.meta.get("run_id"):
        yield "MLflow run", str(run)
    yield "fingerprint", record.fingerprint
    for upstream in _upstream(everything, digest):
        stage = upstream.payload.get("stage")
        if stage in ("clean", "tokenize", "pair", "ingest"):
            yield "data", f"{stage} {upstream.digest}"


def _upstream(everything: Inventory, digest: str) -> Iterator[Record]:
    """The results that a model was made from, the nearest first; those of its base too."""
    waiting, seen = [digest], set[str]()
    while waiting:
        current = waiting.pop(0)
        if current in seen:
            continue
        seen.add(current)
        for record in everything.naming.get(current, [])[:1]:
            if current != digest:
                yield record
            waiting += record.payload.get("inputs", {}).values()


def _remembered(app: AppConfig, identifier: str) -> str | None:
    """The text of an answer that the live endpoint still knows."""
    endpoint = cluster.endpoint_record(app.state_root)
    if endpoint is None:
        return None
    key = client_key(endpoint.get("api_key_env"))
    request = urllib.request.Request(
        f"{endpoint['base_url']}/answers/{identifier}", headers={"Authorization": f"Bearer {key}"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as response:
            found: dict[str, Any] = json.loads(response.read())
            return "\n".join(found["texts"])
    except (OSError, ValueError, KeyError):
        return None


def _say_rows(console: Console, store: Store, everything: Inventory, digest: str, text: str) -> None:
    from stages.text.shared_words import longest_shared

    corpora = [r for r in _upstream(everything, digest) if r.payload.get("stage") == "clean"]
    if not corpora:
        console.line("\nno cleaned rows are among what it was made from: there is nothing to look in")
        return
    found = longest_shared(text, _rows(store, corpora))
    if not found:
        console.line("\nno training row shares four words in a row with the answer")
        return
    console.line("\ntraining rows that share the longest runs of words with the answer:")
    for shared in found:
        quoted = " ".join(shared.text.split())
        cut = quoted if len(quoted) <= SHOWN else f"{quoted[:SHOWN]}..."
        console.line(f"{shared.words:5d} words  {shared.row}\n             {cut}")


def _rows(store: Store, corpora: list[Record]) -> Iterator[tuple[str, str]]:
    from stages.text.corpus import TRAIN, records
    from stages.text.record import learned

    for corpus in corpora:
        place = Corpus(uri=store.object_uri(corpus.digest), digest=corpus.digest).local()
        for record in records(place, TRAIN):
            yield record.id, learned(record)
