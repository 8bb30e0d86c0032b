"""Where this invocation writes its logs. Apart, because a failure anywhere must name them."""

import logging
import warnings
from pathlib import Path

from pipelines.config import AppConfig
from pipelines.mistakes import ConfigError

_logs: list[Path] = []


def directory() -> Path | None:
    """The directory of the logs, once this invocation writes any."""
    return _logs[-1] if _logs else None


def start(app: AppConfig) -> None:
    """Everything that libraries say goes to one file; the console is for people."""
    directory = app.state_root / "logs"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(
            filename=directory / "driver.log",
            level=logging.INFO,
            format="%(asctime)s %(name)s %(levelname)s %(message)s",
            force=True,
        )
    except OSError as error:
        raise ConfigError(
            f"state={app.state}: {directory} cannot be written ({error.strerror}); choose another with state=<directory>"
        ) from error
    _logs.append(directory)
    logging.raiseExceptions = (
        False  # on a full disk a line of the log is lost, not the console under tracebacks about it
    )
    logging.captureWarnings(True)
    warnings.simplefilter("default")
