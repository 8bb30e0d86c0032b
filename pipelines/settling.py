"""Bringing MLflow up to date after deaths: lines that were never sent, runs that nobody ended. Apart from `pipelines/tracking.py`, which
writes what a living run says.
"""

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.config import redacted
from pipelines.journal import left_behind
from pipelines.lease import is_alive, same_host

if TYPE_CHECKING:  # it imports this module
    from pipelines.tracking import Tracking

_log = logging.getLogger(__name__)


def replay(tracking: "Tracking") -> None:
    """Send what processes that are gone could not, oldest first, so that a parent exists before its children; texts last."""
    left = [item for item in left_behind(tracking.spool) if item[1][0]["uri"] == redacted(tracking.uri)]
    for path, lines in sorted(left, key=lambda item: item[1][0]["at"]):
        sender = tracking.sender(path, None, asked=True)
        sender.run_id = next((line["run_id"] for line in lines if line["op"] == "is"), None)
        try:
            for line in sorted(lines, key=lambda line: line["op"] == "text"):
                sender.send(line)
        except Exception as error:
            _log.warning("%s is kept for the next run: %s", path, redacted(str(error)))
        else:
            path.unlink(missing_ok=True)


def reconcile(tracking: "Tracking", maker_of: Callable[[str], str | None]) -> None:
    """Close runs that a killed process of this host left RUNNING, in whichever experiment."""
    client = tracking.client
    try:
        experiments = [e.experiment_id for e in client.search_experiments()]
        for run in client.search_runs(experiments, "attributes.status = 'RUNNING'", max_results=1000):
            owner = json.loads(run.data.tags.get("raykeel.owner", "{}"))
            if not same_host(owner) or is_alive(owner):
                continue
            made = tracking.of_journal(run.data.tags.get("raykeel.journal", ""), run.info.experiment_id)
            if len(made) > 1 and not run.data.metrics and not run.data.params:
                client.delete_run(run.info.run_id)  # made twice: the request came through, its answer did not
                continue
            fingerprint = run.data.tags.get("raykeel.fingerprint")
            published = bool(fingerprint) and maker_of(fingerprint) == run.info.run_id
            how = "after its result was published" if published else "before it ended"
            client.set_tag(run.info.run_id, "raykeel.ended", f"its process was gone {how}; closed for it")
            client.set_terminated(run.info.run_id, "FINISHED" if published else "KILLED")
    except Exception as error:  # an untidy list is no reason not to run
        _log.warning("runs left RUNNING could not be looked for: %s", redacted(str(error)))
