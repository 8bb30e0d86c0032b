"""What a reviewer must know before saying yes: one markdown description for the MLflow run, the same as one HTML file.
Apart, because it reads published summaries and records only; it never computes a number of its own.
"""

import contextlib
import dataclasses
import html
import json
import logging
from dataclasses import dataclass, field
from typing import Any

from pipelines import cost, data_card, data_page, drawing, load_page, plan, reasons
from pipelines.config import AppConfig
from pipelines.data_card import Card
from pipelines.plan import Step
from pipelines.store import Store
from stages.artifacts import (
    SUMMARY,
    Approval,
    Artifact,
    Endpoint,
    EvalReport,
    LoadReport,
    ModelVersion,
    ProbeReport,
)
from stages.storage.bucket import BucketError

SAMPLES_SHOWN = 3
PATIENCE_S = 2.0
"""For one summary, and six more for trying again: Ctrl-C ends within 15 s also when the store is away."""


@dataclass
class Facts:
    """Everything that both renderings show."""

    title: str
    status: str
    problem: str
    command: str
    seed: int
    steps: list[Step]
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Artifact type name -> summary of the last stage that made one."""
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    card: Card = field(default_factory=Card)

    def of(self, kind: type[Artifact]) -> dict[str, Any]:
        return self.summaries.get(kind.__name__, {})

    @property
    def verdict(self) -> str:
        if self.status != "FINISHED":
            return f"{self.status}: {self.problem.partition(chr(10))[0]}"
        bits = self.of(EvalReport).get("metrics", {}).get("bits_per_byte")
        score = f"{bits:.2f} bits per byte, " if bits is not None else ""
        version = self.of(ModelVersion)
        if self.of(ProbeReport) and version:
            return f"PASSED: {score}registered as {version['name']}@{version['version']}, served and asked over HTTP"
        return f"FINISHED: {score}every stage asked for is published"


def log(app: AppConfig, steps: list[Step], store: Store, parent: Any, status: str, problem: str, command: str) -> None:
    """Write description, report.html and plan.json to the parent run."""
    facts = gather(app, steps, store, status, problem, command)
    parent.set_tags({"mlflow.note.content": markdown(facts), "raykeel.verdict": facts.verdict[:250]})
    parent.log_text(page(facts), "report.html")
    parent.log_text(json.dumps(reasons.as_json(app, steps), indent=1), "plan.json")
    numbers = {k: v for k, v in facts.of(EvalReport).get("metrics", {}).items() if isinstance(v, int | float)}
    if numbers:
        parent.log_metrics(numbers)


def gather(app: AppConfig, steps: list[Step], store: Store, status: str, problem: str, command: str) -> Facts:
    """Read the published summaries of the steps that have a record: them alone, the artifacts may be large and far away. A store that
    does not answer is not waited for: the report then says less."""
    facts = Facts(app.name, status, problem, command, app.seed, steps)
    bucket = store.bucket.impatient(PATIENCE_S)
    known = [(step, step.record) for step in steps if step.record is not None]
    for _, record in known:
        facts.curves.update(record.meta.get("curves") or {})
    by_step: dict[str, dict[str, Any]] = {}
    examples: dict[str, list[dict[str, str]]] = {}
    try:
        for step, record in known:
            with contextlib.suppress(ValueError):
                by_step[step.name] = json.loads(bucket.get(f"objects/{record.digest}/{SUMMARY}") or b"{}")
                facts.summaries[step.stage.output.__name__] = by_step[step.name]
        if (corpus := data_card.examples_of(steps)) is not None:
            examples = data_card.read_examples(bucket.get(f"objects/{corpus}/{data_card.EXAMPLES}"))
    except BucketError as error:
        logging.getLogger(__name__).warning("a report without all summaries: %s", error)
    facts.card = dataclasses.replace(Card.of(steps, by_step), examples=examples)
    return facts


def metric_rows(facts: Facts) -> tuple[list[str], list[list[str]]]:
    """(header, rows): the model and its baselines, one column a metric."""
    report = facts.of(EvalReport)
    table: dict[str, dict[str, float]] = {"this model": report.get("metrics", {}), **report.get("baselines", {})}
    known = ("validation_loss", "perplexity", "bits_per_byte", "reward_accuracy", "reward_margin", "ranking_accuracy")
    names = [n for n in known if any(n in row for row in table.values())]
    rows = [[label, *(_number(row.get(name)) for name in names)] for label, row in table.items()]
    return ["", *(name.replace("_", " ") for name in names)], rows


def markdown(facts: Facts) -> str:
    """The description of the MLflow parent run."""
    report, served = facts.of(EvalReport), facts.of(Endpoint)
    parts = [f"## {facts.title}: {_one_line(facts.verdict)}"]
    if "\n" in facts.problem:
        parts.append(_fenced(facts.problem))
    if report:
        header, rows = metric_rows(facts)
        parts.append(_markdown_table(header, rows))
        parts += [f"- {_one_line(finding)}" for finding in report.get("findings", [])]
    approval = facts.of(Approval)
    if approval:
        parts.append("### Gate\n" + "\n".join(f"- {_one_line(rule)}" for rule in gate_lines(approval)))
    if facts.card:
        parts.append("### Data\n" + _markdown_table(["", "", ""], [list(line) for line in data_card.lines(facts.card)]))
    samples = report.get("samples", [])[:SAMPLES_SHOWN]
    if samples:
        parts.append("### Samples")
        for sample in samples:
            parts.append("\n".join(f"**{label}**\n\n{_fenced(text)}" for label, text in sample_parts(sample)))
    if served:
        parts.append(
            f"### Endpoint\n`{served['base_url']}` serves **{served['model']}@{served['version']}**, digest `{served['digest'][:16]}`"
        )
    if loaded := facts.of(LoadReport):
        header, rows = load_page.rows(loaded)
        findings = "\n".join(f"- {line}" for line in load_page.lines(loaded))
        parts.append(f"### Under load\n{load_page.title(loaded)}\n\n{_markdown_table(header, rows)}\n\n{findings}")
    version = facts.of(ModelVersion)
    if version:
        parts.append(
            f"### Registry\n`models:/{version['name']}/{version['version']}`, digest `{version['digest'][:16]}`"
        )
    if accepted_lines(facts):
        parts.append(
            "### Accepted by run.accept\n" + "\n".join(f"- {_one_line(line)}" for line in accepted_lines(facts))
        )
    parts.append("### Stages\n" + _markdown_table(["stage", "", "seconds", "result", "made by run"], stage_rows(facts)))
    parts.append(f"### Reproduce\n{_fenced(facts.command)}\nseed {facts.seed}, {commit_line(facts)}")
    parts.append("The whole report is `report.html` among the artifacts.")
    return "\n\n".join(parts)


def accepted_lines(facts: Facts) -> list[str]:
    """What was waived for the results of this run, then for which stages' results."""
    marked = {step.name: step.record.meta.get("accepted", []) for step in facts.steps if step.record}
    lines = []
    for waiver in dict.fromkeys(waiver for waivers in marked.values() for waiver in waivers):
        stages = [name for name, waivers in marked.items() if waiver in waivers]
        lines.append(f"{waiver} since that result was made; {', '.join(stages)} rest on it")
    return lines


def graph(facts: Facts) -> str:
    """The pipeline as a drawing: what each stage came to in this run."""
    nodes = []
    for step in facts.steps:
        meta = step.record.meta if step.record else {}
        if step.record is None:
            state = "failed" if step.failure else "skipped"
            words = "stopped" if step.failure == plan.STOPPED else "failed" if step.failure else "not reached"
        elif step.action == "run":
            state, words = "ran", f"{cost.duration(meta.get('seconds', 0.0))}, {cost.size(meta.get('bytes', 0))}"
        else:
            state, words = ("accepted", "reused, accepted") if step.accepted else ("reused", "reused")
        title = step.failure or meta.get("headline") or step.reason
        nodes.append(drawing.Node(step.name, state, words, _one_line(title), list(step.cfg.inputs.values())))
    return drawing.draw(nodes)


def stage_rows(facts: Facts) -> list[list[str]]:
    """One row a stage: what became of it, what it cost when it was made, its number, the MLflow run that made it."""
    rows = []
    for step in facts.steps:
        meta = step.record.meta if step.record else {}
        made = f"{meta.get('run_id') or 'unrecorded'}" if step.record else ""
        rows.append(
            [
                step.name,
                step.action if step.record else "not made",
                str(meta.get("seconds", "")),
                meta.get("headline", ""),
                made,
            ]
        )
    return rows


def commit_line(facts: Facts) -> str:
    """Commit of the code that made the newest result, and whether it had uncommitted changes."""
    for step in reversed(facts.steps):
        git = step.record.meta.get("git") if step.record else None
        if git:
            return f"commit {git['commit'][:12]}" + (" with uncommitted changes" if git["dirty"] else "")
    return "not in a git checkout"


def gate_lines(approval: dict[str, Any]) -> list[str]:
    """One sentence a rule."""
    return [f"{rule['rule']}: wanted {rule['wanted']}, found {_number(rule['found'])}" for rule in approval["rules"]]


def sample_parts(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """A sample's texts in reading order: prompt, before (when fine-tuned), after."""
    order = [key for key in ("prompt", "before", "completion") if key in sample]
    return [(key, str(sample[key]) or "(nothing: the model ends here)") for key in order]


def page(facts: Facts) -> str:
    """One self-contained HTML file: no script, no outside request, everything escaped."""
    e = html.escape
    report, served, version = facts.of(EvalReport), facts.of(Endpoint), facts.of(ModelVersion)
    ok = facts.status == "FINISHED"
    body = [f'<h1>{e(facts.title)}</h1><p class="verdict {"ok" if ok else "bad"}">{e(facts.verdict)}</p>']
    if facts.steps:
        body.append("<h2>Pipeline</h2>" + graph(facts))
    if accepted_lines(facts):
        items = "".join(f"<li>{e(line)}</li>" for line in accepted_lines(facts))
        body.append(f"<h2>Accepted by run.accept</h2><ul>{items}</ul>")
    if report:
        header, rows = metric_rows(facts)
        body.append("<h2>Metrics against baselines</h2>" + _html_table(header, rows))
        body.append("<ul>" + "".join(f"<li>{e(f)}</li>" for f in report.get("findings", [])) + "</ul>")
    if facts.curves:
        body.append("<h2>Loss</h2>" + loss_curve(facts.curves))
    approval = facts.of(Approval)
    if approval:
        body.append("<h2>Gate</h2><ul>" + "".join(f"<li>{e(line)}</li>" for line in gate_lines(approval)) + "</ul>")
    body.append(data_page.page(facts.card))
    if report.get("samples"):
        body.append("<h2>Samples</h2>")
        for sample in report["samples"]:
            inner = "".join(f"<dt>{e(label)}</dt><dd><pre>{e(text)}</pre></dd>" for label, text in sample_parts(sample))
            body.append(f'<dl class="sample">{inner}</dl>')
    if served:
        body.append(
            f"<h2>Endpoint</h2><p><code>{e(served['base_url'])}</code> serves {e(served['model'])}@{served['version']}</p>"
        )
    if version:
        where = f"models:/{e(version['name'])}/{version['version']}"
        body.append(f"<h2>Registry</h2><p><code>{where}</code> digest <code>{e(version['digest'])}</code></p>")
    probe = facts.of(ProbeReport)
    if probe.get("metrics"):
        body.append(
            "<h2>Measured over HTTP</h2>"
            + _html_table(["", ""], [[k, _number(v)] for k, v in sorted(probe["metrics"].items())])
        )
    if loaded := facts.of(LoadReport):
        items = "".join(f"<li>{e(line)}</li>" for line in load_page.lines(loaded))
        body.append(f"<h2>Under load</h2><p>{e(load_page.title(loaded))}</p>" + _html_table(*load_page.rows(loaded)))
        body.append(f"<ul>{items}</ul>" + load_page.picture(loaded))
    body.append("<h2>Stages</h2>" + _html_table(["stage", "", "seconds", "result", "made by run"], stage_rows(facts)))
    body.append(f"<h2>Reproduce</h2><pre>{e(facts.command)}</pre><p>seed {facts.seed}, {e(commit_line(facts))}</p>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{e(facts.title)}: {e(facts.verdict)}</title><style>{STYLE}{drawing.STYLE}{data_page.STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>"
    )


STYLE = """
:root{color-scheme:light dark;--line:#8884;--ok:#16803c;--bad:#b42318;--a:#2563eb;--b:#c2410c;--edge:#6b7280}
@media(prefers-color-scheme:dark){:root{--ok:#4ade80;--bad:#f87171;--a:#60a5fa;--b:#fb923c;--edge:#9ca3af}}
body{font:15px/1.5 system-ui,sans-serif;margin:0;padding:1.5rem}main{max-width:56rem;margin:auto}
h1{margin:0 0 .3rem}h2{margin:2rem 0 .5rem;font-size:1.1rem;border-bottom:1px solid var(--line)}
.verdict{font-weight:600;padding:.6rem .9rem;border-left:4px solid}.ok{border-color:var(--ok);color:var(--ok)}
.bad{border-color:var(--bad);color:var(--bad);white-space:pre-wrap}
table{border-collapse:collapse}td,th{padding:.25rem .9rem .25rem 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
td+td{font-variant-numeric:tabular-nums}.wide{overflow-x:auto}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#8881;padding:.6rem;margin:.2rem 0;max-height:14rem;overflow:auto}
dl.sample{border:1px solid var(--line);padding:.6rem .9rem;margin:.8rem 0}dt{font-weight:600;font-size:.85rem}dd{margin:0 0 .4rem}
svg{width:100%;height:auto;font:11px system-ui,sans-serif}
"""


def loss_curve(curves: dict[str, list[tuple[int, float]]], width: int = 760, height: int = 280) -> str:
    """Training and validation loss over steps as inline SVG, in nats per token."""
    left, right, top, bottom = 46, 12, 12, 34
    points = [p for series in curves.values() for p in series]
    x_max = max(step for step, _ in points) or 1
    low, high = min(v for _, v in points), max(v for _, v in points)
    span = (high - low) or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        x = left + (width - left - right) * step / x_max
        return x, top + (height - top - bottom) * (high - value) / span

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss over training steps">']
    for i in range(5):
        value = low + span * i / 4
        _, y = place(0, value)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8883"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{value:.2f}</text>')
        x, _ = place(x_max * i / 4, low)
        anchor = "end" if i == 4 else "middle"  # the last would reach over the edge
        parts.append(
            f'<text x="{x:.1f}" y="{height - 16}" text-anchor="{anchor}" fill="currentColor">{round(x_max * i / 4)}</text>'
        )
    parts.append(f'<text x="{width / 2}" y="{height - 2}" text-anchor="middle" fill="currentColor">step</text>')
    styles = {"loss": ("var(--a)", "training"), "validation_loss": ("var(--b)", "validation")}
    for index, (name, series) in enumerate(sorted(curves.items())):
        colour, label = styles.get(name, ("currentColor", name))
        places = [place(step, value) for step, value in series]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        if len(series) < 30:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text x="{width - 120}" y="{top + 14 + 16 * index}" fill="{colour}">{html.escape(label)}</text>')
    return "".join(parts) + "</svg>"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1e5 else f"{value:.3g}"
    return "" if value is None else str(value)


def _html_table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(_cell(c) for c in header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows])


def _cell(text: str) -> str:
    return html.escape(_one_line(text), quote=False).replace("|", "\\|")


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())


def _fenced(text: str) -> str:
    """A code block that its content cannot close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
