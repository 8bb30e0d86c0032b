"""The local head's bookkeeping, without starting Ray: `tests/e2e` starts it."""

import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from pipelines import cluster
from pipelines.config import ClusterConfig, ClusterMode
from pipelines.lease import identity
from stages.contract import ResourcesUnavailable
from tests.services import free_port


def test_a_long_temp_directory_is_refused_with_the_number_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ResourcesUnavailable, match=r"too long for Ray's sockets \(\d+ > 45 bytes\): set TMPDIR=/tmp"):
        cluster.short_directory()
    assert list(long.iterdir()) == []


def test_a_left_over_address_in_the_environment_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[dict[str, object]] = []
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"})
    monkeypatch.setattr(cluster, "_init", lambda **arguments: joined.append(arguments))
    monkeypatch.setattr(cluster, "_require_a_cpu", lambda timeout_s: None)
    cluster.join(cluster.Address("127.0.0.1:7001", {"RAY_AUTH_MODE": "token"}, 1.0, ship_code=False))
    assert joined == [{"address": "127.0.0.1:7001", "runtime_env": None}]
    assert "RAY_ADDRESS" not in os.environ and os.environ["RAY_AUTH_MODE"] == "token"


def test_the_token_and_the_directory_are_for_their_owner_only(tmp_path: Path) -> None:
    assert cluster.token(tmp_path).stat().st_mode & 0o777 == 0o600
    assert cluster.token(tmp_path).read_text() == cluster.token(tmp_path).read_text() != ""
    directory = cluster.short_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()


def test_a_dead_run_does_not_keep_the_head_and_a_live_one_does(tmp_path: Path) -> None:
    users = tmp_path / "cluster" / "users"
    users.mkdir(parents=True)
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    (users / "1.json").write_text(json.dumps({**identity(), "pid": dead.pid}))
    assert not cluster.is_needed(tmp_path) and list(users.iterdir()) == []
    cluster.hold(tmp_path)
    assert cluster.is_needed(tmp_path)
    cluster.release(tmp_path)
    assert not cluster.is_needed(tmp_path)


def test_a_recycled_pid_is_not_taken_for_the_head(tmp_path: Path) -> None:
    cluster.head_path(tmp_path).parent.mkdir(parents=True)
    cluster.head_path(tmp_path).write_text(json.dumps({**identity(), "started": 1.0, "address": "x"}))
    assert cluster.running_head(tmp_path) is None
    assert cluster.down(ClusterConfig(), tmp_path) is None


def test_an_endpoint_keeps_the_head(tmp_path: Path) -> None:
    assert not cluster.is_needed(tmp_path)
    cluster.endpoint_path(tmp_path).write_text('{"base_url": "http://127.0.0.1:8000"}')
    assert cluster.is_needed(tmp_path)


def test_a_head_of_one_run_leaves_the_record_of_what_is_served_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))  # its start ends here, behind the point in question
    live = '{"base_url": "http://127.0.0.1:8000"}'
    cluster.endpoint_path(tmp_path).write_text(live)
    ephemeral = ClusterConfig(mode=ClusterMode.ephemeral)
    with pytest.raises(ResourcesUnavailable, match="too long"), cluster.provide(ephemeral, tmp_path):
        pass
    assert cluster.endpoint_path(tmp_path).read_text() == live
    with pytest.raises(ResourcesUnavailable, match="too long"), cluster.provide(ClusterConfig(), tmp_path) as address:
        address()
    assert not cluster.endpoint_path(tmp_path).exists()  # the control: this project's own head serves nothing yet


def test_what_was_deployed_on_a_head_that_ended_is_forgotten_and_nothing_else(tmp_path: Path) -> None:
    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"model": "m"}')

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        live = {"base_url": f"http://127.0.0.1:{server.server_port}"}
        gone = {"base_url": f"http://127.0.0.1:{free_port()}"}
        earlier = {"base_url": "http://127.0.0.1:1"}
        for before, now, then in (
            (None, gone, None),
            (earlier, gone, earlier),
            (earlier, earlier, earlier),
            (earlier, live, live),
            (None, live, live),
        ):
            cluster.endpoint_path(tmp_path).write_text(json.dumps(now))
            cluster.forget_endpoint(tmp_path, before)
            assert cluster.endpoint_record(tmp_path) == then
        server.shutdown()
