"""Signs of life while bytes move and the stage itself says nothing. Apart, because silence ends an attempt (`run.stall_limit_s`), and a
large artifact on its way is not silence. What hangs on the way is ended by the object store's own patience or the stage's timeout.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stages.artifacts import Artifact
from stages.storage.bucket import local_path
from stages.storage.copies import cache

EVERY_S = 5.0

Emit = Callable[..., Any]


@contextlib.contextmanager
def moving(emit: Emit, fraction: float, text: str) -> Iterator[None]:
    """Inside the block bytes go to or come from the store."""
    with _every(lambda: emit("progress", fraction, text)):
        yield


@contextlib.contextmanager
def arriving(emit: Emit, inputs: Iterable[Artifact]) -> Iterator[Emit]:
    """Inside the block a stage runs, which fetches its inputs when it wants them: as long as copies of them grow on this node,
    something is said. Yields what the stage shall say its own words through."""
    digests = [one.uri.rstrip("/").rpartition("/")[2] for one in inputs if local_path(one.uri) is None]
    fraction, seen = 0.0, 0

    def heard(kind: str, *arguments: Any) -> Any:
        nonlocal fraction
        if kind == "progress":
            fraction = arguments[0]
        return emit(kind, *arguments)

    def look() -> None:
        nonlocal seen
        now = sum(_bytes(partial) for digest in digests for partial in cache().glob(f".{digest}.*"))
        if now not in (0, seen):
            emit("progress", fraction, f"fetching inputs: {now / 2**20:.0f} MB")
        seen = now

    with _every(look) if digests else contextlib.nullcontext():
        yield heard


@contextlib.contextmanager
def _every(say: Callable[[], Any]) -> Iterator[None]:
    over = threading.Event()

    def keep_on() -> None:
        while not over.wait(EVERY_S):
            say()

    thread = threading.Thread(target=keep_on, name="signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # renamed to its final name meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total
