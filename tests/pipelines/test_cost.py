"""What a plan expects: right within 30 % for a repeat, and silent where nobody can know."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines import cost, reasons, session
from pipelines.__main__ import main
from pipelines.config import RunConfig
from tests.pipelines.test_runner import app_of, go


def done(seconds: float, size: int = 10, work: str = "w", input_bytes: int = 100, fence: int = 1) -> dict[str, Any]:
    meta = {"seconds": seconds, "bytes": size, "work": work, "input_bytes": input_bytes, "started_at": "then"}
    return cost.entry("f" * 64, fence, "recipe", meta)


def test_the_median_of_the_last_five_equal_executions_is_expected() -> None:
    recent = [done(s) for s in (900, 50, 52, 51, 53, 49)]
    assert cost.expect(recent, "w", 100) == cost.Expected(51, 10)


def test_other_work_or_inputs_of_another_size_are_no_history() -> None:
    recent = [done(50)]
    assert cost.expect(recent, "other", 100) is None
    assert cost.expect(recent, "w", 120) is None
    assert cost.expect(recent, "w", None) is None
    assert cost.expect([], "w", 100) is None
    assert cost.expect(recent, "w", 104) == cost.Expected(50, 10)


def test_executions_that_disagree_give_no_number() -> None:
    assert cost.expect([done(s) for s in (5, 40, 100, 300)], "w", 100) is None
    assert cost.expect([done(s) for s in (50, 52, 300)], "w", 100) == cost.Expected(52, 10)
    assert cost.expect([done(s) for s in (0.1, 0.8)], "w", 100) is not None  # nobody waits for half a second


def test_the_history_counts_an_execution_once_and_forgets_old_ones() -> None:
    recent: list[dict[str, Any]] = []
    for fence in range(cost.KEPT + 5):
        recent = cost.remember(cost.remember(recent, done(1, fence=fence)), done(1, fence=fence))
    assert [e["fence"] for e in recent] == list(range(5, cost.KEPT + 5))


@pytest.mark.parametrize(
    ("seconds", "size", "words"),
    [(0.04, 812, "0.0 s, 812 B"), (9.5, 3_400, "9.5 s, 3.4 kB"), (95, 12_100_000, "95 s, 12.1 MB"), (725, 10**9, "12 min, 1.0 GB"),
     (12_000, 250 * 10**12, "3 h 20 min, 250 TB")],
)  # fmt: skip
def test_numbers_are_said_as_people_say_them(seconds: float, size: int, words: str) -> None:
    assert str(cost.Expected(seconds, size)) == words


def test_a_total_says_when_it_is_not_all() -> None:
    one, other = cost.Expected(40, 10**6), cost.Expected(55, 2 * 10**6)
    assert cost.total([one, other]) == "about 95 s, 3.0 MB"
    assert cost.total([one, None, other]) == "at least 95 s, 3.0 MB"
    assert cost.total([None]) == "no history"


def expected(app: Any) -> dict[str, cost.Expected | None]:
    return {step.name: step.expected for step in session.planned(app)[0]}


def test_a_repeat_takes_what_was_expected_within_30_percent_and_gives_as_many_bytes(state: Path) -> None:
    slow = {"seconds": 1.5}
    assert expected(app_of(state, double=slow)) == {"make": None, "double": None, "judge": None}
    go(app_of(state, double=slow))
    again = app_of(state, double=slow, run=RunConfig(rerun_from="make"))
    before = expected(again)
    started = time.monotonic()
    outcome = go(again)
    assert time.monotonic() - started > 1.5
    for step in outcome.steps:
        guess = before[step.name]
        assert guess is not None and step.record is not None
        # Of a stage of some length; what a moment takes is told to a second.
        assert abs(guess.seconds - step.record.meta["seconds"]) <= (0.3 * guess.seconds if step.name == "double" else 1)
        assert guess.bytes == step.record.meta["bytes"] > 0
    words = reasons.summary(session.planned(again)[0])
    decided = "1 of 3 stages to run, 2 to be decided when their inputs are made"
    assert re.fullmatch(rf"{decided}; about [1-4]\.\d s, \d+ B if all of these are made", words), words


def test_a_changed_value_or_resource_has_no_history_and_changed_patience_has(state: Path) -> None:
    go(app_of(state))
    assert expected(app_of(state, double={"factor": 3}))["double"] is None
    rerun = RunConfig(rerun=["make"])
    assert expected(app_of(state, run=rerun))["make"] is not None
    from tests.pipelines.stubs import StubResources

    assert expected(app_of(state, run=rerun, make={"resources": StubResources(workers=7)}))["make"] is None
    assert expected(app_of(state, run=rerun, make={"resources": StubResources(retries=7)}))["make"] is not None


def test_the_plan_for_machines_is_complete_and_alone_on_stdout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--json", f"state={tmp_path}"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["schema"] == 1 and answer["pipeline"] == "quickstart" and answer["accept"] == []
    assert [s["name"] for s in answer["steps"]][:3] == ["ingest", "clean", "tokenize"]
    assert {"from": "clean", "to": "tokenize", "parameter": "corpus"} in answer["edges"]
    assert set(answer["steps"][0]) == {
        "name", "stage", "action", "reason", "changes", "accepted", "fingerprint", "inputs", "digest", "source_run",
        "seconds", "bytes", "expected_seconds", "expected_bytes", "estimated_seconds", "estimated_memory_bytes",
    }  # fmt: skip
    described = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    for name in (*answer, *answer["steps"][0], *answer["edges"][0]):
        assert f"`{name}`" in described, name
    assert not any(tmp_path.iterdir()), "a plan writes nothing"
    assert main(["run", "--json", f"state={tmp_path}"]) == 1
    assert "--json: run has no such form; plan has" in capfd.readouterr().err


def test_why_names_every_facet(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from pipelines.reasons import facet_lines

    go(app_of(state))
    steps = {step.name: step for step in session.planned(app_of(state, seed=4, make={"value": 9}))[0]}
    assert facet_lines(steps["make"])[:2] == [("config", "value 1 -> 9"), ("seed", "0 -> 4")]
    assert steps["double"].reason == "until make is made; seed 0 -> 4"  # that much is certain already
    assert facet_lines(steps["double"])[:2] == [("seed", "0 -> 4"), ("inputs", "not known until make is made")]
    facet, rest = facet_lines(steps["make"])[2]
    assert facet == "as before" and rest.startswith("inputs, sources, code, env, schema (compared with 20")
