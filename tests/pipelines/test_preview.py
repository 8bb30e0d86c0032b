"""`make preview`: what a person sees of the tokens is what training sees, whatever the text, the terminal and the tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole
from tokenizers import Tokenizer, decoders, models

from pipelines import preview, token_view
from pipelines.config import ROOT
from pipelines.mistakes import ConfigError
from pipelines.preview import Wanted
from pipelines.token_view import Fold, Token, Vocabulary
from stages.text.tokenizer import train

EOS = 0


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are the 256 bytes (no merges) and an EOS with id 0."""
    directory = tmp_path_factory.mktemp("tokenizer")
    train(["ab"], 257, directory)
    return directory


def ids_of(directory: Path, text: str) -> list[int]:
    found: list[int] = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    return found


def dataset(
    directory: Path, tokenizer: Path, rows: list[tuple[list[int], list[bool], list[int]]], **facts: int
) -> Path:
    """A TokenDataset of one split, as `tokenize` writes it."""
    (directory / "train").mkdir(parents=True)
    (directory / "tokenizer").symlink_to(tokenizer)
    columns = {
        "input_ids": [ids for ids, _, _ in rows],
        "labels": [[i if on else -100 for i, on in zip(ids, loss, strict=True)] for ids, loss, _ in rows],
        "document_starts": [starts for _, _, starts in rows],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), directory / "train" / "part-00000.parquet")
    tokens = sum(len(ids) for ids, _, _ in rows)
    learned = sum(sum(loss) for _, loss, _ in rows)
    split = {
        "rows": len(rows),
        "tokens": tokens,
        "supervised_tokens": learned,
        "documents": 2,
        "utilisation": 0.9,
        **facts,
    }
    (directory / "summary.json").write_text(
        json.dumps({"sequence_length": len(rows[0][0]), "pad_token_id": EOS, "train": split})
    )
    return directory


def printed(directory: Path, width: int = 80, **wanted: object) -> list[str]:
    summary = json.loads((directory / "summary.json").read_text())
    return [line.plain for line in preview.shown(directory, summary, Wanted(**wanted), width)]  # type: ignore[arg-type]


def test_each_token_has_its_mark_below_it_and_documents_and_padding_are_told_apart(
    tmp_path: Path, bytewise: Path
) -> None:
    question, answer = ids_of(bytewise, "hi?"), [*ids_of(bytewise, "yes"), EOS]
    ids = question + answer + ids_of(bytewise, "ok") + [EOS] + [EOS] * 4
    loss = [False] * 3 + [True] * 4 + [False, True, True] + [False] * 4
    lines = printed(dataset(tmp_path / "data", bytewise, [(ids, loss, [0, 7, 10])]))
    at = next(n for n, line in enumerate(lines) if line.startswith("══ row 1 of 1"))
    assert "2 documents, loss on 6 of 14 tokens" in lines[at]
    assert lines[at + 1].startswith("── document 1: tokens 0 to 6, loss on 4 of 7 ─")
    assert lines[at + 2 : at + 4] == ["  hi?yes⟦<|endoftext|>⟧", "  ···╰╰╰╰" + "─" * 14]
    assert lines[at + 4].startswith("── document 2: tokens 7 to 9, loss on 2 of 3 ─")
    assert lines[at + 5 : at + 7] == ["  ok⟦<|endoftext|>⟧", "  ·╰╰" + "─" * 14]
    assert lines[at + 7].startswith("── padding: 4 tokens without loss, folded ─")
    assert len(lines) == at + 8


def test_a_character_of_several_tokens_is_shown_by_its_bytes_and_once_whole() -> None:
    pieces = [token_view._pieces(b"", b"\xe6\x97", b"\xa5"), token_view._pieces(b"\xe6\x97", b"\xa5!", b"a")]
    assert pieces == [("‹e6·97›", b"\xe6\x97"), ("‹a5→日›!", b"")]
    # What never becomes a character is no character.
    assert token_view._pieces(b"", b"a\xff", b"b") == ("a‹ff›", b"")
    assert token_view._pieces(b"", b"\xe6", b"b") == ("‹e6›", b"")
    assert token_view._pieces(b"", b"\xa5b", b"") == ("‹a5›b", b"")


@pytest.mark.parametrize(
    "text", ["日本語", "naïve café", "👩‍👩‍👧 family", "हिन्दी", "e\u0301\u0301", "plain", "\ud7ff\uffff"]
)
def test_every_text_is_told_by_its_tokens_byte_for_byte(bytewise: Path, text: str) -> None:
    ids = ids_of(bytewise, text)
    assert b"".join(Vocabulary(bytewise).bytes_of(i) for i in ids) == text.encode()
    shown = "".join(t.text for t in token_view.tokens(Vocabulary(bytewise), ids, [True] * len(ids)))
    for letter in text:
        if len(letter.encode()) > 1:
            assert f"→{token_view.visible(letter)}›" in shown
        else:
            assert letter in shown


def test_nothing_of_a_text_is_obeyed_by_the_terminal() -> None:
    attack = "\x1b[2J\x1b]0;owned\x07\r\b\x7f\x9b31m\u202egnp.exe\u200b\ufeff\u2028\U000e0041\u00a0"
    shown = token_view.visible(attack)
    assert all(letter.isprintable() for letter in shown)
    assert "\\u202e" in shown and "␛[2J" in shown and "\\u00a0" in shown and "\\U000e0041" in shown
    assert token_view.visible("a\nb\tc") == "a⏎b⇥c"
    assert token_view.visible("\u0301x") == "◌\u0301x", "an accent of the token before has a place of its own"


def test_text_that_looks_like_a_control_token_is_told_from_one(tmp_path: Path, bytewise: Path) -> None:
    vocabulary = Vocabulary(bytewise)
    assert vocabulary.control(EOS) == "<|endoftext|>"
    read = Tokenizer.from_file(str(bytewise / "tokenizer.json"))
    typed = [i for letter in "<|endoftext|>" for i in read.encode(letter).ids]
    shown = [t.text for t in token_view.tokens(vocabulary, [*typed, EOS], [True] * 14)]
    assert "".join(shown[:13]) == "<|endoftext|>" and shown[13] == "⟦<|endoftext|>⟧"


def test_lines_are_as_wide_as_the_terminal_also_with_wide_letters_and_long_tokens() -> None:
    seen = [Token("日本" * 3, n, n % 2 == 0) for n in range(9)] + [Token("x" * 75, 9, True), Token(" y", 10, False)]
    for ids in (False, True):
        lines = [line.plain for line in token_view.lines(seen, 20, ids)]
        assert all(cell_len(line) <= 20 for line in lines)
        texts, marks = lines[:: 3 if ids else 2], lines[1 :: 3 if ids else 2]
        assert "".join(texts).replace(" ", "") == "".join(t.text for t in seen).replace(" ", "")
        assert [cell_len(a) for a in texts] == [cell_len(b) for b in marks]
        assert "".join(marks).count("╰") == 6 and "".join(marks).count("·") == 5
    assert "10" in "".join(line.plain for line in token_view.lines(seen, 20, True))


def test_a_line_of_the_text_begins_a_line_and_empty_ones_take_no_room() -> None:
    seen = [Token("a⏎", 1, True), Token("⏎", 2, True), Token("⏎  ", 3, True), Token("b", 4, False)]
    assert [line.plain for line in token_view.lines(seen, 40)] == ["a⏎⏎⏎", "╰─╰╰", "  b", "──·"]


def test_long_runs_are_folded_but_no_change_of_the_mask_is() -> None:
    seen = [Token("x", n, 500 <= n < 510) for n in range(1_000)]
    items = list(token_view.folded(seen, whole=False))
    hidden = [item.words for item in items if isinstance(item, Fold)]
    assert hidden == ["… 340 tokens only read, folded …", "… 330 tokens only read, folded …"]
    kept = {item.id for item in items if isinstance(item, Token)}
    assert set(range(460, 550)) <= kept and len(kept) == 330
    assert list(token_view.folded(seen, whole=True)) == seen


def test_rows_come_from_all_over_and_are_the_same_again() -> None:
    assert preview.spread(3_000, 3, seed=0) == preview.spread(3_000, 3, seed=0) != preview.spread(3_000, 3, seed=1)
    for seed in range(20):
        rows = preview.spread(3_000, 3, seed)
        assert [row // 1_000 for row in rows] == [0, 1, 2]
    assert preview.spread(2, 5, seed=7) == [0, 1] and preview.spread(0, 3, seed=0) == []


@pytest.mark.parametrize(
    "learned, prompts, words",
    [(0, 5, "under 1% of the tokens"), (99, 5, "although there are prompts"), (99, 0, None), (50, 5, None)],
)
def test_a_mask_that_is_hardly_meant_is_warned_of(
    tmp_path: Path, bytewise: Path, learned: int, prompts: int, words: str | None
) -> None:
    loss = [n < learned for n in range(100)]
    lines = printed(dataset(tmp_path / "d", bytewise, [([1] * 100, loss, [0])], prompt_tokens=prompts))
    warnings = [line for line in lines if line.startswith("warning:")]
    assert len(warnings) == (words is not None) and (words is None or words in warnings[0])


def test_without_colour_no_escape_is_written_and_with_it_the_words_are_the_same(tmp_path: Path, bytewise: Path) -> None:
    directory = dataset(tmp_path / "d", bytewise, [([1, 2, 3], [False, True, True], [0])])
    summary = json.loads((directory / "summary.json").read_text())
    said = {}
    for colour in (True, False):
        out = RichConsole(
            width=80,
            force_terminal=colour,
            no_color=not colour,
            highlight=False,
            color_system="truecolor" if colour else None,
        )
        with out.capture() as capture:
            for line in preview.shown(directory, summary, Wanted(), 80):
                out.print(line, soft_wrap=True)
        said[colour] = capture.get()
    assert "\x1b[" in said[True] and "\x1b" not in said[False]


def test_byte_fallback_and_metaspace_tokenizers_are_read_too(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁hi": 1, "<0xE6>": 2, "<0x97>": 3, "<0xA5>": 4, "\u2581": 5}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    shown = [t.text for t in token_view.tokens(Vocabulary(tmp_path), [1, 2, 3, 4, 5, 99], [True] * 6)]
    assert shown == [" hi", "‹e6›", "‹97›", "‹a5→日›", " ", "⟨no token 99⟩"]


def test_a_chat_without_any_prompt_in_it_is_warned_of_unless_all_was_to_be_learned(
    tmp_path: Path, bytewise: Path
) -> None:
    directory = dataset(tmp_path / "d", bytewise, [([1] * 100, [True] * 100, [0])])
    summary = json.loads((directory / "summary.json").read_text())
    for loss_on, warned in (("assistant", 1), ("all", 0)):
        said = preview.shown(directory, summary | {"chat_template": {"loss_on": loss_on}}, Wanted(), 80)
        assert sum(line.plain.startswith("warning:") for line in said) == warned


def test_preference_pairs_are_shown_as_a_prompt_and_two_answers(tmp_path: Path, bytewise: Path) -> None:
    directory = tmp_path / "pairs"
    (directory / "train").mkdir(parents=True)
    (directory / "tokenizer").symlink_to(bytewise)
    made = {part: [[*ids_of(bytewise, text), EOS]] for part, text in (("chosen", "yes"), ("rejected", "no"))}
    columns = {"id": ["a\x1b[2J:1"], "source": ["a"], "prompt_ids": [ids_of(bytewise, "ok?")]}
    columns |= {f"{part}_ids": ids for part, ids in made.items()}
    columns |= {"reference_chosen_logprob": [-1.5], "reference_rejected_logprob": [-2.25]}
    pyarrow.parquet.write_table(pyarrow.table(columns), directory / "train" / "part-00000.parquet")
    facts = {"pairs": 1, "prompt_tokens": 3, "chosen_tokens": 4, "rejected_tokens": 3, "truncated": 0}
    (directory / "summary.json").write_text(json.dumps({"sequence_length": 64, "train": facts}))
    lines = printed(directory)
    at = next(n for n, line in enumerate(lines) if line.startswith("══ pair 1 of 1: a␛[2J:1, source a "))
    assert lines[at - 3 : at - 1] == [
        "train: 1 pair of at most 64 tokens",
        "tokens: 3 prompt, 4 chosen, 3 rejected; 0 prompts were cut",
    ]
    assert lines[at + 1].startswith("── prompt: 3 tokens, none with loss ─") and lines[at + 2 : at + 4] == [
        "  ok?",
        "  ···",
    ]
    assert "chosen: 4 tokens, all with loss, log-probability under the base -1.50" in lines[at + 4]
    assert lines[at + 5 : at + 7] == ["  yes⟦<|endoftext|>⟧", "  ╰╰╰╰" + "─" * 14]
    assert "under the base -2.25" in lines[at + 7] and len(lines) == at + 10


def test_a_mistyped_wish_says_what_there_is(tmp_path: Path, bytewise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", "many")
    with pytest.raises(ConfigError, match="ROWS=many: wanted a whole number of at least 1"):
        Wanted.from_environment()
    directory = dataset(tmp_path / "d", bytewise, [([1], [True], [0])])
    with pytest.raises(ConfigError, match=r"SPLIT=trian: no such split.*train"):
        printed(directory, split="trian")


SMALL = ["run.limit=300", "stages.tokenize.vocab_size=300", "stages.tokenize.sequence_length=32"]
INLINE = [f"stages.{stage}.resources.executor=inline" for stage in ("clean", "tokenize")]


@pytest.mark.slow
def test_a_pipeline_that_never_ran_is_run_as_far_as_the_tokens_and_shown(tmp_path: Path) -> None:
    arguments = [*SMALL, *INLINE, f"state={tmp_path}"]
    loaded = "import sys; print('LOADED', [m for m in ('torch', 'ray', 'transformers', 'mlflow') if m in sys.modules])"
    code = f"from pipelines.__main__ import main\nassert main(['preview', *{arguments!r}]) == 0\n{loaded}"
    environment = {**os.environ, "ROWS": "2", "SPLIT": "validation", "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    first, second = (run.stdout for run in runs)
    assert "tokenize is not made yet" in first and "✓ tokenize" in first and "✓ train" not in first
    assert first.count("══ row ") == second.count("══ row ") == 2
    rows = [text.partition("carries loss")[2].partition("LOADED")[0] for text in (first, second)]
    assert rows[0] == rows[1], "the same rows again"
    assert second.rstrip().endswith("LOADED []") and "not made" not in second
