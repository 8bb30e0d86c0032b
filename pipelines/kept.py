"""Small facts that cost more to find out than to read: one JSON file of key -> value, where a key names all that the value depends on, so
that nothing in it can be stale. Apart, because losing it, or not being able to write it, changes nothing but the time.
"""

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

LIMIT = 5_000


class Kept:
    """Read at the first question, written by `save`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] | None = None
        self._fresh: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> Any:
        """The value, or None."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._fresh.get(key, self._known.get(key))

    def put(self, key: str, value: Any) -> None:
        with self._lock:
            self._fresh[key] = value

    def save(self) -> None:
        """Join what this process found out with what others wrote meanwhile. Of too many the oldest go."""
        with self._lock:
            if not self._fresh:
                return
            known = list({**self._read(), **self._fresh}.items())[-LIMIT:]
            self._known, self._fresh = dict(known), {}
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
                partial.write_text(json.dumps(self._known), "utf-8")
                partial.replace(self._path)

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._path.read_text("utf-8")))
        except (OSError, ValueError):
            return {}
