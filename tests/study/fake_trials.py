"""Replacements for a training run in the tests: trials that end in every possible way, without torch.

FAKE in the environment is a JSON object that maps the name of a run directory (or "*") to what its trial does.
"""

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from deskside.study.execute.trial_process import STOPPED, TrialJob
from deskside.utils.errors import RunError, UsageError
from deskside.utils.signals import StopSignal

TARGET = "tests.study.fake_trials:act"
ROOT = Path(__file__).parents[2]
GONE = "gone.txt"  # one line per step, so that a test sees whether a trial is still running


def environment(**acts: str) -> dict[str, str]:
    """Return the value for `Device.environment`. Keywords are run names with -
    written as __, or `other` for all the rest.
    """
    named = {name.replace("__", "-"): act for name, act in acts.items()}
    return {"FAKE": json.dumps(named), "PYTHONPATH": str(ROOT)}


def act(job: TrialJob) -> tuple[str, str]:
    run = Path(job.run)
    acts = json.loads(os.environ["FAKE"])
    what = acts.get(run.name, acts.get("other", "finish"))
    (run / "run.json").write_text(json.dumps({"config": job.config}))
    print("a library says something", "\x1b[31mred\x1b[0m")
    if what == "finish":
        finish(run, job)
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "memory":
        raise MemoryError("out of memory with a single row\nsecond line")
    elif what == "refuse":
        raise UsageError("optim.lr: not here")
    elif what == "fail":
        raise RunError("the loss machine broke")
    elif what == "bug":
        return [][0]
    elif what == "exit":
        os._exit(3)
    elif what == "diverge":
        from deskside.train.loop.guard import Diverged

        raise Diverged("the run went back 3 times already")
    elif what == "full":
        try:
            raise OSError(errno.ENOSPC, "No space left on device", str(run / "x"))
        except OSError:
            raise RunError(f"{run / 'x'}: cannot be written") from None
    elif what == "garbage":
        (run / "summary.json").write_bytes(b"{\xff not json")
        (run / "metrics.jsonl").write_bytes(b'{"step": 1, "tokens": 10, "loss": null}\n[1]\n\xff\xff\n{"st')
        (run / "plan.json").write_text("[]")
        sys.stdout.flush()
    elif what == "steps":
        return steps(run, job)
    elif what == "slow":
        for step in range(1, 10):
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "tokens": step}) + "\n")
            time.sleep(0.5)
        finish(run, job)
    elif what == "hang-at-exit":
        finish(run, job)
        threading.Thread(target=time.sleep, args=(600,)).start()
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    return "finished", ""


def steps(run: Path, job: TrialJob) -> tuple[str, str]:
    """Run a long trial, which saves when it is asked to stop, and resumes where it was."""
    saved = run / "checkpoints" / "step-000000001"
    with StopSignal() as stop:
        for _ in range(4 if job.resume else 6000):
            with (run / GONE).open("a") as file:
                file.write("step\n")
            time.sleep(0.05)
            if stop.requested:
                saved.mkdir(exist_ok=True)
                return STOPPED, f"stopped by {stop.requested}"
    finish(run, job)
    return "finished", ""


def finish(run: Path, job: TrialJob) -> None:
    """Write the files of a run of four steps."""
    rows = [
        {"step": n, "tokens": 100 * n, "loss": 4.0 - n / 10, "val_bpb": None, "tokens_per_second": 50.0}
        for n in range(1, 5)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "plan.json").write_text(
        json.dumps({"fit": [{"micro_rows": 2}], "precision": {"native": True, "chosen": "fp32"}})
    )
    (run / "environment.json").write_text(json.dumps({"device": "cpu", "cpu": "made up"}))
    (run / "model").mkdir()
    (run / "checkpoints" / "step-000000004").mkdir(exist_ok=True)
    summary = {"status": "finished", "val_bpb": 1.5 + job.config["seed"] / 100, "val_loss": 3.0}
    summary |= {"tokens": 400, "steps": 4, "tokens_per_second": 50.0, "mfu": None, "peak_memory_gib": 0.5}
    (run / "summary.json").write_text(json.dumps(summary))
