"""Terminal output of a running study: a line when a trial starts or ends, and progress bars, or a line each minute.

The remaining time is the sum of the forecasts of the remaining trials, multiplied by (time / forecast) of the finished
trials and divided by the number of devices in use. A trial without a forecast is counted at the mean time of the
finished ones.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from deskside.study.execute.measure import Measured
from deskside.study.execute.trial_process import TrialEnd
from deskside.study.spec.expand import PlannedArm
from deskside.utils.console import say, terminal_width, wrap
from deskside.utils.format import end_time, plural
from deskside.utils.parsing import json_value
from deskside.utils.printer import is_interactive, make_console
from deskside.utils.progress import LINE_SECONDS, times

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
        trials: Number of trials of the study; None if it is not known.
        done: Number of trials that have ended.
        remaining_time: Estimator for the line at the end of a trial.
    """

    def __init__(self, trials: int | None, done: int, remaining_time: RemainingTime):
        self.trials, self.done, self.remaining_time = trials, done, remaining_time
        # Name of a trial in every line; the line of its start has the whole label too.
        self.name_of: Callable[[PlannedArm, int], str] = lambda arm, seed: f"{arm.label}, seed {seed}"
        self.console = make_console(stderr=True)
        self._began = self._last_line = time.monotonic()
        self._left: float | None = None  # seconds until the end, as estimated at `_estimated`
        self._estimated = self._began
        self._running: dict[Path, str] = {}  # run -> arm and seed
        self._bars: Progress | None = None
        self._tasks: dict[Path, TaskID] = {}
        if is_interactive(self.console):
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
        """Print a message above the bars."""
        if self._bars is None:
            say(text)
            return
        for line in wrap(text, terminal_width()):
            self.console.print(line, markup=False, soft_wrap=True)

    def begin(self, remaining_arms: list[str]) -> None:
        """Report how many trials there are to run, and the time they take. remaining_arms: the arm id of each."""
        self._estimate(remaining_arms)
        left = "" if self._left is None else f"; done {end_time(self._left)}"
        total = "" if self.trials is None else f" of {self.trials}"
        self.say(f"runs {plural(len(remaining_arms), 'trial')}{total}{left}")

    def started(self, arm: PlannedArm, seed: int, device: str, run: Path, resumed: bool) -> None:
        """Report the start of a trial. resumed: True if it continues from a checkpoint."""
        verb = "resumes" if resumed else "starts"
        name = self.name_of(arm, seed)
        settings = "" if arm.label in name else f": {arm.label}"
        self.say(f"{self._prefix(arm, seed)}: {verb} on {device}{settings}")
        self._running[run] = name
        if self._bars is not None:
            self._tasks[run] = self._bars.add_task(self._running[run], total=None, numbers="setting up")

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
        self._estimate(remaining_arms)
        self.say(f"{self._prefix(arm, seed)}: {text}; {self._times()}")
        self._running.pop(run, None)
        if self._bars is not None and run in self._tasks:
            self._bars.remove_task(self._tasks.pop(run))

    def update(self) -> None:
        """Update the bars from the runs' logs, or print a line if the last one is a minute old."""
        if self._bars is None:
            if time.monotonic() - self._last_line >= LINE_SECONDS:
                self._last_line = time.monotonic()
                self._say_progress()
            return
        for run, task in self._tasks.items():
            progress = read_progress(run)
            if progress is not None:
                step, total = progress
                self._bars.update(task, completed=step, total=total, numbers=f"step {step}/{total}")

    def _say_progress(self) -> None:
        parts = []
        for run, name in self._running.items():
            progress = read_progress(run)
            parts.append(f"{name}: " + ("setting up" if progress is None else "step {}/{}".format(*progress)))
        self.say(f"{self._count()} {'; '.join(parts)}; {self._times()}")

    def _estimate(self, remaining_arms: list[str]) -> None:
        self._left, self._estimated = self.remaining_time.estimate(remaining_arms), time.monotonic()

    def _times(self) -> str:
        """Return the elapsed time, and the time left by the last estimate."""
        now = time.monotonic()
        left = None if self._left is None else max(0.0, self._left - (now - self._estimated))
        return times(now - self._began, left)

    def _prefix(self, arm: PlannedArm, seed: int) -> str:
        return f"{self._count()} {self.name_of(arm, seed)}"

    def _count(self) -> str:
        return f"[{self.done}{'' if self.trials is None else f'/{self.trials}'} done]"


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
