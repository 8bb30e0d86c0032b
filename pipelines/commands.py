"""What each everyday command does: `(console, overrides, conf) -> exit code`. Apart from `__main__`, which parses, dispatches and
turns failures into messages; commands with a topic of their own stand in its module.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from pipelines import log_file
from pipelines.config import AppConfig, compose, compose_node, redacted
from pipelines.console import Console
from pipelines.mistakes import ConfigError


def run(console: Console, overrides: list[str], conf: str | None) -> int:
    from pipelines import runner, session

    app = compose(overrides, conf)
    log_file.start(app)
    started = time.monotonic()
    with session.signals(), session.Session(app, console) as opened:
        outcome = runner.run(app, opened, as_typed("run", overrides))
    _say_what_now(console, app, outcome, time.monotonic() - started)
    return 0


def plan(console: Console, overrides: list[str], conf: str | None) -> int:
    import json

    from pipelines import plan as planning
    from pipelines import reasons, session

    app = compose(overrides, conf)
    steps, _ = session.planned(app)
    if console.json:
        sys.stdout.write(json.dumps(reasons.as_json(app, steps), indent=1) + "\n")
        return 0
    console.plan(app.name, steps, planning.announcements(app, steps))
    console.line(reasons.summary(steps))
    return 0


def why(console: Console, overrides: list[str], conf: str | None) -> int:
    from pipelines import reasons, session

    app = compose(overrides, conf)
    steps, _ = session.planned(app)
    for step in steps:
        console.line(f"{step.name}: {step.action}, {step.reason}")
        for facet, state in reasons.facet_lines(step):
            console.line(f"    {facet.ljust(8)} {state}")
    return 0


def config(console: Console, overrides: list[str], conf: str | None) -> int:
    from omegaconf import OmegaConf

    node = compose_node(overrides, conf)
    console.line(redacted(OmegaConf.to_yaml(node, resolve=True).rstrip()))
    return 0


def ui(console: Console, overrides: list[str], conf: str | None) -> int:
    from pipelines.registry import RegistryReader, tracking_uri

    app = compose(overrides, conf)
    uri = tracking_uri(app.tracking.uri, app.state_root)
    if uri.startswith("http"):
        console.line(f"runs are recorded at {redacted(uri)}: open that address")
        return 0
    if not Path(uri.removeprefix("sqlite:///")).exists():
        raise ConfigError("there is no MLflow store yet: make run makes one")
    port = os.environ.get("PORT", "5000")
    # MLflow's own start page is for chat traces; this part of the address opens it on runs and curves.
    view = "?workflowType=machine_learning"
    rows = [("all runs", f"http://127.0.0.1:{port}/#/experiments{view}")]
    if latest := RegistryReader(uri).latest_run():
        experiment, run_id, name = latest
        rows.insert(0, (name, f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs/{run_id}{view}"))
    console.table(rows)
    console.line("Ctrl-C ends it; another port: make ui PORT=5001")
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_PICKLE_DESERIALIZATION="false")
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # four idle worker processes that nothing here uses
    mlflow = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        uri,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--workers",
        "1",
    ]
    os.execv(sys.executable, mlflow)


def down(console: Console, overrides: list[str], conf: str | None) -> int:
    from pipelines import cluster, desk

    app = compose(overrides, conf)
    ended = [cluster.down(app.cluster, app.state_root), desk.end(app.state_root)]
    console.line("\n".join(said for said in ended if said) or "nothing of this project is running")
    return 0


def _say_what_now(console: Console, app: AppConfig, outcome: Any, seconds: float) -> None:
    from pipelines import cluster

    endpoint = cluster.endpoint_record(app.state_root)
    if outcome.executed:
        console.line(f"{outcome.executed} of {len(outcome.steps)} stages ran in {seconds:.0f} s")
    rows = []
    if endpoint and "deploy" in {step.name for step in outcome.steps}:
        rows += [
            (
                "served",
                f"{endpoint['model']}@{endpoint['version']} at {endpoint['base_url']} (a page to chat; OpenAI's clients: /v1)",
            )
        ]
        rows += [("ask it", 'make ask TEXT="os.path.join("')]
    rows += [("see it", "make ui")]
    if endpoint:
        rows += [("stop it", "make down")]
    console.table(rows)


def as_typed(command: str, overrides: list[str]) -> str:
    """The make command line that repeats this run."""
    import shlex

    return redacted(" ".join(["make", command, *(shlex.quote(o) for o in overrides)]))
