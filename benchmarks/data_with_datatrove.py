"""The work of `benchmarks.data_path` done with datatrove, in its own environment: `python data_with_datatrove.py SOURCE BASE WORK WORDS`.

Its own executor, reader, exact deduplication, filters and tokenizer writer, with the same thresholds and the same tokenizer file.
`WORDS` is `given` (its filters take words from the regular expression that ours do) or `own` (spaCy, its default for English). What it
does not do: pack, split, name rows, or keep why a row left. Shuffling, which it does unless told otherwise, is off.
"""

import json
import logging
import sys
import time
from pathlib import Path

from datatrove.data import DocumentsPipeline
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import ExactDedupFilter, ExactDedupSignature, ExactFindDedups
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.utils.logging import logger
from datatrove.utils.word_tokenizers import WordTokenizer

from benchmarks.data_path import LETTERS
from stages.text.normalise import normalise_row
from stages.text.quality import words_of

WORKERS = 2


class Given(WordTokenizer):
    """Words as this project's rules see them."""

    def word_tokenize(self, text: str) -> list[str]:
        return words_of(text)

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError


def normalised(data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
    for document in data:
        document.text = normalise_row("", document.text)[1]
        yield document


def content(document) -> str:  # type: ignore[no-untyped-def]
    text: str = document.text
    return text


def main() -> None:
    source, base, work = map(Path, sys.argv[1:4])
    words = Given() if sys.argv[4] == "given" else "eng"
    logger.remove()
    logging.disable()
    config = ExactDedupConfig(content_getter=content)
    read = lambda: JsonlReader(str(source), doc_progress=False)  # noqa: E731
    how = {"workers": WORKERS, "skip_completed": False}
    steps = (
        [read(), normalised, ExactDedupSignature(str(work / "signatures"), config, finder_workers=WORKERS)],
        [ExactFindDedups(str(work / "signatures"), str(work / "duplicates"), config)],
        [
            read(),
            normalised,
            ExactDedupFilter(str(work / "duplicates"), config),
            GopherQualityFilter(max_non_alpha_words_ratio=LETTERS, language=words),
            GopherRepetitionFilter(language=words),
            DocumentTokenizer(
                str(work / "tokens"), str(base / "tokenizer.json"), eos_token="<|endoftext|>", shuffle_documents=False
            ),
        ],
    )
    began = time.perf_counter()
    for number, pipeline in enumerate(steps):
        LocalPipelineExecutor(pipeline, tasks=WORKERS, logging_dir=str(work / f"log-{number}"), **how).run()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, **counted(json.loads((work / "log-2" / "stats.json").read_text()))}))


def counted(stats: list[dict]) -> dict[str, int]:  # type: ignore[type-arg]
    """Documents that came and left, from the statistics of the last pipeline."""

    def total(step: str, name: str) -> int:
        found = next(one["stats"] for one in stats if step in one["name"])
        value = found.get(name, 0)
        return int(value if isinstance(value, int) else value["total"])

    return {
        "documents": total("exact-deduplication stage 3", "total"),
        "kept": total("Gopher Repetition", "forwarded"),
        "tokens": total("Writer", "tokens"),
        "duplicates": total("exact-deduplication stage 3", "dropped"),
    }


if __name__ == "__main__":
    main()
