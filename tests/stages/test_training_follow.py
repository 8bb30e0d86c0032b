"""The channel between training and its driver."""

from stages.training.follow import Follower, Writer


def test_each_step_comes_once_though_a_restart_did_it_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.poll() == []
    writer = Writer(path)
    for step in (1, 2, 3):
        writer.write(step=step, loss=0.5)
    assert [line["step"] for line in follower.poll()] == [1, 2, 3]
    writer.write(event="resumed from step 1")
    for step in (2, 3, 4):
        writer.write(step=step, loss=0.5)
    assert follower.poll() == [{"event": "resumed from step 1"}, {"step": 4, "loss": 0.5}]
    assert follower.poll() == []


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert follower.poll() == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b'ss": 1.5}\n')
    assert follower.poll() == [{"step": 2, "loss": 1.5}]


def test_a_half_line_of_a_killed_writer_spoils_no_later_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    follower.poll()
    writer = Writer(path)
    writer.write(step=2, loss=1.5)
    assert follower.poll() == [{"step": 2, "loss": 1.5}]


def test_a_file_that_was_cut_or_replaced_is_read_again_without_doubles(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert len(follower.poll()) == 3
    path.write_bytes(b'{"step": 1}\n')
    assert follower.poll() == []
    with path.open("ab") as file:
        file.write(b'{"step": 2}\n{"step": 3}\n{"step": 4}\n')
    assert follower.poll() == [{"step": 4}]
