"""Runs the trials of a study, one at a time on each device, whatever becomes of them.

How a trial ended is a result, and the study goes on. Only a full disk ends it, because every further trial would end
the same way. The journal is written before and after each trial, results.json after it; a trial's directory keeps its
numbers, and its checkpoints only while it may be resumed.

A trial that hangs would hold up the study for ever. It is told from a slow one by its silence: as long as it logs steps
it is alive, however wrong its forecast was.
"""

import contextlib
import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deskside.run.directory import RunDirectory
from deskside.study import results_io
from deskside.study.execute.devices import Device
from deskside.study.execute.journal import FINAL, Journal, Key
from deskside.study.execute.measure import Measured, measure
from deskside.study.execute.study_folder import Plan, StudyFolder
from deskside.study.execute.study_progress import Clock, Screen
from deskside.study.execute.trial_process import FULL, STOPPED, Child, Ended, Order, read_answer
from deskside.study.results import Results
from deskside.study.spec.expand import PlannedArm
from deskside.train.loop.stop import StopSignal
from deskside.utils.errors import RunError

TARGET = "deskside.study.execute.trial_process:train"
POLL = 0.1  # seconds
PATIENCE = 120.0  # seconds that trials may take to save when the study ends early
# Without logging a step, a trial compiles, evaluates or saves. On a CPU an evaluation alone can take an hour.
SILENCE_GPU, SILENCE_ELSE, SILENCE_FORECASTS = 1800.0, 6 * 3600.0, 3.0
Trial = tuple[PlannedArm, int]


@dataclass
class _Running:
    arm: PlannedArm
    seed: int
    run: Path
    child: Child


class Runner:
    """One process's part in a study, whose folder it holds. keep_models: model/ stays in the trials' directories.

    held: see `StudyFolder.held`. target: what a trial's process calls.
    """

    def __init__(
        self,
        folder: StudyFolder,
        plan: Plan,
        devices: Sequence[Device],
        *,
        keep_models: bool = False,
        held: int | None = None,
        target: str = TARGET,
    ):
        self.folder, self.plan, self.devices = folder, plan, list(devices)
        self.keep_models, self.held_file, self.target = keep_models, held, target
        self.journal = Journal(folder.path)
        self.measured: dict[Key, Measured] = {}
        self.settle()
        done = sum(self.journal.of(arm.id, seed).status in FINAL for arm, seed in plan.trials())
        self.screen = Screen(len(plan.trials()), done, Clock(plan.forecasts, len(devices)))

    def settle(self) -> None:
        """What the journal does not tell of trials that ran when the study died, their directories tell."""
        for arm, seed in self.plan.trials():
            run, past = self.folder.run(arm.id, seed), self.journal.of(arm.id, seed)
            if past.attempts and past.status not in FINAL:
                self.settle_one(arm.id, seed, run, past.status)
            if self.journal.of(arm.id, seed).status in FINAL:
                self.measured[arm.id, seed] = measure(run, arm.config)

    def settle_one(self, arm: str, seed: int, run: Path, status: str) -> None:
        """One that was running; or one that was stopped, and that a person may have resumed by hand since."""
        answer = read_answer(run) or ("", "")
        if answer[0] in FINAL:
            self.journal.ended(arm, seed, *answer, None)
        elif (run / "summary.json").exists():
            self.journal.ended(arm, seed, "finished", "", None)
        elif status == "running":
            self.journal.ended(arm, seed, "pending", "the study died while it ran", None)
        if (now := self.journal.of(arm, seed).status) in FINAL:
            self.tidy(run, now)

    def left(self, again: Sequence[str] = ()) -> list[Trial]:
        """The trials to be run, in their order: those that are not done, and those with a status of `again`."""
        return [
            (arm, seed)
            for arm, seed in self.plan.trials()
            if (status := self.journal.of(arm.id, seed).status) not in FINAL or status in again
        ]

    def run(self, todo: Sequence[Trial]) -> str | None:
        """Run these trials. Returns None, or the name of the signal that stopped the study with everything saved.

        Raises RunError for a full disk; the trials that ran are then to be resumed.
        """
        waiting, running = deque(todo), dict[str, _Running]()
        self.screen.done = len(self.plan.trials()) - len(waiting)
        for arm, seed in waiting:
            if self.journal.of(arm.id, seed).status in FINAL:  # it is done again, from its beginning
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
                        self.screen.say(
                            f"{stop.requested}: the trials that run are saved, then the study stops"
                        )
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
        """Start a trial's process, from its newest checkpoint if it has one."""
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
                self.held_file,
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
        """End a trial that has shown no sign of life for longer than it may; None for one that lives."""
        most = silence(device, self.plan.forecasts.get(one.arm.id))
        if one.child.silent() <= most:
            return None
        return one.child.give_up(f"no step and no end for {most / 60:.0f} minutes: it was ended")

    def end(self, one: _Running, ended: Ended, left: list[str]) -> None:
        """Write down how a trial ended. Raises RunError where the disk was full."""
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
        """results.json and results.parquet, as things stand."""
        results = results_io.collect(self.plan, self.journal.past, self.measured)
        results_io.write(results, self.folder.path)
        return results

    def tidy(self, run: Path, status: str) -> None:
        """Remove what only a resume needs, and the model unless it is to be kept."""
        directory = RunDirectory(run)
        keep = self.keep_models and status == "finished"
        if not keep or directory.model.exists():  # some architectures have no form but the checkpoint's
            shutil.rmtree(directory.checkpoints, ignore_errors=True)
        if not keep:
            shutil.rmtree(directory.model, ignore_errors=True)

    def abandon(self, running: dict[str, _Running]) -> None:
        """End what still runs when the study ends early: by itself if it can save in time, and if not, at once."""
        try:
            for one in running.values():
                one.child.stop()
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until and any(one.child.poll() is None for one in running.values()):
                time.sleep(POLL)
        finally:
            for one in running.values():
                one.child.kill()
            # What ends the study early may be the disk; the directories tell a resume what the journal does not.
            with contextlib.suppress(RunError):
                for one in running.values():
                    self.end(one, one.child.poll() or Ended(STOPPED, "", 0.0), [])


def silence(device: str, forecast: float | None) -> float:
    """Seconds that a trial may go without logging a step. forecast: seconds of the whole trial, None: not known."""
    if forecast is None:
        return SILENCE_ELSE
    return (SILENCE_GPU if device.startswith("cuda") else SILENCE_ELSE) + SILENCE_FORECASTS * forecast
