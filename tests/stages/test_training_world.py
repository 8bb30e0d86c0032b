"""What the ranks of a training run do together, between two real processes."""

import os
import socket
import time
from pathlib import Path

import pytest
from torch import multiprocessing

from stages.training.world import joined

TIMEOUT_S = 2
ALONE_S = 2 * TIMEOUT_S


def _apart(rank: int, port: int, waiting: bool, place: str) -> None:
    """Rank 0 needs longer than a collective may take."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joined(TIMEOUT_S) as world:
        world.wait()
        if waiting:
            with world.waiting():
                if rank == 0:
                    time.sleep(ALONE_S)
        else:
            if rank == 0:
                time.sleep(ALONE_S)
            world.wait()
        (Path(place) / str(rank)).write_text(str(time.time()))


def apart(place: Path, *, waiting: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(_apart, args=(port, waiting, str(place)), nprocs=2, start_method="spawn")


@pytest.mark.slow
def test_the_others_wait_longer_for_an_export_than_for_a_collective(tmp_path):
    with pytest.raises(multiprocessing.ProcessRaisedException, match=r"[Tt]imed? ?out|closed by peer"):
        apart(tmp_path, waiting=False)  # the control: it is longer
    for file in tmp_path.iterdir():
        file.unlink()
    apart(tmp_path, waiting=True)
    ended = [float((tmp_path / name).read_text()) for name in ("0", "1")]
    assert abs(ended[0] - ended[1]) < ALONE_S / 2, "they went on together"
