"""What listens to each step: the metrics file, the terminal, and trackers (off by default)."""

import importlib
import importlib.util
import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from deskside.config.sections import TrackConfig
from deskside.run.directory import RunDirectory
from deskside.utils.errors import UsageError

LINE_SECONDS = 10.0  # between plain lines, where there is no terminal to draw a bar on


class MetricsFile:
    """One JSON object per step in metrics.jsonl; what is measured now and then stands in the rows that have it."""

    def __init__(self, run: RunDirectory):
        self.run = run

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        self.run.append_metrics(row)

    def close(self) -> None:
        pass


class Terminal:
    """A progress bar with loss, speed and the time left; plain lines where standard error is no terminal."""

    def __init__(self, first_step: int, total_steps: int):
        self.console = Console(stderr=True)
        self._bar: Progress | None = None
        self._last_line = 0.0
        self._last_value = ""
        self._first_step, self._started = first_step, time.monotonic()
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("train", completed=first_step, total=total_steps, numbers="")
            self._bar.start()

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        if row.get("val_loss") is not None:  # an objective that is measured by its loss
            self._last_value = f"  val {row['val_loss']:.3f}"
        elif row.get("val_bpb") is not None:
            self._last_value = f"  val {row['val_bpb']:.3f} bpb"
        speed = f"  {row['tokens_per_second']:,.0f} tok/s" if row["tokens_per_second"] else ""
        goal = next((f"  {name} {row[name]:.3f}" for name in ("reward", "accuracy") if name in row), "")
        numbers = f"loss {row['loss']:.3f}{goal}{self._last_value}{speed}"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], total=total_steps, numbers=numbers)
        elif time.monotonic() - self._last_line >= LINE_SECONDS or row["step"] == total_steps:
            self._last_line = time.monotonic()
            share = f" ({row['step'] / max(1, total_steps):.0%})"
            print(
                f"step {row['step']}/{total_steps}{share}  {numbers}{self._times(row['step'], total_steps)}",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _times(self, step: int, total: int) -> str:
        """Return the time that the steps of this process have taken, and the time left at their pace."""
        elapsed, done = time.monotonic() - self._started, max(1, step - self._first_step)
        left = timedelta(seconds=round(elapsed / done * max(0, total - step)))
        return f"  {timedelta(seconds=round(elapsed))} elapsed, {left} left"

    @staticmethod
    def say(text: str) -> None:
        """One line to the person; rich prints it above a bar that is being drawn."""
        Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


class TensorBoard:
    """Events for TensorBoard under the run directory."""

    def __init__(self, run: RunDirectory):
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"))

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """Weights & Biases or trackio; the two share one interface."""

    def __init__(self, package: str, project: str, run: RunDirectory, config: dict[str, Any]):
        self._package: Any = importlib.import_module(package)
        self._package.init(project=project, name=run.path.name, config=config)

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        self._package.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self._package.finish()


def check_trackers(config: TrackConfig) -> None:
    """Imports nothing. Raises UsageError when a tracker was switched on whose package is missing."""
    switched_on = {"tensorboard": config.tensorboard, "wandb": config.wandb, "trackio": config.trackio}
    for package, given in switched_on.items():
        # A folder of that name, as wandb makes one for its files, is found as a package without origin.
        spec = importlib.util.find_spec(package) if given not in (False, None) else None
        if given not in (False, None) and (spec is None or spec.origin is None):
            raise UsageError(f"track.{package}: needs its package: pip install 'deskside[{package}]'")


def trackers(config: TrackConfig, run: RunDirectory, resolved: dict[str, Any]) -> list[TensorBoard | Tracker]:
    """The trackers that were switched on. Raises UsageError when a package is missing."""
    check_trackers(config)
    chosen: list[TensorBoard | Tracker] = []
    if config.tensorboard:
        chosen.append(TensorBoard(run))
    for package, project in (("wandb", config.wandb), ("trackio", config.trackio)):
        if project is not None:
            chosen.append(Tracker(package, project, run, resolved))
    return chosen


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name != "step" and value is not None}
