"""Processes of the parity benchmark: one ordinary training run per arm, distributed over the GPUs of the machine.

A failed arm becomes a row with its last error line, and the others continue. Each run has its own session, so that its
compile workers and data loaders can be ended with it, also at the time limit and on Ctrl-C.
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

END_SHARE = 0.1  # the final training loss is the mean over this last share of the steps
STAGGER_SECONDS = 1.0  # between the starts of two runs
GRACE_SECONDS = 8.0  # seconds between SIGTERM, on which a run saves a checkpoint, and SIGKILL
POLL_SECONDS = 0.1


@dataclass
class Running:
    """A job that runs on a slot (a value of CUDA_VISIBLE_DEVICES), with its folder and log."""

    job: Job
    slot: str
    process: "subprocess.Popen[bytes]"
    folder: Path
    log: Path
    began: float
    stopped: bool = False  # by the time limit


def run_jobs(
    jobs: Sequence[Job], slots: Sequence[str], out: Path, runs: Path | None, deadline: float | None
) -> list[dict[str, Any]]:
    """Run all jobs, each on the first free slot, until `deadline` (time.monotonic). Return their rows.

    A row is appended to parity.jsonl, and the files of the run to metrics.zip, as soon as the run ends. Raises
    UsageError if the folders already contain results.
    """
    rows: list[dict[str, Any]] = []
    waiting, running = list(jobs), list[Running]()
    with _run_folder(runs) as base, _ending(running):
        _check_unused(jobs, out, base)
        out.mkdir(parents=True, exist_ok=True)
        last_start = -math.inf
        while waiting or running:
            now = time.monotonic()
            if deadline is not None and now >= deadline - GRACE_SECONDS:
                waiting.clear()
                _stop(running, deadline)
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                row = _result_row(run)
                rows.append(row)
                _record(row, run, out)
                if runs is None:
                    shutil.rmtree(run.folder, ignore_errors=True)
            free = [slot for slot in slots if slot not in {r.slot for r in running}]
            if waiting and free and now - last_start >= STAGGER_SECONDS:
                running.append(_start(waiting.pop(0), free[0], base, len(slots)))
                last_start = now
            time.sleep(POLL_SECONDS)
    order = {job.label: number for number, job in enumerate(jobs)}
    return sorted(rows, key=lambda row: order[row["label"]])


def _check_unused(jobs: Sequence[Job], out: Path, base: Path) -> None:
    existing = [base / job.label for job in jobs if (base / job.label).exists()]
    for path in [out / "parity.jsonl", out / "metrics.zip", *existing]:
        if path.exists():
            raise UsageError(f"{path} exists; choose another folder")


def _start(job: Job, slot: str, base: Path, slots: int) -> Running:
    """Start a run. With an empty slot it uses the CPU."""
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
    """Ask every run to save and end; kill those that still run a second before the deadline."""
    late = time.monotonic() >= deadline - 1.0
    for run in running:
        if late:
            _kill(run.process)
        elif not run.stopped:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                run.process.terminate()
        run.stopped = True


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # the run and all its child processes have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _run_folder(runs: Path | None) -> Iterator[Path]:
    """Yield the folder of the runs: the given one, or a temporary one, since a run's checkpoint takes gigabytes."""
    if runs is not None:
        runs.mkdir(parents=True, exist_ok=True)
        yield runs
        return
    with tempfile.TemporaryDirectory(prefix="deskside-parity-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _ending(running: list[Running]) -> Iterator[None]:
    """End the runs on any exit from the context, including SIGTERM."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        for run in running:
            _kill(run.process)
        signal.signal(signal.SIGTERM, previous)


def _result_row(run: Running) -> dict[str, Any]:
    """Return the line of parity.jsonl for a run that has ended."""
    job = run.job
    with contextlib.suppress(ProcessLookupError):  # kill workers that are still alive
        os.killpg(run.process.pid, signal.SIGKILL)
    plan, summary, machine = (_json(run.folder / f"{n}.json") for n in ("plan", "summary", "environment"))
    metrics = _metrics(run.folder)
    status = "finished" if run.process.returncode == 0 and summary else "stopped" if run.stopped else "failed"
    layers = job.config.model.num_hidden_layers
    quantized = job.config.precision.quantized
    # Blocks that stay in BF16: the first ones and the last ones.
    bf16_blocks = job.config.precision.recipe().kept_blocks(layers) if quantized else (layers, 0)
    losses = [row["loss"] for row in metrics if not row["skipped"]]
    end_losses = losses[-max(1, round(len(losses) * END_SHARE)) :] if status == "finished" else []
    curve = [[row["tokens"], row["val_bpb"]] for row in metrics if row.get("val_bpb") is not None]
    if status == "finished":
        curve.append([summary["tokens"], summary["val_bpb"]])
    return {
        "arm": job.arm,
        "seed": job.seed,
        "label": job.label,
        "status": status,
        "error": _error(run.log, run.process.returncode) if status == "failed" else "",
        "native": plan.get("precision", {}).get("native") if quantized else None,
        "layers": layers,
        "kept": list(bf16_blocks),
        "val_loss": summary.get("val_loss"),
        "val_bpb": summary.get("val_bpb"),
        "val_tokens": summary.get("val_tokens"),
        "train_loss_end": statistics.fmean(end_losses) if end_losses else None,
        "tokens": summary.get("tokens", metrics[-1]["tokens"] if metrics else 0),
        "steps": summary.get("steps", len(metrics)),
        "skipped_steps": len(metrics) - len(losses),
        "tokens_per_second": summary.get("tokens_per_second"),
        "peak_memory_gib": summary.get("peak_memory_gib"),
        "seconds": time.monotonic() - run.began,
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


def _record(row: dict[str, Any], run: Running, out: Path) -> None:
    with (out / "parity.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    with zipfile.ZipFile(out / "metrics.zip", "a", zipfile.ZIP_DEFLATED) as archive:
        for path, name in (
            (run.folder / "metrics.jsonl", f"{row['label']}.jsonl"),
            (run.folder / "plan.json", f"{row['label']}.plan.json"),
            (run.log, f"{row['label']}.log"),
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
    """Return the rows of metrics.jsonl, without a partial last line, which a killed run may leave."""
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _error(log: Path, code: int) -> str:
    """Return the signal that ended a run, or the error line of deskside, the last line, or the exit code."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own_errors = [line for line in lines if line.startswith("deskside: ") and "this is a bug" not in line]
    if code < 0:
        return f"ended by {signal.Signals(-code).name}" + (f" after: {lines[-1][:300]}" if lines else "")
    return (own_errors or lines or [f"exit code {code}"])[-1][:500]
