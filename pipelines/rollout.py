"""`make serve` and `make rollback`: a registered version is served, without a pipeline that makes it. Apart from the commands, because both
are one run of `pipeline=serve` with other words."""

import json
import os
from typing import Any
from urllib.parse import urlsplit

from pipelines.commands import run
from pipelines.config import compose
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from stages.contract import ResourcesUnavailable
from stages.serving.endpoint import Deployed, read_record


def serve(console: Console, overrides: list[str], conf: str | None) -> int:
    model = os.environ.get("MODEL", "").strip()
    if not model:
        raise ConfigError("name a registered model: make serve MODEL=models:/quickstart@champion")
    return run(console, _words(model, overrides), conf)


def rollback(console: Console, overrides: list[str], conf: str | None) -> int:
    """The version before, or `TO=<number>`, under the options that are live: trial, golden questions, switch, aliases last, as always."""
    live = read_record(compose(["pipeline=serve", "stages.select.model=models:/any/1", *overrides], conf).state_root)
    if live is None:
        raise ResourcesUnavailable("nothing is served by this project now: make serve MODEL=models:/name@champion")
    number = os.environ.get("TO", "").strip()
    if number and not number.isdecimal():
        raise ConfigError(f"TO must be a version's number, got {number!r}: make rollback TO=3")
    model = f"models:/{live.model}/{number}" if number else f"models:/{live.model}@previous"
    return run(console, _words(model, [*live_options(live), *overrides]), conf)


def live_options(live: Deployed) -> list[str]:
    """The overrides that deploy with the options of what serves."""
    options: dict[str, Any] = {
        name: getattr(live.options, name)
        for name in ("max_tokens", "max_batch", "max_batch_tokens", "prefill_chunk", "max_queue", "request_timeout_s")
    }
    options |= {"endpoint": live.application, "api_key_env": live.api_key_env, "port": urlsplit(live.base_url).port}
    options |= {"cors_origins": list(live.options.cors_origins)}
    options |= {"resources.threads": live.options.threads, "resources.num_cpus": live.num_cpus}
    return [f"stages.deploy.{name}={json.dumps(value)}" for name, value in options.items()]


def _words(model: str, overrides: list[str]) -> list[str]:
    return ["pipeline=serve", f"stages.select.model={json.dumps(model)}", *overrides]
