"""What is finished stays finished: torn lines count as never written, and processes do not write into each other's files."""

from stages.text.journal import Journal


def test_entries_come_back_by_position(tmp_path) -> None:
    journal = Journal(tmp_path)
    journal.add(0, [(3, {"text": "é\n\ud800"}), (1, {"bad": "no_question"})])
    journal.add(1, [(256, {"text": "other window"})])
    assert Journal(tmp_path).read(0) == {3: {"text": "é\n\ud800"}, 1: {"bad": "no_question"}}
    assert Journal(tmp_path).read(1) == {256: {"text": "other window"}}
    assert Journal(tmp_path).read(2) == {}


def test_a_line_cut_at_any_byte_counts_as_never_written(tmp_path) -> None:
    journal = Journal(tmp_path)
    journal.add(0, [(0, {"text": "first"}), (1, {"text": "second"})])
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(second, len(whole)):
        file.write_bytes(whole[:cut])
        assert Journal(tmp_path).read(0) == {0: {"text": "first"}}, cut


def test_a_changed_line_counts_as_never_written(tmp_path) -> None:
    Journal(tmp_path).add(0, [(0, {"text": "first"}), (1, {"text": "second"})])
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(b"second", b"secomd"))
    assert Journal(tmp_path).read(0) == {0: {"text": "first"}}


def test_two_writers_never_share_a_file_and_the_first_answer_stays(tmp_path) -> None:
    one, two = Journal(tmp_path), Journal(tmp_path)
    one.add(0, [(0, {"text": "a"})])
    two.add(0, [(0, {"text": "a"}), (1, {"text": "b"})])
    assert len(list(tmp_path.iterdir())) == 2
    assert one.read(0) == {0: {"text": "a"}, 1: {"text": "b"}}


def test_what_was_passing_yields_to_what_came_of_asking_again(tmp_path) -> None:
    Journal(tmp_path).add(0, [(0, {"bad": "request_failed", "again": True})])
    Journal(tmp_path).add(0, [(0, {"text": "a"})])
    assert Journal(tmp_path).read(0) == {0: {"text": "a"}}
