"""Step time that a checkpoint costs: while training waits, and written in the background.

    python -m benchmarks.checkpoint [--preset 124m] [--tokens N] [--micro-tokens N] [--precision bf16]
        [--optimizer adamw] [--saves 2] [--steps 8] [--device cuda] [--folder DIR] [--json FILE]

The state is saved once while training waits, then `--saves` times in the background while steps go on, the first time
from the same state: the checksums of both must be equal. The lost time of a checkpoint in the background is the time
from the call of `save` until it is published and at least `--steps` steps are done, less the mean time of as many
steps before. It includes the copy, and what writing slows the steps down. The disk must have room for two checkpoints.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_config import configuration
from deskside.config.run import RunConfig
from deskside.config.sections import CheckpointConfig
from deskside.probe.point import StepTimer, prepare_step, random_batches
from deskside.run.directory import RunDirectory
from deskside.train import environment_record
from deskside.train.loop.callbacks import RunLog
from deskside.train.loop.clock import Clock
from deskside.train.loop.trainer import TrainProgress
from deskside.train.state.checkpointer import Checkpointer
from deskside.utils.errors import UsageError
from deskside.weights.checkpoint_folder import MANIFEST, OPTIMIZER, WEIGHTS, find

WARMUP_STEPS = 3


class Measurement:
    """A training step, and what checkpoints of its state in `folder` cost."""

    def __init__(self, config: RunConfig, folder: Path, steps: int):
        prepared = prepare_step(config)
        self.stepper, self.steps, self.folder = prepared.stepper, steps, folder
        world = self.stepper.world
        batches = random_batches(prepared.rows, prepared.fit.micro_rows, prepared.rows_per_step, world)
        sensors = environment_record.Sensors(world.device)
        self.timer = StepTimer(self.stepper, batches, prepared.fit.accumulation, sensors)
        self.run_until(WARMUP_STEPS)
        seconds, done = self.run_until(steps)
        self.step_seconds = seconds / done

    def run_until(self, steps: int, also: Callable[[], bool] = lambda: True) -> tuple[float, int]:
        """Run at least `steps` steps, and until `also` returns True. Return the seconds and the number of steps."""
        began, before, pending = time.perf_counter(), self.timer.step, self.timer.launch()
        while self.timer.step - before < steps or not also():
            previous, pending = pending, self.timer.launch()  # one step ahead, as in training
            self.timer.read(previous)
        self.timer.read(pending)
        return time.perf_counter() - began, self.timer.step - before

    def checkpointer(self, background: bool) -> Checkpointer:
        """Return a checkpointer that keeps one checkpoint in a folder of its own."""
        options = CheckpointConfig(background=background, keep=1)
        config = self.stepper.config.model_copy(update={"checkpoint": options})
        run = RunDirectory(self.folder / ("background" if background else "foreground"))
        run.checkpoints.mkdir(parents=True)
        context = replace(self.stepper.context, config=config)
        return Checkpointer(context, self.stepper.optimizer, Clock("training", 0.0), RunLog(run))

    def progress(self) -> TrainProgress:
        return TrainProgress(self.timer.step, self.timer.step)

    def foreground(self) -> dict[str, Any]:
        """Save while training waits; return the seconds and the checksums, and delete the checkpoint."""
        with self.checkpointer(background=False) as checkpointer:
            checkpointer.prepare()
            began = time.perf_counter()
            checkpointer.save(self.progress(), 0.0)
            lost = time.perf_counter() - began
            checksums = tensor_checksums(checkpointer.run)
            shutil.rmtree(checkpointer.run.path)
        return {"lost_seconds": lost, "checksums": checksums}

    def background(self, saves: int) -> dict[str, Any]:
        """Save while steps go on. Return the seconds to prepare, those of every save, and the first checksums."""
        rows, checksums = [], {}
        with self.checkpointer(background=True) as checkpointer:
            began = time.perf_counter()
            checkpointer.prepare()
            prepared = time.perf_counter() - began
            for _ in range(saves):
                began = time.perf_counter()
                checkpointer.save(self.progress(), 0.0)
                waited = time.perf_counter() - began
                seconds, steps = self.run_until(self.steps, lambda: checkpointer.has_written)
                checkpointer.finish()
                checksums = checksums or tensor_checksums(checkpointer.run)
                lost = waited + seconds - steps * self.step_seconds
                rows.append({"lost_seconds": lost, "steps_meanwhile": steps, **checkpointer.timings})
        return {"prepare_seconds": prepared, "saves": rows, "checksums": checksums}


def tensor_checksums(run: RunDirectory) -> dict[str, Any]:
    """Return size and checksum of the weights and of the optimizer's file of the only checkpoint."""
    (checkpoint,) = find(run.checkpoints)
    listed = json.loads((checkpoint.path / MANIFEST).read_bytes())["files"]
    return {name: listed[name] for name in (WEIGHTS, OPTIMIZER)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--tokens", type=int, help="tokens per step; default: the preset's")
    parser.add_argument("--micro-tokens", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="timed steps, at least")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--folder", type=Path, help="the folder to write in; default: that for temporary files"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    names = ("preset", "tokens", "micro_tokens", "precision", "optimizer", "device")
    config = configuration({name: getattr(options, name) for name in names})
    with tempfile.TemporaryDirectory(prefix="deskside-checkpoint-", dir=options.folder) as folder:
        measurement = Measurement(config, Path(folder), options.steps)
        foreground = measurement.foreground()
        background = measurement.background(options.saves)
    gigabytes = sum(entry["bytes"] for entry in foreground["checksums"].values()) / 1e9
    equal = foreground["checksums"] == background["checksums"]
    print(f"{options.preset}: {gigabytes:.2f} GB, step {1e3 * measurement.step_seconds:.1f} ms")
    print(f"while training waits: {foreground['lost_seconds']:.2f} s lost")
    print(
        f"background: host memory prepared in {background['prepare_seconds']:.2f} s; the same bytes: {equal}"
    )
    for row in background["saves"]:
        print(
            f"background: {row['lost_seconds']:.2f} s lost, of which {row['checkpoint_copy_seconds']:.2f} s copying; "
            f"written in {row['checkpoint_write_seconds']:.2f} s, {row['steps_meanwhile']} steps meanwhile"
        )
    if options.json is not None:
        result = {
            "preset": options.preset,
            "gigabytes": gigabytes,
            "step_seconds": measurement.step_seconds,
            "foreground": foreground,
            "background": background,
            "equal": equal,
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        sys.exit(2)
