"""Many rows at once give what each gives alone: answers and log-probabilities, against plain computations."""

import pytest
import torch

from stages.serving.batch import answers, batches, log_probabilities
from stages.serving.generate import generate
from stages.serving.model import load_model
from stages.serving.sampling import Sampling
from stages.training.world import repeatable
from tests.stages.tiny_model import save_tiny_model

PROMPTS = [
    "os.path.join(",
    "x",
    "def f(value):\n    return",
    "naïve 🙂",
    "a much longer prompt than the others are " * 3,
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(save_tiny_model(tmp_path_factory.mktemp("model"), golden=False))


@pytest.fixture(autouse=True)
def one_thread():
    with repeatable(1):  # small matrices, and other work on the machine
        yield


def encode(loaded, texts):
    return [loaded.backend.encode(text).ids for text in texts]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_decoded_together_get_the_answers_of_rows_decoded_alone(loaded, temperature) -> None:
    prompts, seeds = encode(loaded, PROMPTS), [11, 12, 13, 14, 15]
    sampling = Sampling(max_tokens=24, temperature=temperature, top_p=0.9)
    together = answers(loaded, prompts, seeds, sampling)
    for prompt, seed, answer in zip(prompts, seeds, together, strict=True):
        alone = Sampling(max_tokens=24, temperature=temperature, top_p=0.9, seed=seed)
        ids = list(generate(loaded, prompt, alone))
        assert answer.tokens == len(ids)
        assert answer.finished == (ids[-1] in loaded.eos_ids)
        if answer.text.isascii():
            kept = [token for token in ids if token not in loaded.eos_ids]
            assert answer.text == loaded.backend.decode(kept).rstrip("\ufffd")


def test_a_row_ends_at_its_stop_string_and_leaves_the_others_as_they_were(loaded) -> None:
    prompts = encode(loaded, PROMPTS)
    free = answers(loaded, prompts, [0] * 5, Sampling(max_tokens=24, temperature=0.0))
    stop = free[0].text[2:4]
    stopped = answers(loaded, prompts, [0] * 5, Sampling(max_tokens=24, temperature=0.0, stop=(stop,)))
    assert stopped[0].text == free[0].text[: free[0].text.index(stop)] and stopped[0].finished
    for before, after in zip(free, stopped, strict=True):
        assert after.text == before.text.split(stop)[0]


def test_log_probabilities_are_those_of_a_plain_computation_and_of_rows_alone(loaded) -> None:
    rows = encode(loaded, ["hello world", "x = 1", "a longer row of text than the others", "ab"])
    counted = [[index >= 3 for index in range(len(row))] for row in rows]
    counted[3] = [True, True]
    found = log_probabilities(loaded, rows, counted)
    for row, marks, value in zip(rows, counted, found, strict=True):
        expected = 0.0
        for at in range(1, len(row)):
            if marks[at]:
                with torch.no_grad():
                    logits = loaded.model(torch.tensor([row[:at]]), use_cache=False).logits[0, -1].double()
                expected += float(torch.log_softmax(logits, -1)[row[at]])
        assert value == pytest.approx(expected, rel=1e-7, abs=1e-5)
        assert log_probabilities(loaded, [row], [marks])[0] == pytest.approx(value, rel=1e-7, abs=1e-5)


def test_a_row_with_nothing_counted_sums_to_nothing(loaded) -> None:
    assert log_probabilities(loaded, [[1, 2], [3]], [[False, False], [True]]) == [0.0, 0.0]


def test_batches_hold_every_row_once_neighbours_in_length_within_both_limits() -> None:
    lengths = [5, 100, 7, 7, 30, 1, 99, 6]
    made = list(batches(lengths, 3, 200))
    assert sorted(index for batch in made for index in batch) == list(range(8))
    assert made[0] == [1, 6]  # a third would be 300 places
    assert all(len(batch) <= 3 for batch in made)
    assert list(batches([500], 3, 200)) == [[0]]
    assert list(batches([], 3)) == []
