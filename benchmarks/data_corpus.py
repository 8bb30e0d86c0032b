"""Text to measure with: real text of the packages that are installed, and generated text of any size. Apart, because every arm of every
data bench must be given the very same files."""

import ast
import hashlib
import itertools
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

FILES = 4
"""JSON Lines files that a corpus is cut into: two workers have something to share."""
PIECE = 4_000
LEAST = 400
"""Characters of a piece of source at most, and of a document at least."""
EOS = "<|endoftext|>"
WORDS = 30_000
COPIES = 0.1
FREQUENT = tuple(
    "the of and to in a is that it was for on are with as his they be at one have this from".split()  # noqa: SIM905
)


def real(directory: Path, megabytes: float) -> dict[str, int]:
    """`megabytes` MB of docstrings and sources of installed packages, a row each; what was written."""
    return _write(directory, _packages(), megabytes)


def generated(directory: Path, megabytes: float, seed: int = 0) -> dict[str, int]:
    """`megabytes` MB of sentences of made-up words, as frequent as words are (Zipf), one document in ten a copy."""
    return _write(directory, _made_up(seed), megabytes)


def _write(directory: Path, texts: Iterator[str], megabytes: float) -> dict[str, int]:
    directory.mkdir(parents=True, exist_ok=True)
    documents = size = 0
    files = [(directory / f"part-{number}.jsonl").open("w", encoding="utf-8") for number in range(FILES)]
    try:
        for file, text in zip(itertools.cycle(files), texts, strict=False):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            documents, size = documents + 1, size + len(text.encode())
            if size >= megabytes * 1_000_000:
                break
    finally:
        for file in files:
            file.close()
    return {"documents": documents, "bytes": size}


def _packages() -> Iterator[str]:
    """Docstrings of each module, then its source in pieces; modules in an order that mixes packages."""
    place = Path(sysconfig.get_path("purelib"))
    modules = [path for path in place.rglob("*.py") if path.stat().st_size >= LEAST]
    for path in sorted(modules, key=lambda path: hashlib.sha256(str(path.relative_to(place)).encode()).digest()):
        try:
            source = path.read_text("utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for text in (*_docstrings(tree), *_pieces(source)):
            # Where EOS is typed, ours makes text of it, and the other tools an end.
            if len(text) >= LEAST and "\0" not in text and EOS not in text:
                yield text


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _pieces(source: str) -> Iterator[str]:
    """Neighbouring paragraphs of a source, up to PIECE characters together."""
    held: list[str] = []
    for paragraph in source.split("\n\n"):
        if held and sum(map(len, held)) + len(paragraph) > PIECE:
            yield "\n\n".join(held)
            held = []
        held.append(paragraph[:PIECE])
    yield "\n\n".join(held)


def _made_up(seed: int) -> Iterator[str]:
    chance = random.Random(seed)
    words = [*FREQUENT] + ["".join(chance.choices("etaoinshrdlucmfw", k=chance.randint(3, 10))) for _ in range(WORDS)]
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(words))))
    before: list[str] = []
    while True:
        if before and chance.random() < COPIES:
            yield chance.choice(before)
            continue
        count = min(int(chance.lognormvariate(5.8, 0.8)) + 60, 8_000)
        drawn = chance.choices(words, cum_weights=weights, k=count)
        text, start = [], 0
        while start < count:
            end = start + chance.randint(6, 22)
            text.append(" ".join(drawn[start:end]).capitalize() + ("\n\n" if chance.random() < 0.15 else ""))
            start = end
        said = ". ".join(text).replace("\n\n. ", ".\n\n").strip() + "."
        before = [*before[-999:], said] if len(before) < 1_000 or chance.random() < 0.01 else before
        yield said
