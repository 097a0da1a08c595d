"""Callbacks, trackers and the log of a run: everything that observes its steps.

A `Callback` is called when training begins and with the metrics of every step. It may request a stop, and can reserve
time for work after the run; `deskside go` controls its run with one. `RunLog` writes the files of metrics and events
and passes the metrics to callbacks, on rank 0 only.
"""

import importlib
import importlib.util
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from deskside.config.sections import TrackConfig
from deskside.run.directory import RunDirectory
from deskside.train.objective import RowDataset
from deskside.train.time_budget import REPORT_SECONDS, REPORT_SHARE
from deskside.utils.console import say, terminal_width, wrap
from deskside.utils.errors import UsageError
from deskside.utils.printer import is_interactive, make_console
from deskside.utils.progress import LINE_SECONDS, times
from deskside.utils.signals import StopSignal

TRACKER_FILE = "tracker.json"


class Callback:
    """Base class of callbacks; does nothing.

    earlier_seconds: wall-clock seconds of the run's earlier processes, including steps that were lost. resume_command:
    the command that resumes the run, for the message after a stop; None selects the objective's own command.
    earlier_phases_until: value of time.perf_counter() at which the command began the run, after other work.
    """

    earlier_seconds = 0.0
    resume_command: str | None = None
    earlier_phases_until: float | None = None

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        """Called on every rank before the first step. The callback may set `stop.requested` from now on."""

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        """Called with each step's row of metrics.jsonl, on rank 0."""

    def close(self) -> None:
        """Called after the last step, also if training failed, on rank 0."""

    def reserve(self, limit: float | None) -> float:
        """Return the seconds to keep free for work after the run. limit: the run's length in wall-clock seconds."""
        return 0.0

    def summary_entries(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return entries to add to summary.json."""
        return {}


class Watch(Callback):
    """Base class of callbacks that warn about the run."""

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        self.run = run

    def warn(self, text: str) -> None:
        """Print a warning, and write it into events.log."""
        RunLog(self.run).say(f"warning: {text}")


class ReserveReportTime(Callback):
    """Reserves time for the report, which the command writes after the run but within the same limit."""

    def reserve(self, limit: float | None) -> float:
        return 0.0 if limit is None else min(REPORT_SECONDS, REPORT_SHARE * limit)


class OnFirstStep(Callback):
    """Calls a function once, after the first step of this process."""

    def __init__(self, function: Callable[[], None]):
        self._function: Callable[[], None] | None = function

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


class RunLog:
    """Messages, events and metrics of a run. Writes nothing unless `active`, which is True on rank 0 only."""

    def __init__(self, run: RunDirectory, active: bool = True):
        self.run, self.active = run, active
        self.callbacks: Sequence[Callback] = ()

    def event(self, text: str) -> None:
        """Write a line to the events file only."""
        if self.active:
            self.run.event(text)

    def say(self, text: str) -> None:
        """Write a line to the terminal and to the events file."""
        if self.active:
            Terminal.say(text)
            self.run.event(text)

    def step(self, row: dict[str, Any], total_steps: int) -> None:
        """Append a step's metrics to metrics.jsonl and pass them to the callbacks."""
        if self.active:
            self.run.append_metrics(row)
        for callback in self.callbacks:
            callback.on_step(row, total_steps)

    def close(self) -> None:
        for callback in self.callbacks:
            callback.close()


class Terminal(Callback):
    """A progress bar with loss, speed and time left, or plain lines if standard error is not a terminal.

    estimated: True if the run's length is a time. The number of steps is then an estimate, shown as ~500.
    """

    _bar_console: ClassVar[Console | None] = None  # of the progress bar that is shown, if any

    def __init__(self, first_step: int, total_steps: int, estimated: bool):
        self._total_prefix = "~" if estimated else ""
        self.console = make_console(stderr=True)
        self._bar: Progress | None = None
        self._last_line = -LINE_SECONDS  # so that the first step has a line
        self._validation = ""
        self._first_step, self._started = first_step, time.monotonic()
        if is_interactive(self.console):
            self._bar = Progress(
                TextColumn(f"step {{task.completed}}/{self._total_prefix}{{task.total}}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("train", completed=first_step, total=total_steps, numbers="")
            self._bar.start()
            Terminal._bar_console = self.console

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        if row.get("val_loss") is not None:  # SFT and DPO
            self._validation = f"  val {row['val_loss']:.3f}"
        elif row.get("val_bpb") is not None:
            self._validation = f"  val {row['val_bpb']:.3f} bpb"
        speed = f"  {row['tokens_per_second']:,.0f} tok/s" if row["tokens_per_second"] else ""
        objective = next((f"  {name} {row[name]:.3f}" for name in ("reward", "accuracy") if name in row), "")
        numbers = f"loss {row['loss']:.3f}{objective}{self._validation}{speed}"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], total=total_steps, numbers=numbers)
        elif time.monotonic() - self._last_line >= LINE_SECONDS or row["step"] == total_steps:
            self._last_line = time.monotonic()
            share = f" ({row['step'] / max(1, total_steps):.0%})"
            prefix = self._total_prefix if row["step"] < total_steps else ""
            step = f"step {row['step']}/{prefix}{total_steps}{share}"
            say(f"{step}  {numbers}  {self._times(row['step'], total_steps)}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            Terminal._bar_console = None

    def _times(self, step: int, total: int) -> str:
        """Return the elapsed time of this process's steps, and the time left at the same speed."""
        elapsed, steps = time.monotonic() - self._started, max(1, step - self._first_step)
        return times(elapsed, elapsed / steps * max(0, total - step))

    @staticmethod
    def say(text: str) -> None:
        """Print one line, above the progress bar if there is one."""
        # Another console would write into the line of the bar.
        if Terminal._bar_console is None:
            say(text)
        else:
            lines = "\n".join(wrap(text, terminal_width()))
            Terminal._bar_console.print(lines, markup=False, soft_wrap=True)


class TensorBoard(Callback):
    """Writes TensorBoard events to the run directory."""

    def __init__(self, run: RunDirectory, first_step: int):
        self._folder = str(run.path / "tensorboard")
        self._open(first_step)

    def _open(self, last_step: int) -> None:
        """Open the files of events. Events of later steps, which the run repeats, are not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(self._folder, purge_step=last_step + 1)
        self._last_step = last_step

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        if row["step"] <= self._last_step:  # the run went back to a checkpoint
            self._writer.close()
            self._open(row["step"] - 1)
        self._last_step = row["step"]
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Tracker(Callback):
    """Logs to Weights & Biases or trackio, which share one interface.

    A resumed run continues its record there, whose id is in `TRACKER_FILE`. trackio identifies a run by its name, so
    the id is part of the name.
    """

    def __init__(self, package: str, project: str, run: RunDirectory, config: dict[str, Any]):
        self._package: Any = importlib.import_module(package)
        name, run_id = run.path.name, _tracker_id(run)
        names = {"name": name, "id": run_id} if package == "wandb" else {"name": f"{name}-{run_id}"}
        self._package.init(project=project, config=config, resume="allow", **names)

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        self._package.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self._package.finish()


def check_trackers(config: TrackConfig) -> None:
    """Raise UsageError if the package of an enabled tracker is missing. Imports nothing."""
    settings = {"tensorboard": config.tensorboard, "wandb": config.wandb, "trackio": config.trackio}
    for package, setting in settings.items():
        if setting in (False, None):
            continue
        spec = importlib.util.find_spec(package)
        # A folder named wandb, which wandb itself creates, is found as a namespace package, which has no origin.
        if spec is None or spec.origin is None:
            raise UsageError(
                f"track.{package}: the package is missing; install it with: pip install 'deskside[{package}]'"
            )


def _tracker_id(run: RunDirectory) -> str:
    """Return the id of the run at trackers, which the first call creates."""
    if (run.path / TRACKER_FILE).is_file():
        return str(run.read_json(TRACKER_FILE).get("id"))
    run_id = secrets.token_hex(4)
    run.write_json(TRACKER_FILE, {"id": run_id})
    return run_id


def trackers(
    config: TrackConfig, run: RunDirectory, run_config: dict[str, Any], first_step: int = 0
) -> list[TensorBoard | Tracker]:
    """Return the enabled trackers. Weights & Biases and trackio also record `run_config`.

    first_step: the last step that is not repeated. Raises UsageError if a package is missing.
    """
    check_trackers(config)
    enabled: list[TensorBoard | Tracker] = []
    if config.tensorboard:
        enabled.append(TensorBoard(run, first_step))
    for package, project in (("wandb", config.wandb), ("trackio", config.trackio)):
        if project is not None:
            enabled.append(Tracker(package, project, run, run_config))
    return enabled


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in row.items() if name != "step" and isinstance(value, int | float)
    }
