"""No part of an evaluation set passes, whatever its case and punctuation; everything else does."""

import os
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest

from stages.text.curation import Decontamination
from stages.text.decontaminate import Index, words_of

WORDS = [f"w{number}" for number in range(2000)]
QUESTION = " ".join(WORDS[:20])
OTHER = " ".join(WORDS[100:130])
INDEX = Index.of({"quiz": [QUESTION, "Paris, of course."], "trivia": [OTHER]})


def test_the_share_is_of_words_that_stand_in_shared_13_grams_and_the_task_is_named() -> None:
    assert INDEX.overlap(QUESTION) == (1.0, "quiz")
    assert INDEX.overlap(" ".join(WORDS[:13] + WORDS[1000:1013])) == (0.5, "quiz")
    assert INDEX.overlap(" ".join(WORDS[1000:1020] + WORDS[:15] + WORDS[1100:1115])) == (15 / 50, "quiz")
    assert INDEX.overlap(f"{QUESTION} and so {OTHER}") == (50 / 52, "trivia")


def test_twelve_words_are_no_match_and_thirteen_are() -> None:
    around = WORDS[1000:1040]
    assert INDEX.overlap(" ".join(around + WORDS[3:15] + around)) == (0.0, None)
    assert INDEX.overlap(" ".join(around + WORDS[3:16] + around)) == (13 / 93, "quiz")


def test_order_and_every_word_count() -> None:
    swapped = [*WORDS[:6], WORDS[7], WORDS[6], *WORDS[8:13]]
    assert INDEX.overlap(" ".join(swapped)) == (0.0, None)
    assert INDEX.overlap(" ".join([*WORDS[:6], "other", *WORDS[7:13]])) == (0.0, None)


def test_case_punctuation_and_white_space_hide_nothing() -> None:
    hidden = ",\n".join(word.upper() for word in WORDS[:13]) + "!!!"
    assert INDEX.overlap(hidden) == (1.0, "quiz")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("paris of COURSE", (1.0, "quiz")),
        ("Paris, of course, and Rome", (0.0, None)),
        ("of course Paris", (0.0, None)),
        ("Paris, of", (0.0, None)),
        ("", (0.0, None)),
        ("?!", (0.0, None)),
    ],
)
def test_a_short_evaluation_text_is_found_where_it_is_the_whole(text: str, found: tuple[float, str | None]) -> None:
    assert INDEX.overlap(text) == found


def test_text_without_spaces_is_compared_sign_by_sign() -> None:
    question = "法国的首都是哪一座城市请回答这个问题"
    index = Index.of({"c": [question]})
    assert index.overlap("请看：" + question + "。谢谢") == (len(question) / (len(question) + 4), "c")
    assert index.overlap("请看：" + question[:12] + "。谢谢大家的回答和提问") == (0.0, None)


def test_evaluation_texts_without_words_and_tasks_without_texts_match_nothing() -> None:
    index = Index.of({"empty": [], "signs": ["?", ""]})
    assert index.overlap(QUESTION) == (0.0, None) and index.overlap("?") == (0.0, None)


def test_another_n_and_a_text_shorter_than_it() -> None:
    index = Index.of({"quiz": [QUESTION]}, n=3)
    assert index.overlap(" ".join(WORDS[4:7])) == (1.0, "quiz")
    assert index.overlap(" ".join(WORDS[4:6])) == (0.0, None)


def test_what_is_found_is_what_comparing_all_ngrams_finds() -> None:
    rng = random.Random(3)
    texts = [" ".join(rng.choices(WORDS[:4], k=rng.randint(0, 40))) for _ in range(60)]
    index = Index.of({"a": texts[:10], "b": texts[10:20]}, n=5)
    ngrams = {tuple(w[i : i + 5]) for text in texts[:20] if len(w := words_of(text)) >= 5 for i in range(len(w) - 4)}
    wholes = {tuple(w) for text in texts[:20] if 0 < len(w := words_of(text)) < 5}
    shares = set()
    for text in texts:
        words = words_of(text)
        hits = [i for i in range(len(words) - 4) if tuple(words[i : i + 5]) in ngrams]
        covered = {i + k for i in hits for k in range(5)}
        share = len(covered) / len(words) if len(words) >= 5 else float(tuple(words) in wholes)
        assert index.overlap(text)[0] == pytest.approx(share)
        shares.add(share)
    assert {0.0, 1.0} < shares and len(shares) > 5


def test_an_ngram_takes_ten_bytes_and_the_index_travels_between_processes() -> None:
    index = Index.of({"big": (" ".join(WORDS[start:]) for start in range(0, 1000, 10))})
    assert len(index.ngrams) == 2000 - 12 and index.ngrams.dtype == np.uint64
    assert index.ngrams.nbytes + index.owners.nbytes == 10 * len(index.ngrams)
    # Python's own hash() differs between processes; these do not.
    script = "import pickle, sys; index, text = pickle.load(sys.stdin.buffer); print(index.overlap(text))"
    answer = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps((INDEX, QUESTION)),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        check=True,
    )
    assert answer.stdout.decode().strip() == "(1.0, 'quiz')"


def test_a_config_without_evaluation_sets_or_with_single_words_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decontamination\.tasks is empty"):
        Decontamination()
    with pytest.raises(ValueError, match=r"decontamination\.ngram must be at least 2"):
        Decontamination(tasks={"quiz": "quiz.jsonl"}, ngram=1)
    with pytest.raises(ValueError, match=r"decontamination\.max_overlap"):
        Decontamination(tasks={"quiz": "quiz.jsonl"}, max_overlap=13)
