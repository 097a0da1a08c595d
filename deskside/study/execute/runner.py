"""Execution of a study: runs its trials, one at a time on each device of an executor (`executor.py`).

A failed trial is a result, and the study continues. But a full disk ends it, because every further trial would fail as
well. The journal and results.json are written when a trial starts and when it ends. A trial's directory keeps its
metrics, and its checkpoints until the trial has ended.

A trial counts as hung if it has logged no step and saved no checkpoint for too long (`max_silence`), not if it takes
longer than its forecast. A trial whose machine has died is continued on another one, up to MAX_LOSSES times.
"""

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deskside.data.corpus.prepare_sources import prepare_sources
from deskside.data.reading.index_file import is_prepared
from deskside.run.directory import RunDirectory
from deskside.run.record import read_object
from deskside.study.execute import results_io
from deskside.study.execute.check_arm import check_arm
from deskside.study.execute.devices import Device
from deskside.study.execute.executor import Executor, RunningTrial
from deskside.study.execute.journal import FINAL, Key, StudyJournal
from deskside.study.execute.measure import Measured, measure
from deskside.study.execute.study_folder import StudyFolder, StudyPlan
from deskside.study.execute.study_progress import RemainingTime, StudyDisplay
from deskside.study.execute.trial_process import (
    DISK_FULL,
    LOST,
    STOPPED,
    TrialEnd,
    TrialJob,
    outcome_of_summary,
    read_outcome,
)
from deskside.study.execute.trial_queue import ArmAndSeed, TrialList, TrialQueue
from deskside.study.results import Results
from deskside.study.spec.expand import PlannedArm
from deskside.utils.errors import RunError, UsageError
from deskside.utils.signals import StopSignal

TARGET = "deskside.study.execute.trial_process:train"
POLL_SECONDS = 0.1
STOP_TIMEOUT = 120.0  # seconds for trials to save when the study ends early
# Seconds, and multiples of the forecast, that a trial may go without progress. Meanwhile it compiles or evaluates; on a
# CPU an evaluation alone can take an hour.
SILENCE_GPU, SILENCE_CPU, SILENCE_FORECASTS = 1800.0, 6 * 3600.0, 3.0
MAX_LOSSES = 3  # machines that a trial may lose, because it may itself be what kills them
PRUNED = "pruned"  # status of a trial that its queue ended early


@dataclass
class _RunningTrial:
    arm: PlannedArm
    seed: int
    run: Path
    process: RunningTrial
    ending: str = ""  # why the queue ends it early
    kill_after: float = float("inf")  # time.monotonic() at which a trial that was asked to end is killed


class Runner:
    """Runs the trials of a study.

    Args:
        keep_models: Keep the model of finished trials in their directories.
        lock: The descriptor that `StudyFolder.lock` yields.
        target: "MODULE:FUNCTION" that a trial's process calls.
    """

    def __init__(
        self,
        folder: StudyFolder,
        plan: StudyPlan,
        executor: Executor,
        *,
        keep_models: bool = False,
        lock: int | None = None,
        target: str = TARGET,
    ):
        self.folder, self.plan, self.executor = folder, plan, executor
        self.keep_models, self.lock, self.target = keep_models, lock, target
        self.journal = StudyJournal(folder.path)
        self.measured: dict[Key, Measured] = {}
        self.losses: Counter[Key] = Counter()
        self.reconcile()
        done = sum(self.journal.history(arm.id, seed).status in FINAL for arm, seed in plan.trials())
        self.display = StudyDisplay(
            len(plan.trials()), done, RemainingTime(plan.forecasts, len(executor.devices()))
        )

    def reconcile(self) -> None:
        """Record the ends of trials that the journal lacks because the study was killed; measure all ended trials."""
        for arm, seed in self.plan.trials():
            run, history = self.folder.run(arm.id, seed), self.journal.history(arm.id, seed)
            if history.attempts and history.status not in FINAL:
                # The study was killed while the trial ran, or the trial was stopped and then resumed outside the study.
                self.executor.wait_until_idle(run)
                status, reason = read_outcome(run) or ("", "")
                if status in FINAL:
                    self.journal.ended(arm.id, seed, status, reason, None)
                elif (run / "summary.json").exists():
                    status, reason = outcome_of_summary(read_object(run / "summary.json")[0])
                    self.journal.ended(arm.id, seed, status, reason, None)
                elif history.status == "running":
                    self.journal.ended(
                        arm.id, seed, "pending", "the study was killed while the trial ran", None
                    )
                new_status = self.journal.history(arm.id, seed).status
                if new_status in FINAL:
                    self.delete_unneeded(run, new_status)
            if self.journal.history(arm.id, seed).status in FINAL:
                self.measured[arm.id, seed] = measure(run, arm.config)

    def remaining(self, again: Sequence[str] = ()) -> list[ArmAndSeed]:
        """Return the trials to run, in order: those that have not ended, and those with a status in `again`."""
        return [
            (arm, seed)
            for arm, seed in self.plan.trials()
            if (status := self.journal.history(arm.id, seed).status) not in FINAL or status in again
        ]

    def run(self, trials: Sequence[ArmAndSeed]) -> str | None:
        """Run these trials, and return what `run_queue` does."""
        self.display.done = len(self.plan.trials()) - len(trials)
        for arm, seed in trials:
            if self.journal.history(arm.id, seed).status in FINAL:  # repeat it from the start
                self.journal.ended(arm.id, seed, "pending", "to be run again", None)
                self.measured.pop((arm.id, seed), None)
                shutil.rmtree(self.folder.run(arm.id, seed), ignore_errors=True)
        return self.run_queue(TrialList(trials))

    def run_queue(self, queue: TrialQueue) -> str | None:
        """Run the trials of a queue. Returns None, or the signal that stopped the study after all was saved.

        Raises RunError if the disk is full; the running trials can then be resumed.
        """
        running = dict[str, _RunningTrial]()  # by the name of the device
        stopping = False
        try:
            self.write_results()
            with StopSignal() as stop, self.display:
                if waiting := queue.waiting():
                    self.display.begin([arm.id for arm, _ in waiting])
                while running or (stop.requested is None and not queue.is_over()):
                    if stop.requested is not None and not stopping:
                        stopping = True
                        self.display.say(f"{stop.requested}: saving the running trials, then stopping")
                        for trial in running.values():
                            trial.process.stop()
                    for device in self.executor.devices():
                        if device.name in running or stop.requested is not None:
                            continue
                        if (taken := queue.take()) is not None:
                            running[device.name] = self.start_trial(*taken, device)
                            if not queue.is_over():
                                self.executor.prepare(device, self.lock)
                            self.write_results()
                    for device_name, trial in list(running.items()):
                        end = trial.process.poll() or self.kill_if_hung(trial, device_name)
                        if end is None:
                            if not stopping:
                                self.end_early(trial, queue)
                            continue
                        del running[device_name]
                        remaining_arms = [other.arm.id for other in running.values()]
                        remaining_arms += [arm.id for arm, _ in queue.waiting()]
                        self.finish_trial(trial, end, remaining_arms)
                        key = trial.arm.id, trial.seed
                        history = self.journal.history(*key)
                        if history.status in FINAL:
                            queue.ended((trial.arm, trial.seed), history, self.measured.get(key))
                        else:
                            queue.put_back((trial.arm, trial.seed))
                    self.display.update()
                    time.sleep(POLL_SECONDS)
                return stop.requested if stopping or not queue.is_over() else None
        except KeyboardInterrupt:  # the second Ctrl-C stops at once
            for trial in running.values():
                trial.process.kill()
            raise
        finally:
            self.executor.close()
            self.stop_all(running)

    def start_trial(self, arm: PlannedArm, seed: int, device: Device) -> _RunningTrial:
        """Start a trial's process, from its newest checkpoint if there is one."""
        run = self.folder.run(arm.id, seed)
        self.executor.wait_until_idle(run)
        resume = any((run / "checkpoints").glob("step-*")) and (run / "run.json").exists()
        config = arm.config.model_dump(mode="json") | {"seed": seed}
        try:
            if not resume:
                shutil.rmtree(run, ignore_errors=True)
                (run / "checkpoints").mkdir(parents=True)
            job = TrialJob(
                self.target,
                str(run),
                config,
                self.plan.command,
                resume,
                self.plan.memory_fraction,
                self.keep_models,
            )
            process = self.executor.start(job, device, self.lock)
        except OSError as error:
            raise RunError(f"{error.filename or run}: cannot be written: {error.strerror}") from None
        trial = _RunningTrial(arm, seed, run, process)
        try:
            self.journal.started(arm.id, seed, device.name, process.pid, resume)
        except BaseException:
            process.kill()
            raise
        self.display.started(arm, seed, device.name, run, resume)
        return trial

    def kill_if_hung(self, trial: _RunningTrial, device: str) -> TrialEnd | None:
        """Kill a trial that has made no progress for too long. Returns its end, or None if it is not hung."""
        limit = max_silence(device, self.plan.forecasts.get(trial.arm.id))
        if trial.process.seconds_without_progress() <= limit:
            return None
        return trial.process.kill_hung(f"no step for {limit / 60:.0f} minutes; the trial was killed")

    def end_early(self, trial: _RunningTrial, queue: TrialQueue) -> None:
        """End a running trial if its queue has a reason. It may finish its step and save, like one that is stopped."""
        now = time.monotonic()
        if not trial.ending and (reason := queue.reason_to_end((trial.arm, trial.seed), trial.run)):
            trial.ending, trial.kill_after = reason, now + STOP_TIMEOUT
            trial.process.stop()
        elif now > trial.kill_after:
            trial.process.kill()

    def finish_trial(self, trial: _RunningTrial, end: TrialEnd, remaining_arms: list[str]) -> None:
        """Record how a trial ended. Raises RunError if the disk was full.

        Args:
            remaining_arms: The arm's id of each trial that has not ended.
        """
        arm, seed = trial.arm, trial.seed
        if trial.ending and end.status in (STOPPED, LOST, "killed"):
            end = replace(end, status=PRUNED, reason=trial.ending)
        if end.status == LOST:
            self.losses[arm.id, seed] += 1
            if self.losses[arm.id, seed] == MAX_LOSSES:
                end = replace(end, status="killed", reason=f"lost {MAX_LOSSES} times, at last: {end.reason}")
        if end.status in (STOPPED, DISK_FULL, LOST):
            self.journal.ended(arm.id, seed, "pending", end.reason, end.seconds)
        else:
            self.journal.ended(arm.id, seed, end.status, end.reason, end.seconds)
            self.measured[arm.id, seed] = measure(trial.run, arm.config)
            self.delete_unneeded(trial.run, end.status)
            self.display.done += 1
        if end.status == "finished":
            self.display.remaining_time.add_finished(arm.id, end.seconds)
        measured = self.measured.get((arm.id, seed))
        self.display.ended(arm, seed, trial.run, end, measured, remaining_arms)
        if end.status == DISK_FULL:
            raise RunError(end.reason)
        self.write_results()

    def write_results(self) -> Results:
        """Write results.json and results.parquet."""
        results = results_io.collect(self.plan, self.journal.histories, self.measured)
        results_io.write(results, self.folder.path)
        return results

    def delete_unneeded(self, run: Path, status: str) -> None:
        """Delete what a trial that has ended no longer needs: its checkpoints, and its model unless it is kept."""
        directory = RunDirectory(run)
        keep_model = self.keep_models and status == "finished"
        if not keep_model or directory.model.exists():  # some architectures are saved only as checkpoints
            shutil.rmtree(directory.checkpoints, ignore_errors=True)
        if not keep_model:
            shutil.rmtree(directory.model, ignore_errors=True)

    def stop_all(self, running: dict[str, _RunningTrial]) -> None:
        """Stop the running trials when the study ends early. Kills those that cannot save within STOP_TIMEOUT."""
        try:
            for trial in running.values():
                trial.process.stop()
            deadline = time.monotonic() + STOP_TIMEOUT
            while time.monotonic() < deadline and any(t.process.poll() is None for t in running.values()):
                time.sleep(POLL_SECONDS)
        finally:
            for trial in running.values():
                trial.process.kill()
            # The disk may be full. A resume then recovers the state from the run directories.
            with contextlib.suppress(RunError):
                for trial in running.values():
                    self.finish_trial(trial, trial.process.poll() or TrialEnd(STOPPED, "", 0.0), [])


def max_silence(device: str, forecast: float | None) -> float:
    """Return the seconds that a trial may go without progress. forecast: seconds of the whole trial, or None."""
    if forecast is None:
        return SILENCE_CPU
    return (SILENCE_GPU if device.startswith("cuda") else SILENCE_CPU) + SILENCE_FORECASTS * forecast


def prepare_all(arms: Sequence[PlannedArm], say: Callable[[str], None]) -> None:
    """Prepare all missing data sets before the first trial, so that trials do not prepare the same one at once.

    Raises UsageError for an arm that `check_start` refuses, and for two arms that would prepare one folder differently.
    """
    first_arm: dict[str, PlannedArm] = {}  # by data.path
    for arm in arms:
        check_arm(arm)
        path = str(arm.config.data.path)  # checked by check_start
        if is_prepared(path):
            continue
        first = first_arm.setdefault(path, arm)
        recipe, first_recipe = (
            (config.data.sources, config.data.val_fraction, config.model.vocab_size, config.seed)
            for config in (arm.config, first.config)
        )
        if recipe != first_recipe:
            raise UsageError(
                f"data.path: {path}: arms {first.id} and {arm.id} would prepare it differently; give each its own "
                f"data.path, or prepare it with: deskside data prepare"
            )
    for arm in first_arm.values():
        prepare_sources(arm.config, say)
