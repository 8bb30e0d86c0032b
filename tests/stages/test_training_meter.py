"""What is measured while training runs."""

import time

import numpy as np
import psutil
import pytest
import torch
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor

from stages.text.packed import PackedSplit
from stages.training.config import Precision
from stages.training.device import UNTRIED, peak_flops
from stages.training.host import Host
from stages.training.loop import Training
from stages.training.memory import free_memory, resident
from stages.training.meter import Meter, histogram, quantile
from stages.training.world import World
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import config, job

CPU = torch.device("cpu")


def test_steps_are_timed_and_what_stands_between_them_is_not():
    meter = Meter(CPU)
    time.sleep(0.05)  # a checkpoint is read
    meter.restart()
    for _ in range(4):
        with meter.waiting():
            time.sleep(0.01)
        time.sleep(0.03)
        meter.lap(30, 60)
        time.sleep(0.05)  # validation
        meter.restart()
    facts = meter.summary(padded=400)
    assert facts["timed_steps"] == 4
    assert 0.16 <= facts["timed_seconds"] < 0.3
    assert facts["tokens_per_second_supervised"] == pytest.approx(120 / facts["timed_seconds"])
    assert facts["tokens_per_second_unpadded"] == pytest.approx(240 / facts["timed_seconds"])
    assert facts["tokens_per_second_padded"] == pytest.approx(400 / facts["timed_seconds"])
    assert 0.1 < facts["data_wait_share"] < 0.4
    assert facts["step_seconds_median"] <= facts["step_seconds_p95"] <= facts["step_seconds_max"]


def test_before_the_first_step_there_is_nothing_to_say():
    assert Meter(CPU).summary(0) == {} and Meter(CPU).histogram() == ""


def test_quantiles_are_values_that_were_seen():
    values = [float(v) for v in range(1, 101)]
    assert quantile(values, 0.5) == 50 and quantile(values, 0.95) == 95 and quantile([7.0], 0.5) == 7.0


def test_the_histogram_counts_every_step_once():
    lines = histogram([1.0, 1.0, 1.05, 2.0]).splitlines()
    assert len(lines) == 10
    assert [int(line.split()[2]) for line in lines] == [3, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert lines[0].count("#") == 40
    assert histogram([2.0, 2.0]).splitlines()[0].split()[2] == "2"


def test_the_peak_is_that_of_the_run_and_not_of_what_was_before():
    big = torch.ones(40_000_000)  # 160 MB
    del big
    meter = Meter(CPU)
    kept = torch.ones(10_000_000)  # 40 MB
    meter.lap(1, 1)
    found = meter.summary(1)["training_memory_bytes"]
    assert 38e6 < found < 120e6
    assert len(kept) and meter.summary(1)["peak_memory_bytes"] >= resident() - 50e6


def test_the_free_memory_of_this_machine_is_known():
    found = free_memory()
    assert found is not None and 1e8 < found < 1e14


def test_a_processor_has_no_peak_unless_one_is_stated():
    assert peak_flops(None, CPU, Precision.float32) is None
    assert peak_flops(0.15, CPU, Precision.float32) == 1.5e11


def test_padding_is_the_last_document_of_one_id_without_a_label():
    ids = np.array([[5, 6, 7, 0, 0, 0], [5, 6, 7, 8, 9, 4], [0, 0, 0, 0, 0, 0], [5, 6, 7, 3, 3, 3]], np.int32)
    labels = np.array([[-100, 6, 7, *[-100] * 3], [-100, 6, -100, -100, 9, 4], [-100] * 6, [-100, 6, 7, -100, 3, 3]])
    starts = [np.array(s, np.int32) for s in ([0, 3], [0, 3], [0], [0, 3])]
    split = PackedSplit(ids, labels.astype(np.int32), starts, ["a"] * 4)
    assert split.lengths.tolist() == [3, 6, 6, 6]


def test_a_run_on_a_device_that_no_test_has_used_says_so_first(tmp_path):
    data = tiny.dataset(tmp_path)[0]
    for kind, said in (("cpu", []), ("meta", [UNTRIED])):
        training = Training(job(config(), data, tmp_path / kind), World(0, 1, torch.device(kind)), lambda: None)
        training.resume()
        events = [line["event"] for line in tiny.lines(tmp_path / kind / "metrics.jsonl") if "event" in line]
        assert events == said


def test_what_the_machine_does_is_told_in_mlflows_words_and_not_at_each_step(tmp_path):
    host = Host(tmp_path, CPU, every_s=0.2)
    assert host.sample() == {}
    until, ones = time.monotonic() + 0.25, torch.ones(64, 64)
    while time.monotonic() < until:
        ones @ ones
    found = host.sample()
    assert host.sample() == {}
    memory = psutil.virtual_memory()
    assert found["system/system_memory_usage_percentage"] == pytest.approx(100 * memory.used / memory.total, abs=5)
    assert found["system/process_memory_usage_megabytes"] == pytest.approx(resident() / 1e6, rel=0.1)
    assert 5 < found["system/cpu_utilization_percentage"] <= 100  # one core of it worked
    monitor = CPUMonitor()
    monitor.collect_metrics()
    assert {f"system/{name}" for name in monitor.aggregate_metrics()} < set(found)
