"""What it costs to find out that there is nothing to do: `run` and `plan` of a pipeline of 20 stages whose results are all known,
against `dvc repro` on the same graph, whose 20 stages are up to date as well.

Our stages are the real verbs with their whole configs and code, under results that were published beforehand. DVC's are one `cat`
each, with one output file and the same edges; parameters, code and library versions, which we compare, are not asked of it.
"""

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import alternatives, machine, published
from benchmarks.harness import Bench, Check, Result, medians
from benchmarks.machine import Usage

LIVES = ("a", "b")
BRANCHES = (1, 2, 3)
VALUES = {
    "ingest": ", limit: {}",
    "tokenize": ", vocab_size: 2048",
    "train": ", max_steps: 100, learning_rate: 0.0{:02d}",
    "gate": ", rules: {{max_bits_per_byte: 4.0}}",
}
"""Written into each stage of a verb, with the stage's number: no two stages are the same work."""
COMMANDS = {"run": ("noop_run_seconds", "noop_run_cpu_seconds"), "plan": ("noop_plan_seconds", "noop_plan_cpu_seconds")}
"""Command -> names of its results."""
GOAL = 0.5
"""Of DVC's wall time; the limit is 1."""


def graph() -> dict[str, tuple[str, dict[str, str]]]:
    """Stage -> (verb, parameter -> upstream stage): two lives, each with three trainings that are judged."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for life in LIVES:
        found[f"ingest_{life}"] = ("ingest", {})
        found[f"clean_{life}"] = ("clean", {"rows": f"ingest_{life}"})
        found[f"tokenize_{life}"] = ("tokenize", {"corpus": f"clean_{life}"})
        for n in BRANCHES:
            data = {"dataset": f"tokenize_{life}"}
            judged = {"checkpoint": f"train_{life}{n}", "corpus": f"clean_{life}"}
            found[f"train_{life}{n}"] = ("train", data)
            found[f"evaluate_{life}{n}"] = ("evaluate", {**data, **judged})
        found[f"gate_{life}"] = ("gate", {"checkpoint": f"train_{life}1", "report": f"evaluate_{life}1"})
    return found


def pipeline_yaml() -> str:
    """The graph as a pipeline file."""
    lines = ["# @package _global_", "defaults:"]
    lines += [f"  - /{verb}@stages.{name}: schema" for name, (verb, _) in graph().items()]
    lines += [f"  - /model@stages.{name}.model: llama_1m" for name, (verb, _) in graph().items() if verb == "train"]
    lines += ["  - _self_", "name: twenty", "stages:"]
    for index, (name, (verb, inputs)) in enumerate(graph().items()):
        edges = ", ".join(f"{parameter}: {upstream}" for parameter, upstream in inputs.items())
        lines.append(f"  {name}: {{inputs: {{{edges}}}{VALUES.get(verb, '').format(index + 1)}}}")
    return "\n".join(lines) + "\n"


def dvc_yaml() -> str:
    """The same graph for DVC: each stage makes one file from its upstream stages' files (or from `source.txt`)."""
    lines = ["stages:"]
    for name, (_, inputs) in graph().items():
        read = [f"{upstream}.txt" for upstream in inputs.values()] or ["source.txt"]
        lines += [f"  {name}:", f"    cmd: (echo {name}; cat {' '.join(read)}) > {name}.txt"]
        lines += [f"    deps: [{', '.join(read)}]", f"    outs: [{name}.txt]"]
    return "\n".join(lines) + "\n"


def run(bench: Bench) -> list[Result]:
    dvc = str(alternatives.installed("dvc", bench.say) / "dvc")
    with machine.scratch() as directory:
        theirs = _prepared_dvc(dvc, directory)
        ours = _prepared_raykeel(bench, directory)
        ours("plan"), theirs()  # both once more from warm files
        results = []
        for command, (wall, cpu_time) in COMMANDS.items():
            used: dict[str, list[Usage]] = {"A": [], "B": []}

            def arm(name: str, measure: Callable[[], Usage], used: dict[str, list[Usage]] = used) -> float:
                used[name].append(measure())
                return used[name][-1].wall_s

            pairs = bench.alternate(
                bench.pairs(10),
                lambda arm=arm: arm("A", theirs),  # type: ignore[misc]
                lambda arm=arm, command=command: arm("B", lambda: ours(command)),  # type: ignore[misc]
            )
            gate = [
                Check("nothing was to be done by us", _said_nothing_to_do(directory / "ours.log"), command),
                Check("nothing was to be done by DVC", "up to date" in (directory / "dvc.log").read_text(), "repro"),
            ]
            cpu = {arm: [round(usage.cpu_s, 4) for usage in used[arm]] for arm in used}
            details = {"stages": len(graph()), "goal": GOAL, "dvc": alternatives.PINNED["dvc"]}
            results += [
                bench.compare(
                    wall,
                    f"How long does `{command}` of a pipeline of {len(graph())} known stages take, against DVC's no-op repro?",
                    unit="s",
                    better="lower",
                    arms={"A": "dvc repro", "B": f"raykeel {command}"},
                    pairs=pairs,
                    margin=0.05,
                    limit=1.0,
                    gate=gate,
                    details={**details, **medians(pairs), "cpu_s_a": cpu["A"], "cpu_s_b": cpu["B"]},
                ),
                bench.value(
                    cpu_time,
                    f"How much CPU time does `{command}` of {len(graph())} known stages take?",
                    unit="s",
                    values=cpu["B"],
                    limit=1.5,
                    gate=gate,
                    details={"stages": len(graph())},
                ),
            ]
    return results


def _prepared_dvc(dvc: str, directory: Path) -> Callable[[], Usage]:
    place, environ = directory / "dvc", alternatives.environment(directory / "home")
    place.mkdir()
    (place / "dvc.yaml").write_text(dvc_yaml())
    (place / "source.txt").write_text("rows\n")
    machine.timed([dvc, "init", "--no-scm", "-q"], directory / "dvc.log", environ, cwd=place)
    machine.timed([dvc, "repro"], directory / "dvc.log", environ, cwd=place)
    return lambda: machine.timed([dvc, "repro"], directory / "dvc.log", environ, cwd=place)


def _prepared_raykeel(bench: Bench, directory: Path) -> Callable[[str], Usage]:
    from pipelines.config import compose

    conf = directory / "conf"
    (conf / "pipeline").mkdir(parents=True)
    (conf / "pipeline" / "twenty.yaml").write_text(pipeline_yaml())
    overrides = ["pipeline=twenty", f"state={directory / 'state'}"]
    made = published.complete([compose(overrides, str(conf))])
    bench.say(f"{made} results are published")
    time.sleep(published.MEMO_S)
    environ = machine.clean_environment()

    def measure(command: str) -> Usage:
        words = machine.python("-m", "pipelines", command, "--conf", str(conf), *overrides)
        return machine.timed(words, directory / "ours.log", environ)

    measure("plan")  # what the store may still have to remember
    return measure


def _said_nothing_to_do(log: Path) -> bool:
    return f"0 of {len(graph())} stages to run" in log.read_text()
