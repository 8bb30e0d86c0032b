"""What a plan asks of the endpoint, and impossible options: no Ray, no torch."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stages.artifacts import Endpoint
from stages.contract import Context
from stages.deploy import DeployConfig, DeployResources, holds, replaces
from stages.probe import ProbeConfig
from stages.register import RegisterResources
from stages.serving.endpoint import Deployed, read_record, write_record
from stages.serving.options import ServingOptions

DEPLOYED = Deployed(
    application="raykeel",
    base_url="http://127.0.0.1:9",
    model="quickstart",
    version=3,
    digest="d" * 64,
    config_digest=ServingOptions().digest(),
    instance="i" * 32,
    uri="file:///models/quickstart",
    num_cpus=0.5,
    options=ServingOptions(max_tokens=100),
)


def test_the_record_comes_back_as_it_was_written_and_junk_is_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    write_record(tmp_path, DEPLOYED)
    assert read_record(tmp_path) == DEPLOYED
    for junk in ("", "{", "[]", '{"model": "m"}'):
        (tmp_path / "endpoint.json").write_text(junk)
        assert read_record(tmp_path) is None


def test_an_endpoint_that_does_not_answer_is_named_with_its_address(
    make_context: Callable[..., Context], tmp_path: Path
) -> None:
    ctx = make_context("deploy")
    endpoint = Endpoint(uri=Endpoint.write(ctx.output, DEPLOYED.summary()).uri)
    write_record(tmp_path, DEPLOYED)
    assert holds(endpoint, None, tmp_path) == "the endpoint does not answer at http://127.0.0.1:9"
    assert replaces(DeployConfig(), tmp_path) is None


def test_options_that_change_answers_change_the_digest_and_threads_do_not() -> None:
    plain = DeployConfig().options()
    assert plain.digest() == DeployConfig(port=9000, resources=DeployResources(threads=2)).options().digest()
    for other in (DeployConfig(max_tokens=5), DeployConfig(max_queue=5), DeployConfig(request_timeout_s=5)):
        assert other.options().digest() != plain.digest()
    assert replace(DEPLOYED, version=4).serves(DEPLOYED.summary()) is False
    assert replace(DEPLOYED, instance="other").serves(DEPLOYED.summary()) is True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeployConfig(host="0.0.0.0"), "host must be a loopback address"),
        (lambda: DeployConfig(host="example.org"), "host must be a loopback address"),
        (lambda: DeployConfig(port=0), "port must be within 1..65535, got 0"),
        (lambda: DeployConfig(endpoint="a/b"), "endpoint must be letters"),
        (lambda: DeployConfig(max_tokens=0), "max_tokens must be null or at least 1, got 0"),
        (lambda: DeployConfig(max_queue=0), "max_queue must be at least 1, got 0"),
        (lambda: DeployConfig(request_timeout_s=0), "request_timeout_s must be above 0"),
        (lambda: DeployResources(num_cpus=0), "resources.num_cpus must be above 0"),
        (lambda: DeployResources(threads=-1), "resources.threads must be above 0"),
        (lambda: DeployResources(rollout_timeout_s=0), "resources.rollout_timeout_s must be above 0"),
        (lambda: RegisterResources(load_timeout_s=0), "resources.load_timeout_s must be above 0"),
        (lambda: RegisterResources(timeout_s=0), "resources.timeout_s must be above 0"),
        (lambda: RegisterResources(retries=-1), "resources.retries must be 0 or more"),
        (lambda: ProbeConfig(max_tokens=1), "max_tokens must be at least 2, got 1"),
        (lambda: ProbeConfig(requests=0), "requests must be at least 1, got 0"),
        (lambda: ProbeConfig(timeout_s=0), "timeout_s must be above 0"),
    ],
)
def test_impossible_values_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_verbs_import_nothing_heavy() -> None:
    code = (
        "import sys, stages.register, stages.deploy, stages.probe\n"
        "heavy = {'ray', 'torch', 'transformers', 'openai', 'pydantic', 'numpy', 'mlflow'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
