"""What a person sees while it runs. Apart, because a terminal gets moving progress and a pipe gets plain lines."""

import sys
import threading
import time
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
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
        self._bars: Progress | None = None
        self._lock = threading.Lock()

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

    @property
    def bars(self) -> Progress:
        """The moving lines of a terminal, one for each running stage."""
        if self._bars is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(24),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bars = Progress(*columns, console=self.out, transient=True)
        return self._bars

    def open_bar(self, name: str) -> TaskID | None:
        """A moving line; None where there is no terminal."""
        if not self.out.is_terminal:
            return None
        with self._lock:
            task = self.bars.add_task(name, total=1.0, text="")
            self.bars.start()
            return task

    def close_bar(self, task: TaskID | None) -> None:
        if task is None:
            return
        with self._lock:
            self.bars.remove_task(task)
            if not self.bars.task_ids:
                self.bars.stop()
                self._bars = None

    def verdict(self, mark: str, text: str) -> None:
        """A plain line behind a coloured word."""
        self.out.print(f"{mark} {escape(text)}", soft_wrap=True)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Two aligned columns."""
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            self.line(f"  {label.ljust(width)}  {value}")


class StageLine:
    """One stage while it runs: a bar on a terminal, a line every 15 s elsewhere, and one closing line. Several may be open."""

    PLAIN_EVERY_S = 15.0

    def __init__(self, console: Console, name: str, width: int) -> None:
        self._console = console
        self._name = name.ljust(width)
        self._started = time.monotonic()
        self._said = self._started
        self._headline = ""
        self._task: Any = None

    def __enter__(self) -> "StageLine":
        self._task = self._console.open_bar(self._name)
        return self

    def progress(self, fraction: float, text: str) -> None:
        if self._task is not None:
            self._console.bars.update(self._task, completed=fraction, text=escape(text))
        elif time.monotonic() - self._said > self.PLAIN_EVERY_S:
            self._said = time.monotonic()
            self._console.line(f"  {self._name}  {fraction:4.0%}  {text}")

    def note(self, text: str) -> None:
        """A line that stays, for what a person should know while it runs."""
        self._console.line(f"  {self._name}  {text}")

    def headline(self, text: str) -> None:
        self._headline = text

    @property
    def said(self) -> str:
        """The last headline."""
        return self._headline

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._console.close_bar(self._task)
        seconds = time.monotonic() - self._started
        mark = "[green]✓[/]" if kind is None else "[red]✗[/]"
        self._console.out.print(
            f"{mark} {escape(self._name)}  {seconds:6.1f} s  {escape(self._headline if kind is None else '')}"
        )
