"""Draws a measured curve as SVG, from a committed result. Apart, and by hand: the same numbers give the same bytes everywhere, so a
test can hold the picture in the documents against the result, as it holds the numbers."""

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.harness import number

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 46, 58
INK, LINE, GUIDE = "#444", "#0b6e99", "#b9b9b9"


def curve(points: dict[float, float], *, title: str, x: str, y: str) -> str:
    """Points on logarithmic axes, and from the first of them a dashed line along which y grows as x does."""
    xs, ys = sorted(points), [points[at] for at in sorted(points)]
    linear = [ys[0] * at / xs[0] for at in xs]
    across = _Axis(xs[0], xs[-1], LEFT, WIDTH - RIGHT)
    up = _Axis(min(ys), max(*ys, *linear), HEIGHT - BOTTOM, TOP)

    def path(values: list[float]) -> str:
        return " ".join(f"{across.at(at):.1f},{up.at(value):.1f}" for at, value in zip(xs, values, strict=True))

    middle = (LEFT + WIDTH - RIGHT) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" '
        f'font-size="13" fill="{INK}">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{middle}" y="24" text-anchor="middle" font-size="15">{title}</text>',
    ]
    for at in xs:
        parts.append(_rule(across.at(at), TOP, across.at(at), HEIGHT - BOTTOM))
        parts.append(_label(across.at(at), HEIGHT - BOTTOM + 20, f"{at:,.0f}", "middle"))
    for value in up.ticks():
        parts.append(_rule(LEFT, up.at(value), WIDTH - RIGHT, up.at(value)))
        parts.append(_label(LEFT - 8, up.at(value) + 4, f"{value:g}", "end"))
    parts += [
        f'<polyline points="{path(linear)}" fill="none" stroke="{INK}" stroke-dasharray="5 4"/>',
        _label(across.at(xs[-1]) - 26, up.at(linear[-1]) + 6, "linear", "end"),
        f'<polyline points="{path(ys)}" fill="none" stroke="{LINE}" stroke-width="2.5"/>',
    ]
    for at, value in zip(xs, ys, strict=True):
        parts.append(f'<circle cx="{across.at(at):.1f}" cy="{up.at(value):.1f}" r="4" fill="{LINE}"/>')
        parts.append(_label(across.at(at), up.at(value) - 10, number(value), "middle"))
    parts += [
        _label(middle, HEIGHT - 14, x, "middle"),
        f'<text x="18" y="{HEIGHT / 2:.1f}" text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2:.1f})">{y}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def lookup(results: Path) -> str | None:
    """The picture of bench `lookup`; None without a valid result."""
    details = _details(results, "lookup_growth")
    if details is None:
        return None
    return curve(
        {float(size): seconds for size, seconds in details["seconds_by_results"].items()},
        title=f"Fingerprints and lookup of {details['points']} composed points",
        x="results in the store",
        y="seconds",
    )


def data_scale(results: Path) -> str | None:
    """The picture of bench `data_scale`; None without a valid result."""
    details = _details(results, "data_scale_growth")
    if details is None:
        return None
    return curve(
        {float(size): seconds for size, seconds in details["seconds_by_mb"].items()},
        title="Ingest, clean and tokenize of generated text",
        x="MB of text",
        y="seconds",
    )


PICTURES = {"lookup.svg": lookup, "data-scale.svg": data_scale}
"""File in docs -> how it is drawn."""


def _details(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return None if result["quick"] or result["verdict"] == "INVALID" else result["details"]


class _Axis:
    """Numbers between two bounds -> places between two pixels, by their logarithm, with a little room around."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        room = 0.08 * max(math.log(high / low), 0.5)
        self._low, self._high = math.log(low) - room, math.log(high) + room
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        share = (math.log(value) - self._low) / (self._high - self._low)
        return self._first + share * (self._last - self._first)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every power of ten within the bounds."""
        powers = range(math.floor(self._low / math.log(10)), math.ceil(self._high / math.log(10)) + 1)
        wanted = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        return [value for value in wanted if self._low <= math.log(value) <= self._high]


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GUIDE}" stroke-width="0.6"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
