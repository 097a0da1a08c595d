"""Terminal output of a running study: a line when a trial starts or ends, and progress bars.

The remaining time is the sum of the remaining forecasts, scaled by how the forecasts of finished trials turned out;
without forecasts it is based on the mean duration of the finished trials.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from deskside.study.execute.measure import Measured
from deskside.study.execute.trial_process import Ended
from deskside.study.spec.expand import PlannedArm
from deskside.utils.format import duration
from deskside.utils.parsing import json_value

TAIL = 4096  # bytes at the end of metrics.jsonl that contain its last line


class RemainingTime:
    """Estimate of a study's remaining time on `devices`."""

    def __init__(self, forecasts: Mapping[str, float | None], devices: int):
        self._forecasts, self._devices = forecasts, devices
        self._took: list[tuple[str, float]] = []

    def ended(self, arm: str, seconds: float) -> None:
        """Record that a trial of this arm finished after so many seconds."""
        self._took.append((arm, seconds))

    def left(self, arms: list[str]) -> float | None:
        """Return the seconds for trials of these arms, or None if nothing is known."""
        if not arms:
            return 0.0
        known = [(f, took) for arm, took in self._took if (f := self._forecasts.get(arm)) is not None]
        mean = sum(took for _, took in self._took) / len(self._took) if self._took else None
        factor = sum(took for _, took in known) / sum(f for f, _ in known) if known else 1.0
        forecasts = [self._forecasts.get(arm) for arm in arms]
        each = [mean if forecast is None else forecast * factor for forecast in forecasts]
        expected = [seconds for seconds in each if seconds is not None]
        if len(expected) < len(arms):
            return None
        return sum(expected) / min(self._devices, len(arms))


class Screen:
    """The progress display on standard error. trials: total number; done: finished ones."""

    def __init__(self, trials: int, done: int, clock: RemainingTime):
        self.trials, self.done, self.clock = trials, done, clock
        self.console = Console(stderr=True, highlight=False)
        self._bars: Progress | None = None
        self._tasks: dict[Path, TaskID] = {}
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}", markup=False),
                console=self.console,
                transient=True,
                refresh_per_second=2,  # the trials need the cores
            )

    def __enter__(self) -> "Screen":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        self.console.print(text, markup=False, soft_wrap=True)

    def started(self, arm: PlannedArm, seed: int, device: str, run: Path, resumed: bool) -> None:
        """Report the start of a trial."""
        how = "resumes" if resumed else "starts"
        self.say(f"{self._place(arm, seed)}: {how} on {device}")
        if self._bars is not None:
            self._tasks[run] = self._bars.add_task(
                f"{arm.label}, seed {seed}", total=None, numbers="setting up"
            )

    def ended(
        self, arm: PlannedArm, seed: int, run: Path, ended: Ended, measured: Measured | None, left: list[str]
    ) -> None:
        """Report the end of a trial. left: the arms of the remaining trials."""
        told = f"{ended.status} after {ended.seconds:.0f} s"
        metrics = measured.metrics if measured is not None else {}
        if "val_bpb" in metrics:
            told += f": {metrics['val_bpb']:.4f} bits per byte"
        if "tokens_per_second" in metrics:
            emulated = " (emulated)" if measured is not None and measured.emulated else ""
            told += f", {metrics['tokens_per_second']:,.0f} tokens/s{emulated}"
        if ended.reason:
            told += f": {ended.reason}"
        seconds = self.clock.left(left)
        if seconds:
            told += f"; about {duration(seconds)} left"
        self.say(f"{self._place(arm, seed)}: {told}")
        if self._bars is not None and run in self._tasks:
            self._bars.remove_task(self._tasks.pop(run))

    def draw(self) -> None:
        """Update the bars from the runs' logs."""
        if self._bars is None:
            return
        for run, task in self._tasks.items():
            row = last_row(run)
            if row is not None:
                step, total = row
                self._bars.update(task, completed=step, total=total, numbers=f"step {step}/{total}")

    def _place(self, arm: PlannedArm, seed: int) -> str:
        return f"[{self.done}/{self.trials} done] {arm.label}, seed {seed}"


def last_row(run: Path) -> tuple[int, int] | None:
    """Return (step, planned steps) of a run, or None before its first step."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(-min(TAIL, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        revision = json_value((run / "plan.json").read_bytes())["revisions"][-1]
        return int(json_value(lines[-1])["step"]), int(revision["step"]) + int(revision["remaining"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
