"""Length histograms in the summaries: every row and document once, in the bucket of its own length."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from stages.artifacts import Rows
from stages.clean import CleanConfig, CleanResources, clean
from stages.contract import Context, Executor
from stages.text.record import Record
from stages.text.shards import ROWS_SCHEMA, ShardWriter
from stages.tokenize import TokenizeConfig, TokenizeResources, tokenize

MakeContext = Callable[..., Context]


def bucket(length: int) -> str:
    """n holds 2^(n-1) to 2^n - 1, found without bit_length."""
    return str(next(n for n in range(64) if length < 2**n))


def test_rows_and_documents_are_counted_by_powers_of_two_of_their_length(
    make_context: MakeContext, tmp_path: Path
) -> None:
    lengths = [1, 2, 3, 4, 7, 8, 15, 16, 17, 100, 300] * 12
    texts = [chr(0x4E00 + n) + "a" * (length - 1) for n, length in enumerate(lengths)]
    (tmp_path / "in").mkdir()
    with ShardWriter(tmp_path / "in" / "rows", ROWS_SCHEMA) as writer:
        for n, text in enumerate([*texts, texts[0]]):
            writer.write(*Record(f"r:{n:09d}", "test", "text", "", text).values())
    rows = Rows.write(tmp_path / "in", {})
    inline = Executor.inline
    cfg = CleanConfig(validation_fraction=0.2, resources=CleanResources(executor=inline, blocks=3))
    corpus = clean(cfg, make_context(), rows)
    assert corpus.summary()["characters_log2"] == Counter(map(bucket, lengths)), "the duplicate is not among them"
    wanted = TokenizeConfig(vocab_size=257, sequence_length=64, resources=TokenizeResources(executor=inline))
    summary = tokenize(wanted, make_context(), corpus).summary()
    # Without merges a token is a byte: three for the first letter; one token ends the document.
    assert summary["tokens_log2"] == Counter(bucket(length + 2 + 1) for length in lengths)
    assert summary["reasons"] == {} and not any(name.startswith("log2") for name in summary["train"])
