"""Sweeps on Ray-free stub stages with a real MLflow store: what is made once, what goes on, who wins."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from pipelines import sweep as sweeping
from pipelines.axes import axes_of, grid
from pipelines.config import ROOT
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from pipelines.points import Book, Entry
from stages.contract import ResourcesUnavailable
from tests.pipelines import stubs, sweep_stubs  # noqa: F401 (their stages are registered)


class Project:
    """A state directory, and the two commands as people type them."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = place / "state"
        self.conf = place / "conf"
        self.trouble = place / "trouble"
        self.trouble.mkdir()
        (self.conf / "pipeline").mkdir(parents=True)
        (self.conf / "pipeline" / "stub.yaml").write_text(sweep_stubs.PIPELINE)
        self._env, self._capsys = monkeypatch, capsys
        self.code = 0

    def __call__(self, command: Callable[..., int], *overrides: str, name: str | None = "s") -> str:
        self._env.setenv("SWEEP", name or "")
        self._capsys.readouterr()
        self.code = command(Console(), [*self.base, *overrides], str(self.conf))
        return self._capsys.readouterr().out

    @property
    def base(self) -> list[str]:
        return [f"state={self.state}"]

    def begin(self, *overrides: str, name: str | None = "s") -> str:
        return self(sweeping.sweep, "pipeline=stub", "sweep.metric=fit.loss", *overrides, name=name)

    @property
    def executions(self) -> list[str]:
        log = self.state / "executions.log"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(f"sqlite:///{self.state / 'mlflow' / 'mlflow.db'}")

    def runs(self, query: str) -> list[Any]:
        found = self.client.get_experiment_by_name("stub")
        assert found is not None
        return list(self.client.search_runs([found.experiment_id], query, order_by=["attributes.start_time ASC"]))

    def entries(self, name: str = "s") -> list[Entry]:
        return Book.of(self.state, name).entries()


@pytest.fixture
def project(
    tmp_path: Path, fresh_mlflow: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Project:
    made = Project(tmp_path, monkeypatch, capsys)
    shutil.copytree(fresh_mlflow, made.state)
    return made


def test_a_grid_makes_shared_stages_once_and_its_children_in_mlflow_compare(project: Project) -> None:
    printed = project.begin("stages.fit.x=1,3,4", "stages.fit.count=1,2")
    assert project.code == 0 and "point 6 of 6" in printed
    assert sorted(project.executions) == sorted(
        ["make"] + [f"fit {x} {count} plain" for x in (1, 3, 4) for count in (1, 2)]
    )
    [above] = project.runs("tags.`raykeel.kind` = 'sweep'")
    assert above.info.status == "FINISHED" and above.info.run_name == "s"
    children = project.runs(f"tags.`mlflow.parentRunId` = '{above.info.run_id}'")
    assert len(children) == 6 and {run.data.tags["raykeel.kind"] for run in children} == {"pipeline"}
    for run in children:
        x, count = float(run.data.params["stages.fit.x"]), int(run.data.params["stages.fit.count"])
        assert run.data.metrics["fit.loss"] == (x - 3.0) ** 2 + count
    attempts = project.runs("tags.`raykeel.stage` = 'fit'")
    assert {run.data.tags["mlflow.parentRunId"] for run in attempts} == {run.info.run_id for run in children}


@pytest.mark.slow
def test_best_prints_the_winners_overrides_ready_to_be_pasted(project: Project) -> None:
    project.begin("stages.fit.x=1,3,4", "stages.fit.kind='a b','c'", "stages.fit.steps=2")
    line, value = project(sweeping.best).splitlines()
    assert shlex.split(line) == [
        *project.base,
        "pipeline=stub",
        "stages.fit.steps=2",
        "stages.fit.x=3",
        "stages.fit.kind='a b'",
    ]
    assert value == "fit.loss = 1 (s, point 3 of 6)"
    assert project(sweeping.best, name=None).splitlines() == [line, value]
    shutil.rmtree(project.state / "mlflow")  # the sweep's own state is enough
    assert project(sweeping.best).splitlines() == [line, value]


@pytest.mark.slow
def test_the_greatest_wins_when_asked_for(project: Project) -> None:
    project.begin("stages.fit.x=1,3,5.5", "sweep.direction=maximize")
    assert "stages.fit.x=5.5" in project(sweeping.best)


@pytest.mark.slow
def test_a_point_that_fails_does_not_end_the_sweep_and_is_run_again_alone(project: Project) -> None:
    (project.trouble / "bad").touch()
    printed = project.begin("stages.fit.kind=good,bad,fine", f"stages.fit.trouble={project.trouble}")
    assert project.code == 2 and "failed: bad does not fit" in printed
    assert [entry.state for entry in project.entries()] == ["done", "failed", "done"]
    assert project.runs("tags.`raykeel.kind` = 'sweep'")[0].info.status == "FAILED"
    (project.trouble / "bad").unlink()
    before = project.executions
    project(sweeping.sweep)
    assert project.code == 0 and project.executions[len(before) :] == ["fit 0 1 bad"]
    assert [entry.state for entry in project.entries()] == ["done", "done", "done"]
    [above] = project.runs("tags.`raykeel.kind` = 'sweep'")  # the same run goes on
    assert above.info.status == "FINISHED"
    assert (
        len(project.runs(f"tags.`mlflow.parentRunId` = '{above.info.run_id}'")) == 4
    )  # the failed one stays on record


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("away", "the cluster does not answer"), pytest.param("full", "no space left", marks=pytest.mark.slow)],
)
def test_what_is_not_the_points_own_trouble_ends_the_sweep_where_it_is(
    project: Project, trouble: str, message: str
) -> None:
    (project.trouble / f"{trouble}-b").touch()
    with pytest.raises(ResourcesUnavailable, match=rf"point 2 of 3 .*{message}.*make sweep SWEEP=s goes on"):
        project.begin("stages.fit.kind=a,b,c", f"stages.fit.trouble={project.trouble}")
    assert [entry.state for entry in project.entries()] == ["done"]  # neither this point nor the next one failed
    (project.trouble / f"{trouble}-b").unlink()
    project(sweeping.sweep)
    assert project.code == 0 and [entry.state for entry in project.entries()] == ["done", "done", "done"]


@pytest.mark.slow
def test_a_kill_before_a_points_end_is_noted_doubles_nothing_in_mlflow(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Book.write

    def killed(book: Book, entry: Entry) -> None:
        if entry.number == 2:
            raise KeyboardInterrupt
        write(book, entry)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Book, "write", killed)
        project.begin("stages.fit.x=1,2,3")
    before = project.executions
    assert len(before) == 3 and [entry.number for entry in project.entries()] == [1]
    project(sweeping.sweep)
    assert project.code == 0 and project.executions[:3] == before and len(project.executions) == 4
    [above] = project.runs("tags.`raykeel.kind` = 'sweep'")
    children = project.runs(f"tags.`mlflow.parentRunId` = '{above.info.run_id}'")
    assert sorted(run.data.tags["raykeel.point"] for run in children) == ["1", "2", "3"]
    assert {run.info.status for run in children} == {"FINISHED"}


@pytest.mark.slow
def test_a_kill_before_a_pruned_points_end_is_noted_runs_it_no_second_time(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Book.write

    def killed(book: Book, entry: Entry) -> None:
        if entry.state == "pruned":
            raise KeyboardInterrupt
        write(book, entry)

    prune = ["sweep.pruning.enabled=true", "sweep.pruning.metric=fit.loss", "sweep.pruning.warmup_steps=2"]
    settings = ["sweep.pruning.min_points=3", "stages.fit.steps=30", "stages.fit.pause=0.1"]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Book, "write", killed)
        project.begin("stages.fit.x=3,3.1,3.2,9,3.05", *prune, *settings)
    before = project.executions
    project(sweeping.sweep)
    assert [entry.state for entry in project.entries()] == ["done", "done", "done", "pruned", "done"]
    assert len(project.executions) == len(before) + 1  # the fifth
    assert len(project.runs("tags.`raykeel.point` = '4'")) == 1


@pytest.mark.slow
def test_a_point_whose_stages_are_known_still_stands_in_the_comparison(project: Project) -> None:
    project.begin("stages.fit.x=1,2", name="one")
    before = project.executions
    project.begin("stages.fit.x=1,2", name="two")
    assert project.executions == before
    above = project.runs("tags.`raykeel.kind` = 'sweep'")[-1]
    children = project.runs(f"tags.`mlflow.parentRunId` = '{above.info.run_id}'")
    assert [(run.data.params["stages.fit.x"], run.data.metrics["fit.loss"]) for run in children] == [
        ("1", 5.0),
        ("2", 2.0),
    ]


SEARCH = ["stages.fit.x=interval(0.0,8.0)", "stages.fit.count=int(interval(1,9))", "stages.fit.kind=choice(a,b)"]


@pytest.mark.slow
def test_a_search_goes_on_where_it_was_interrupted_and_chooses_what_it_would_have_chosen(project: Project) -> None:
    settings = ["sweep.sampler=tpe", "sweep.seed=4", *SEARCH]
    project.begin(*settings, "sweep.trials=8", name="whole")
    project.begin(*settings, "sweep.trials=3", name="parts")
    before = project.executions
    project(sweeping.sweep, "sweep.trials=8", name="parts")
    assert project.code == 0 and len(before) == 9  # eight points and what they share
    assert project.executions == before  # every point was known from the other sweep: the same choices
    whole, parts = project.entries("whole"), project.entries("parts")
    assert [e.varied for e in whole] == [e.varied for e in parts] and len({e.shown for e in whole}) == 8
    assert {e.varied["stages.fit.kind"] for e in whole} == {"a", "b"}
    assert all(1 <= int(e.varied["stages.fit.count"]) <= 9 for e in whole)
    assert all(0.0 <= float(e.varied["stages.fit.x"]) <= 8.0 for e in whole)


def test_tpe_finds_a_better_point_than_chance(tmp_path: Path) -> None:
    from pipelines.axes import Sampler, SweepConfig
    from pipelines.search import propose

    axes = axes_of(["x=interval(0.0,8.0)", "y=tag(log,interval(1e-4,1e0))"])[1]

    def lowest(sampler: Sampler, seed: int) -> float:
        cfg, entries = SweepConfig(sampler=sampler, seed=seed), []
        for number in range(1, 41):
            varied = dict(override.split("=") for override in propose(cfg, axes, entries, number))
            value = (float(varied["x"]) - 3) ** 2 + abs(float(varied["y"]) - 0.01) * 10
            entries.append(Entry(number, varied, "done", value))
        return min(entry.value or 0.0 for entry in entries)

    tpe, chance = ([lowest(sampler, seed) for seed in range(3)] for sampler in (Sampler.tpe, Sampler.random))
    assert sum(tpe) < sum(chance)


@pytest.mark.slow
def test_a_hopeless_point_is_ended_early_and_is_no_failure(project: Project) -> None:
    prune = ["sweep.pruning.enabled=true", "sweep.pruning.metric=fit.loss", "sweep.pruning.warmup_steps=2"]
    printed = project.begin(
        "stages.fit.x=3,3.1,3.2,9,3.05",
        *prune,
        "sweep.pruning.min_points=3",
        "stages.fit.steps=30",
        "stages.fit.pause=0.1",
    )
    assert project.code == 0 and "point 4 ended early" in printed
    ended = project.entries()[3]
    assert ended.state == "pruned" and [step for step, _ in ended.curve] == [0, 1, 2]
    assert [entry.state for entry in project.entries()] == ["done", "done", "done", "pruned", "done"]
    pruned = project.runs("tags.`raykeel.pruned` LIKE '%worse than the median%'")
    assert [run.info.status for run in pruned] == ["KILLED", "KILLED"]  # the point and its stage
    history = project.client.get_metric_history(pruned[1].info.run_id, "loss")
    assert 3 <= len(history) < 30  # the control: it really ended early
    before = project.executions
    project(sweeping.sweep)
    assert project.executions == before  # a pruned point is not made again
    assert "stages.fit.x=3 " in project(sweeping.best).replace("\n", " ")


@pytest.mark.slow
@pytest.mark.faults
def test_a_sweep_whose_driver_is_killed_goes_on_under_the_same_run(project: Project) -> None:
    (project.trouble / "kill-b").touch()
    typed = ["pipeline=stub", "sweep.metric=fit.loss", "stages.fit.kind=a,b,c", f"stages.fit.trouble={project.trouble}"]
    script = "import sys; from tests.pipelines import stubs, sweep_stubs; from pipelines.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "sweep", f"state={project.state}", *typed, "--conf", str(project.conf)]
    killed = subprocess.run(command, cwd=ROOT, env={**os.environ, "SWEEP": "s"}, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert [entry.shown for entry in project.entries()] == ["stages.fit.kind=a"]
    (project.trouble / "kill-b").unlink()
    project(sweeping.sweep)
    assert [line for line in project.executions if line.startswith("fit")] == [f"fit 0 1 {kind}" for kind in "abbc"]
    [above] = project.runs("tags.`raykeel.kind` = 'sweep'")
    assert above.info.status == "FINISHED"
    states = sorted(run.info.status for run in project.runs(f"tags.`mlflow.parentRunId` = '{above.info.run_id}'"))
    assert states == ["FINISHED", "FINISHED", "FINISHED", "KILLED"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["stages.fit.x=interval(0,1)"], "a grid has no interval"),
        (["stages.fit.x=interval(1,0)", "sweep.sampler=tpe"], "from a smaller to a larger"),
        (["stages.fit.x=tag(deep,interval(0,1))", "sweep.sampler=tpe"], "the only tag known is log"),
        (["sweep.sampler=random"], "has nothing to choose"),
        (["stages.fit.count=interval(1,9)", "sweep.sampler=tpe"], "count"),
        (["stages.fit.x=1,2", "sweep.metric=loss"], "must be written stage.metric"),
        (["stages.fit.x=interval(0,1)", "sweep.sampler=tpe", "sweep.metric=judge.loss"], "has no stage judge"),
        (["stages.fit.nosuch=1,2"], "nosuch"),
    ],
)
def test_a_mistaken_sweep_is_refused_before_anything_is_made(project: Project, typed: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        project.begin(*typed)
    assert project.executions == [] and not Book.of(project.state, "s").begun


def test_a_begun_sweep_takes_no_other_overrides(project: Project) -> None:
    project.begin("stages.fit.x=1,2")
    with pytest.raises(ConfigError, match=r"was begun with .*stages.fit.x=1,2"):
        project(sweeping.sweep, "stages.fit.x=1,2,3")
    with pytest.raises(ConfigError, match="a name has letters"):
        project(sweeping.sweep, name="../x")
    with pytest.raises(ConfigError, match="did you mean 's'"):
        project(sweeping.best, name="s2")


def test_two_processes_are_not_at_one_sweep_at_once(project: Project) -> None:
    book = Book.of(project.state, "s")
    with book.locked(), pytest.raises(ResourcesUnavailable, match="another process is at this sweep"):
        project.begin("stages.fit.x=1,2")


def test_a_line_that_a_kill_cut_short_counts_for_nothing(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.write(Entry(1, {"a": "1"}, "failed", error="no"))
    book.write(Entry(1, {"a": "1"}, "done", 2.0, curve=[(1, 3.0)]))
    with (tmp_path / "points.jsonl").open("a") as file:
        file.write('{"number": 2, "varied"')
    assert book.entries() == [Entry(1, {"a": "1"}, "done", 2.0, curve=[(1, 3.0)])]


def test_hydras_grammar_becomes_axes() -> None:
    fixed, axes = axes_of(
        ["a=1", "b=range(1,4)", "c=tag(log,interval(1e-4,1e-2))", "d=int(interval(1,8))", "e=choice(x,y)"]
    )
    assert fixed == ["a=1"] and [axis.key for axis in axes] == ["b", "c", "d", "e"]
    assert axes[0].values == ("1", "2", "3") and axes[3].values == ("x", "y")
    assert (axes[1].low, axes[1].high, axes[1].log, axes[1].whole) == (1e-4, 1e-2, True, False)
    assert axes[2].whole and not axes[2].log
    assert grid(axes[:1] + axes[3:])[1] == ["b=1", "e=y"]
