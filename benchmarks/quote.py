"""Keeps the numbers in documents equal to the results: `python -m benchmarks.quote` rewrites what stands between

    <!-- bench:NAME:FIELD -->value<!-- /bench -->

in README.md and docs/*.md from `benchmarks/results/NAME.json`. FIELD is `summary` (number, interval, verdict in one line)
or a field of the result, dotted for nested ones (`details.difference_s`). Without a valid result the text says so.
The pictures docs/*.svg are drawn anew as well (`benchmarks/plot.py`).
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.harness import number, summary
from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs"
MISSING = "not measured here yet"
MARK = re.compile(r"(<!-- bench:(?P<name>\w+):(?P<field>[\w.]+) -->)(?P<value>.*?)(<!-- /bench -->)", re.DOTALL)


def documents(root: Path = ROOT) -> list[Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists()]


def rewritten(text: str, results: Path = RESULTS) -> str:
    """The text with every quoted value as the results have it now. KeyError for a field that a result lacks."""
    return MARK.sub(lambda m: f"{m[1]}{quoted(m['name'], m['field'], results)}{m[5]}", text)


def quoted(name: str, field: str, results: Path = RESULTS) -> str:
    """What a document may say: never a number of a quick or an invalid measurement."""
    path = results / f"{name}.json"
    if not path.exists():
        return MISSING
    result: Any = json.loads(path.read_text("utf-8"))
    if result["quick"] or result["verdict"] == "INVALID":
        return MISSING
    if field == "summary":
        return summary(result)
    value = result
    for key in field.split("."):
        value = value[key]
    if isinstance(value, list):
        return f"[{', '.join(number(item) for item in value)}]"
    return number(value) if isinstance(value, float) else str(value)


def main() -> int:
    for path in documents():
        before = path.read_text("utf-8")
        after = rewritten(before)
        if after != before:
            path.write_text(after, "utf-8")
            print(f"rewritten: {path.relative_to(ROOT)}")
    for name, draw in plot.PICTURES.items():
        if (drawn := draw(RESULTS)) is not None:
            (PICTURES / name).write_text(drawn, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
