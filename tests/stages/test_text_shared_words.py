"""Which rows share the longest runs of words with a text, against a search that tries every run."""

from hypothesis import given
from hypothesis import strategies as st

from stages.text.decontaminate import words_of
from stages.text.record import CHAT, TEXT, Record, canonical
from stages.text.shared_words import LEAST, Runs, search

WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=12)


def row(name: str, text: str) -> Record:
    return Record(name, "file", TEXT, text=text)


def every_run(words: list[str], texts: list[list[str]]) -> int:
    """Length of the longest run that stands in one of the texts, found by trying all of them."""
    known = {tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    runs = {tuple(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    return max((len(run) for run in runs & known), default=0)


@given(st.lists(WORDS, max_size=3), WORDS)
def test_the_longest_run_is_the_one_that_trying_all_runs_finds(texts: list[list[str]], words: list[str]) -> None:
    most, end = Runs([" ".join(text) for text in texts]).longest(words)
    assert most == every_run(words, texts)
    assert most == 0 or any(text[i : i + most] == words[end - most : end] for text in texts for i in range(len(text)))


def test_rows_come_by_the_length_of_what_they_share_then_as_they_stand() -> None:
    answer = "It says: one two three four five six seven, and then something else entirely."
    rows = [
        row("none", "nothing of it"),
        row("five", "before one two three four five after"),
        row("seven", "ONE two, three: four five -- six (seven)!"),
        row("again", "one two three four five"),
        row("four", "one two three four"),
    ]
    found = search([answer], rows, most=2)
    assert (found.rows, found.sharing) == (5, 3) and LEAST == 5
    assert [(match.words, match.record.id) for match in found.matches] == [(7, "seven"), (5, "five")]
    assert [match.shared for match in found.matches] == [
        "ONE two, three: four five -- six (seven",
        "one two three four five",
    ]


def test_a_run_never_reaches_from_one_choice_into_the_next() -> None:
    whole = row("whole", "one two three four five six")
    assert search(["one two three", "four five six"], [whole], 5).matches == []
    assert search(["nothing", "one two three four five six"], [whole], 5).matches[0].words == 6


def test_what_a_chat_says_counts_and_letters_that_grow_when_lowered_are_quoted() -> None:
    messages = canonical(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "İ one two three four five"}]
    )
    chat = Record("chat", "file", CHAT, messages=messages)
    (match,) = search(["one two three four five"], [chat], 5).matches
    assert (match.words, match.shared) == (5, "one two three four five")


def test_a_text_that_repeats_itself_is_compared_in_one_pass() -> None:
    again = "again " * 20_000
    (match,) = search([again], [row("long", again + "x " + again)], 5).matches
    assert match.words == 20_000 == len(words_of(match.shared))
