"""Run the trials of a study, one at a time on each device.

A trial that fails is a result, and the study continues. Only a full disk ends it, because every further trial would
fail as well. The journal is written before and after each trial, results.json after it. A trial's directory keeps
its metrics, and its checkpoints as long as it may be resumed.

A hung trial is detected by its silence: as long as it logs steps it is alive, however wrong its forecast was.
"""

import contextlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.run.directory import RunDirectory
from deskside.study import results_io
from deskside.study.execute.devices import Device
from deskside.study.execute.journal import FINAL, Key, StudyJournal
from deskside.study.execute.measure import Measured, measure
from deskside.study.execute.study_folder import StudyFolder, StudyPlan
from deskside.study.execute.study_progress import RemainingTime, Screen
from deskside.study.execute.trial_process import FULL, STOPPED, Child, Ended, Order, read_answer
from deskside.study.results import Results
from deskside.study.spec.expand import PlannedArm
from deskside.train.prepare.preflight import check_start
from deskside.utils.errors import RunError, UsageError
from deskside.utils.signals import StopSignal

TARGET = "deskside.study.execute.trial_process:train"
POLL = 0.1  # seconds
PATIENCE = 120.0  # seconds for trials to save when the study ends early
# Without logging a step, a trial compiles, evaluates or saves. On a CPU an evaluation alone can take an hour.
SILENCE_GPU, SILENCE_CPU, SILENCE_FORECASTS = 1800.0, 6 * 3600.0, 3.0
Trial = tuple[PlannedArm, int]


@dataclass
class _Running:
    arm: PlannedArm
    seed: int
    run: Path
    child: Child


class Runner:
    """The process that runs a study.

    keep_models: keep model/ in the trials' directories. lock: the descriptor of `StudyFolder.lock`. target: the
    function that a trial's process calls.
    """

    def __init__(
        self,
        folder: StudyFolder,
        plan: StudyPlan,
        devices: Sequence[Device],
        *,
        keep_models: bool = False,
        lock: int | None = None,
        target: str = TARGET,
    ):
        self.folder, self.plan, self.devices = folder, plan, list(devices)
        self.keep_models, self.lock_file, self.target = keep_models, lock, target
        self.journal = StudyJournal(folder.path)
        self.measured: dict[Key, Measured] = {}
        self.reconcile()
        done = sum(self.journal.of(arm.id, seed).status in FINAL for arm, seed in plan.trials())
        self.screen = Screen(len(plan.trials()), done, RemainingTime(plan.forecasts, len(devices)))

    def reconcile(self) -> None:
        """Bring the journal up to date with the run directories of trials that were running when the study died."""
        for arm, seed in self.plan.trials():
            run, past = self.folder.run(arm.id, seed), self.journal.of(arm.id, seed)
            if past.attempts and past.status not in FINAL:
                # It was running, or it was stopped and then resumed outside the study.
                answer = read_answer(run) or ("", "")
                if answer[0] in FINAL:
                    self.journal.ended(arm.id, seed, *answer, None)
                elif (run / "summary.json").exists():
                    self.journal.ended(arm.id, seed, "finished", "", None)
                elif past.status == "running":
                    self.journal.ended(
                        arm.id, seed, "pending", "the study was killed while the trial ran", None
                    )
                if (now := self.journal.of(arm.id, seed).status) in FINAL:
                    self.tidy(run, now)
            if self.journal.of(arm.id, seed).status in FINAL:
                self.measured[arm.id, seed] = measure(run, arm.config)

    def remaining(self, again: Sequence[str] = ()) -> list[Trial]:
        """Return the trials to run, in order: those not done, and those with a status in `again`."""
        return [
            (arm, seed)
            for arm, seed in self.plan.trials()
            if (status := self.journal.of(arm.id, seed).status) not in FINAL or status in again
        ]

    def run(self, todo: Sequence[Trial]) -> str | None:
        """Run these trials. Returns None, or the name of the signal that stopped the study after everything was
        saved.

        Raises RunError if the disk is full; the running trials can then be resumed.
        """
        waiting, running = deque(todo), dict[str, _Running]()
        self.screen.done = len(self.plan.trials()) - len(waiting)
        for arm, seed in waiting:
            if self.journal.of(arm.id, seed).status in FINAL:  # repeat it from the start
                self.journal.ended(arm.id, seed, "pending", "to be run again", None)
                self.measured.pop((arm.id, seed), None)
                shutil.rmtree(self.folder.run(arm.id, seed), ignore_errors=True)
        asked = False
        try:
            self.publish()
            with StopSignal() as stop, self.screen:
                while running or (waiting and stop.requested is None):
                    if stop.requested is not None and not asked:
                        asked = True
                        self.screen.say(f"{stop.requested}: saving the running trials, then stopping")
                        for one in running.values():
                            one.child.stop()
                    for device in self.devices:
                        if device.name not in running and waiting and stop.requested is None:
                            running[device.name] = self.begin(*waiting.popleft(), device)
                            self.publish()
                    for name, one in list(running.items()):
                        ended = one.child.poll() or self.hung(one, name)
                        if ended is not None:
                            del running[name]
                            rest = [other.arm.id for other in running.values()] + [a.id for a, _ in waiting]
                            self.end(one, ended, rest)
                    self.screen.draw()
                    time.sleep(POLL)
                return stop.requested if asked or waiting else None
        except KeyboardInterrupt:  # the second Ctrl-C: at once
            for one in running.values():
                one.child.kill()
            raise
        finally:
            self.abandon(running)

    def begin(self, arm: PlannedArm, seed: int, device: Device) -> _Running:
        """Start a trial's process, from its newest checkpoint if there is one."""
        run = self.folder.run(arm.id, seed)
        resume = any((run / "checkpoints").glob("step-*")) and (run / "run.json").exists()
        config = arm.config.model_dump(mode="json") | {"seed": seed}
        try:
            if not resume:
                shutil.rmtree(run, ignore_errors=True)
                (run / "checkpoints").mkdir(parents=True)
            child = Child(
                Order(self.target, str(run), config, self.plan.command, resume, self.plan.memory_fraction),
                device.environment,
                self.lock_file,
            )
        except OSError as error:
            raise RunError(f"{error.filename or run}: cannot be written: {error.strerror}") from None
        one = _Running(arm, seed, run, child)
        try:
            self.journal.started(arm.id, seed, device.name, child.pid, resume)
        except BaseException:
            child.kill()
            raise
        self.screen.started(arm, seed, device.name, run, resume)
        return one

    def hung(self, one: _Running, device: str) -> Ended | None:
        """End a trial that has been silent for too long. Returns None if it is alive."""
        most = max_silence(device, self.plan.forecasts.get(one.arm.id))
        if one.child.silent() <= most:
            return None
        return one.child.give_up(f"no step for {most / 60:.0f} minutes; the trial was killed")

    def end(self, one: _Running, ended: Ended, left: list[str]) -> None:
        """Record how a trial ended. Raises RunError if the disk was full."""
        arm, seed = one.arm, one.seed
        if ended.status in (STOPPED, FULL):
            self.journal.ended(arm.id, seed, "pending", ended.reason, ended.seconds)
        else:
            self.journal.ended(arm.id, seed, ended.status, ended.reason, ended.seconds)
            self.measured[arm.id, seed] = measure(one.run, arm.config)
            self.tidy(one.run, ended.status)
            self.screen.done += 1
        if ended.status == "finished":
            self.screen.clock.ended(arm.id, ended.seconds)
        self.screen.ended(arm, seed, one.run, ended, self.measured.get((arm.id, seed)), left)
        if ended.status == FULL:
            raise RunError(ended.reason)
        self.publish()

    def publish(self) -> Results:
        """Write results.json and results.parquet."""
        results = results_io.collect(self.plan, self.journal.histories, self.measured)
        results_io.write(results, self.folder.path)
        return results

    def tidy(self, run: Path, status: str) -> None:
        """Delete checkpoints, which only a resume needs, and the model unless it is to be kept."""
        directory = RunDirectory(run)
        keep = self.keep_models and status == "finished"
        if not keep or directory.model.exists():  # some architectures exist only as checkpoints
            shutil.rmtree(directory.checkpoints, ignore_errors=True)
        if not keep:
            shutil.rmtree(directory.model, ignore_errors=True)

    def abandon(self, running: dict[str, _Running]) -> None:
        """Stop the running trials when the study ends early. Trials that cannot save within PATIENCE are killed."""
        try:
            for one in running.values():
                one.child.stop()
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and any(one.child.poll() is None for one in running.values()):
                time.sleep(POLL)
        finally:
            for one in running.values():
                one.child.kill()
            # The disk may be full. A resume then recovers the state from the run directories.
            with contextlib.suppress(RunError):
                for one in running.values():
                    self.end(one, one.child.poll() or Ended(STOPPED, "", 0.0), [])


def max_silence(device: str, forecast: float | None) -> float:
    """Return the seconds that a trial may go without logging a step. forecast: seconds of the whole trial, or None."""
    if forecast is None:
        return SILENCE_CPU
    return (SILENCE_GPU if device.startswith("cuda") else SILENCE_CPU) + SILENCE_FORECASTS * forecast


def prepare_all(arms: Sequence[PlannedArm], say: Callable[[str], None]) -> None:
    """Prepare all missing data sets before the first trial, so that trials do not race to prepare them.

    Raises UsageError for an arm without data, and for two arms that would prepare one folder differently.
    """
    first: dict[str, PlannedArm] = {}
    for arm in arms:
        try:
            check_start(arm.config)
        except UsageError as error:
            raise UsageError(f"arm {arm.id}: {error}") from None
        path = str(arm.config.data.path)  # checked by check_start
        if (Path(path) / "index.json").exists():
            continue
        before = first.setdefault(path, arm)
        made_of = [
            (one.config.data.sources, one.config.data.val_fraction, one.config.model.vocab_size)
            for one in (before, arm)
        ]
        if made_of[0] != made_of[1]:
            raise UsageError(
                f"data.path: {path}: arms {before.id} and {arm.id} would prepare it differently; give each its own "
                f"data.path, or prepare it with: deskside data prepare"
            )
    for path, arm in first.items():
        data, vocabulary = arm.config.data, arm.config.model.vocab_size
        say(f"preparing {', '.join(data.sources)} into {path}")
        options = CorpusOptions(vocab_size=vocabulary, val_fraction=data.val_fraction, seed=1)
        prepare(list(data.sources), path, options)
