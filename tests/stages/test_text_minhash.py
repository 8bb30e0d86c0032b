"""Near-duplicates: the recall that the S-curve promises, keys that depend on the text alone, clusters on no order."""

import random

import numpy as np
import pytest

from stages.text.clusters import components, pairs
from stages.text.minhash import MinHash


def pair_of(similarity: float, number: int, words: int = 400) -> tuple[str, str]:
    """Two texts whose sets of words have this Jaccard similarity, to the word."""
    both = round(similarity * words)
    half = (words - both) // 2
    names = [f"w{number}x{index}" for index in range(words)]
    return " ".join(names[: both + half]), " ".join(names[:both] + names[both + half :])


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.75, 0.8, 0.9])
def test_pairs_are_found_as_often_as_the_s_curve_says(similarity: float) -> None:
    found = MinHash(ngram=1)
    texts = [pair_of(similarity, number) for number in range(1_500)]
    (one, _), (other, _) = (found.keys([pair[side] for pair in texts]) for side in (0, 1))
    recall = float((one == other).any(axis=1).mean())
    assert abs(recall - (1 - (1 - similarity**8) ** 14)) < 0.05
    assert found.probability(similarity) == 1 - (1 - similarity**8) ** 14


def test_other_bands_and_rows_have_another_s_curve() -> None:
    found = MinHash(bands=20, rows=13, ngram=1)
    texts = [pair_of(0.8, number) for number in range(1_500)]
    (one, _), (other, _) = (found.keys([pair[side] for pair in texts]) for side in (0, 1))
    assert one.shape == (1_500, 20)
    assert abs(float((one == other).any(axis=1).mean()) - 0.677) < 0.05


def test_recall_of_word_five_grams_follows_their_jaccard_similarity() -> None:
    chance, found, expected = random.Random(3), MinHash(), 0.0
    texts: tuple[list[str], list[str]] = ([], [])
    for number in range(1_000):
        words = [f"v{chance.randrange(5_000)}" for _ in range(200)]
        changed = [f"z{number}" if place in (20, 90, 150) else word for place, word in enumerate(words)]
        one, other = ({tuple(each[at : at + 5]) for at in range(196)} for each in (words, changed))
        expected += found.probability(len(one & other) / len(one | other))
        texts[0].append(" ".join(words))
        texts[1].append(" ".join(changed))
    hits = int((found.keys(texts[0])[0] == found.keys(texts[1])[0]).any(axis=1).sum())
    assert abs(hits - expected) / 1_000 < 0.05


def test_a_texts_keys_depend_on_it_alone_not_on_what_is_hashed_with_it() -> None:
    chance = random.Random(4)
    texts = ["".join(chance.choice("ab c\n d.é漢") for _ in range(chance.randrange(3_000))) for _ in range(400)]
    together, known = MinHash().keys(texts)
    for index in range(0, 400, 7):
        alone, has = MinHash().keys([texts[index]])
        assert (alone[0] == together[index]).all() and has[0] == known[index]


def test_case_punctuation_and_white_space_make_no_difference_and_numbers_do() -> None:
    same = [
        "The quick, brown fox jumps over it.",
        "the  QUICK brown\nfox -- jumps over it",
        "THE QUICK BROWN FOX JUMPS OVER IT",
    ]
    keys, known = MinHash().keys([*same, "add 1 and 2 and 3 to it", "add 4 and 5 and 6 to it"])
    assert known.all() and (keys[0] == keys[1]).all() and (keys[0] == keys[2]).all()
    assert not (keys[3] == keys[4]).any()


def test_texts_too_short_for_an_n_gram_have_no_keys_and_scripts_without_spaces_are_read_letter_by_letter() -> None:
    keys, known = MinHash().keys(
        ["", "one two three four", "a b c d e", "漢字仮名文", "漢字仮名", "ภาษาไทย", "हिन्दी भाषा", "\ud800" * 9]
    )
    assert known.tolist() == [False, False, True, True, False, True, False, False]
    assert not keys[~known].any()


def test_published_keys_never_change() -> None:
    keys, _ = MinHash().keys(["Parameters are published, so keys of one release must equal those of the next. 漢字 é"])
    assert [f"{key:016x}" for key in keys[0, :3]] == PUBLISHED


PUBLISHED = ["d5b7e85e05471f5e", "22b6a8d3c6d7c62c", "a7ddbbae33b64901"]


def test_clusters_do_not_depend_on_the_order_of_the_pairs_and_are_named_by_their_smallest_member() -> None:
    chance = random.Random(5)
    links = [(chance.randrange(3_000), chance.randrange(3_000)) for _ in range(1_400)] + [
        (n, n + 1) for n in range(9_000, 9_500)
    ]
    expected = {n: n for link in links for n in link}
    for _ in range(600):  # the plainest way: spread the smallest until nothing moves
        moved = False
        for a, b in links:
            low = min(expected[a], expected[b])
            moved |= expected[a] != low or expected[b] != low
            expected[a] = expected[b] = low
        if not moved:
            break
    for _ in range(4):
        chance.shuffle(links)
        turned = [(a, b) if chance.random() < 0.5 else (b, a) for a, b in links]
        members, roots = components(*(np.array(side, np.int64) for side in zip(*turned, strict=True)))
        assert dict(zip(members.tolist(), roots.tolist(), strict=True)) == expected
    empty = np.zeros(0, np.int64)
    assert [part.tolist() for part in components(empty, empty)] == [[], []]


def test_equal_keys_are_paired_with_the_smallest_position() -> None:
    first, other = pairs(np.array([7, 5, 7, 9, 7], np.uint64), np.array([4, 1, 2, 0, 3]))
    assert (first.tolist(), other.tolist()) == ([2, 2], [3, 4])
