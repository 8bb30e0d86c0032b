"""What counts as the same text."""

import re
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.text.normalise import content_key, in_validation, normalise, normalise_row

text = st.text(alphabet=st.characters(codec="utf-8"))


def test_equal_looking_texts_become_equal() -> None:
    assert normalise("e\u0301") == "\u00e9"
    assert normalise("a \t\r\nb\rc\u2028d") == "a\nb\nc\nd"
    assert normalise("a\x00\x07\ufeffb\tc") == "ab\tc"
    assert normalise("a\n\n\n \n\nb") == "a\n\nb"
    assert normalise("e\x00\u0301") == "\u00e9"


def test_white_space_that_means_something_stays() -> None:
    code = "def f():\n    return  1\n"
    assert normalise(code) == code
    assert normalise_row("", "\n\n" + code + "\n ") == ("", "def f():\n    return  1")
    assert normalise_row("Q: 2+2\nA: ", " 4\n") == ("Q: 2+2\nA: ", " 4")


@given(text)
@settings(max_examples=300, deadline=None)
def test_normalising_twice_changes_nothing_more(value: str) -> None:
    once = normalise(value)
    assert normalise(once) == once
    assert unicodedata.is_normalized("NFC", once)
    assert normalise_row("", normalise_row("", value)[1]) == normalise_row("", value)


@given(st.one_of(text, st.text(alphabet="a \t\r\n\x00\x0b\u00a0\u2028e\u0301\ufeff")))
@settings(max_examples=500, deadline=None)
def test_shortcuts_for_plain_texts_give_what_the_rules_say(value: str) -> None:
    said = re.sub(r"\r\n?|\u0085|\u2028|\u2029", "\n", value)
    said = "".join(c for c in said if c in "\t\n" or not (ord(c) < 0x20 or ord(c) in (0x7F, 0xFEFF)))
    said = re.sub(r"[^\S\n]+(?=\n)", "", unicodedata.normalize("NFC", said))
    assert normalise(value) == re.sub(r"\n{3,}", "\n\n", said)


@given(text, text, text, text)
def test_keys_are_equal_only_for_equal_rows(a: str, b: str, c: str, d: str) -> None:
    assert (content_key(a, b) == content_key(c, d)) == ((a, b) == (c, d))
    assert content_key("ab", "c") != content_key("a", "bc")


def test_the_split_has_the_share_that_was_asked_for_and_grows_without_moving_rows() -> None:
    keys = [content_key("", str(i)) for i in range(20_000)]
    small, large = ({k for k in keys if in_validation(k, share)} for share in (0.05, 0.2))
    assert abs(len(small) / 20_000 - 0.05) < 0.006 and abs(len(large) / 20_000 - 0.2) < 0.012
    assert small < large
