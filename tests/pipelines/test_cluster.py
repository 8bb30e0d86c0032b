"""The local head's bookkeeping, without starting Ray: `tests/e2e` starts it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipelines import cluster
from pipelines.config import ClusterConfig
from pipelines.lease import identity
from stages.contract import ResourcesUnavailable


def test_a_long_temp_directory_is_refused_with_the_number_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ResourcesUnavailable, match=r"too long for Ray's sockets \(\d+ > 45 bytes\): set TMPDIR=/tmp"):
        cluster.short_directory()
    assert list(long.iterdir()) == []


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
