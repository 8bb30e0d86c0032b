"""The tokenizer on disk, and the bytes that each token stands for."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from stages.contract import StageError
from stages.text.tokenizer import END_OF_TEXT, Encoder, take_over, train
from tests.stages.chat_tokenizers import save_tokenizer

TEXTS = [
    "def join(a, *p):\n    return a",
    "Wörter und mehr Wörter",
    "def open(file, mode='r'):\n    pass",
    "日本語 text",
] * 50


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("byte-level")
    train(TEXTS, 320, directory)
    return directory


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lower case, spaces as `▁`, unknown characters as one token, a begin token: no token knows its bytes."""
    directory = tmp_path_factory.mktemp("unigram")
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    specials = ["<s>", "</s>", "<unk>"]
    made.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=120, special_tokens=specials, unk_token="<unk>", show_progress=False)
    )
    begin = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    made.enable_truncation(3)
    made.enable_padding(length=7)
    made.save(str(directory / "tokenizer.json"))
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_trained_tokenizer_is_the_same_each_time_and_loads_as_any_other(byte_level: Path, tmp_path: Path) -> None:
    train(iter(TEXTS), 320, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (byte_level / file).read_bytes()
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(byte_level)
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == (END_OF_TEXT, END_OF_TEXT, None)
    text = "def join(a):\n    é 日本 \U0001f600"
    ids = loaded(text)["input_ids"]
    assert loaded.decode(ids) == text
    [(ours, _)] = Encoder.load(byte_level).encode([text])
    assert ours.tolist() == ids


def test_a_text_too_short_for_the_vocabulary_gives_a_smaller_one(tmp_path: Path) -> None:
    train(["ab"], 4_096, tmp_path)
    assert Encoder.load(tmp_path).vocab_size == 258


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(
    byte_level: Path, sentencepiece_like: Path, text: str
) -> None:
    for directory in (byte_level, sentencepiece_like):
        for whole, (ids, sizes) in zip(
            (text, END_OF_TEXT + text), Encoder.load(directory).encode([text, END_OF_TEXT + text]), strict=True
        ):
            assert len(ids) == len(sizes) and (sizes >= 0).all()
            assert not len(ids) or sizes.sum() == len(whole.encode())


def test_bytes_of_characters_that_are_split_over_tokens_are_exact(byte_level: Path) -> None:
    encoder = Encoder.load(byte_level)
    [(ids, sizes)] = encoder.encode(["\U0001f600é"])
    assert sizes.tolist()[:4] == [1, 1, 1, 1]
    assert sizes.sum() == 6
    assert len(ids) >= 5


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe", "unigram"])
def test_prompt_and_completion_are_the_text_that_they_were(kind: str, tmp_path: Path) -> None:
    encoder = Encoder.load(save_tokenizer(tmp_path, kind, "mistral_v1"))
    for prompt, completion in (
        ("hello say", "s the"),  # within a word
        ("Q: hi\nA:", " the model"),
        ("Q: hi\n", "the model"),
        ("Q: hi", "\n\nthe model"),
        ("Q: hi", ""),
        ("Q: hi ", "café 你好"),
    ):
        [(before, _)] = encoder.encode([prompt])
        [(ids, sizes)] = encoder.encode([completion], behind=True)
        assert encoder.tokenizer.decode([*before, *ids]) == prompt + completion
        assert len(sizes) == len(ids) and sizes.sum() == len(completion.encode()) and (sizes >= 0).all()


def test_words_for_control_tokens_in_a_text_are_text(byte_level: Path) -> None:
    encoder = Encoder.load(byte_level)
    [(ids, sizes)] = encoder.encode([f"a{END_OF_TEXT}b"])
    assert encoder.eos_id not in ids
    assert sizes.sum() == len(END_OF_TEXT) + 2


def test_a_taken_over_tokenizer_keeps_its_files_its_begin_token_and_its_end(
    sentencepiece_like: Path, tmp_path: Path
) -> None:
    (sentencepiece_like / "model.safetensors").write_bytes(b"weights")
    take_over(sentencepiece_like, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert (tmp_path / "tokenizer.json").read_bytes() == (sentencepiece_like / "tokenizer.json").read_bytes()
    encoder = Encoder.load(tmp_path)
    assert encoder.eos == "</s>" and encoder.eos_id == encoder.pad_id == 1
    assert encoder.prefix.tolist() == [0]
    [(ids, _)] = encoder.encode(["def def def def def def def def"])
    assert len(ids) > 7 and 0 not in ids  # neither cut nor padded, and no begin token twice


def test_an_end_that_only_the_model_names_is_found_and_its_absence_is_said(byte_level: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(StageError, match="names no eos_token"):
        Encoder.load(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Encoder.load(tmp_path).eos_id == 5
    assert Encoder.load(byte_level, tmp_path).eos_id == 0
