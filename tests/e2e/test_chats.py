"""Chats as people export them, on top of a model with a chat template, as typed on the command line; without Ray."""

import json
from pathlib import Path

import pytest

from stages.text.builtin_templates import TEMPLATES
from tests.e2e.project import Project
from tests.stages.tiny_model import save_tiny_model

INLINE = [f"stages.{name}.resources.executor=inline" for name in ("ingest", "clean", "tokenize", "evaluate")]
INLINE += ["stages.train.resources.launcher=inline"]


def line(number: int) -> dict[str, object]:
    """OpenAI's form; each third row with parts, a system turn and a null that exporters write."""
    content: object = f"what is {number}?"
    if number % 3 == 0:
        content = [{"type": "text", "text": "what is "}, {"type": "text", "text": f"{number}?"}]
    turns: list[dict[str, object]] = [{"role": "user", "content": content}]
    turns += [{"role": "assistant", "content": f"it is {number}.", "tool_calls": None}]
    if number % 3 == 1:
        turns.insert(0, {"role": "system", "content": "be short"})
    return {"messages": turns}


@pytest.mark.slow
def test_an_export_of_chats_tunes_a_model_that_stops_and_is_asked_as_it_was_taught(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", context=256, chat_template=TEMPLATES["zephyr"])
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(line(number)) + "\n" for number in range(300)))
    project = Project(tmp_path / "project" / "state")
    printed = project.cli(
        "run", "pipeline=finetune", f"model={base}", f"stages.ingest.source.path={chats}", "run.until=gate", *INLINE
    )
    assert "7 of 7 stages ran" in printed
    models = [path.parent for path in (project.state / "store" / "objects").glob("*/golden.json")]
    trained = next(model for model in models if "validation_loss" in (model / "summary.json").read_text())
    assert (trained / "chat_template.jinja").read_text() == TEMPLATES["zephyr"]
    assert json.loads((trained / "generation_config.json").read_text())["eos_token_id"] == 0
    tokens = json.loads(
        next(project.state.glob("store/objects/*/tokenizer")).parent.joinpath("summary.json").read_text()
    )
    assert tokens["waterfall"][-1] == {"step": "out", "documents": 300}
    assert tokens["chat_template"]["terminators"] == [0]
