"""The check that a run stopped in the middle goes on as if it had not been: `benchmarks.scaling resume`."""

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scaling_cases import Case
from deskside.utils.signals import exit_code

POLL_SECONDS = 0.2
STOPPED_CODE = exit_code("SIGTERM")  # of a run that SIGTERM stopped after it had saved


def train_command(case: Case, options: argparse.Namespace, run: Path) -> list[str]:
    """Return the command that trains a case deterministically in a directory."""
    keys = {f"{part}.{key}": value for part, values in case.config().items() for key, value in values.items()}
    for part, values in options.others.items():
        keys |= {f"{part}.{key}": value for key, value in values.items()}
    keys |= {"data.path": options.data, "steps": options.steps, "gpus": case.gpus, "deterministic": "true"}
    keys |= {"runs": run.parent, "name": run.name}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "deskside", "train", case.preset, *words]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics that are written whole."""
    path = run / "metrics.jsonl"
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def resume(options: argparse.Namespace) -> dict[str, Any]:
    """Stop a run in the middle, resume it on as many and on fewer GPUs, and compare with an uninterrupted run.

    Returns the largest relative difference of a loss after the stop, for each number of GPUs, and the median tokens/s
    of the uninterrupted run: `deskside train` with its data loader. Raises SystemExit if the stopped run did not save
    and end as SIGTERM asks, and CalledProcessError if another one fails.
    """
    gpus = options.gpus[0]
    case = Case(options.preset, "muon", "bf16", gpus, gpus * options.tokens)
    differences = {}
    with tempfile.TemporaryDirectory(prefix="deskside-scaling-", dir=options.folder) as name:
        folder = Path(name)
        whole = folder / "whole"
        subprocess.run(train_command(case, options, whole), check=True, stdout=subprocess.DEVNULL)
        expected = {row["step"]: row["loss"] for row in metrics(whole)}
        speeds = [row["tokens_per_second"] for row in metrics(whole)[options.steps // 3 :]]
        run = folder / "stopped"
        with subprocess.Popen(train_command(case, options, run), stdout=subprocess.DEVNULL) as process:
            try:
                while process.poll() is None and len(metrics(run)) < options.steps // 2:
                    time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                process.kill()  # and the kernel kills its ranks
                raise
            process.send_signal(signal.SIGTERM)
        if process.returncode != STOPPED_CODE:
            # Without a checkpoint of the last step, resumed runs would repeat steps that were to be left out.
            raise SystemExit(
                f"the run that was to be stopped ended with exit code {process.returncode}; one that saves on SIGTERM "
                f"ends with {STOPPED_CODE}"
            )
        stopped = len(metrics(run))
        for then in (gpus, options.then):
            resumed = folder / f"then-{then}"
            shutil.copytree(run, resumed)
            words = ["train", "--resume", str(resumed), "--gpus", str(then)]
            subprocess.run([sys.executable, "-m", "deskside", *words], check=True, stdout=subprocess.DEVNULL)
            losses = {row["step"]: row["loss"] for row in metrics(resumed)}
            if losses.keys() != expected.keys() or not 0 < stopped < options.steps:
                raise SystemExit(f"the run was not stopped in the middle, or did not end: step {stopped}")
            differences[then] = max(
                abs(losses[step] / expected[step] - 1) for step in losses if step > stopped
            )
            print(
                f"{gpus} GPUs, stopped after step {stopped}, then {then}: {differences[then]:.3g}", flush=True
            )
    return {
        "case": case.name,
        "steps": options.steps,
        "stopped_after": stopped,
        "largest_relative_difference": differences,
        "tokens_per_second": statistics.median(speeds),
    }
