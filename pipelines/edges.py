"""The edges that a pipeline file draws: what they must be like, and the order that follows. Apart, because nothing here knows of stores."""

from typing import TYPE_CHECKING

from pipelines.mistakes import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pipelines.plan import Step


def check_edges(step: "Step", steps: dict[str, "Step"]) -> None:
    """Raise ConfigError unless every edge into a step leads from a stage that makes what the parameter takes."""
    wanted = step.stage.inputs
    for parameter, upstream in step.cfg.inputs.items():
        where = f"stages.{step.name}.inputs.{parameter}"
        if parameter not in wanted:
            raise ConfigError(
                f"{where}: {step.stage.name} has no such input{did_you_mean(parameter, list(wanted) or ['none'])}"
            )
        if upstream not in steps:
            raise ConfigError(
                f"{where}: no stage named '{upstream}' in this pipeline{did_you_mean(upstream, list(steps))}"
            )
        kind, made = wanted[parameter][0], steps[upstream].stage.output
        if not issubclass(made, kind):
            raise ConfigError(f"{where} wants {kind.__name__}, but {upstream} makes {made.__name__}")
    for parameter, (kind, required) in wanted.items():
        if required and parameter not in step.cfg.inputs:
            raise ConfigError(
                f"stages.{step.name}.inputs misses '{parameter}' ({kind.__name__}): "
                f"add `inputs: {{{parameter}: <a stage that makes {kind.__name__}>}}`"
            )


def topological(steps: dict[str, "Step"]) -> list[str]:
    """Upstream first; among equals the order of the pipeline file."""
    done: list[str] = []
    on_path: list[str] = []

    def visit(name: str) -> None:
        if name in on_path:
            raise ConfigError(f"the stages form a cycle: {' -> '.join([*on_path[on_path.index(name) :], name])}")
        if name not in done:
            on_path.append(name)
            for upstream in steps[name].cfg.inputs.values():
                visit(upstream)
            on_path.pop()
            done.append(name)

    for name in steps:
        visit(name)
    return done


def ancestors(name: str, steps: dict[str, "Step"]) -> set[str]:
    """The stage and all that leads to it."""
    found, waiting = {name}, [name]
    while waiting:
        above = set(steps[waiting.pop()].cfg.inputs.values()) - found
        found |= above
        waiting += above
    return found
