"""What the record of an attempt keeps."""

from pipelines.recorder import Recorder


class Child:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def log_metrics(self, metrics, step=None, at=None):
        self.told.append(dict(metrics))

    def log_dataset(self, *given):
        raise AssertionError

    log_text = log_dataset


def test_what_tells_of_the_machine_is_shown_and_is_no_result():
    child = Child()
    recorder = Recorder(child, "train")
    recorder.log_metrics({"loss": 2.5, "system/cpu_utilization_percentage": 97.0}, step=1)
    recorder.log_metrics({"loss": 2.0}, step=2)
    assert child.told[0] == {"loss": 2.5, "system/cpu_utilization_percentage": 97.0}
    assert recorder.last == {"loss": 2.0}
    assert recorder.curves() == {"loss": [(1, 2.5), (2, 2.0)]}
