"""Terminal output of a running study: a line when a trial starts or ends, and progress bars.

The remaining time is the sum of the forecasts of the remaining trials, multiplied by (time / forecast) of the finished
trials and divided by the number of devices in use. A trial without a forecast is counted at the mean time of the
finished ones.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from deskside.study.execute.measure import Measured
from deskside.study.execute.trial_process import TrialEnd
from deskside.study.spec.expand import PlannedArm
from deskside.utils.format import duration
from deskside.utils.parsing import json_value

TAIL_BYTES = 4096  # more than a line of metrics.jsonl


class RemainingTime:
    """Estimator of a study's remaining time.

    Args:
        forecasts: Arm -> seconds of a trial; None if unknown.
        devices: Number of devices that share the trials.
    """

    def __init__(self, forecasts: Mapping[str, float | None], devices: int):
        self._forecasts, self._devices = forecasts, devices
        self._finished: list[tuple[str, float]] = []  # arm, seconds

    def add_finished(self, arm: str, seconds: float) -> None:
        """Record the duration of a finished trial of this arm."""
        self._finished.append((arm, seconds))

    def estimate(self, remaining_arms: list[str]) -> float | None:
        """Return the seconds until the remaining trials have ended. remaining_arms: the arm of each of them.

        Returns None if one of them has no forecast and no trial has finished yet.
        """
        if not remaining_arms:
            return 0.0
        mean, factor = None, 1.0
        if self._finished:
            mean = sum(seconds for _, seconds in self._finished) / len(self._finished)
        forecast_total = actual_total = 0.0
        for arm, seconds in self._finished:
            forecast = self._forecasts.get(arm)
            if forecast is not None:
                forecast_total += forecast
                actual_total += seconds
        if forecast_total:
            factor = actual_total / forecast_total
        total = 0.0
        for arm in remaining_arms:
            forecast = self._forecasts.get(arm)
            seconds_left = mean if forecast is None else forecast * factor
            if seconds_left is None:
                return None
            total += seconds_left
        return total / min(self._devices, len(remaining_arms))


class StudyDisplay:
    """The progress display on standard error.

    Args:
        trials: Number of trials of the study.
        done: Number of trials that have ended.
        remaining_time: Estimator for the line at the end of a trial.
    """

    def __init__(self, trials: int, done: int, remaining_time: RemainingTime):
        self.trials, self.done, self.remaining_time = trials, done, remaining_time
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
                refresh_per_second=2,  # low, because the trials need the CPU cores
            )

    def __enter__(self) -> "StudyDisplay":
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
        """Report the start of a trial. resumed: True if it continues from a checkpoint."""
        verb = "resumes" if resumed else "starts"
        self.say(f"{self._prefix(arm, seed)}: {verb} on {device}")
        if self._bars is not None:
            self._tasks[run] = self._bars.add_task(
                f"{arm.label}, seed {seed}", total=None, numbers="setting up"
            )

    def ended(
        self,
        arm: PlannedArm,
        seed: int,
        run: Path,
        end: TrialEnd,
        measured: Measured | None,
        remaining_arms: list[str],
    ) -> None:
        """Report the end of a trial. remaining_arms: the arm id of each trial that has not ended."""
        text = f"{end.status} after {end.seconds:.0f} s"
        metrics = measured.metrics if measured is not None else {}
        if "val_bpb" in metrics:
            text += f": {metrics['val_bpb']:.4f} bits per byte"
        if "tokens_per_second" in metrics:
            emulated = " (emulated)" if measured is not None and measured.emulated else ""
            text += f", {metrics['tokens_per_second']:,.0f} tokens/s{emulated}"
        if end.reason:
            text += f": {end.reason}"
        seconds = self.remaining_time.estimate(remaining_arms)
        if seconds:
            text += f"; about {duration(seconds)} left"
        self.say(f"{self._prefix(arm, seed)}: {text}")
        if self._bars is not None and run in self._tasks:
            self._bars.remove_task(self._tasks.pop(run))

    def update(self) -> None:
        """Update the bars from the runs' logs."""
        if self._bars is None:
            return
        for run, task in self._tasks.items():
            progress = read_progress(run)
            if progress is not None:
                step, total = progress
                self._bars.update(task, completed=step, total=total, numbers=f"step {step}/{total}")

    def _prefix(self, arm: PlannedArm, seed: int) -> str:
        return f"[{self.done}/{self.trials} done] {arm.label}, seed {seed}"


def read_progress(run: Path) -> tuple[int, int] | None:
    """Return (last logged step, planned steps) of a run, or None if its files do not have them (yet)."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        revision = json_value((run / "plan.json").read_bytes())["revisions"][-1]
        return int(json_value(lines[-1])["step"]), int(revision["step"]) + int(revision["remaining"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
