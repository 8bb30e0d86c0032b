"""The server as a Ray Serve application, and the moves of a roll-out. Apart from the verb, which tells the story in order,
and from the app, which knows nothing of Ray.

The engine lives in the ingress replica: streaming through a second deployment was measured at 400 events a second, here 8,000.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus

from stages.artifacts import ArtifactError, Checkpoint
from stages.contract import ResourcesUnavailable, StageError
from stages.serving.endpoint import Deployed, ask_ready
from stages.serving.golden import Question
from stages.serving.options import ServingOptions

DEPLOYMENT = "model"
PORTS_TRIED = 100
LIGHT_REQUESTS = 32
"""Requests a replica takes beside those that generate or wait: health, readiness, models, refusals."""
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


class Replica:
    """One process with the model. Its constructor returns when the model loaded and gave its golden answers, so Serve
    sends no request to one that would answer wrongly. A plain class: Serve wraps it in `application` alone."""

    def __init__(self, deployed: Deployed, load_timeout_s: float) -> None:
        listen_on_loopback()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from stages.serving.app import build_app

        self._app = build_app(
            Checkpoint(uri=deployed.uri).local(),
            name=deployed.model,
            version=deployed.version,
            digest=deployed.digest,
            options=deployed.options,
            instance=deployed.instance,
        )
        self._app.engine.wait_ready(load_timeout_s)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    def check_health(self) -> None:
        """Called by Serve every few seconds; raising makes it replace this process."""
        if not self._app.engine.alive:
            raise RuntimeError("the model's thread is dead or stuck")


def listen_on_loopback() -> None:
    """A replica opens a port for calls of other deployments, on all interfaces, that unpickles what it is sent and asks
    for no token. Nothing here calls it, so it is bound where only this machine can."""
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))


def trial(uri: str, threads: int) -> dict[str, Any]:
    """Load a model and ask its golden questions in this process: {"questions": [...]} or {"error": reason}."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from stages.serving.golden import check_golden
    from stages.serving.model import load_model

    torch.set_num_threads(threads)
    try:
        directory = Checkpoint(uri=uri).local()
        return {"questions": check_golden(load_model(directory), directory)}
    except (StageError, ArtifactError) as error:
        return {"error": str(error)}


def application(deployed: Deployed, load_timeout_s: float) -> serve.Application:
    options = deployed.options
    made = serve.deployment(
        serve.ingress()(Replica),
        name=DEPLOYMENT,
        num_replicas=1,
        # The default, 0, stops the old replica before the new one starts: an outage for as long as the load takes.
        max_surge_percent=100,
        max_constructor_retry_count=2,
        ray_actor_options={"num_cpus": deployed.num_cpus},
        # The app refuses what exceeds its own queue, with OpenAI's error body; Serve's limits are the outer net.
        max_ongoing_requests=options.max_queue + options.max_batch + LIGHT_REQUESTS,
        max_queued_requests=options.max_queue + options.max_batch + LIGHT_REQUESTS,
        backpressure_config={"status_code": 429, "retry_after_s": 1.0},
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=options.request_timeout_s + 10.0,  # running answers are finished
        logging_config=QUIET,
    )
    return made.bind(deployed, load_timeout_s)


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application from plain values, as Ray Serve's own configuration file names it (`import_path`): the fields of `Deployed`, and
    `load_timeout_s`."""
    fields = dict(arguments)
    load_timeout_s = float(fields.pop("load_timeout_s"))
    return application(Deployed(**{**fields, "options": ServingOptions(**fields["options"])}), load_timeout_s)


def require_cpus(num_cpus: float, timeout_s: float) -> None:
    """ResourcesUnavailable unless the cluster has room for one more replica: without it a surge waits for ever."""
    end = time.monotonic() + timeout_s  # the workers of the stage before may still be ending
    while (free := ray.available_resources().get("CPU", 0.0)) < num_cpus:
        if time.monotonic() > end:
            raise ResourcesUnavailable(
                f"the new version needs {num_cpus:g} CPU beside what runs, and the cluster has {free:g} of "
                f"{ray.cluster_resources().get('CPU', 0.0):g} free: set stages.deploy.resources.num_cpus lower or wait"
            )
        time.sleep(0.2)


def start_serve(host: str, port: int) -> int:
    """Start Serve's proxy on the first free port from `port` on, or find the one that this cluster has; the port it has."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if (running := running_port()) is not None:
        return running
    chosen = next((number for number in range(port, min(port + PORTS_TRIED, 65536)) if is_free(host, number)), None)
    if chosen is None:
        raise ResourcesUnavailable(
            f"{host}: the ports {port} to {port + PORTS_TRIED - 1} are taken; set stages.deploy.port"
        )
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": chosen}, logging_config=QUIET)
    except Exception as error:  # a task error of Serve's proxy: its text is a remote traceback
        raise ResourcesUnavailable(
            f"Serve's proxy does not start on {host}:{chosen}: {last_line(str(error))}"
        ) from error
    return chosen


def running_port() -> int | None:
    """The port of the proxy that this cluster has already, or None. Serve has no public question for it."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return int(client.http_config.port) if client is not None else None


def is_free(host: str, port: int) -> bool:
    """Nobody listens there. Asked by us, because Serve binds with SO_REUSEPORT and would share a port with a stranger."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def require_route(name: str) -> None:
    """StageError when another application holds `/` on this cluster: an endpoint is one application."""
    others = [app for app, status in serve.status().applications.items() if app != name and status.status != "DELETING"]
    if others:
        raise StageError(
            f"endpoint {others[0]!r} is served by this cluster already, wanted {name!r}: "
            f"set stages.deploy.endpoint={others[0]} or run make down first"
        )


def start_trial(deployed: Deployed) -> Any:
    """A Ray task that loads the new version and asks it, apart from what serves."""
    task = ray.remote(trial).options(num_cpus=deployed.num_cpus, max_retries=0, name="trial")
    return task.remote(deployed.uri, deployed.options.threads)


def finish_trial(running: Any, deployed: Deployed, timeout_s: float) -> list[Question]:
    """The golden questions with the texts to expect; StageError with the reason why this version must not serve."""
    wanted = f"{deployed.model}@{deployed.version}"
    try:
        found = ray.get(running, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise StageError(f"{wanted} did not load and answer a trial in {timeout_s:g} s; nothing was switched") from None
    except ray.exceptions.RayError as error:
        raise StageError(f"{wanted} ended its trial process: {last_line(str(error))}; nothing was switched") from error
    if "error" in found:
        raise StageError(f"{wanted} fails its trial: {found['error']}; nothing was switched")
    questions: list[Question] = found["questions"]
    return questions


def cancel_trial(running: Any) -> None:
    """Nothing of a trial is left running.

    Never of a finished one, and never by force: a forced cancel that meets the task's reply ends the driver (a failed check
    in Ray 2.60's task_manager.cc, "Tried to complete task that was not pending")."""
    finished, _ = ray.wait([running], timeout=0)
    if not finished:
        ray.cancel(running)


def restore(failed: Deployed, before: Deployed | None, something_serves: bool, timeout_s: float) -> str:
    """Aim Serve at what served before (its old replica answers meanwhile), or at nothing. Says what serves now.

    Needed although the old replica still answers: Serve would go on trying the failed version, and replace a lost old
    replica by it. With `timeout_s` 0 it does not wait for the outcome.
    """
    if before is None and something_serves:
        return "what served before still answers, but there is no record to deploy it again: run make down and make run"
    if before is None:
        serve.delete(failed.application, _blocking=timeout_s > 0)
        return "nothing serves now, as before"
    begin(before, max(timeout_s, 60.0))
    if timeout_s > 0:
        wait_serving(before, timeout_s, lambda fraction, text: None)
    return f"{before.model}@{before.version} still serves at {before.base_url}"


def begin(deployed: Deployed, load_timeout_s: float) -> None:
    """Make `deployed` what Serve aims at, without waiting: serve.run would wait without a limit."""
    target = serve.RunTarget(
        target=application(deployed, load_timeout_s), name=deployed.application, route_prefix="/", logging_config=QUIET
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def wait_serving(deployed: Deployed, timeout_s: float, progress: Callable[[float, str], None]) -> None:
    """Until the public address answers as this deployment and no other replica takes requests. StageError with the cause.

    Serve calls an application running only when the old replica has finished its last answer, which may take minutes."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < timeout_s:
        ready = ask_ready(deployed.base_url)
        status = serve.status().applications.get(deployed.application)
        if status is not None and status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            messages = [status.message, *(part.message for part in status.deployments.values())]
            raise StageError(f"{deployed.model}@{deployed.version} does not start: {cause(messages)}")
        part = status.deployments.get(DEPLOYMENT) if status is not None else None
        alone = part is not None and part.replica_states.get("RUNNING") == 1
        if alone and ready is not None and ready.get("instance") == deployed.instance:
            return
        progress(0.3 + 0.5 * passed / timeout_s, "waiting for the new version")
        time.sleep(0.1)
    raise StageError(
        f"{deployed.model}@{deployed.version} does not answer at {deployed.base_url} after {timeout_s:g} s "
        "(stages.deploy.resources.rollout_timeout_s)"
    )


def cause(messages: list[str]) -> str:
    """The reason inside Serve's status messages: the last line of the exception in the replica, else the last line."""
    text = "\n".join(messages)
    found = re.findall(r"^(?:\w+\.)*(?:\w*Error|\w*Exception|Stage\w+|ResourcesUnavailable): (.+)$", text, re.MULTILINE)
    return found[-1] if found else last_line(text)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")
