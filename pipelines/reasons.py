"""A decided plan in words and as JSON: why each stage runs, what changed, what it should cost. Apart, because it decides nothing."""

from typing import TYPE_CHECKING, Any

from pipelines import cost
from pipelines import fingerprint as fp
from pipelines.config import AppConfig

if TYPE_CHECKING:
    from pipelines.plan import Step
    from pipelines.store import Record


def why(step: "Step") -> str:
    """In one line, why a step has to run."""
    if step.last is None:
        return "never made"
    return shortened(step.changes) if step.changes else "its record is gone"


def facet_lines(step: "Step") -> list[tuple[str, str]]:
    """For `make why`: (facet, change) for every change since the last result, then the facets that are as they were."""
    if step.last is None:
        return []
    lines = [(facet, in_words(facet, [change])) for facet, found in step.changed.items() for change in found]
    waiting = [up.name for up in step.upstream if up.record is None]
    if waiting:
        lines.append(("inputs", f"not known until {listed(waiting)} made"))
    same = [facet for facet in fp.FACETS if facet not in step.changed and not (waiting and facet == "inputs")]
    since = step.last["meta"].get("started_at", "the last time")
    return [*lines, ("as before", f"{', '.join(same)} (compared with {since})")] if same else lines


def summary(steps: list["Step"]) -> str:
    """ "3 of 6 stages to run, 2 to be decided when their inputs are made; about 95 s, 12 MB"."""
    run, unknown = ([s for s in steps if s.action == action] for action in ("run", "unknown"))
    if not run and not unknown:
        return f"0 of {len(steps)} stages to run: nothing changed"
    words = f"{len(run)} of {len(steps)} stages to run"
    if unknown:
        words += f", {len(unknown)} to be decided when their inputs are made"
    spent = cost.total([s.expected for s in (*run, *unknown)])
    return f"{words}; {spent}" + (" if all of these are made" if unknown and spent != cost.NO_HISTORY else "")


def as_json(app: AppConfig, steps: list["Step"]) -> dict[str, Any]:
    """The plan for machines (`raykeel plan --json`), and `plan.json` of the MLflow parent run; docs/plan.md describes it."""
    return {
        "schema": 1,
        "pipeline": app.name,
        "seed": app.seed,
        "accept": app.run.accept,
        "steps": [
            {
                "name": s.name,
                "stage": s.stage.name,
                "action": s.action,
                "reason": s.reason,
                "changes": s.changes,
                "accepted": s.accepted,
                "fingerprint": s.fingerprint,
                "inputs": s.cfg.inputs,
                "digest": s.record.digest if s.record else None,
                "source_run": s.record.meta.get("run_id") if s.record else None,
                "seconds": s.record.meta.get("seconds") if s.record else None,
                "bytes": s.record.meta.get("bytes") if s.record else None,
                "expected_seconds": s.expected.seconds if s.expected else None,
                "expected_bytes": s.expected.bytes if s.expected else None,
                "estimated_memory_bytes": s.foreseen.memory if s.foreseen else None,
                "estimated_seconds": (s.foreseen.seconds or None) if s.foreseen else None,
            }
            for s in steps
        ],
        "edges": [
            {"from": up, "to": s.name, "parameter": parameter} for s in steps for parameter, up in s.cfg.inputs.items()
        ],
    }


def since(record: "Record") -> str:
    return f"made {record.meta.get('started_at', 'earlier')}"


def shortened(changes: list[str]) -> str:
    return "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more (make why)" if len(changes) > 3 else "")


def listed(names: list[str]) -> str:
    """ "a is", "a and b are", "a, b and c are"."""
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"


def in_words(facet: str, changes: list[str]) -> str:
    """Changes of one facet, whose name is said already."""
    return "; ".join(change.removeprefix(facet).lstrip(" .") for change in changes)
