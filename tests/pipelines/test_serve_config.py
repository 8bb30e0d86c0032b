"""Ray Serve's configuration file: what is written is valid, what is misspelt is found."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.mistakes import ConfigError
from pipelines.serve_config import made, require_valid
from stages.deploy import DeployConfig, DeployResources

GOLDEN = Path(__file__).parents[1] / "golden" / "serve-config.yaml"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("TEST_KEY", "the-key-itself")
    deploy = DeployConfig(
        max_tokens=256,
        api_key_env="TEST_KEY",
        cors_origins=["https://app.example.com"],
        resources=DeployResources(num_cpus=2.0, threads=2),
    )
    return made(deploy, "quickstart", 3, "d" * 64, "s3://bucket/objects/" + "d" * 64)


def test_the_file_is_the_golden_one_and_holds_no_key(config: dict[str, Any]) -> None:
    written = yaml.safe_dump(config, sort_keys=False, width=120)
    assert "the-key-itself" not in written
    assert yaml.safe_load(GOLDEN.read_text("utf-8")) == config
    require_valid(yaml.safe_load(written), "serve.yaml")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("num_replica",), "num_replica is not a key here"),
        (("http_options", "prt"), "http_options.prt is not a key here; did you mean port?"),
        (("applications", 0, "import_pth"), "applications.0.import_pth is not a key here; did you mean import_path?"),
        (
            ("applications", 0, "deployments", 0, "num_replica"),
            "num_replica is not a key here; did you mean num_replicas?",
        ),
        (("applications", 0, "args", "modl"), "applications.0.args.modl is not a key here; did you mean model?"),
        (
            ("applications", 0, "args", "options", "max_quue"),
            "options.max_quue is not a key here; did you mean max_queue?",
        ),
    ],
)
def test_a_misspelt_key_is_named_at_every_depth(config: dict[str, Any], place: tuple[Any, ...], said: str) -> None:
    edited: Any = copy.deepcopy(config)
    edited["applications"][0]["deployments"] = [{"name": "model", "num_replicas": 1}]
    require_valid(edited, "serve.yaml")
    inner = edited
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = 1
    with pytest.raises(ConfigError) as caught:
        require_valid(edited, "serve.yaml")
    assert str(caught.value).startswith("serve.yaml: ") and said in str(caught.value)


def test_what_is_missing_or_of_another_kind_is_told(config: dict[str, Any]) -> None:
    without = copy.deepcopy(config)
    del without["applications"][0]["args"]["digest"]
    with pytest.raises(ConfigError, match=r"args\.digest is missing"):
        require_valid(without, "serve.yaml")
    wrong = copy.deepcopy(config)
    wrong["http_options"]["port"] = "many"
    with pytest.raises(ConfigError, match=r"http_options\.port"):
        require_valid(wrong, "serve.yaml")
    with pytest.raises(ConfigError, match="no YAML mapping"):
        require_valid([1], "serve.yaml")
