"""The published rules: each case was also given to datatrove 0.10.1, which says the same unless a test says otherwise."""

import random
import re

import pytest

from stages.text import quality
from stages.text.curation import C4, FineWeb, Gopher, Quality, Repetition
from stages.text.quality import Rules, reasons, sentences_in, words_of

U = [f"word{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(200)]
"""Two hundred different words of six letters."""


def some(count: int, start: int = 0) -> str:
    return " ".join(U[start : start + count])


def only(**groups: Gopher | Repetition | C4 | FineWeb) -> Rules:
    return Rules(Quality(**({"gopher": None, "repetition": None, "c4": None, "fineweb": None} | groups)))


LINES = [some(8, 8 * number) for number in range(8)]

GOPHER = {
    "49 words": (some(47) + " the of", "gopher_few_words"),
    "50 words": (some(48) + " the of", None),
    "24 of 60 words have one letter": ("a b c of the " * 12, "gopher_short_words"),
    "half of the words have 20 letters": ("the of " + "internationalisations " * 50, "gopher_long_words"),
    "6 hashes, 56 words": (some(48) + " the of" + " #" * 6, "gopher_hashes"),
    "5 hashes, 55 words": (some(48) + " the of" + " #" * 5, None),
    "6 ellipses, 56 words": (some(48) + " the of" + " ..." * 6, "gopher_ellipses"),
    "12 of 12 lines are bullets": (
        "\n".join(f"- {some(5, 5 * n)}" for n in range(12)) + " the of",
        "gopher_bullet_lines",
    ),
    "9 of 10 lines are bullets": ("\n".join(f"- {some(5, 5 * n)}" for n in range(9)) + "\nthe of so on and on", None),
    "3 of 8 lines end in an ellipsis": (
        "\n".join(line + ("..." if number < 3 else ".") for number, line in enumerate(LINES)) + " the of",
        "gopher_ellipsis_lines",
    ),
    "2 of 8 lines end in an ellipsis": (
        "\n".join(line + ("…" if number < 2 else ".") for number, line in enumerate(LINES)) + " the of",
        None,
    ),
    "32 of 52 words have letters": (
        some(30) + " the of " + " ".join(map(str, range(100, 120))),
        "gopher_few_letters",
    ),
    "one stop word": (some(60) + " the", "gopher_stop_words"),
    "stop words are written small": (some(60) + " The OF", "gopher_stop_words"),
    "two stop words": (some(60) + " the with", None),
    "no spaces between words": ("今天天气很好，我们一起去公园散步吧。" * 20, "gopher_few_words"),
    "punctuation alone": ("! ? . , ; :" * 20, "gopher_few_words"),
}

REPETITION = {
    "2 of 4 paragraphs again": (
        "\n\n".join(["one two three", "four five six", *["one two three"] * 2]),
        "repeated_paragraphs",
    ),
    "34 of 85 characters in a paragraph again": (
        "\n\n".join([some(5), "a b", "c d", "e f", some(5)]),
        "repeated_paragraph_characters",
    ),
    "2 of 6 lines again": ("\n".join(["a b", "c d", "e f", "a b", "c d", some(40)]), "repeated_lines"),
    "55 of 189 characters in a line again": (
        "\n".join([some(8), "a", "b", "c", "d", some(8), some(10, 20)]),
        "repeated_line_characters",
    ),
    "12 times 8 of 401 characters": (
        some(30) + " " + " ".join(f"big deal {word}" for word in U[40:52]),
        "top_2_gram",
    ),
    "10 times 13 of 629 characters": (
        some(60) + " " + " ".join(f"very big deal {word}" for word in U[70:80]),
        "top_3_gram",
    ),
    "9 times 15 of 626 characters": (
        some(60) + " " + " ".join(f"a very big deal {word}" for word in U[70:79]),
        "top_4_gram",
    ),
    "5 times 30 of 559 characters": (
        some(50) + " " + " ".join(f"{some(5, 3 * number)} {U[100 + number]}" for number in range(5)),
        "repeated_5_grams",
    ),
    "60 of 783 characters": (some(100) + " " + some(12, 10), None),
    "one word": ("yes " * 100, "top_2_gram"),
    "one line": (some(60), None),
}

FIVE = [f"This is sentence {word}." for word in ("one", "two", "three", "four", "five")]
C4_PUBLISHED = {
    "five sentences": ("\n".join(FIVE), None),
    "four sentences": ("\n".join(FIVE[:4]), "c4_few_sentences"),
    "five in one line": ("One is here. Two is here! Is three here? Four is here. Five is here.", None),
    "a curly bracket": ("This is { one. " + " ".join(FIVE), "c4_curly_bracket"),
    "filler text": ("Lorem ipsum dolor sit amet. " + " ".join(FIVE), "c4_lorem_ipsum"),
    "lines about JavaScript": ("Please enable Javascript now.\n" * 5, "c4_few_sentences"),
    "lines about cookies": ("We use cookies here today.\n" * 5, "c4_few_sentences"),
    "two words a line": ("Too few.\n" * 9, "c4_few_sentences"),
    "lines without an end": ("these lines have no end\n" * 6, "c4_few_sentences"),
    "words without an end": (f"One is {'x' * 1001}.\n" * 6, "c4_few_sentences"),
    "a bracket in a line that does not count": ("\n".join(["Javascript { is here today.", *FIVE]), None),
}

CJK = "今天天气很好，我们一起去公园散步吧，那里有很多花，还有很多人在那里{}。"
FINEWEB = {
    "no line has an end": ("\n".join(some(6, 6 * number) for number in range(9)), "fineweb_punctuation"),
    "one of 8 lines has an end": ("\n".join(some(6, 6 * n) + "." * (n == 0) for n in range(8)), None),
    "one of 9 lines has an end": ("\n".join(some(6, 6 * n) + "." * (n == 0) for n in range(9)), "fineweb_punctuation"),
    "3 of 4 lines are short": (
        "\n".join([f"{word} ends." for word in U[:3]] + [some(12, 20) + "."]),
        "fineweb_short_lines",
    ),
    "2 of 3 lines are short": ("\n".join([f"{word} ends." for word in U[:2]] + [some(12, 20) + "."]), None),
    "a line again": ("\n".join([some(6) + "."] * 2), "fineweb_repeated_lines"),
    "more ends of lines than words": ("\n".join(["x" * 40 + ".", "\n" * 30, some(12) + "."]), "fineweb_list"),
    "ends of sentences in Chinese": (CJK.format("跑步") + "\n" + CJK.format("跳舞"), None),
    "white space": (" \n ", "empty"),
}


@pytest.mark.parametrize("case", GOPHER)
def test_gopher_quality(case: str) -> None:
    text, reason = GOPHER[case]
    assert only(gopher=Gopher()).reason(text) == reason


@pytest.mark.parametrize("case", REPETITION)
def test_gopher_repetition(case: str) -> None:
    text, reason = REPETITION[case]
    assert only(repetition=Repetition()).reason(text) == reason


@pytest.mark.parametrize("case", C4_PUBLISHED)
def test_c4_as_published(case: str) -> None:
    text, reason = C4_PUBLISHED[case]
    assert only(c4=C4(terminal_punctuation=True)).reason(text) == reason


@pytest.mark.parametrize("case", FINEWEB)
def test_fineweb(case: str) -> None:
    text, reason = FINEWEB[case]
    assert only(fineweb=FineWeb()).reason(text) == reason


def test_c4_as_fineweb_takes_it_asks_for_no_ends_of_lines() -> None:
    assert only(c4=C4()).reason("these lines have no end\n" * 6) is None


def test_c4_removes_lines_only_when_asked_and_what_comes_after_judges_the_rest() -> None:
    text = "\n".join(["Menu", "We use cookies here today.", *FIVE, "As is known [3] it [edit] is known.", "Home"])
    assert only(c4=C4()).lines(text) == text
    assert only(c4=C4(remove_lines=True)).lines(text) == "\n".join([*FIVE, "As is known  it  is known."])
    assert Rules(Quality(gopher=None)).lines(text) == text
    copies = "\n".join([*(f"{line} And it goes on for more than thirty." for line in FIVE), "Menu a", "Menu a"])
    assert only(c4=C4(), fineweb=FineWeb()).reason(copies) == "fineweb_repeated_lines"
    assert only(c4=C4(min_words_per_line=3, remove_lines=True), fineweb=FineWeb()).reason(copies) is None


def test_a_short_text_in_which_nothing_comes_again_is_no_repetition() -> None:
    # datatrove takes the most frequent 2-gram of two words, once there, for a repetition.
    assert only(repetition=Repetition()).reason("hello world") is None


@pytest.mark.parametrize(
    "text", ["", "\n", " \t ", "!!!", "…", "a", "。", "一" * 400, "-\n-\n-", "a" * 3000, "😀" * 60, "\u0000"]
)
@pytest.mark.parametrize(
    "group",
    [
        {"gopher": Gopher(min_words=0, min_stop_words=0)},
        {"repetition": Repetition()},
        {"c4": C4()},
        {"fineweb": FineWeb()},
    ],
)
def test_no_text_is_so_strange_that_a_rule_fails(
    text: str, group: dict[str, Gopher | Repetition | C4 | FineWeb]
) -> None:
    rules = only(**group)
    reason = rules.reason(text)
    assert reason is None or reason in reasons(rules.cfg)
    assert text.strip() or reason == "empty"


def test_every_reason_is_explained_with_the_threshold_that_loosens_it() -> None:
    told = reasons(Quality(gopher=Gopher(min_words=7), repetition=Repetition(top_ngrams={2: 0.5}, duplicate_ngrams={})))
    assert told["gopher_few_words"] == "below gopher.min_words=7"
    assert told["top_2_gram"] == "above repetition.top_ngrams.2=0.5"
    assert "top_3_gram" not in told
    cases = {reason for table in (GOPHER, REPETITION, C4_PUBLISHED, FINEWEB) for _, reason in table.values() if reason}
    assert cases <= set(reasons(Quality()))


def test_punctuation_is_counted_among_words_or_not() -> None:
    text = " ".join(f"{word}(), " for word in U[:60]) + "the of"  # 62 words with letters, 180 marks
    assert only(gopher=Gopher()).reason(text) == "gopher_few_letters"
    assert only(gopher=Gopher(count_punctuation=False)).reason(text) is None
    hashes = some(48) + " the of" + " #" * 6  # 6 of 56 or of 50
    assert only(gopher=Gopher(max_symbols_per_word=0.11)).reason(hashes) is None
    assert only(gopher=Gopher(max_symbols_per_word=0.11, count_punctuation=False)).reason(hashes) == "gopher_hashes"


def test_a_group_that_is_null_and_a_rule_that_is_wide_open_refuse_nothing() -> None:
    assert only(repetition=Repetition(duplicate_ngrams={}, top_ngrams={})).reason("yes " * 100) is None
    assert only(gopher=Gopher(min_stop_words=0)).reason(some(60)) is None
    assert only(c4=C4(curly_bracket=False, min_sentences=0)).reason("x { y") is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gopher(max_bullet_lines=1.5), "gopher.max_bullet_lines"),
        (lambda: Gopher(min_words=10, max_words=5), "gopher.max_words"),
        (lambda: Gopher(min_stop_words=9), "gopher.min_stop_words"),
        (lambda: Repetition(top_ngrams={0: 0.1}), "repetition.top_ngrams"),
        (lambda: Repetition(duplicate_ngrams={5: 2.0}), "repetition.duplicate_ngrams.5"),
        (lambda: C4(max_word_length=0), "c4.max_word_length"),
        (lambda: FineWeb(max_short_lines=-0.1), "fineweb.max_short_lines"),
        (lambda: Quality(gopher=None, repetition=None, c4=None, fineweb=None), "quality=null"),
    ],
)
def test_impossible_thresholds_are_refused_by_name(make: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_words_and_sentences() -> None:
    assert words_of("Don't stop, it's 3.14 (at http://a.b/c?d)...") == [
        "Don't", "stop", ",", "it's", "3.14", "(", "at", "http://a.b/c?d)...",
    ]  # fmt: skip
    assert [sentences_in(line) for line in ("", "no end", "One. Two", 'He said: "Go!" Then', "3.14 is it.", "Wait...")] == [
        0, 1, 2, 2, 1, 1,
    ]  # fmt: skip


def test_lines_and_paragraphs_are_what_the_published_expressions_split() -> None:
    chance = random.Random(0)
    for text in ("".join(chance.choices("a b\n", [2, 1, 1, 3], k=chance.randint(1, 12))) for _ in range(5_000)):
        if text.strip():
            assert quality._lines(text) == re.split(r"\n+", text)
            assert quality._paragraphs(text.strip()) == re.split(r"\n{2,}", text.strip())
