"""What a cluster can never give is said in one sentence that names the field."""

import time

import pytest

from stages.contract import ResourcesUnavailable
from stages.training import preflight
from stages.training.preflight import require


def nodes(*counts: float, kind: str = "CPU") -> list[dict]:
    alive = [{"Alive": True, "Resources": {kind: count} if count else {}} for count in counts]
    return [*alive, {"Alive": False, "Resources": {kind: 64.0}}]


@pytest.mark.parametrize(
    ("workers", "cpus", "given", "free", "message"),
    [
        (8, 1.0, (2.0,), 2.0, "needs 8 CPU, cluster has 2: set workers <= 2"),
        (2, 4.0, (2.0,), 2.0, "needs 4 CPU, cluster has 2: set cpus <= 2"),
        (3, 3.0, (4.0, 4.0), 8.0, "needs 9 CPU, cluster has 8: set workers <= 2"),
        (1, 8.0, (4.0, 4.0), 8.0, "needs 8 CPU, its largest node has 4: set cpus <= 4"),
        (1, 1.0, (0.0,), 0.0, "needs 1 CPU, cluster has 0: set cpus <= 0"),
        (
            2,
            1.0,
            (4.0,),
            1.0,
            "needs 2 CPU, cluster has 4 of which 1 are free: stop what holds the others, or set workers <= 1",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_in_seconds(workers, cpus, given, free, message, monkeypatch):
    monkeypatch.setattr(preflight, "SETTLE_S", 1.0)
    start = time.monotonic()
    with pytest.raises(ResourcesUnavailable) as error:
        require(
            "CPU",
            workers=workers,
            each=cpus,
            nodes=nodes(*given),
            free=lambda: {"CPU": free},
            fields=("workers", "cpus"),
        )
    assert str(error.value) == message
    assert time.monotonic() - start < 4


def test_what_is_given_back_meanwhile_is_waited_for():
    counts = iter([0.0, 1.0, 2.0])
    require(
        "CPU",
        workers=2,
        each=1.0,
        nodes=nodes(4.0),
        free=lambda: {"CPU": next(counts)},
        fields=("workers", "cpus"),
    )


@pytest.mark.parametrize(
    ("workers", "given", "free", "message"),
    [
        (1, 0.0, 0.0, "needs 1 GPU, cluster has 0: set each <= 0"),
        (3, 2.0, 2.0, "needs 3 GPU, cluster has 2: set workers <= 2"),
        (
            2,
            4.0,
            1.0,
            "needs 2 GPU, cluster has 4 of which 1 are free: stop what holds the others, or set workers <= 1",
        ),
        (1, 1.0, 0.0, "needs 1 GPU, cluster has 1 of which 0 are free: stop what holds the others, or set each <= 0"),
    ],
)
def test_gpus_are_counted_as_processors_are(workers, given, free, message, monkeypatch):
    monkeypatch.setattr(preflight, "SETTLE_S", 0.2)
    with pytest.raises(ResourcesUnavailable) as error:
        require(
            "GPU",
            workers=workers,
            each=1,
            nodes=nodes(given, kind="GPU"),
            free=lambda: {"GPU": free} if free else {},
            fields=("workers", "each"),
        )
    assert str(error.value) == message
