"""Room for a step, as the schedule counts it."""

import time

from pipelines.schedule import Schedule


def test_the_room_of_a_step_that_ended_is_free_once_it_is_known_how_it_ended() -> None:
    schedule = Schedule(cpus=1.0, max_parallel=1)

    def fails(share: object) -> None:
        raise ValueError("broken")

    assert schedule.start("bad", 1.0, fails)
    deadline = time.monotonic() + 10
    while schedule._ended.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not schedule.start("late", 1.0, lambda share: None)
    [(name, result, error)] = schedule.ended()
    assert (name, result, str(error)) == ("bad", None, "broken")
    assert schedule.start("late", 1.0, lambda share: "made")
    ended: list[object] = []
    while not ended and time.monotonic() < deadline:
        ended = list(schedule.ended())
    assert ended == [("late", "made", None)]
