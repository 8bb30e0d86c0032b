"""vLLM behind Ray Serve, for a model that this project made: `python -m benchmarks.gpu.serve_vllm FOLDER NAME`, in an environment of
its own (`pip install -c constraints-vllm.txt 'ray[llm]'`), on a machine with GPUs. No run has exercised it yet (docs/support.md).

FOLDER is what `make export` writes. What serves is then taken for the endpoint as any server is: `deploy=external
stages.deploy.external.base_url=http://127.0.0.1:8000 stages.deploy.external.model=NAME`.
"""

import argparse
from pathlib import Path
from typing import Any


def app_config(
    folder: str, name: str, tensor_parallel: int, replicas: tuple[int, int], adapters: str | None
) -> dict[str, Any]:
    """What `ray.serve.llm.build_openai_app` takes. `replicas`: fewest and most. `adapters`: where LoRA adapters lie, one folder each, on an
    object store (Ray takes no local folder); they are asked for as `NAME:adapter`."""
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": name, "model_source": folder},
        "engine_kwargs": {"tensor_parallel_size": tensor_parallel},
        "deployment_config": {
            "autoscaling_config": {"min_replicas": replicas[0], "max_replicas": replicas[1]},
            "max_ongoing_requests": 256,
        },
        # Ray gathers tokens for 50 ms before it sends the first of them (ray#59681): a first token that late helps nobody.
        "experimental_configs": {"stream_batching_interval_ms": 0},
    }
    if adapters is not None:
        config["engine_kwargs"]["enable_lora"] = True
        config["lora_config"] = {"dynamic_lora_loading_path": adapters, "max_num_adapters_per_replica": 4}
    return {"llm_configs": [config]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.serve_vllm", description="vLLM behind Ray Serve.")
    parser.add_argument("folder", type=Path, help="a model in Hugging Face's layout")
    parser.add_argument("name", help="what clients call it")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one replica")
    parser.add_argument("--replicas", type=int, nargs=2, default=(1, 1), metavar=("MIN", "MAX"))
    parser.add_argument("--adapters", help="s3://... with one LoRA adapter a folder")
    given = parser.parse_args()
    folder = str(given.folder.resolve(strict=True))
    from ray import serve
    from ray.serve.llm import build_openai_app

    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    config = app_config(folder, given.name, given.tensor_parallel, tuple(given.replicas), given.adapters)
    serve.run(build_openai_app(config), name="vllm", blocking=True)


if __name__ == "__main__":
    main()
