"""The drawn pipeline: whole, readable and self-contained, whatever the graph."""

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import drawing
from pipelines.drawing import HEIGHT, STATES, WIDTH, Node, draw

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@st.composite
def graphs(pick: st.DrawFn) -> list[Node]:
    """Up to 14 stages; each takes results of some earlier ones."""
    nodes: list[Node] = []
    for number in range(pick(st.integers(1, 14))):
        upstream = pick(st.lists(st.sampled_from([n.name for n in nodes]), max_size=3, unique=True)) if nodes else []
        nodes.append(Node(f"stage_{number}", pick(st.sampled_from(list(STATES))), "12 s, 3 MB", "why", upstream))
    return nodes


def boxes(markup: str) -> dict[str, tuple[float, float]]:
    """Name -> upper left corner of its box, read from the SVG."""
    found = {}
    for group in ElementTree.fromstring(f"<div>{markup}</div>").iter("g"):
        rect, name = group.find("rect"), group.find("text[@class='name']")
        if rect is not None and name is not None:
            found[str(name.text)] = (float(rect.attrib["x"]), float(rect.attrib["y"]))
    return found


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_every_stage_is_drawn_once_below_what_it_needs_and_no_box_lies_over_another(nodes: list[Node]) -> None:
    markup = draw(nodes)
    places = boxes(markup)
    assert places.keys() == {node.name for node in nodes}
    for node in nodes:
        assert all(places[up][1] + HEIGHT < places[node.name][1] for up in node.upstream)
    spots = list(places.values())
    for i, (x, y) in enumerate(spots):
        for other_x, other_y in spots[i + 1 :]:
            assert y != other_y or abs(x - other_x) > WIDTH
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', markup)
    assert size is not None
    assert all(x >= 0 and x + WIDTH <= int(size[1]) + 1 and y + HEIGHT <= int(size[2]) for x, y in spots)
    assert markup.count('class="edge') == sum(len(node.upstream) for node in nodes)


def test_a_line_of_stages_is_a_straight_line_and_crossings_are_taken_out() -> None:
    line = [Node(f"s{i}", "ran", upstream=[f"s{i - 1}"] if i else []) for i in range(5)]
    assert len({x for x, _ in boxes(draw(line)).values()}) == 1
    crossed = [Node("a", "ran"), Node("b", "ran"), Node("x", "ran", upstream=["b"]), Node("y", "ran", upstream=["a"])]
    places = boxes(draw(crossed))
    assert (places["a"][0] < places["b"][0]) == (places["y"][0] < places["x"][0])


def test_states_are_told_apart_without_colour_and_the_legend_names_those_that_are_there() -> None:
    markup = draw([Node("a", "ran"), Node("b", "failed", upstream=["a"])])
    assert "executed by this run" in markup and "failed or stopped" in markup and "reused" not in markup
    assert len({mark for mark, _ in STATES.values()}) == len(STATES)
    for state in ("reused", "accepted", "failed", "skipped"):
        assert re.search(rf"\.dag \.{state} rect{{stroke-(dasharray|width)", drawing.STYLE), state


def test_names_and_words_are_escaped_and_nothing_is_fetched_or_run() -> None:
    attack = '"><script>alert(1)</script>'
    markup = draw([Node(attack, "ran", attack, attack)])
    assert "<script" not in markup and "http" not in markup and "onload" not in markup
    ElementTree.fromstring(f"<div>{markup}</div>")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_wide_pipeline_scrolls_and_words_can_be_read_in_light_and_dark(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    from pipelines import report

    leaves = [Node(f"train_{i}", list(STATES)[i % len(STATES)], "12 s", upstream=["ingest"]) for i in range(15)]
    page_file = tmp_path / "page.html"
    markup = draw([Node("ingest", "ran"), *leaves])
    page_file.write_text(
        f"<!doctype html><meta charset=utf-8><style>{report.STYLE}{drawing.STYLE}</style><main>{markup}</main>"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_context(color_scheme=scheme, viewport={"width": 700, "height": 600}).new_page()  # type: ignore[arg-type]
            page.goto(page_file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 700, (
                "the page itself does not scroll sideways"
            )
            assert page.evaluate("document.querySelector('.dag').scrollWidth") > 2_000, "the drawing does"
            text, behind = page.evaluate(
                "[getComputedStyle(document.querySelector('.dag .name')).fill, getComputedStyle(document.documentElement).colorScheme]"
            )
            assert behind == "light dark"
            assert text == ("rgb(0, 0, 0)" if scheme == "light" else "rgb(255, 255, 255)")
        browser.close()
