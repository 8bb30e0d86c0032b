"""What a person sees while it runs. Apart, because a terminal gets moving progress and a pipe gets plain lines."""

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pipelines import cost
from pipelines.plan import Step

MARKS = {"run": "[yellow]run[/]", "reuse": "[green]reuse[/]", "unknown": "[dim]unknown[/]"}


class Console:
    """Prints the plan, one line a stage, and the end."""

    def __init__(self) -> None:
        self.out = RichConsole(highlight=False, soft_wrap=not sys.stdout.isatty())
        self.err = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        self.json = False
        """The command line asked for JSON (`--json`) on stdout, and nothing else there."""

    def line(self, text: str) -> None:
        """A plain line; rich markup in it is not interpreted."""
        self.out.print(escape(text))

    def warn(self, text: str) -> None:
        self.err.print(f"[yellow]warning:[/] {escape(text)}")

    def error(self, text: str, code: int) -> None:
        """The last line names the exit code, because make turns every failure into 2."""
        self.err.print(f"[red]error:[/] {escape(text)}")
        self.err.print(f"raykeel exited with code {code}")

    def plan(self, name: str, steps: list[Step], notes: list[str]) -> None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for header in ("stage", "", "why", "expected"):
            table.add_column(header, overflow="fold")
        for step in steps:
            spent = "" if step.action == "reuse" else str(step.expected or cost.NO_HISTORY)
            table.add_row(step.name, MARKS[step.action], escape(step.reason), spent)
        self.out.print(f"[bold]pipeline {escape(name)}[/]")
        self.out.print(table)
        for note in notes:
            self.line(note)

    def stage(self, name: str, width: int) -> "StageLine":
        return StageLine(self, name, width)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Two aligned columns."""
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            self.line(f"  {label.ljust(width)}  {value}")


class StageLine:
    """One stage while it runs: a bar on a terminal, a line every 15 s elsewhere, and one closing line."""

    PLAIN_EVERY_S = 15.0

    def __init__(self, console: Console, name: str, width: int) -> None:
        self._console = console
        self._name = name.ljust(width)
        self._started = time.monotonic()
        self._said = self._started
        self._headline = ""
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> "StageLine":
        if self._console.out.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(24),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._progress = Progress(*columns, console=self._console.out, transient=True)
            self._task = self._progress.add_task(self._name, total=1.0, text="")
            self._progress.start()
        return self

    def progress(self, fraction: float, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=fraction, text=escape(text))
        elif time.monotonic() - self._said > self.PLAIN_EVERY_S:
            self._said = time.monotonic()
            self._console.line(f"  {self._name}  {fraction:4.0%}  {text}")

    def headline(self, text: str) -> None:
        self._headline = text

    @property
    def said(self) -> str:
        """The last headline."""
        return self._headline

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        seconds = time.monotonic() - self._started
        mark = "[green]✓[/]" if kind is None else "[red]✗[/]"
        self._console.out.print(
            f"{mark} {escape(self._name)}  {seconds:6.1f} s  {escape(self._headline if kind is None else '')}"
        )
