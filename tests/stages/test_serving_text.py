"""Text that leaves the server: whole characters only, stop strings never leaked, whatever tokens they are split over."""

import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stages.serving.text_stream import TextStream

PIECES = ["be", "ta ga", "mma delta", "alpha ", "<|end|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(PIECES[:-1])
    made.add_special_tokens(PIECES[-1:])
    return made


def run(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = (), prompt: tuple[int, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer, prompt, stop)
    deltas = []
    for token in ids:
        deltas.append(stream.push(token))
        if stream.stopped:
            return deltas
    return [*deltas, stream.flush()]


def test_no_delta_holds_half_a_character_and_the_deltas_are_the_text(tokenizer: Tokenizer) -> None:
    text = "héllo 🙂 日本語 naïve\n\ttail"
    deltas = run(tokenizer, tokenizer.encode(text).ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_answer_cut_inside_a_character_drops_its_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🙂").ids
    assert "".join(run(tokenizer, ids[:-1])) == "ok "


def test_a_prompt_that_ends_inside_a_character_does_not_repeat_itself(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("long prompt é").ids
    deltas = run(tokenizer, [ids[-1], *tokenizer.encode("xy").ids], prompt=tuple(ids[:-1]))
    assert "".join(deltas) == "éxy"


def test_a_stop_string_spread_over_three_tokens_ends_the_text_and_never_leaks(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(piece) for piece in ("alpha ", "be", "ta ga", "mma delta")]
    deltas = run(tokenizer, ids, stop=("beta gamma",))
    assert deltas == ["alpha ", "", "", ""]


def test_text_held_for_a_stop_that_does_not_come_is_released(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id("be"), tokenizer.token_to_id("ta ga")]
    assert run(tokenizer, ids, stop=("beta gamma",)) == ["", "", "beta ga"]
    assert run(tokenizer, [*ids, *tokenizer.encode("s").ids], stop=("beta gamma",)) == ["", "", "beta gas", ""]


def test_the_stop_that_is_complete_first_wins(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(piece) for piece in ("alpha ", "mma delta")]
    assert "".join(run(tokenizer, ids, stop=("delta", "ma d"))) == "alpha m"
    assert "".join(run(tokenizer, ids, stop=("a d", "mma d"))) == "alpha "


def test_every_split_of_a_text_into_pieces_gives_the_same_cut(tokenizer: Tokenizer) -> None:
    """Brute force over all token borders: the result is `text` before the first stop, computed by str.find."""
    text, stop = "ababcabx", "abx"
    for size in range(4):
        for cuts in itertools.combinations(range(1, len(text)), size):
            pieces = [text[a:b] for a, b in itertools.pairwise((0, *cuts, len(text)))]
            made = Tokenizer(
                models.WordLevel({piece: n for n, piece in enumerate(dict.fromkeys(pieces))}, unk_token="?")
            )
            made.decoder = decoders.Fuse()
            ids = [made.token_to_id(piece) for piece in pieces]
            assert "".join(run(made, ids, stop=(stop,))) == text[: text.find(stop)]


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id("be"), tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("mma delta")]
    assert "".join(run(tokenizer, ids)) == "bemma delta"
