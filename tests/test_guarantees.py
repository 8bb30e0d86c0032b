"""docs/guarantees.md speaks of tests and mutants that exist, and every mutant still fits the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from pipelines.config import ROOT
from tests.mutants import MUTANTS, Mutant, mutated

PAGE = (ROOT / "docs" / "guarantees.md").read_text("utf-8")


@cache
def functions(path: Path) -> dict[str, bool]:
    """Test functions of a file, and whether each has parameters."""
    found = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {f.name: bool(f.args.args) for f in found if f.name.startswith("test_")}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutated(mutant) != (ROOT / mutant.file).read_text("utf-8")
    for test in mutant.tests:
        path, _, name = test.partition("::")
        function, _, parameter = name.partition("[")
        assert function in functions(ROOT / path), test
        assert functions(ROOT / path)[function] or not parameter, test


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutated(Mutant("m", "pipelines/lease.py", "no such text", "", ()))


def test_every_promise_names_tests_and_mutants_that_exist() -> None:
    files: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files.setdefault(path.stem, set()).update(functions(path))
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| Promise")]
    assert len(rows) > 30
    named = set()
    for row in rows:
        promise, kept_by, shown_by, mutants = (cell.strip() for cell in row.strip("| ").split(" | "))
        for place in re.findall(r"`([^`]+)`", kept_by):
            assert (ROOT / place).is_file(), (promise, place)
        tests = re.findall(r"`([^`]+)`", shown_by)
        assert tests, promise
        for test in tests:
            stem, _, name = test.partition("::")
            assert name in files.get(stem, ()), (promise, test)
        found = re.findall(r"`([^`]+)`", mutants)
        assert found or mutants == "-", promise
        named |= set(found)
        # A mutant stands beside one of the tests that notice it.
        for mutant in (m for m in MUTANTS if m.name in found):
            noticing = {test.partition("::")[2].partition("[")[0] for test in mutant.tests}
            assert noticing & {test.partition("::")[2] for test in tests}, (promise, mutant.name)
    assert named == {mutant.name for mutant in MUTANTS}
