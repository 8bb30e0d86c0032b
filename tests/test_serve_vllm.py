"""What vLLM's application is told is what the installed Ray takes; nothing here starts vLLM, which is not installed."""

import importlib.metadata
from pathlib import Path

import pytest

from benchmarks.gpu.serve_vllm import app_config


def test_the_configuration_is_one_that_rays_own_schema_takes() -> None:
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig, LoraConfig

    (told,) = app_config("/models/m", "mine", 2, (1, 4), "s3://bucket/adapters")["llm_configs"]
    config = LLMConfig.model_validate(told)
    assert config.model_id == "mine" and config.model_loading_config.model_source == "/models/m"
    assert config.engine_kwargs == {"tensor_parallel_size": 2, "enable_lora": True}
    assert config.experimental_configs == {"stream_batching_interval_ms": 0}
    assert config.deployment_config["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 4}
    assert isinstance(config.lora_config, LoraConfig) and config.lora_config.max_num_adapters_per_replica == 4
    (plain,) = app_config("/models/m", "mine", 1, (1, 1), None)["llm_configs"]
    assert LLMConfig.model_validate(plain).lora_config is None and "enable_lora" not in plain["engine_kwargs"]


def test_a_misspelt_key_is_refused_by_that_schema() -> None:
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig

    (told,) = app_config("/models/m", "mine", 1, (1, 1), None)["llm_configs"]
    with pytest.raises(ValueError, match="engine_kwarg"):
        LLMConfig.model_validate({**told, "engine_kwarg": {}})


def test_the_pins_are_those_that_the_installed_ray_asks_for() -> None:
    pins = dict(
        line.split("==")
        for line in Path("constraints-vllm.txt").read_text().splitlines()
        if "==" in line and "#" not in line
    )
    wanted = [
        need
        for need in importlib.metadata.requires("ray") or []
        if need.startswith("vllm") and "llm" in need.partition(";")[2]
    ]
    assert wanted and wanted[0].partition("==")[2].split(";")[0].strip() == pins["vllm"]
    assert (
        pins["ray"] == importlib.metadata.version("ray")
        and pins["torch"] == importlib.metadata.version("torch").partition("+")[0]
    )
