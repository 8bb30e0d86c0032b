"""The documentation says what the code does: reference, README's map, README's example of a stage."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from docs import reference
from pipelines.config import ROOT


def test_the_reference_is_what_the_config_classes_say() -> None:
    assert (ROOT / "docs" / "reference.md").read_text("utf-8") == reference.text(), (
        "make reference, then review the diff"
    )


def test_the_map_names_every_file_of_both_packages_and_no_other() -> None:
    shown = set(re.findall(r"`(\w+\.py)`", (ROOT / "docs" / "map.md").read_text("utf-8")))
    files = {p.name for place in ("pipelines", "stages") for p in (ROOT / place).glob("*.py")} - {"__init__.py"}
    assert shown == files


def test_the_readme_can_be_read_at_once() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_the_readmes_example_of_a_stage_runs_and_is_reused(tmp_path: Path) -> None:
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    code, option, pipeline = (text for _, text in blocks)
    for package in ("pipelines", "stages", "conf"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "local"))
    (tmp_path / "stages" / "vocabulary.py").write_text(code)
    (tmp_path / "conf" / "vocabulary").mkdir()
    (tmp_path / "conf" / "vocabulary" / "standard.yaml").write_text(option)
    (tmp_path / "conf" / "pipeline" / "words.yaml").write_text(pipeline)

    def run() -> str:
        command = [sys.executable, "-m", "pipelines", "run", "pipeline=words", "run.limit=50"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert "distinct words" in run()
    assert "0 of 2 stages to run" in run()
