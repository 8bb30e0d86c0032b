"""A run's record in MLflow as its driver sees it: journals, lines and registry calls that the scribe is asked to carry out. Apart from
`pipelines/tracking.py`, which carries them out, because nothing here may load MLflow.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.conversation import Conversation
from pipelines.desk import Desk
from pipelines.journal import Recorded, Runs
from pipelines.registry import require_server
from stages.artifacts import Artifact


class Dictation(Runs):
    """An open MLflow store, with this project's experiment, as `Tracking` is one, in the scribe."""

    def __init__(self, desk: Desk, experiment: str) -> None:
        """Raises ResourcesUnavailable when nothing can be recorded there."""
        super().__init__(desk.uri, Path(desk.state) / "spool")
        if desk.uri.startswith("http"):
            require_server(desk.uri, desk.timeout_s)
        self._desk, self._experiment = desk, experiment
        self._open = Conversation(desk)
        """Stays, so that the scribe sees when this process is gone."""
        self.experiment_id = str(self._open.ask(op="open", experiment=experiment)["experiment_id"])

    def sender(self, journal: Path, parent: Recorded | None, asked: bool) -> "RemoteSender":
        return RemoteSender(self._desk, self._experiment, journal, parent, asked)

    def registry(self, run: Recorded) -> "RemoteRegistry":
        return RemoteRegistry(self._desk, self._experiment, run)

    def ended_point(self, sweep: str, number: int) -> dict[str, str] | None:
        """Tags of the run of a sweep's point that came to its end; None when there is none."""
        asked = {"experiment": self._experiment, "sweep": sweep, "number": number}
        found: dict[str, str] | None = self._open.ask(op="point", **asked)["answer"]
        return found

    def close(self) -> None:
        self._open.close()


class RemoteSender:
    """Has the scribe apply the lines of one journal."""

    def __init__(self, desk: Desk, experiment: str, journal: Path, parent: Recorded | None, asked: bool) -> None:
        self._facts = {"experiment": experiment, "journal": journal.stem}
        self._parent = parent
        self._asked = asked
        self._conversation = Conversation(desk)
        self.run_id: str | None = None

    def send(self, line: dict[str, Any]) -> None:
        above = self._parent.run_id if self._parent else None
        if self._parent is not None and above is None and line["op"] == "create":
            raise LookupError("the run above this one is not recorded yet")
        asked, self._asked = self._asked, True
        answer = self._conversation.ask(
            op="line", line=line, run_id=self.run_id, above=above, asked=asked, **self._facts
        )
        self.run_id = answer["run_id"]

    def close(self) -> None:
        self._conversation.close()


class RemoteRegistry:
    """`stages.contract.Registry`, asked of the scribe."""

    def __init__(self, desk: Desk, experiment: str, run: Recorded) -> None:
        self._experiment, self._run = experiment, run
        self._conversation = Conversation(desk)

    def find(self, name: str, digest: str) -> int | None:
        found: int | None = self._ask("find", name, digest)
        return found

    def register(self, name: str, model: Artifact, tags: Mapping[str, str], metrics: Mapping[str, float]) -> int:
        plain = {"uri": model.uri, "digest": model.digest}
        return int(self._ask("register", name, plain, dict(tags), dict(metrics)))

    def alias(self, name: str, alias: str) -> int | None:
        found: int | None = self._ask("alias", name, alias)
        return found

    def set_alias(self, name: str, alias: str, version: int) -> None:
        self._ask("set_alias", name, alias, version)

    def resolve(self, model: str) -> tuple[str, str]:
        uri, digest = self._ask("resolve", model)
        return uri, digest

    def close(self) -> None:
        self._conversation.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        run_id = self._run.run_id
        asked = {"method": method, "arguments": arguments, "run_id": run_id, "asked": False}
        return self._conversation.ask(op="registry", experiment=self._experiment, **asked)["answer"]
