"""Who removes and who makes take turns at one store. Apart, because `make gc` and `make run` keep this promise to each other without
knowing each other.

Each says what it is about to do before it looks at what the other does: a collection takes the lease `turns/.../collection` and then reads
the ledger and all leases; a run enters what it needs in the ledger, or takes the lease of a result, and then looks for a collection. So at
least one of them sees the other: the collection keeps what the run may need, or the run waits and then looks anew at what is there.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from pipelines.console import Console
from pipelines.lease import Lease, LeaseTimeout, Slots
from pipelines.store import Store
from stages.contract import ResourcesUnavailable
from stages.storage.bucket import Bucket

COLLECTION = "collection"
DOUBT_S = 5.0
"""Who has not looked at its own lease for so long may have slept, and been taken for dead."""


class Turns:
    """The turns of one store."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._bucket = Bucket(f"{store.root}/turns", single_writer=store.bucket.single_writer)
        self._timeout_s = timeout_s

    def wait(self, waiting: Callable[[str], None]) -> None:
        """Until nobody collects. `waiting(who)` is called once a second and may raise. Raises ResourcesUnavailable."""
        if Slots.of(self._bucket, COLLECTION).holder() is not None:
            self._take(waiting).release()

    @contextlib.contextmanager
    def removing(self, waiting: Callable[[str], None]) -> Iterator[Callable[[], None]]:
        """Collect, alone. Gives a check to be called before each removal: it raises ResourcesUnavailable when this process slept and
        somebody took its turn."""
        with self._take(waiting) as lease:
            seen = time.monotonic()

            def check() -> None:
                nonlocal seen
                if time.monotonic() - seen > DOUBT_S:
                    slots = Slots.of(self._bucket, COLLECTION)
                    if slots.newest != lease.fence or slots.ended(lease.fence):
                        lease.lost.set()
                    seen = time.monotonic()
                if lease.lost.is_set():
                    raise ResourcesUnavailable(
                        "this collection stood still and another process took its turn; run it again"
                    )

            yield check

    def _take(self, waiting: Callable[[str], None]) -> Lease:
        """Raises ResourcesUnavailable when somebody has it for too long."""
        try:
            lease = Lease.acquire(self._bucket, COLLECTION, waiting, self._timeout_s)
        except LeaseTimeout as error:
            said = str(error).partition(" has been ")[0]
            raise ResourcesUnavailable(
                f"{said} has been at make gc in this store for more than {self._timeout_s:.0f} s; "
                "stop it or raise run.lease_timeout_s"
            ) from error
        keys = [entry.key for entry in self._bucket.entries(f"results/{COLLECTION}")]
        self._bucket.delete(key for key in keys if int(key.rpartition("/")[2].partition(".")[0]) < lease.fence)
        return lease


def once(console: Console) -> Callable[[str], None]:
    """For who waits on the command line: one line for each process that it waits for."""
    told: set[str] = set()

    def waiting(who: str) -> None:
        if who not in told:
            told.add(who)
            console.line(f"{who} collects in this store; waiting")

    return waiting
