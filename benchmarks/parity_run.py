"""Processes of the parity benchmark: one ordinary training run per arm, distributed over the GPUs of the machine.

A failed arm is a row with its last error line, and the others continue. Each run leads its own session, so that its
compile workers and loaders end with it, even when the time limit or Ctrl-C ends it.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parity_jobs import Job
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import UsageError

END_SHARE = 0.1  # share of the steps, at the end, over which the training loss is averaged
STAGGER_SECONDS = 1.0
GRACE_SECONDS = 8.0  # seconds between SIGTERM, on which a run saves a checkpoint, and SIGKILL
POLL_SECONDS = 0.1


@dataclass
class Running:
    """A running job on a slot, with its log."""

    job: Job
    slot: str
    process: "subprocess.Popen[bytes]"
    folder: Path
    log: Path
    began: float
    stopped: bool = False


def carry_out(
    jobs: Sequence[Job], slots: Sequence[str], out: Path, runs: Path | None, deadline: float | None
) -> list[dict[str, Any]]:
    """Run all jobs, each on the first free slot, until `deadline` (time.monotonic). Return their rows.

    A row is appended to parity.jsonl, and the files of the run to metrics.zip, as soon as the run ends. Raises
    UsageError if the folders already contain results.
    """
    rows: list[dict[str, Any]] = []
    waiting, running = list(jobs), list[Running]()
    with _folder(runs) as base, _ended(running):
        _refuse_old(jobs, out, base)
        out.mkdir(parents=True, exist_ok=True)
        last_start = -math.inf
        while waiting or running:
            now = time.monotonic()
            if deadline is not None and now >= deadline - GRACE_SECONDS:
                waiting.clear()
                _stop(running, deadline)
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                row = _row(one)
                rows.append(row)
                _record(row, one, out)
                if runs is None:
                    shutil.rmtree(one.folder, ignore_errors=True)
            free = [slot for slot in slots if slot not in {r.slot for r in running}]
            if waiting and free and now - last_start >= STAGGER_SECONDS:
                running.append(_start(waiting.pop(0), free[0], base, len(slots)))
                last_start = now
            time.sleep(POLL_SECONDS)
    order = {job.label: number for number, job in enumerate(jobs)}
    return sorted(rows, key=lambda row: order[row["label"]])


def _refuse_old(jobs: Sequence[Job], out: Path, base: Path) -> None:
    taken = [base / job.label for job in jobs if (base / job.label).exists()]
    for path in [out / "parity.jsonl", out / "metrics.zip", *taken]:
        if path.exists():
            raise UsageError(f"{path} exists; choose another folder")


def _start(job: Job, slot: str, base: Path, slots: int) -> Running:
    """Start a run. With an empty slot it sees no GPU."""
    log = base / f"{job.label}.log"
    threads = max(1, cpu_cores() // slots)
    threads = min(threads, 8, int(os.environ.get("OMP_NUM_THREADS", "8").split(",")[0] or 8))
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": slot,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "deskside", "train", *job.words]
    command += ["--name", job.label, "--runs", str(base)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    print(f"{job.label}: started on {f'GPU {slot}' if slot else 'the CPU'}", flush=True)
    return Running(job, slot, process, base / job.label, log, time.monotonic())


def _stop(running: list[Running], deadline: float) -> None:
    """Ask every run to save and end. Kill those that still run at the deadline."""
    late = time.monotonic() >= deadline - 1.0
    for one in running:
        if late:
            _kill(one.process)
        elif not one.stopped:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                one.process.terminate()
        one.stopped = True


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # the run and all its child processes have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _folder(runs: Path | None) -> Iterator[Path]:
    """Yield the folder for runs: the given one, or a temporary one, because the checkpoint of a run takes gigabytes."""
    if runs is not None:
        runs.mkdir(parents=True, exist_ok=True)
        yield runs
        return
    with tempfile.TemporaryDirectory(prefix="deskside-parity-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _ended(running: list[Running]) -> Iterator[None]:
    """End the runs on any exit, SIGTERM included."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        for one in running:
            _kill(one.process)
        signal.signal(signal.SIGTERM, previous)


def _row(one: Running) -> dict[str, Any]:
    """Return a finished run as a line of parity.jsonl."""
    job = one.job
    with contextlib.suppress(ProcessLookupError):  # workers that are still alive
        os.killpg(one.process.pid, signal.SIGKILL)
    plan, summary, machine = (_json(one.folder / f"{n}.json") for n in ("plan", "summary", "environment"))
    metrics = _metrics(one.folder)
    status = "finished" if one.process.returncode == 0 and summary else "stopped" if one.stopped else "failed"
    layers = job.config.model.num_hidden_layers
    quantized = job.config.precision.quantized
    kept = job.config.precision.recipe().kept_blocks(layers) if quantized else (layers, 0)
    losses = [row["loss"] for row in metrics if not row["skipped"]]
    end = losses[-max(1, round(len(losses) * END_SHARE)) :] if status == "finished" else []
    curve = [[row["tokens"], row["val_bpb"]] for row in metrics if row.get("val_bpb") is not None]
    if status == "finished":
        curve.append([summary["tokens"], summary["val_bpb"]])
    return {
        "arm": job.arm,
        "seed": job.seed,
        "label": job.label,
        "status": status,
        "error": _error(one.log, one.process.returncode) if status == "failed" else "",
        "native": plan.get("precision", {}).get("native") if quantized else None,
        "layers": layers,
        "kept": list(kept),
        "val_loss": summary.get("val_loss"),
        "val_bpb": summary.get("val_bpb"),
        "val_tokens": summary.get("val_tokens"),
        "train_loss_end": statistics.fmean(end) if end else None,
        "tokens": summary.get("tokens", metrics[-1]["tokens"] if metrics else 0),
        "steps": summary.get("steps", len(metrics)),
        "skipped_steps": len(metrics) - len(losses),
        "tokens_per_second": summary.get("tokens_per_second"),
        "peak_memory_gib": summary.get("peak_memory_gib"),
        "seconds": time.monotonic() - one.began,
        "curve": curve,
        "setting": {**job.setting, "data": plan.get("data")},
        "compile": plan.get("compile"),
        "attention": plan.get("attention", {}).get("full", {}).get("name"),
        "machine": {
            "device": machine.get("gpu", {}).get("name") or machine.get("cpu"),
            **{key: machine.get(key) for key in ("torch", "python")},
        },
        "command": ["deskside", "train", *job.words],
    }


def _record(row: dict[str, Any], one: Running, out: Path) -> None:
    with (out / "parity.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    with zipfile.ZipFile(out / "metrics.zip", "a", zipfile.ZIP_DEFLATED) as archive:
        for path, name in (
            (one.folder / "metrics.jsonl", f"{row['label']}.jsonl"),
            (one.folder / "plan.json", f"{row['label']}.plan.json"),
            (one.log, f"{row['label']}.log"),
        ):
            if path.is_file():
                archive.write(path, name)
    outcome = {
        "finished": f"{row['val_bpb'] or 0:.4f} bits per byte, {row['tokens_per_second'] or 0:,.0f} tokens/s",
        "stopped": f"stopped by the time limit after {row['tokens']:,} tokens",
        "failed": f"failed: {row['error']}",
    }[row["status"]]
    print(f"{row['label']}: {outcome}, {row['seconds']:.0f} s", flush=True)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Return complete lines only; a killed run may leave a partial last line."""
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _error(log: Path, code: int) -> str:
    """Return the command's own error line, else the last line, else the exit status."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("deskside: ") and "this is a bug" not in line]
    if code < 0:
        return f"ended by {signal.Signals(-code).name}" + (f" after: {lines[-1][:300]}" if lines else "")
    return (own or lines or [f"exit code {code}"])[-1][:500]
