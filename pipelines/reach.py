"""What `make gc` keeps, and why. Apart from `pipelines/gc.py`, which removes the rest: these are the rules that people rely on.

Kept are, and everything they were made from (an object's lineage: the objects whose digests stand in its record's inputs, transitively):
  - what an alias of any registered model points at, with its approval: a champion's weights, and the data and the report behind them,
    so that `make why` and the report still tell how it came to be;
  - the live endpoint's model; pins;
  - the last `store.keep_runs` runs of each pipeline, the points of one sweep counting as one run, also those that failed or were
    killed: their work/ stays, so that they can resume;
  - runs that go on, here or on another host; runs recorded in a tracking store that cannot be read from here, because its aliases
    may point at them.
What `fetch` copied out of another model is in its own checkpoint, so that model is not lineage. Results whose object is kept stay
hits. A version without an alias is not kept: `make pin` or an alias keeps it.
"""

from dataclasses import dataclass

from pipelines import cluster, ledger, pins
from pipelines.config import AppConfig
from pipelines.inventory import Inventory
from pipelines.ledger import Invocation
from pipelines.registered import Registered
from pipelines.store import Store


@dataclass(frozen=True)
class Root:
    """A reason to keep something."""

    label: str
    digests: frozenset[str]
    fingerprints: frozenset[str] = frozenset()


def roots(app: AppConfig, store: Store, runs: list[Invocation], registry: Registered) -> list[Root]:
    """Everything that keeps something, the strongest reasons first."""
    found = []
    for (model, alias), number in sorted(registry.aliases.items()):
        version = registry.versions.get((model, number))
        if version and version.digest:
            found.append(Root(f"alias {model}@{alias} (version {number})", frozenset([version.digest])))
    endpoint = cluster.endpoint_record(app.state_root)
    if endpoint and endpoint.get("digest"):
        found.append(Root(f"endpoint {endpoint['model']}@{endpoint['version']}", frozenset([endpoint["digest"]])))
    found += [
        Root(label, frozenset(digests), frozenset(prints)) for label, digests, prints in pins.roots(pins.read(store))
    ]
    ours, pinned = ledger.home_of_records(app), {pin.name for pin in pins.read(store)}
    last = _last(runs, app.store.keep_runs)
    for run in runs:
        if run.goes_on:
            why = f"still running: {run.owner}"
        elif ledger.is_out_of_sight(run.facts.get("tracking"), ours):
            why = f"recorded in {run.facts['tracking']}, whose aliases cannot be seen from here"
        elif run.id in last or run.id in pinned:
            why = run.status
        else:
            continue
        digests = {str(step["digest"]) for step in run.steps.values() if step.get("digest")}
        prints = {str(step["fingerprint"]) for step in run.steps.values() if step.get("fingerprint")}
        found.append(Root(f"run {run.pipeline} {run.id} ({why})", frozenset(digests), frozenset(prints)))
    return found


def _last(runs: list[Invocation], keep: int) -> set[str]:
    """Ids of the last `keep` runs of each pipeline."""
    found: set[str] = set()
    for pipeline in {run.pipeline for run in runs}:
        mine = [run for run in runs if run.pipeline == pipeline]
        groups = list(dict.fromkeys(run.group for run in reversed(mine)))[:keep]
        found |= {run.id for run in mine if run.group in groups}
    return found


def is_kept(run: Invocation, kept: list[Root]) -> bool:
    return any(root.label.startswith(f"run {run.pipeline} {run.id} ") for root in kept)


def reach(everything: Inventory, root: Root) -> set[str]:
    """Digests of the objects that a root keeps."""
    start = set(root.digests)
    start |= {record.digest for name in root.fingerprints if (record := everything.newest(name)) is not None}
    # A registered model's approval and report are not what it was made from, but what it was let pass for.
    start |= {record.digest for digest in set(start) for record in everything.registering.get(digest, [])}
    reached: set[str] = set()
    waiting = list(start)
    while waiting:
        digest = waiting.pop()
        if digest not in reached:
            reached.add(digest)
            for record in everything.naming.get(digest, []):
                waiting += record.payload.get("inputs", {}).values()
    return reached
