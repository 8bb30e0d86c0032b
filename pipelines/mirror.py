"""Resumable state of a stage that runs on a node of its own, kept in the store so that an attempt on another node goes on from it.
Apart from the running of the stage, because it has a promise of its own: nobody's state is written over by somebody who was given up.

    work/<name>/<turn>/...        one turn for each attempt: fence of the lease, number of the attempt
    work/<name>/<turn>/.mirrored  the turn holds all that it began with; until then an earlier one is the newest

Each attempt writes into its own turn alone and begins as the newest whole one before it. A node that was taken for dead and goes on
writes into a turn that nobody reads any more. The driver removes all of them when the result is published.
"""

import contextlib
import logging
import re
import threading
from pathlib import Path

from stages.storage.bucket import BlobMissing, Bucket, BucketError

PASSING = (".writing-", ".partial", "windows/", "ray/")
"""Parts of names in `work/` that no later attempt needs."""
WHOLE = ".mirrored"
TURN = re.compile(r"\d{6,}-\d{3,}")


class Mirror:
    """One attempt's `work` directory and its turn in the store."""

    def __init__(self, bucket: Bucket, work: Path, fence: int, number: int) -> None:
        self._bucket, self._work = bucket, work
        self._root = f"work/{work.name}"
        self._turn = f"{fence:06d}-{number:03d}"
        self._known: dict[str, tuple[int, int]] = {}
        """File -> its size and time when it was stored."""
        self._is_whole = False

    def fetch(self) -> None:
        """Begin as the newest whole turn up to ours. Raises BucketError."""
        self._work.mkdir(parents=True)
        whole = {turn: names for turn, names in self._turns().items() if WHOLE in names and turn <= self._turn}
        newest = max(whole, default="")
        for name in whole.get(newest, []):
            if name != WHOLE:
                self._bucket.download(f"{self._root}/{newest}/{name}", self._work / name)

    def bring(self, over: threading.Event | None = None) -> None:
        """Store what changed, remove what is gone; leave off when `over` is set. A file that moves meanwhile is caught the next
        time: readers of `work/` trust nothing that is not complete by its own marker. A store that is away is asked the next time."""
        found: dict[str, tuple[int, int]] = {}
        for path in self._work.rglob("*"):
            name = path.relative_to(self._work).as_posix()
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not any(part in name for part in PASSING):
                    found[name] = _stamp(path)
        place, all_there = f"{self._root}/{self._turn}", True
        try:
            # Markers last: what they vouch for is there before them.
            for name in sorted(found, key=lambda n: (n.endswith(".json"), n)):
                if over is not None and over.is_set():
                    return
                if self._known.get(name) == found[name]:
                    continue
                try:
                    self._bucket.upload(self._work, [name], place)
                    self._known[name] = found[name]
                except (FileNotFoundError, BlobMissing):
                    all_there = False
            gone = self._known.keys() - found.keys()
            self._bucket.delete(f"{place}/{name}" for name in gone)
            for name in gone:
                del self._known[name]
            if all_there and not self._is_whole:
                self._bucket.put(f"{place}/{WHOLE}", b"")
                self._is_whole = True
                self._remove_earlier()
        except BucketError as error:
            logging.getLogger(__name__).warning("work not mirrored yet: %s", error)

    def _turns(self) -> dict[str, list[str]]:
        """Turn -> names of its files."""
        turns: dict[str, list[str]] = {}
        for entry in self._bucket.entries(self._root):
            turn, _, name = entry.key.removeprefix(f"{self._root}/").partition("/")
            if TURN.fullmatch(turn):
                turns.setdefault(turn, []).append(name)
        return turns

    def _remove_earlier(self) -> None:
        earlier = {turn: names for turn, names in self._turns().items() if turn < self._turn}
        for turn, names in earlier.items():
            # Its marker first: half a turn must not be taken for a whole one.
            self._bucket.delete(f"{self._root}/{turn}/{name}" for name in sorted(names, key=lambda n: n != WHOLE))


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
