"""The planner's refusals: each a ConfigError before anything starts."""

import re
from pathlib import Path

import pytest

from pipelines import edges, plan, reasons
from pipelines.config import AppConfig, RunConfig, compose
from pipelines.mistakes import ConfigError
from pipelines.session import planned
from stages.contract import ResourcesUnavailable, StageConfig
from tests.pipelines.stubs import DoubleConfig, JudgeConfig, MakeConfig


def build(stages: dict[str, StageConfig], run: RunConfig | None = None) -> list[plan.Step]:
    return plan.build(AppConfig(name="stub", stages=stages, run=run or RunConfig()))


def test_stages_are_ordered_by_their_edges_not_by_the_file() -> None:
    steps = build(
        {
            "judge": JudgeConfig(inputs={"corpus": "double"}),
            "double": DoubleConfig(inputs={"rows": "make"}),
            "make": MakeConfig(),
        }
    )
    assert [s.name for s in steps] == ["make", "double", "judge"]


def test_a_missing_edge_is_named_with_its_type() -> None:
    with pytest.raises(ConfigError, match=r"stages\.double\.inputs misses 'rows' \(Rows\)"):
        build({"double": DoubleConfig()})


def test_an_edge_of_the_wrong_type_says_what_is_wanted_and_what_is_made() -> None:
    with pytest.raises(ConfigError, match=r"stages\.judge\.inputs\.corpus wants Corpus, but make makes Rows"):
        build({"make": MakeConfig(), "judge": JudgeConfig(inputs={"corpus": "make"})})


def test_an_edge_to_nowhere_suggests_the_nearest_stage() -> None:
    with pytest.raises(ConfigError, match=r"no stage named 'mak' in this pipeline; did you mean 'make'\?"):
        build({"make": MakeConfig(), "double": DoubleConfig(inputs={"rows": "mak"})})


def test_an_unknown_input_suggests_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"double has no such input; did you mean 'rows'\?"):
        build({"make": MakeConfig(), "double": DoubleConfig(inputs={"row": "make"})})


def test_a_cycle_is_drawn() -> None:
    with pytest.raises(ConfigError, match="the stages form a cycle: double -> again -> double"):
        edges.topological(
            {
                name: plan.Step(name, plan.STAGES[DoubleConfig], DoubleConfig(inputs={"rows": other}))
                for name, other in (("double", "again"), ("again", "double"))
            }
        )


@pytest.mark.parametrize("run", [RunConfig(until="jugde"), RunConfig(rerun=["jugde"]), RunConfig(rerun_from="jugde")])
def test_unknown_stage_names_in_run_fields_are_refused(run: RunConfig) -> None:
    app = AppConfig(
        name="stub",
        run=run,
        stages={
            "make": MakeConfig(),
            "double": DoubleConfig(inputs={"rows": "make"}),
            "judge": JudgeConfig(inputs={"corpus": "double"}),
        },
    )
    with pytest.raises(ConfigError, match="jugde: no stage of that name in this run; did you mean 'judge'"):
        plan.force(app, plan.build(app))


def test_an_empty_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match="the pipeline has no stages"):
        build({})


def test_a_plan_says_what_training_needs_and_a_run_that_can_never_fit_is_refused_before_it_starts(
    tmp_path: Path,
) -> None:
    fitting = compose([f"state={tmp_path}"])
    steps, _ = planned(fitting)
    plan.require_memory(fitting, steps)
    (line,) = plan.announcements(fitting, steps)
    assert re.fullmatch(
        r"train should need about \d+ MB a worker \(process 550 MB, weights 4 MB, .*\) and [\d.]+ min", line
    )
    assert reasons.as_json(fitting, steps)["steps"][3]["estimated_memory_bytes"] > 550e6
    huge = compose([f"state={tmp_path}", "stages.train.resources.micro_batch_rows=100000"])
    steps, _ = planned(huge)
    assert plan.announcements(huge, steps)[0].startswith("train does not fit this machine: training needs about ")
    with pytest.raises(ResourcesUnavailable, match=r"train does not fit this machine: .* lower resources\.micro_batch"):
        plan.require_memory(huge, steps)
