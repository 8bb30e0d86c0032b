"""The pipeline as one inline SVG: layers from top to bottom, no script, no outside request. Apart, because laying out a graph has
nothing to do with what a report says.

The classic steps (Sugiyama): layers by longest path, long edges through invisible places of their own, fewer crossings by
barycentres, then positions that pull each node under its neighbours.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

WIDTH, HEIGHT, GAP, FALL, MARGIN = 176, 50, 26, 46, 8
THREAD = 14
"""Width of the place that a long edge takes in the layers it crosses."""
SWEEPS = 12

STYLE = """
.dag{overflow-x:auto;margin:.5rem 0}.dag svg{max-width:none;display:block;margin:auto}
.dag text{fill:currentColor;text-anchor:middle}
.dag .name,.dag .mark{font:600 13px system-ui,sans-serif}.dag .what{font:11px system-ui,sans-serif}
.dag .edge{fill:none;stroke:var(--edge);stroke-width:1.3}.dag .head{fill:var(--edge)}.dag .edge.idle{stroke-dasharray:2 4}
.dag .node rect{fill:color-mix(in srgb,var(--c) 13%,transparent);stroke:var(--c);stroke-width:1.6}.dag .node .mark{fill:var(--c)}
.dag .ran{--c:var(--a)}.dag .reused{--c:var(--ok)}.dag .accepted{--c:var(--b)}.dag .failed{--c:var(--bad)}.dag .skipped{--c:var(--edge)}
.dag .reused rect{stroke-dasharray:7 3}.dag .accepted rect{stroke-dasharray:7 3 1.5 3}.dag .failed rect{stroke-width:3.4}
.dag .skipped rect{stroke-dasharray:1.5 4;fill:none}.dag .skipped text{opacity:.75}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.4rem;justify-content:center;font-size:.85rem}
.legend span{display:inline-flex;gap:.4rem;align-items:center}
"""

STATES = {
    "ran": ("▶", "executed by this run"),
    "reused": ("=", "reused: its recipe is known"),
    "accepted": ("≈", "reused although something changed: run.accept"),
    "failed": ("✕", "failed or stopped"),
    "skipped": ("–", "not reached"),
}
"""State -> (mark, what the legend says). Each has a colour, a border and a mark of its own."""


@dataclass
class Node:
    """One box: name, state (a key of STATES), the words under the name, the words shown on pointing at it."""

    name: str
    state: str
    words: str = ""
    title: str = ""
    upstream: Sequence[str] = ()


@dataclass
class _Place:
    """Where a node, or an edge passing by, stands in its layer."""

    width: float
    x: float = 0.0
    above: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)


def draw(nodes: Sequence[Node]) -> str:
    """The graph with its legend. Nodes stand in an order in which upstream comes first."""
    layers, places = _layout(nodes)
    shift = MARGIN - min(p.x - p.width / 2 for p in places.values())
    for place in places.values():
        place.x += shift
    width = max(p.x + p.width / 2 for p in places.values()) + MARGIN
    height = len(layers) * (HEIGHT + FALL) - FALL + 2 * MARGIN
    depth = {name: level for level, layer in enumerate(layers) for name in layer}
    by_name = {node.name: node for node in nodes}
    label = ", ".join(f"{node.name} {node.words}".strip() for node in nodes)
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {height}" style="width:{width:.0f}px;height:{height}px" role="img" '
        f'aria-label="{html.escape(f"stages from top to bottom: {label}")}">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for node in nodes:
        for up in dict.fromkeys(node.upstream):
            idle = " idle" if "skipped" in (node.state, by_name[up].state) else ""
            parts.append(
                f'<path class="edge{idle}" marker-end="url(#head)" d="{_path(up, node.name, places, depth)}"/>'
            )
    for node in nodes:
        parts.append(_box(node, places[node.name].x, MARGIN + depth[node.name] * (HEIGHT + FALL)))
    shown = {node.state for node in nodes}
    return f'<div class="dag">{"".join(parts)}</svg></div>{_legend(state for state in STATES if state in shown)}'


def _box(node: Node, x: float, y: float) -> str:
    e = html.escape
    name = node.name if len(node.name) <= 20 else node.name[:19] + "…"
    mark = f'<tspan class="mark">{STATES[node.state][0]}</tspan> {e(node.words)}'
    return (
        f'<g class="node {node.state}"><title>{e(f"{node.name}: {node.title}")}</title>'
        f'<rect x="{x - WIDTH / 2:.1f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7"/>'
        f'<text class="name" x="{x:.1f}" y="{y + 21}">{e(name)}</text>'
        f'<text class="what" x="{x:.1f}" y="{y + 39}">{mark}</text></g>'
    )


def _legend(states: Iterable[str]) -> str:
    items = "".join(
        f'<span><svg style="width:34px;height:20px" aria-hidden="true"><g class="node {state}">'
        f'<rect x="2" y="2" width="30" height="16" rx="4"/><text class="mark" x="17" y="15">{STATES[state][0]}</text></g></svg>'
        f"{STATES[state][1]}</span>"
        for state in states
    )
    return f'<p class="legend dag">{items}</p>'


def _path(up: str, down: str, places: Mapping[str, _Place], depth: Mapping[str, int]) -> str:
    """From the foot of one box to the head of another, straight down through the layers between."""
    first, last = depth[up], depth[down]
    between = [(_thread(up, down, level), level) for level in range(first + 1, last)]
    start = _port(places, up, between[0][0] if between else down, places[up].below)
    end = _port(places, down, between[-1][0] if between else up, places[down].above)
    top = MARGIN + first * (HEIGHT + FALL) + HEIGHT
    path, x, y = f"M{start:.1f} {top}", start, top
    for name, level in [*between, ("", last)]:
        to = places[name].x if name else end
        y_to = MARGIN + level * (HEIGHT + FALL)
        middle = (y + y_to) / 2
        path += f"C{x:.1f} {middle:.1f} {to:.1f} {middle:.1f} {to:.1f} {y_to}"
        if name:
            path += f"V{y_to + HEIGHT}"
        x, y = to, y_to + HEIGHT
    return path


def _port(places: Mapping[str, _Place], name: str, other: str, neighbours: Sequence[str]) -> float:
    """Where on a box's edge the line to a neighbour starts: side by side, in the order of the neighbours."""
    ordered = sorted(neighbours, key=lambda neighbour: places[neighbour].x)
    step = min(22.0, WIDTH * 0.7 / max(len(ordered), 1))
    return places[name].x + (ordered.index(other) - (len(ordered) - 1) / 2) * step


def _thread(up: str, down: str, level: int) -> str:
    return f"{up}\n{down}\n{level}"


def _layout(nodes: Sequence[Node]) -> tuple[list[list[str]], dict[str, _Place]]:
    """(names by layer from left to right, place of each name); long edges have names of their own."""
    depth: dict[str, int] = {}
    for node in nodes:
        depth[node.name] = max((depth[up] + 1 for up in node.upstream), default=0)
    for node in reversed(nodes):  # a source that is needed late stands next to where it is needed
        below = [depth[other.name] for other in nodes if node.name in other.upstream]
        if not node.upstream and below:
            depth[node.name] = min(below) - 1
    places = {node.name: _Place(WIDTH) for node in nodes}
    layers: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for node in nodes:
        layers[depth[node.name]].append(node.name)
        for up in dict.fromkeys(node.upstream):
            chain = [up]
            for level in range(depth[up] + 1, depth[node.name]):
                chain.append(_thread(up, node.name, level))
                places[chain[-1]] = _Place(THREAD)
                layers[level].append(chain[-1])
            chain.append(node.name)
            for above, below_it in pairwise(chain):
                places[above].below.append(below_it)
                places[below_it].above.append(above)
    _uncross(layers, places)
    _settle(layers, places)
    return layers, places


def _uncross(layers: list[list[str]], places: Mapping[str, _Place]) -> None:
    """Order each layer by the mean position of its neighbours, down and up, and keep the order with the fewest crossings."""
    best, fewest = [list(layer) for layer in layers], _crossings(layers, places)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for level in range(1, len(layers)) if down else range(len(layers) - 2, -1, -1):
            beside = {name: i for i, name in enumerate(layers[level - 1 if down else level + 1])}
            now = {name: float(i) for i, name in enumerate(layers[level])}
            for name in layers[level]:
                near = [beside[n] for n in (places[name].above if down else places[name].below)]
                if near:
                    now[name] = sum(near) / len(near) * len(layers[level]) / max(len(beside), 1)
            layers[level].sort(key=now.__getitem__)
        crossings = _crossings(layers, places)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    layers[:] = best


def _crossings(layers: Sequence[Sequence[str]], places: Mapping[str, _Place]) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        order = {name: i for i, name in enumerate(lower)}
        edges = [(i, order[below]) for i, name in enumerate(upper) for below in places[name].below]
        count += sum((a - c) * (b - d) < 0 for i, (a, b) in enumerate(edges) for c, d in edges[i + 1 :])
    return count


def _settle(layers: Sequence[Sequence[str]], places: Mapping[str, _Place]) -> None:
    """Positions: each name as near as can be to the mean of its neighbours, none over another."""
    for layer in layers:
        _spread(layer, places, [0.0] * len(layer))
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wanted = []
            for name in layer:
                near = [places[n].x for n in (places[name].above if down else places[name].below)]
                wanted.append(sum(near) / len(near) if near else places[name].x)
            _spread(layer, places, wanted)


def _spread(layer: Sequence[str], places: Mapping[str, _Place], wanted: Sequence[float]) -> None:
    """The mean of two ways to keep the order and the distances: pushed right, and pushed left, where it is too tight."""
    right, left = list(wanted), list(wanted)
    apart = [
        (places[a].width + places[b].width) / 2 + (GAP if WIDTH in (places[a].width, places[b].width) else 4)
        for a, b in pairwise(layer)
    ]
    for i in range(1, len(layer)):
        right[i] = max(right[i], right[i - 1] + apart[i - 1])
    for i in range(len(layer) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - apart[i])
    for name, a, b in zip(layer, right, left, strict=True):
        places[name].x = (a + b) / 2
