"""The command line: `raykeel <command> [overrides]` = `python -m pipelines ...`; `make` is its front door.

Overrides are Hydra's. From make they arrive in RAYKEEL_OVERRIDES, free text in RAYKEEL_TEXT; never spliced into a shell.
Exit codes: 0 ok, 1 configuration, 2 stage failed, 3 gate refused, 4 awaiting approval, 5 cluster or tracking unavailable,
6 integrity, 130/143 signals.
"""

import argparse
import importlib
import logging
import os
import re
import sys
import traceback

from pipelines import log_file
from pipelines.console import Console
from pipelines.mistakes import ConfigError

COMMANDS = {
    "run": "pipelines.commands:run",
    "plan": "pipelines.commands:plan",
    "why": "pipelines.commands:why",
    "preview": "pipelines.preview:preview",
    "debug": "pipelines.debug:debug",
    "config": "pipelines.commands:config",
    "sweep": "pipelines.sweep:sweep",
    "best": "pipelines.sweep:best",
    "status": "pipelines.status:status",
    "ask": "pipelines.chat:ask",
    "chat": "pipelines.chat:chat",
    "trace": "pipelines.trace:trace",
    "serve": "pipelines.rollout:serve",
    "rollback": "pipelines.rollout:rollback",
    "serve-config": "pipelines.serve_config:serve_config",
    "ui": "pipelines.commands:ui",
    "down": "pipelines.commands:down",
    "gc": "pipelines.gc:gc",
    "pin": "pipelines.pins:pin",
    "unpin": "pipelines.pins:unpin",
    "verify": "pipelines.verify:verify",
    "export": "pipelines.export:export",
    "doctor": "pipelines.doctor:doctor",
}
"""Command -> its function `(console, overrides, conf) -> exit code`, imported when it is asked for."""

ANSWERS_JSON = {"plan"}
"""Commands with a form for machines: `--json`."""


def main(argv: list[str] | None = None) -> int:
    """Parse, dispatch, and turn every failure into one message and one exit code."""
    parser = argparse.ArgumentParser(
        prog="raykeel", description="From raw rows to a served, versioned model: one config."
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "overrides", nargs="*", help="Hydra overrides, for example pipeline=finetune stages.train.learning_rate=3e-4"
    )
    parser.add_argument("--traceback", action="store_true", help="print the Python traceback of a failure")
    parser.add_argument("--json", action="store_true", help="of plan: print it as JSON (docs/plan.md)")
    parser.add_argument("--conf", default=os.environ.get("CONF"), help="directory with more pipelines and options")
    try:
        arguments = parser.parse_intermixed_args(argv)
    except SystemExit as error:
        return 1 if error.code else 0
    console = Console()
    if arguments.json and arguments.command not in ANSWERS_JSON:
        console.error(f"--json: {arguments.command} has no such form; {', '.join(sorted(ANSWERS_JSON))} has", 1)
        return 1
    console.json = arguments.json
    overrides = from_make(os.environ.get("RAYKEEL_OVERRIDES", "")) + arguments.overrides
    module, _, function = COMMANDS[arguments.command].partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(console, overrides, arguments.conf))
    except BaseException as error:
        code, message = _verdict(error)
        if code is None:
            raise
        if arguments.traceback:
            traceback.print_exc()
        if code in (2, 5) and (logs := log_file.directory()):
            message += f"\nlogs: {logs} (driver.log; head.log and ray/ of the last local Ray)"
        console.error(message, code)
        return code


def from_make(words: str) -> list[str]:
    """`$(MAKEOVERRIDES)` -> overrides. make lists them last first, with blanks and backslashes escaped and `$` doubled;
    ALL-CAPS names are make's own variables."""
    found = [re.sub(r"\\(.)", r"\1", word).replace("$$", "$") for word in re.findall(r"(?:\\.|[^\s\\])+", words)]
    return [word for word in reversed(found) if not re.match(r"^[A-Z_]+:?=", word)]


def _verdict(error: BaseException) -> tuple[int | None, str]:
    """(exit code, message) of a failure; code None for SystemExit."""
    from pipelines.lease import LeaseLost, LeaseTimeout
    from pipelines.session import Terminated
    from pipelines.store import IntegrityError
    from stages.artifacts import ArtifactError
    from stages.contract import GateRefused, ResourcesUnavailable, StageError
    from stages.storage.bucket import BucketError

    if isinstance(error, SystemExit):
        return None, ""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted; what was published stays, the next run goes on from there"
    if isinstance(error, Terminated):
        return 128 + error.number, "terminated; what was published stays, the next run goes on from there"
    codes: list[tuple[type[BaseException], int]] = [
        (ConfigError, 1),
        (GateRefused, 3),
        (ResourcesUnavailable, 5),
        (LeaseTimeout, 5),
        (StageError, 2),
        (ArtifactError, 2),
        (IntegrityError, 6),
        (LeaseLost, 6),
        (BucketError, 5),
    ]
    for kind, code in codes:
        if isinstance(error, kind):
            return code, str(error)
    logging.getLogger(__name__).error("unexpected failure", exc_info=error)  # whole in driver.log
    return 2, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]} (--traceback shows where)"


if __name__ == "__main__":
    sys.exit(main())
