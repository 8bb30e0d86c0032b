"""The data card: every row accounted for, every string escaped, and to be read in light and dark and on a telephone."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipelines import data_card, data_page, drawing, report
from pipelines.data_card import Card, Level
from pipelines.plan import Step
from pipelines.store import Record
from stages.artifacts import Artifact, Checkpoint, Corpus, PairDataset, Rows, TokenDataset
from stages.contract import Stage, StageConfig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ATTACK = '"><script>alert(1)</script>&amp;'


def card(sources: int = 1, reasons: int = 0, quarantine: int = 0, rows: int = 100_000, name: str = "source") -> Card:
    """A card as the stages make one: `reasons` rules of clean that took rows, `quarantine` codes of ingest."""
    bad = {code: 40 * (n + 1) for n, code in enumerate(["broken_json", "not_text", "missing_field"][:quarantine])}
    gone = {f"rule_{n:02d}": rows // 4 >> n for n in range(reasons) if rows // 4 >> n}
    kept = rows - sum(gone.values())
    tokens = {"train": kept * 190, "validation": kept * 10}
    each: list[dict[str, Any]] = [
        {"name": f"{name}-{n}" if sources > 1 else name, "weight": float(n + 1)} for n in range(sources)
    ]
    languages = {"en": kept, "de": kept // 3, "fr": kept // 9, "la": 3}
    raw = {
        "rows": rows,
        "characters": rows * 900,
        "quarantined": sum(bad.values()),
        "reasons": bad,
        "sources": [
            {**s, "format": "chat", "why": "first rows hold `messages`", "rows": rows // sources, "quarantined": 0}
            for s in each
        ],
    }
    corpus = {
        "waterfall": [
            {"step": "in", "rows": rows, "characters": rows * 900},
            {"step": "normalise", "rows": 0, "characters": 1_234},
            *({"step": reason, "rows": count, "characters": count * 700} for reason, count in gone.items()),
            {"step": "too_long", "rows": 0, "characters": 0},
            {"step": "out", "rows": kept, "characters": kept * 900},
        ],
        "reasons": {reason: f"what {reason} asks for (stages.clean.quality)" for reason in gone},
        "sources": [{**s, "rows": kept // sources, "languages": languages} for s in each],
        "clusters": {"exact": {"2": 30, "3": 4, "9": 1, "700": 1}, "near": {"2": 12}},
        "characters_log2": {str(n): 2 ** (12 - abs(n - 10)) for n in range(3, 19)},
        "masked": {"EMAIL": 40, "IP": 2},
        "contaminated": {},
        "split_overlap": 0,
        "train": {"rows": kept * 19 // 20, "characters": kept * 855},
        "validation": {"rows": kept - kept * 19 // 20, "characters": kept * 45},
    }
    made = {
        "waterfall": [
            {"step": "in", "documents": kept},
            {"step": "over_long", "documents": 5},
            {"step": "out", "documents": kept - 5},
        ],
        "reasons": {"over_long": "longer than stages.tokenize.sequence_length"},
        "sources": [{**s, "train": {"tokens": tokens["train"] // sources}} for s in each],
        "tokens_log2": {str(n): 2 ** (9 - abs(n - 8)) for n in range(2, 13)},
        **{
            split: {"tokens": count, "supervised_tokens": count // 3, "documents": kept}
            for split, count in tokens.items()
        },
    }
    drawn = {
        s["name"]: {"rows": 10, "share": s["weight"] / sum(x["weight"] for x in each), "epochs": 1.5} for s in each
    }
    return Card(raw, corpus, made, drawn if sources > 1 else {})


def test_every_row_is_accounted_for_from_the_files_to_tokens() -> None:
    levels = data_card.waterfall(card(reasons=30, quarantine=3))
    standing = 0
    for level in levels:
        if level.left:
            standing -= level.rows
        else:
            assert standing in (0, level.rows), f"{level.label} is what is left of the total before"
            standing = level.rows
    assert [level.label for level in levels if not level.left] == ["found", "read", "kept", "became tokens"]
    assert [level.label for level in levels if level.bad] == ["missing_field", "not_text", "broken_json"]
    assert all(level.words for level in levels if level.left and level.label != "normalise")
    assert "too_long" not in {level.label for level in levels}, "what took nothing is not listed"


def test_a_stage_that_did_not_run_leaves_no_hole() -> None:
    whole = card()
    assert data_page.page(Card()) == "" and not Card()
    assert "Length in tokens" not in data_page.page(Card(whole.rows, whole.corpus))
    assert [level.label for level in data_card.waterfall(Card(rows=whole.rows))] == ["read"]
    assert [level.label for level in data_card.waterfall(Card(tokens=whole.tokens))] == [
        "into tokenize",
        "over_long",
        "became tokens",
    ]
    for part in (Card(rows=whole.rows), Card(corpus=whole.corpus), Card(tokens=whole.tokens), Card(corpus={"rows": 1})):
        ElementTree.fromstring(data_page.page(part).replace("&nbsp;", " "))
        list(data_card.lines(part))


@pytest.mark.parametrize("given", [card(), card(12, 30, 3), card(reasons=1, rows=3)])
def test_the_card_is_well_formed_and_fetches_and_runs_nothing(given: Card) -> None:
    markup = data_page.page(given)
    ElementTree.fromstring(markup)
    assert "<script" not in markup and "http" not in markup and "url(" not in markup + data_page.STYLE
    for width in re.findall(r"width:([\d.]+)%", markup):
        assert 0 <= float(width) <= 100


def test_every_string_of_the_data_is_escaped() -> None:
    given = card(2, 3, 2, name=ATTACK)
    given.examples = {ATTACK: [{"id": ATTACK, "source": ATTACK, "text": ATTACK}]}
    facts: Any = given.rows
    facts["sources"][0]["why"] = facts["sources"][0]["format"] = ATTACK
    facts["reasons"] = {ATTACK: 5}
    changed: Any = given.corpus
    changed["reasons"] = {"rule_00": ATTACK}
    changed["masked"] = {ATTACK: 1}
    changed["sources"][0]["languages"] = {ATTACK: 2}
    markup = data_page.page(given)
    assert "<script" not in markup and markup.count("&lt;script&gt;") >= 9
    ElementTree.fromstring(markup)


def test_shares_are_of_what_was_asked_for_and_what_training_drew() -> None:
    given = card(3)
    assert [round(s["wanted"], 3) for s in data_card.shares(given)] == [0.167, 0.333, 0.5]
    assert [round(s["drawn"], 3) for s in data_card.shares(given)] == [0.167, 0.333, 0.5]
    given.trained = {}
    assert [(s["drawn"], round(s["stored"], 2)) for s in data_card.shares(given)] == [(None, 0.33)] * 3


def test_small_reasons_are_folded_with_their_sum_and_large_ones_are_not() -> None:
    markup = data_page.page(card(reasons=30))
    hidden = [level for level in data_card.waterfall(card(reasons=30)) if level.left and level.rows < 100]
    assert len(hidden) > 5 and "more reasons" in markup
    assert "Nothing left on the way" not in markup
    empty = card()
    tokens: Any = empty.tokens
    tokens["waterfall"] = [{"step": "in", "documents": 100_000}, {"step": "out", "documents": 100_000}]
    corpus: Any = empty.corpus
    corpus["waterfall"] = [entry for entry in corpus["waterfall"] if entry["step"] != "normalise"]
    assert "Nothing left on the way" in data_page.page(empty)


def test_histograms_have_no_gaps_and_name_their_ranges() -> None:
    assert data_page._lengths({"1": 3, "4": 5, "11": 1})[:4] == [("1", 3), ("2 – 4", 0), ("4 – 8", 0), ("8 – 16", 5)]
    assert data_page._lengths({"11": 1, "21": 2})[-1] == ("1M – 2M", 2) and data_page._lengths({}) == []
    sizes = Card(corpus={"clusters": {"near": {"2": 7, "4": 1, "5": 1, "8": 1, "9": 2, "16": 1, "700": 1}}})
    found = [("2 rows", 7), ("4 rows", 1), ("5 to 8 rows", 2), ("9 to 16 rows", 3), ("513 to 1024 rows", 1)]
    assert data_page._clusters(sizes, "near") == found


def step(name: str, output: type[Artifact], *inputs: Step) -> Step:
    stage = Stage(name, lambda: None, StageConfig, {}, output, (), False, None, None)  # type: ignore[arg-type,return-value]
    cfg = StageConfig(inputs={f"in{n}": up.name for n, up in enumerate(inputs)})
    return Step(name, stage, cfg, upstream=list(inputs))


def test_the_card_follows_the_edges_to_what_the_tokens_were_made_from() -> None:
    first, other = step("ingest", Rows), step("more", Rows)
    cleaned, unused = step("clean", Corpus, other), step("clean_other", Corpus, first)
    packed = step("tokenize", TokenDataset, cleaned)
    trained = step("train", Checkpoint, packed)
    steps = [first, other, unused, cleaned, packed, trained]
    facts: dict[str, dict[str, Any]] = {s.name: {"name": s.name} for s in steps} | {
        "train": {"sources": {"a": {"share": 1.0}}}
    }
    found = Card.of(steps, facts)
    assert (found.rows["name"], found.corpus["name"], found.tokens["name"]) == ("more", "clean", "tokenize")
    assert found.trained == {"a": {"share": 1.0}}
    assert Card.of(steps[:2], facts).rows["name"] == "more" and not Card.of([], {})


def test_preference_pairs_have_a_card_too() -> None:
    rows = [{"step": "in", "rows": 10}, {"step": "identical", "rows": 2}, {"step": "out", "rows": 8}]
    split = {"pairs": 7, "chosen_tokens": 70, "rejected_tokens": 30}
    facts = {"waterfall": rows, "train": split, "validation": {**split, "pairs": 1}}
    found = Card(tokens=facts)
    assert [level.label for level in data_card.waterfall(found)] == ["into pair", "identical", "became pairs"]
    assert ("train pairs", "7", "100 tokens in answers") in list(data_card.lines(found))
    assert "<th>chosen tokens</th>" in data_page.page(found)
    cleaned = step("clean", Corpus)
    steps = [cleaned, step("pair", PairDataset, cleaned)]
    assert Card.of(steps, {"pair": facts, "clean": {"rows": 10}}) == Card({}, {"rows": 10}, facts)


def test_examples_are_read_line_by_line_whatever_stands_in_them() -> None:
    text = '{"reason":"too_long","id":"a:1","source":"a","text":"one\u2028two"}\nbroken\n{"reason":1}\n[]\n'
    assert data_card.read_examples(text.encode()) == {
        "too_long": [{"id": "a:1", "source": "a", "text": "one\u2028two"}]
    }
    assert data_card.read_examples(None) == {}
    assert data_card.examples_of([step("clean", Corpus)]) is None, "nobody asked for texts"


def test_the_description_in_mlflow_is_short_and_says_the_same() -> None:
    found = list(data_card.lines(card(12, 30, 3)))
    assert len(found) < 40
    assert ("read", "100,000", "90,000,000 characters") in found and (
        "on both sides of the split",
        "0",
        "contents",
    ) in found
    assert sum(line[1].startswith("−") for line in found) == 8
    assert [level for level in data_card.waterfall(card()) if level == Level("read", 100_000, 90_000_000)]


def write(directory: Path, given: Card, title: str) -> Path:
    """The report's page with this card alone."""
    made = step("ingest", Rows)
    made.record = Record(
        "f" * 64, "d" * 64, {}, {"run_id": "e3" * 16, "headline": "1,531 rows, 803,074 characters: " * 3}
    )
    facts = report.Facts(title, "FINISHED", "", "make run", 1, [made], card=given)
    page = directory / f"{title}.html"
    page.write_text(report.page(facts))
    return page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_never_scrolls_sideways_and_words_can_be_read(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    many = card(12, 30, 3, name="a_long_name_of_a_source_without_any_space_in_it")
    many.examples = {"rule_00": [{"id": "a:1", "source": "a", "text": "x" * 2_000}]}
    cards = {"plain": card(), "many": many}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for title, given in cards.items():
            for scheme in ("light", "dark"):
                for width in (400, 1_000):
                    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
                    page = context.new_page()
                    page.goto(write(tmp_path, given, title).as_uri())
                    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                    assert page.evaluate("document.documentElement.scrollWidth") <= width
                    bars = page.evaluate(
                        "[...document.querySelectorAll('.dc-bar')].map(b => b.getBoundingClientRect().width)"
                    )
                    assert min(bars) > 40, "a bar has room"
                    context.close()
        browser.close()


def test_the_report_holds_the_card_once(tmp_path: Path) -> None:
    page = write(tmp_path, card(2, 3), "t").read_text()
    assert page.count("<h2>Data card</h2>") == 1 and data_page.STYLE in page and drawing.STYLE in page
    facts = report.Facts("t", "FINISHED", "", "make run", 1, [], card=dataclasses.replace(card(2, 3)))
    assert "| read | 100,000 | 90,000,000 characters |" in report.markdown(facts)
