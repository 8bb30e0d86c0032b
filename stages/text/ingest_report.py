"""What an ingest found, in numbers and words: the quarantine, the table of reasons, each source's profile. Apart from reading."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from stages.contract import StageError
from stages.text.faults import RULES
from stages.text.files import OTHER_SPLITS, words
from stages.text.ingesting import LINES_SHOWN
from stages.text.record import PREFERENCE
from stages.text.shards import Table, shard_name
from stages.text.sources import Source

Facts = dict[str, Any]


def quarantine(reports: list[Facts], parts: Path, output: Path) -> None:
    """The faults of all parts, in the order of their rows."""
    with (output / "quarantine.jsonl").open("wb") as whole:
        for report in reports:
            with (parts / f"faults-{report['part']:06d}.jsonl").open("rb") as part:
                shutil.copyfileobj(part, whole)


def rules_of(reports: list[Facts]) -> Counter[str]:
    """Rule -> rows."""
    return sum((Counter(report["rules"]) for report in reports), Counter())


def profile(number: int, source: Source, weight: float, reports: list[Facts]) -> Facts:
    """One source in numbers."""
    mine = [report for report in reports if report["source"] == number]
    return {
        "name": source.name,
        "weight": weight,
        "files": len(source.files),
        "format": source.format.value if source.files else "docstrings",
        "why": source.why,
        "rows": sum(report["rows"] for report in mine),
        "characters": sum(report["characters"] for report in mine),
        "quarantined": rules_of(mine).total(),
        "reasons": dict(rules_of(mine)),
        "kinds": dict(sum((Counter(report["kinds"]) for report in mine), Counter())),
    }


def refuse_unsettled(number: int, source: Source, reports: list[Facts]) -> None:
    """Whether the prompt is taken off was settled by the first rows; those behind them may not say otherwise."""
    mine = [report for report in reports if report["source"] == number]
    pairs = sum(report["kinds"].get(PREFERENCE, 0) for report in mine)
    repeats = sum(report["repeats"] for report in mine)
    if repeats < pairs if source.reading.fields.prompt_repeated else 2 * repeats > pairs:
        raise StageError(
            f"{source.name}: of {pairs:,} preferences {repeats:,} have answers that both begin with the prompt; "
            "stages.ingest.source.prompt_repeated=true takes it off these, prompt_repeated=false leaves it there"
        )


def refuse_above(
    fraction: float, good: int, rules: Counter[str], reports: list[Facts], output: Path, kept: Path
) -> None:
    """Fails with the table of reasons when too many rows cannot be used. Of a quarantine that is longer than the table a copy is
    `kept`: the attempt's output goes."""
    bad = rules.total()
    if not bad or bad <= fraction * (bad + good):
        return
    first: dict[str, list[str]] = {}
    for report in reports:
        for rule, where in report["first"].items():
            first.setdefault(rule, []).extend(where)
    lines = []
    for rule, count in sorted(rules.items(), key=lambda item: (-item[1], item[0])):
        shown = ", ".join(first[rule][:LINES_SHOWN]) + (", ..." if count > LINES_SHOWN else "")
        lines.append(f"  {count:>9,}  {rule}: {shown}\n             {RULES[rule]}")
    if any(count > LINES_SHOWN for count in rules.values()):
        shutil.copyfile(output / "quarantine.jsonl", kept)
        lines.append(f"  all of them: {kept}")
    table = "\n".join(lines)
    raise StageError(
        f"{bad:,} of {bad + good:,} rows cannot be used, at most {fraction:.1%} are allowed "
        f"(stages.ingest.max_bad_fraction); mend these lines:\n{table}"
    )


def where(rows: Any, parts: Path) -> str:
    """The id of the first of some rows, which are named by part and place."""
    if not len(rows):
        return ""
    part, row = int(rows[0]["part"]), int(rows[0]["row"])
    table = next(Table.of([parts / "rows" / shard_name(part)]).slices(row, row + 1))
    return str(table.column("id")[0])


def headline(sources: list[Source], numbers: dict[str, int], rules: Counter[str], clash: str) -> str:
    """`clash`: the first row whose own id stands on another row."""
    said = [f"{numbers['rows']:,} rows, {numbers['characters']:,} characters: {described(sources)}"]
    if rules:
        counts = ", ".join(f"{count:,} {rule}" for rule, count in sorted(rules.items()))
        said.append(f"{numbers['quarantined']:,} quarantined ({counts})")
    if numbers["repaired"]:
        said.append(f"{numbers['repaired']:,} repaired")
    if numbers["id_clashes"]:
        said.append(f"{numbers['id_clashes']:,} rows have an id of other rows (first: {clash})")
    return "; ".join(said)


def facts(found: list[Facts], numbers: dict[str, int], rules: Counter[str]) -> Facts:
    """The summary: `found` are the profiles of the sources."""
    steps = {"in": numbers["rows"] + numbers["quarantined"], **dict(sorted(rules.items())), "out": numbers["rows"]}
    return {
        "kind": "+".join(sorted({kind for profile in found for kind in profile["kinds"]})),
        **numbers,
        "reasons": dict(rules),
        "waterfall": [{"step": step, "rows": rows} for step, rows in steps.items()],
        "sources": found,
    }


def described(sources: list[Source]) -> str:
    """What was read, and as what."""
    if len(sources) > 1:
        return f"{len(sources)} sources ({', '.join(f'{s.name}: {s.format.value}' for s in sources)})"
    source = sources[0]
    if not source.files:
        return "the standard library's docstrings"
    what = source.files[0].name if len(source.files) == 1 else f"{len(source.files):,} files"
    kinds = Counter(source.left_out).most_common()
    left = ", ".join(f"{n} {word}" if n > 1 else word for word, n in kinds[:5]) + (", ..." if len(kinds) > 5 else "")
    files = "file" if len(source.left_out) == 1 else "files"
    left = f", {len(source.left_out):,} {files} left out: {left}" if left else ""
    return f"{what} as {source.format.value} ({source.why}{left}){_of_other_splits(source)}"


def _of_other_splits(source: Source) -> str:
    """A directory often holds its test set beside the training set, and nobody means to learn that."""
    others = [file.name for file in source.files if words(file.name) & OTHER_SPLITS]
    if len(others) in (0, len(source.files)):
        return ""
    more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
    return f", {others[0]}{more} among them: a path like .../*train* leaves what is for tests out"
