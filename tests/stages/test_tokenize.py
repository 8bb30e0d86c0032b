"""Tokenising on a real Ray: every document is there once, ends once, and its bytes are counted to the last one."""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from stages.artifacts import Checkpoint, Corpus, TokenDataset
from stages.contract import Context, Executor, StageError
from stages.text.packed import PackedSplit
from stages.text.record import Record
from stages.text.shards import CORPUS_SCHEMA, ShardWriter
from stages.tokenize import TokenizeConfig, TokenizeResources, tokenize

MakeContext = Callable[..., Context]
Given = Sequence[tuple[str, str, str]]
EOS = "<|endoftext|>"
pytestmark = pytest.mark.ray


def corpus_of(directory: Path, given: Given) -> Corpus:
    """(prompt, text, split) as clean writes them."""
    directory.mkdir(parents=True)
    with ShardWriter(directory / "rows", CORPUS_SCHEMA) as writer:
        for index, (prompt, text, split) in enumerate(given):
            kind = "prompt_completion" if prompt else "text"
            writer.write(*Record(f"row:{index:09d}", "test", kind, prompt, text).values(), split)
    Corpus.write(directory, {})
    return Corpus(uri=directory.as_uri())


def digest(directory: Path) -> str:
    files = sorted(f for f in directory.rglob("*") if f.is_file())
    content = [(f.relative_to(directory).as_posix(), hashlib.sha256(f.read_bytes()).hexdigest()) for f in files]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def pieces(dataset: TokenDataset, split: str) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each piece, padding left out: the last piece of a row, without any label."""
    packed = PackedSplit.read(dataset.local(), split)
    found = []
    for ids, labels, starts in zip(packed.input_ids, packed.labels, packed.document_starts, strict=True):
        assert starts[0] == 0
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            if (labels[start:end] != -100).any():
                found.append((ids[start:end].tolist(), labels[start:end].tolist()))
            else:
                assert end == len(ids)  # only padding has no label, and it stands at the end
    return found


@pytest.fixture(scope="module")
def many() -> Given:
    """2,500 documents: more than one window; some longer than a row, some with characters of several bytes."""
    chance = random.Random(3)
    words = ["path", "join", "the", "wörld", "日本", "def", "(self)", "return", "\n    ", "x" * 9]
    texts = [
        " ".join(chance.choices(words, k=chance.choice((1, 3, 9, 30, 90)))).strip() + f" {i}" for i in range(5_000)
    ]
    return [("", text, "validation" if chance.random() < 0.1 else "train") for text in texts]


def test_one_digest_for_any_blocks_and_executor_and_every_document_once(
    ray_session: None, make_context: MakeContext, many: Given, tmp_path: Path
) -> None:
    corpus = corpus_of(tmp_path / "in", many)
    digests = set()
    for blocks, executor in ((1, Executor.ray), (2, Executor.ray), (7, Executor.ray), (1, Executor.inline)):
        context = make_context()
        resources = TokenizeResources(blocks=blocks, executor=executor)
        config = TokenizeConfig(vocab_size=400, sequence_length=64, resources=resources)
        dataset = tokenize(config, context, corpus)
        dataset.check()
        digests.add(digest(dataset.local()))
        assert not list(context.work.iterdir())
    assert len(digests) == 1

    tokenizer = Tokenizer.from_file(str(dataset.local() / "tokenizer" / "tokenizer.json"))
    summary = dataset.summary()
    eos = summary["eos_token_id"]
    assert summary["vocab_size"] == 400 and tokenizer.id_to_token(eos) == EOS
    for split in ("train", "validation"):
        texts = [text for _, text, side in many if side == split]
        facts: dict[str, Any] = summary[split]
        found = pieces(dataset, split)
        for ids, labels in found:
            assert labels == [-100, *ids[1:]]
        assert sum(ids.count(eos) for ids, _ in found) == len(texts) == facts["documents"]
        assert all(eos not in ids[:-1] for ids, _ in found)
        whole = {tokenizer.decode(ids) for ids, _ in found if ids[-1] == eos}
        short = [text for text in texts if len(tokenizer.encode(text).ids) < 64]
        assert len(short) > 100 and set(short) <= whole
        assert facts["supervised_bytes"] + facts["unsupervised_bytes"] == sum(len(text.encode()) for text in texts)
        # A byte-level token is written with one character for each byte.
        assert facts["unsupervised_bytes"] == sum(len(tokenizer.id_to_token(ids[0])) for ids, _ in found)
        assert (
            facts["tokens"]
            == sum(len(tokenizer.encode(text).ids) + 1 for text in texts)
            == sum(len(i) for i, _ in found)
        )
        assert facts["supervised_tokens"] == facts["tokens"] - len(found)
        assert facts["first_tokens"] == facts["pieces"] == len(found)
        assert facts["utilisation"] == pytest.approx(facts["tokens"] / (facts["rows"] * 64), abs=1e-6)
        assert facts["utilisation"] > 0.9 and facts["dropped_pieces"] == facts["dropped_tokens"] == 0


def test_shards_are_plain_lists_of_fixed_length_and_fixed_count(
    ray_session: None, make_context: MakeContext, many: Given, tmp_path: Path
) -> None:
    dataset = tokenize(
        TokenizeConfig(vocab_size=300, sequence_length=32), make_context(), corpus_of(tmp_path / "in", many)
    )
    shards = sorted((dataset.local() / "train").glob("*"))
    assert [shard.name for shard in shards] == [f"part-{index:05d}.parquet" for index in range(len(shards))]
    counts = [pyarrow.parquet.read_metadata(shard).num_rows for shard in shards]
    assert len(counts) > 2 and set(counts[:-1]) == {1_024} and sum(counts) == dataset.summary()["train"]["rows"]
    plain = pyarrow.list_(pyarrow.int32())
    kinds = {field.name: field.type for field in pyarrow.parquet.read_schema(shards[0])}
    columns = ("input_ids", "labels", "document_starts")
    assert kinds == dict.fromkeys(columns, plain) | {"source": pyarrow.string()}


def test_loss_is_taken_on_completions_and_their_end_alone(
    ray_session: None, make_context: MakeContext, tmp_path: Path
) -> None:
    rows = [
        ("the sky is ", "blue"),
        ("hello wo", "rld"),
        ("", "no prompt"),
        ("long " * 40, "answer"),
        ("a", f"done{EOS}"),
        ("", f"alone{EOS}"),
    ]
    given = [(prompt, text, split) for split in ("train", "validation") for prompt, text in rows]
    dataset = tokenize(
        TokenizeConfig(vocab_size=257, sequence_length=64), make_context(), corpus_of(tmp_path / "in", given)
    )
    tokenizer = Tokenizer.from_file(str(dataset.local() / "tokenizer" / "tokenizer.json"))
    answers = [tokenizer.decode([label for label in labels if label != -100]) for _, labels in pieces(dataset, "train")]
    assert sorted(answers) == sorted(["blue", "rld", "o prompt", "answer", "done", "lone"])
    assert all(labels[-1] == ids[-1] == 0 for ids, labels in pieces(dataset, "train"))
    facts = dataset.summary()["train"]
    assert facts["supervised_bytes"] == len("bluerldo promptanswerdonelone")
    assert (facts["first_tokens"], facts["unsupervised_bytes"]) == (2, 2)
    assert facts["prompt_bytes"] == facts["prompt_tokens"] == 11 + 8 + 200 + 1
    assert facts["dropped_pieces"] == 3 and facts["dropped_tokens"] == 192


def test_the_tokenizer_never_sees_the_validation_split(
    ray_session: None, make_context: MakeContext, tmp_path: Path
) -> None:
    train = [("", f"train text {i}", "train") for i in range(50)]
    config = TokenizeConfig(vocab_size=300, sequence_length=16)
    trained = [
        (tokenize(config, make_context(), corpus_of(tmp_path / word, [*train, ("", word * 99, "validation")])).local())
        for word in ("zebra", "quagga")
    ]
    first, second = ((directory / "tokenizer" / "tokenizer.json").read_bytes() for directory in trained)
    assert first == second


def test_a_base_models_tokenizer_is_taken_as_it_is(
    ray_session: None, make_context: MakeContext, tmp_path: Path
) -> None:
    given = [("", f"text number {i}", "validation" if i % 9 == 0 else "train") for i in range(99)]
    corpus = corpus_of(tmp_path / "in", given)
    first = tokenize(TokenizeConfig(vocab_size=280, sequence_length=32), make_context(), corpus)
    base = tmp_path / "base"
    base.mkdir()
    for file in (first.local() / "tokenizer").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    (base / "config.json").write_text('{"max_position_embeddings": 32}')
    checkpoint = Checkpoint(uri=base.as_uri())
    second = tokenize(TokenizeConfig(sequence_length=32), make_context(), corpus, checkpoint)
    assert digest(second.local()) == digest(first.local())
    with pytest.raises(StageError, match=r"sequence_length=64: the base model reads at most 32 tokens"):
        tokenize(TokenizeConfig(sequence_length=64), make_context(), corpus, checkpoint)


def test_a_split_without_rows_is_refused(ray_session: None, make_context: MakeContext, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "in", [("", "text", "train")])
    with pytest.raises(StageError, match="the validation split of the corpus has no text"):
        tokenize(TokenizeConfig(vocab_size=300), make_context(), corpus)


def test_values_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="vocab_size must be at least 257"):
        TokenizeConfig(vocab_size=256)
    with pytest.raises(ValueError, match="sequence_length"):
        TokenizeConfig(sequence_length=1)
    with pytest.raises(ValueError, match=r"resources\.blocks"):
        TokenizeResources(blocks=0)
    with pytest.raises(ValueError, match="vocab_size must be null with a base model"):
        TokenizeConfig(vocab_size=300).check(frozenset({"corpus", "base"}))
    with pytest.raises(ValueError, match="vocab_size must be set"):
        TokenizeConfig().check(frozenset({"corpus"}))
    TokenizeConfig(vocab_size=300).check(frozenset({"corpus"}))
    TokenizeConfig().check(frozenset({"corpus", "base"}))
