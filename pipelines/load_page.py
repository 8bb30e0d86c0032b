"""What a crowd got from the endpoint, for the report: one table and one picture. Apart from the report, because that says which sections
a run has, and this how one of them is drawn; nothing is computed here, the percentiles stand in the summary.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 260, 58, 12, 26, 34
LINES = {
    "ttft_ms": ("first token", "var(--a)"),
    "latency_ms": ("whole answer", "var(--b)"),
    "itl_ms": ("from token to token", "var(--ok)"),
}
"""Name of a curve -> (what it is called, its colour)."""


def title(load: Facts) -> str:
    """How the requests came, in one sentence."""
    how = load["load"]
    came = f"{how['concurrency']} clients at once" if how["concurrency"] else f"{how['rate']:g} requests a second"
    return f"{how['requests']} requests, {came}, {how['prompt_tokens']} tokens each, {how['output_tokens']} back"


def rows(load: Facts) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of times in milliseconds."""
    metrics = load["metrics"]
    header = ["milliseconds", "p50", "p95", "p99"]
    table = []
    for name, (label, _) in LINES.items():
        found = [metrics.get(f"{name.removesuffix('_ms')}_p{percent}_ms") for percent in (50, 95, 99)]
        table.append([label, *("" if value is None else f"{value:,.1f}" for value in found)])
    return header, table


def lines(load: Facts) -> list[str]:
    """What else was measured, a sentence each."""
    metrics, objective = load["metrics"], load["objective"]
    asked = {"ttft_ms": "first token within {:g} ms", "itl_ms": "{:g} ms from token to token"}
    wanted = " and ".join(asked[name].format(value) for name, value in objective.items() if value is not None)
    return [
        f"{metrics['output_tokens_per_second']:,.1f} output tokens and {metrics['requests_per_second']:,.2f} answers a second",
        f"{metrics['errors']:.0f} of {metrics['requests']:.0f} requests were not answered",
        f"{metrics['goodput']:.1%} kept the objective ({wanted}): {metrics['goodput_per_second']:,.2f} a second",
    ]


def picture(load: Facts) -> str:
    """Milliseconds (logarithmic) over the share of requests that waited no longer, as inline SVG."""
    curves = {name: load["curves"][name] for name in LINES if load["curves"].get(name)}
    values = [max(value, 0.1) for curve in curves.values() for value in curve]
    low, high = (
        math.floor(math.log10(min(values))),
        max(math.ceil(math.log10(max(values))), math.floor(math.log10(min(values))) + 1),
    )

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(max(value, 0.1))) / (high - low)

    def x(percent: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * percent / 100

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="milliseconds by share of requests">']
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#8883"/>')
        parts.append(_text(LEFT - 6, at + 4, f"{10.0**power:g} ms", "end"))
    for percent in (0, 25, 50, 75, 95, 100):
        parts.append(_text(x(percent), HEIGHT - 16, f"{percent}", "end" if percent == 100 else "middle"))
    parts.append(_text(WIDTH / 2, HEIGHT - 2, "percent of the requests that waited no longer", "middle"))
    for index, (name, curve) in enumerate(curves.items()):
        label, colour = LINES[name]
        parts.append(_curve(curve, colour, x, y))
        parts.append(f'<text x="{LEFT + 10 + 170 * index}" y="14" fill="{colour}">{html.escape(label)}</text>')
    return "".join(parts) + "</svg>"


def _curve(curve: Sequence[float], colour: str, x: Any, y: Any) -> str:
    points = " ".join(f"{x(100 * i / (len(curve) - 1)):.1f},{y(value):.1f}" for i, value in enumerate(curve))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{text}</text>'
