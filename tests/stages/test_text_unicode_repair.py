"""Broken text comes back; whole text comes back as it was."""

import pytest

from stages.text.curation import UnicodeRepair
from stages.text.unicode_repair import repair

BROKEN = {
    "schÃ¶n": "schön",
    "itâ€™s â€œfineâ€\x9d": "it’s “fine”",
    "ã\x81\x93ã\x82\x93": "こん",
    "Ã\xa0 la carte": "à la carte",
    "l&eacute;on &amp; co": "léon & co",
    "\x1b[31mred\x1b[0m": "red",
    "one fine line: schön\nand one brokÃ©n": "one fine line: schön\nand one brokén",
}
WHOLE = [
    "",
    "plain",
    "schön, naïve, “quoted” ﬁnd ＡＢ ｶﾞ",
    "if (a < b && c > d) { x &= y; }",
    "<p>caf&eacute;</p>",
    "tab\tand\r\nlines\n\n  indented",
    "今天天气很好，我们一起去公园散步吧。",
    "e\u0301 stays decomposed: normalisation has its own step",
    "emoji 👩‍👩‍👧 and flags 🇩🇪",
    "a letter of Portuguese: NÃO, IRMÃ, MAÇÃ E PÃO",
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_a_broken_encoder_did_is_undone(text: str) -> None:
    assert repair(text, UnicodeRepair()) == BROKEN[text]
    assert repair(BROKEN[text], UnicodeRepair()) == BROKEN[text]


@pytest.mark.parametrize("text", WHOLE)
def test_whole_text_stays_as_it_is(text: str) -> None:
    assert repair(text, UnicodeRepair()) == text


@pytest.mark.parametrize(
    ("option", "text", "after", "without"),
    [
        ("encoding", "schÃ¶n", "schön", "schÃ¶n"),
        ("html_entities", "l&eacute;on", "léon", "l&eacute;on"),
        ("terminal_escapes", "\x1b[31mred", "red", "\x1b[31mred"),
        ("straight_quotes", "“q”", '"q"', "“q”"),
        ("ligatures", "ﬁnd", "find", "ﬁnd"),
        ("character_width", "ＡＢ ｱ", "AB ア", "ＡＢ ｱ"),
    ],
)
def test_each_option_does_its_own_part(option: str, text: str, after: str, without: str) -> None:
    off = UnicodeRepair(encoding=False, html_entities=False, terminal_escapes=False)
    assert repair(text, off) == without
    setattr(off, option, True)
    assert repair(text, off) == after


def test_entities_stay_from_the_first_line_of_markup_on() -> None:
    assert repair("a &eacute;\n<p>&eacute;\n&eacute;", UnicodeRepair()) == "a é\n<p>&eacute;\n&eacute;"
