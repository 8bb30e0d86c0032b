"""The three ways to train, one on top of the other, as they are typed: from nothing, on chats, on preferences. Small, without Ray."""

import json
from pathlib import Path

import pytest

from tests.e2e.project import Project


def inline(*stages: str, trains: str) -> list[str]:
    """Overrides that run these stages in the driver's process."""
    return [f"stages.{name}.resources.executor=inline" for name in stages] + [
        f"stages.{trains}.resources.launcher=inline"
    ]


@pytest.mark.slow
def test_a_model_is_pretrained_then_tuned_on_chats_then_taught_to_prefer(tmp_path: Path) -> None:
    project = Project(tmp_path / "project" / "state")
    printed = project.cli(
        "run",
        "pipeline=pretrain",
        *inline("clean", "tokenize", "evaluate", trains="train"),
        "run.limit=300",
        "stages.tokenize.vocab_size=512",
        "stages.train.max_steps=30",
        "stages.gate.rules.must_beat=[untrained]",
    )
    assert "7 of 7 stages ran" in printed
    assert project.client.get_model_version_by_alias("pretrain", "candidate").version == 1

    printed = project.cli(
        "run",
        "pipeline=sft",
        "model=models:/pretrain@candidate",
        "tokenize=chatml",  # a pretrained model has no template of its own
        "stages.train.adapter.modules_to_save=[embed_tokens,lm_head]",
        "stages.train.adapter.ensure_weight_tying=true",
        "stages.train.max_steps=12",
        "run.until=register",
        *inline("clean", "tokenize", "evaluate", trains="train"),
        "run.limit=200",
    )
    tuned = project.client.get_model_version_by_alias("sft", "candidate")
    summaries = [json.loads(path.read_text()) for path in (project.state / "store" / "objects").glob("*/summary.json")]
    (report,) = [summary for summary in summaries if "before" in summary.get("baselines", {})]
    assert report["metrics"]["validation_loss"] < report["baselines"]["before"]["validation_loss"]
    sample = report["samples"][0]
    assert sample["prompt"].startswith("What does ") and {"completion", "before"} <= sample.keys()
    assert tuned.tags["digest"]

    printed = project.cli(
        "run",
        "pipeline=dpo",
        "model=models:/sft@candidate",
        "run.until=gate",
        *inline("clean", "pair", "evaluate", trains="dpo"),
        "stages.ingest.limit=200",
        "stages.dpo.learning_rate=1e-3",
    )
    assert "2 of 2 rules hold" in printed, "below ln 2, and most chosen answers raised more than the rejected"
