"""`make serve-config MODEL=models:/name@champion TO=serve.yaml`: the endpoint as Ray Serve's own configuration file, for clusters on
which this project does not start Serve itself. `CHECK=serve.yaml` checks one that was edited.

Apart from deploy, because nothing is started here: the alias is resolved to a version and a digest, once, and written down.
Serve's own schema lets a misspelt key pass in silence, so keys are checked here, down to the last level that has a schema.
"""

import dataclasses
import difflib
import hashlib
import json
import os
import types
import typing
from pathlib import Path
from typing import Any

from pipelines.config import compose
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from pipelines.registry import RegistryReader, tracking_uri

IMPORT_PATH = "stages.serving.deployment:build"


def serve_config(console: Console, overrides: list[str], conf: str | None) -> int:
    import yaml  # type: ignore[import-untyped]

    if check := os.environ.get("CHECK", "").strip():
        require_valid(_read(Path(check)), check)
        console.line(f"{check}: every key is one that Ray Serve or this project's server knows")
        return 0
    model, to = os.environ.get("MODEL", "").strip(), os.environ.get("TO", "").strip()
    if not model.startswith("models:/") or not to:
        raise ConfigError(
            "name a registered model and a file: make serve-config MODEL=models:/quickstart@champion TO=serve.yaml"
        )
    app = compose(["pipeline=serve", f"stages.select.model={json.dumps(model)}", *overrides], conf)
    reader = RegistryReader(tracking_uri(app.tracking.uri, app.state_root))
    name, number = reader._name_and_version(model)
    uri, digest = reader.resolve(f"models:/{name}/{number}")
    config = made(app.stages["deploy"], name, number, digest, uri)
    require_valid(config, to)
    target = Path(to).expanduser()
    if target.exists():
        raise ConfigError(f"TO={to}: exists; nothing is written over, name another or remove it")
    head = f"# {name}@{number}, digest {digest}, as Ray Serve's configuration: serve deploy {target.name}\n"
    target.write_text(head + yaml.safe_dump(config, sort_keys=False, width=120), "utf-8")
    console.line(f"{name}@{number} is described in {target}: serve deploy {target}")
    return 0


def made(deploy: Any, name: str, version: int, digest: str, uri: str) -> dict[str, Any]:
    """The configuration. `deploy` is a DeployConfig. Nothing in it depends on when or where it was written."""
    from stages.serving.endpoint import Deployed

    options = deploy.options()
    facts = {"model": name, "version": version, "digest": digest, "config_digest": options.digest()}
    deployed = Deployed(
        application=deploy.endpoint,
        base_url=f"http://{deploy.host}:{deploy.port}",
        instance=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32],
        uri=uri,
        num_cpus=deploy.resources.num_cpus,
        options=options,
        api_key_env=deploy.api_key_env,
        **facts,
    )
    arguments = json.loads(json.dumps(dataclasses.asdict(deployed)))  # as JSON has it: lists, no tuples
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": deploy.host, "port": deploy.port},  # Serve's own default is all interfaces
        "applications": [
            {
                "name": deploy.endpoint,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": {**arguments, "load_timeout_s": deploy.resources.rollout_timeout_s},
            }
        ],
    }


def require_valid(config: Any, where: str) -> None:
    """ConfigError with the first key that nobody knows, or the first value that Serve refuses."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    from stages.serving.endpoint import Deployed
    from stages.serving.options import ServingOptions

    if not isinstance(config, dict):
        raise ConfigError(f"{where}: holds no YAML mapping; wanted Ray Serve's configuration")
    _require_known(config, ServeDeploySchema, where, "")
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for number, application in enumerate(config.get("applications") or []):
        if application.get("import_path") != IMPORT_PATH:
            continue
        place, arguments = f"applications.{number}.args", application.get("args") or {}
        wanted = {field.name for field in dataclasses.fields(Deployed)} | {"load_timeout_s"}
        _require_names(arguments, wanted, where, place)
        missing = sorted(wanted - set(arguments) - {"api_key_env"})
        if missing:
            raise ConfigError(f"{where}: {place}.{missing[0]} is missing; make serve-config writes all of them")
        known = {field.name for field in dataclasses.fields(ServingOptions)}
        _require_names(arguments["options"], known, where, f"{place}.options")


def _require_known(value: Any, kind: Any, where: str, place: str) -> None:
    """Every key of a mapping that stands for a pydantic model is one of its fields, at every depth."""
    from pydantic import BaseModel

    if isinstance(value, list):
        for number, each in enumerate(value):
            _require_known(each, _inner(kind), where, f"{place}.{number}".strip("."))
        return
    model = next((k for k in _kinds(kind) if isinstance(k, type) and issubclass(k, BaseModel)), None)
    if not isinstance(value, dict) or model is None:
        return
    _require_names(value, set(model.model_fields), where, place)
    for name, each in value.items():
        _require_known(each, model.model_fields[name].annotation, where, f"{place}.{name}".strip("."))


def _require_names(value: Any, known: set[str], where: str, place: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {place} must be a mapping, got {type(value).__name__}")
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: {f'{place}.{name}'.strip('.')} is not a key here{hint}")


def _kinds(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _inner(kind: Any) -> Any:
    """What a list of this kind holds."""
    of = next((k for k in _kinds(kind) if typing.get_origin(k) is list), None)
    return typing.get_args(of)[0] if of is not None else None


def _read(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.expanduser().read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"CHECK={path}: not readable as YAML ({type(error).__name__})") from error
