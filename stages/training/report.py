"""Tells the tracker and the console how training goes, from its lines. Apart, because every launcher reports alike."""

import math
from pathlib import Path
from typing import Any

from stages.contract import Context
from stages.training.follow import METRICS, Follower


class Report:
    """Carries the lines of `metrics.jsonl` to the tracker and the console."""

    def __init__(self, ctx: Context, work: Path) -> None:
        self.ctx, self.work = ctx, work
        self.follower = Follower(work / METRICS)
        self.last: dict[str, Any] = {}
        self.events: list[str] = []
        self.speeds: list[float] = []
        self.plan, self.histogram = "", ""
        self.summary: dict[str, float] = {}

    def poll(self) -> None:
        """Log what is new, each step once."""
        for line in self.follower.poll():
            if "event" in line:
                self.events.append(line["event"])
                self.ctx.progress(self.fraction, line["event"])
            elif "plan" in line:
                self.plan = line["plan"]
                self.ctx.progress(self.fraction, self.plan)
            elif "summary" in line:
                self.summary, self.histogram = line["summary"], line["histogram"]
            elif "step" in line:
                self._step(line)

    @property
    def fraction(self) -> float:
        return self.last["step"] / self.last["steps"] if self.last else 0.0

    def _step(self, line: dict[str, Any]) -> None:
        numbers = {k: float(v) for k, v in line.items() if k not in ("step", "steps", "at")}
        self.ctx.tracker.log_metrics(numbers, step=line["step"], at=line["at"])
        self.last |= line
        self.speeds.append(numbers["tokens_per_second"])
        recent = self.speeds[-20:]
        speed = sum(recent) / len(recent)
        per_step = line["tokens"] / line["step"]
        remaining = (line["steps"] - line["step"]) * per_step / speed if speed else math.inf
        loss = f"loss {line['loss']:.2f}" if "loss" in line else "loss not finite, skipped"
        text = f"step {line['step']}/{line['steps']} {loss} {_short(speed)} tok/s ETA {_seconds(remaining)}"
        self.ctx.progress(self.fraction, text)

    def finish(self) -> None:
        """What is known at the end: the environment of each worker, events, and the headline."""
        self.poll()
        workers = sorted((self.work / "workers").glob("rank-*.json"))
        self.ctx.tracker.log_text("[" + ",\n".join(w.read_text("utf-8") for w in workers) + "]\n", "environment.json")
        if self.events:
            self.ctx.tracker.log_text("\n".join(self.events) + "\n", "events.txt")
        if self.summary:
            self.ctx.tracker.log_metrics(self.summary)
            self.ctx.tracker.log_text(self._speed(), "speed.txt")
        if self.last:
            best = self.last.get("best_step", self.last["step"])
            of_best = (
                f" (best {self.last['best_validation_loss']:.3f} at step {best})" if best != self.last["step"] else ""
            )
            self.ctx.headline(
                f"validation loss {self.last['validation_loss']:.3f}{of_best} after {self.last['step']} steps, "
                f"{_short(self.last['tokens'])} tokens"
            )

    def _speed(self) -> str:
        """What was planned, what came of it, the MFU's formula and peak, and the step times."""
        numbers = self.summary
        lines = [self.plan] if self.plan else []
        lines += [f"{name}: {value:.6g}" for name, value in numbers.items()]
        if "estimated_seconds" in numbers:
            memory = numbers["peak_memory_bytes"] / numbers["estimated_memory_bytes"]
            seconds = numbers["timed_seconds"] / max(numbers["estimated_seconds"], 1e-9)
            lines.append(f"found beside estimated: {memory:.2f} times the memory, {seconds:.2f} times the seconds")
        if "flops_per_token" in numbers:
            lines.append(
                "MFU = tokens_per_second_padded / workers * flops_per_token / peak_flops; "
                + (
                    f"peak {numbers['peak_flops']:.4g} a second"
                    if "mfu" in numbers
                    else "none: no peak_tflops was stated"
                )
                + "; flops_per_token = (4 + 2 * trained share) * multiplied weights + 12 * layers * heads * head_dim * length"
            )
        return "\n".join([*lines, "step times:", self.histogram])


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
