"""Canaries: each asserts that the installed Ray still has a gap that this project works around (docs/ray-gaps.md names
them). One that fails after an upgrade is good news: delete the work-around that its message names, then the test."""

import inspect
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ray-gaps.md"


def in_a_process(code: str, **environ: str) -> str:
    """What a fresh Python prints: Ray reads much of its environment once, at import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=kept | environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_row_of_the_page_names_a_file_that_exists_and_a_test_that_exists() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 10
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        files = re.findall(r"`((?:pipelines|stages|benchmarks)/[\w/]+\.py)`", row)
        assert files and all((ROOT / name).exists() for name in files), row
        told = row.rstrip(" |").rpartition("|")[2]
        names = re.findall(r"`(test_\w+)`", told)
        assert names or "no test" in told, row
        for name in names:
            assert f"def {name}(" in tests, name


# Core


def test_ray_start_still_opens_fixed_ports() -> None:
    from ray._private import ray_constants
    from ray.scripts import scripts

    told = "ray start asks for free ports now: the keeper process of pipelines/cluster.py may become `ray start`"
    assert ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT == 52365, told
    assert "ray_client_server_port = 10001" in inspect.getsource(scripts.start.callback), told


def test_ray_still_replaces_the_loopback_address_unless_it_is_told_not_to_cluster() -> None:
    code = "from ray._private.services import resolve_ip_for_localhost as r; print(r('127.0.0.1'))"
    assert in_a_process(code, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0") == "127.0.0.1"
    if (
        in_a_process("from ray._private.services import node_ip_address_from_perspective as n; print(n())")
        != "127.0.0.1"
    ):
        assert in_a_process(code) != "127.0.0.1", (
            "Ray keeps a loopback address now: pass _node_ip_address in pipelines/cluster.py instead of the switch"
        )


@pytest.mark.ray
@pytest.mark.slow
def test_a_local_head_listens_on_loopback_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    from benchmarks import machine

    with machine.scratch() as directory, machine.local_head(directory / "state") as keeper:
        processes = machine.Processes()
        processes.add(keeper)
        connections = [c for p in processes.alive() for c in p.net_connections(kind="inet") if c.status == "LISTEN"]
        assert len(connections) >= 4
        assert {c.laddr.ip.removeprefix("::ffff:") for c in connections} == {"127.0.0.1"}


def test_ray_still_writes_its_token_file_with_the_default_mode() -> None:
    from ray._private.authentication import authentication_token_setup

    source = inspect.getsource(authentication_token_setup.generate_and_save_token)
    assert "chmod" not in source and "0o600" not in source, (
        "Ray protects its token file now: `token` in pipelines/cluster.py may let Ray make it"
    )


@pytest.mark.ray
@pytest.mark.slow
def test_joining_a_dead_address_still_takes_longer_than_a_person_waits() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"import ray; ray.init(address='127.0.0.1:{port}', logging_level='ERROR')"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=15)
            pytest.fail("Ray gives up early now: delete _require_listening in pipelines/cluster.py")
    finally:
        child.kill()
        child.wait()


@pytest.mark.ray
def test_threads_of_a_worker_still_follow_its_cpus(ray_session: None) -> None:
    import ray

    seen = ray.get(ray.remote(num_cpus=2)(lambda: os.environ.get("OMP_NUM_THREADS")).remote())
    assert seen == "2", "Ray leaves OMP_NUM_THREADS alone now: see _torchrun_environment in stages/launching/launch.py"


# Data


@pytest.mark.ray
def test_writing_into_a_directory_twice_still_doubles_the_rows(ray_session: None, tmp_path: Path) -> None:
    import pyarrow.parquet
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    with ray.data.DataContext.current(context):
        rows = ray.data.range(10, override_num_blocks=1)
        for _ in range(2):
            rows.write_parquet(str(tmp_path / "out"))
    assert pyarrow.parquet.read_table(tmp_path / "out").num_rows == 20, (
        "write_parquet no longer appends; the stages' own writer (stages/text/shards.py) stays, because it gives equal bytes"
    )


def test_a_library_still_decides_alone_that_progress_is_shown() -> None:
    code = (
        "import ray.data; c = ray.data.DataContext.get_current();"
        "print(c.enable_progress_bars, c.print_on_execution_start)"
    )
    assert in_a_process(code) == "True True", (
        "Ray Data is quiet by default now: simplify _settled in stages/text/blocks.py"
    )


@pytest.mark.ray
def test_ray_data_still_begins_with_one_task(ray_session: None) -> None:
    import ray.data

    def begun(batch: Any) -> Any:
        at = time.monotonic()
        time.sleep(0.3)
        yield {"at": [at]}

    gaps = []
    for _ in range(2):  # the first also starts workers
        data = ray.data.from_items([{"n": 0}, {"n": 1}], override_num_blocks=2).map_batches(begun, batch_size=1)
        first, second = sorted(row["at"] for row in data.take_all())
        gaps.append(second - first)
    assert gaps[1] > 0.28, (
        "Ray Data begins with several tasks now: leave op_resource_reservation_enabled in stages/text/blocks.py as it is"
    )


# Train


def test_an_unplaceable_group_of_workers_is_still_asked_for_without_end() -> None:
    from ray.train import FailureConfig

    assert FailureConfig().controller_failure_limit == -1, (
        "Ray Train gives up by itself now: the limit in stages/launching/launch.py may go (the preflight stays: it names the fix)"
    )


def test_fit_still_takes_ctrl_c_for_itself() -> None:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    source = inspect.getsource(DataParallelTrainer._register_sigint_handler)
    assert "signal.signal(signal.SIGINT" in source and "sys.exit(0)" in source, (
        "fit() leaves Ctrl-C to its caller now: the task and the subclass around it in stages/launching/launch.py may go"
    )


def test_failures_of_code_are_still_retried_like_failures_of_machines() -> None:
    from ray.train import FailureConfig

    fields = set(inspect.signature(FailureConfig).parameters)
    known = {
        "max_failures", "fail_fast", "controller_failure_limit", "max_preemption_failures",
        "relax_collectives_on_preemption", "preemption_grace_s",
    }  # fmt: skip
    assert fields <= known, (
        f"Ray Train has {fields - known}: can it stop at an error of code? Then _refuse in stages/launching/launch.py goes"
    )


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_still_loses_its_metrics_without_a_checkpoint_and_inherits_one_by_its_name(
    ray_session: None, tmp_path: Path
) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    calls = tmp_path / "calls"

    def loop(config: dict[str, str]) -> None:
        import tempfile

        import ray.train

        with Path(config["calls"]).open("a") as file:
            nccl = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "unset")
            file.write(f"{config['name']} {nccl} {'inherits' if ray.train.get_checkpoint() else 'starts'}\n")
        if config["name"] == "without":
            ray.train.report({"loss": 1.0})
            return
        with tempfile.TemporaryDirectory() as directory:
            ray.train.report({"loss": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(directory))

    def metrics(name: str) -> object:
        trainer = TorchTrainer(
            loop,
            train_loop_config={"calls": str(calls), "name": name},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name=name, storage_path=str(tmp_path / "storage")),
        )
        return trainer.fit().metrics

    assert metrics("without") is None, "metrics survive now: stages/launching/launch.py could use ray.train.report"
    assert calls.read_text() == "without unset starts\n", (
        "Ray Train sets what torchrun sets: see _torchrun_environment in stages/launching/launch.py"
    )
    assert metrics("with") == metrics("with") == {"loss": 1.0}
    assert calls.read_text().splitlines()[1:] == ["with unset starts", "with unset inherits"], (
        "a run no longer continues another of its name: stages/launching/launch.py may name its runs for people"
    )


# Serve


def test_serve_still_stops_the_old_replica_before_the_new_one_starts() -> None:
    from ray.serve._private.config import DeploymentConfig

    assert DeploymentConfig().max_surge_percent == 0, (
        "Serve surges by default now: max_surge_percent in stages/serving/deployment.py may go"
    )


def test_serve_run_still_has_no_time_limit() -> None:
    from ray import serve

    for function in (serve.run, serve.run_many):
        assert not [name for name in inspect.signature(function).parameters if "timeout" in name], (
            f"{function.__name__} has a time limit now: wait_serving in stages/serving/deployment.py may use it"
        )


def test_serve_still_shares_its_port_with_strangers() -> None:
    from ray.serve._private import http_util

    assert "SO_REUSEPORT" in inspect.getsource(http_util.set_socket_reuse_port), (
        "Serve's proxy binds alone now: is_free in stages/serving/deployment.py may go"
    )


def test_serve_still_does_not_say_which_port_it_has() -> None:
    import dataclasses

    from ray.serve.schema import ServeStatus

    fields = {field.name for field in dataclasses.fields(ServeStatus)}
    assert fields == {"proxies", "applications", "target_capacity"}, (
        "serve.status() says more now: running_port in stages/serving/deployment.py may ask it"
    )


def test_serves_yaml_still_accepts_a_misspelt_key() -> None:
    from ray.serve.schema import ServeDeploySchema

    deployment = {"name": "model", "num_replica": 7}
    application = {"name": "a", "import_path": "m:app", "deployments": [deployment]}
    try:
        parsed = ServeDeploySchema.model_validate({"applications": [application]})
    except ValueError:
        pytest.fail("Serve refuses unknown keys now: its YAML has become an option beside stages/serving/deployment.py")
    assert parsed.applications[0].deployments[0].num_replicas != 7


def test_the_dashboard_process_still_asks_the_cloud_where_it_is_before_it_looks_whether_it_may() -> None:
    from ray.dashboard.modules.usage_stats.usage_stats_head import UsageStatsHead

    source = inspect.getsource(UsageStatsHead.run)
    asks, looks = source.find("get_cluster_config_to_report("), source.find("usage_stats_enabled")
    assert 0 <= asks < looks, "start the dashboard process again: remove the line in cluster.start_here"


def test_a_serve_replica_still_opens_a_port_on_all_interfaces() -> None:
    from ray.serve._private import replica

    source = inspect.getsource(replica)
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in source, "remove deployment.listen_on_loopback"
