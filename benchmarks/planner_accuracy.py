"""Accuracy of the planner for memory and speed: measure configurations, fit the constants, compare.

    python -m benchmarks.planner_accuracy measure --out points.jsonl [--seed S]   on a machine with GPUs
    python -m benchmarks.planner_accuracy fit points.jsonl                        fit the constants of budget/speed.py
    python -m benchmarks.planner_accuracy compare points.jsonl ... [--probes DIR] [--out FILE]
                                          write docs/planner-accuracy.md

`planner_compare.py` draws the configurations and compares predictions with their measurements,
`planner_published.py` compares with published measurements.
"""

import argparse
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import planner_compare, planner_fit, planner_published, planner_section, planner_tables
from benchmarks.planner_compare import (
    DRAWN,
    SEED,
    configurations,
    is_fitting_row,
    label,
    read_points,
    shape_of,
    step_spec_of,
)
from deskside.budget.operators.step import step_operators
from deskside.budget.speed import length_factor
from deskside.utils import child_process
from deskside.utils.machine import code_version, this_machine

# The H200 that the constants were fitted on: published rate of a large matrix product, bandwidth of the data sheet.
MATMUL_FLOPS, BANDWIDTH = 790e12, 4.8e12
PULL = 0.03  # weight of the regularization
LIMIT_SECONDS = 200.0  # per point


def measure(seed: int, specs: list[dict[str, Any]], out: Path, limit: float) -> None:
    """Measure every point in its own process, on all GPUs in parallel, and append each result to `out`.

    limit: seconds after which no further point starts.
    """
    machine = this_machine().key()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    all_gpus = ",".join(str(number) for number in range(len(listed.strip().splitlines())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
    pending: queue.Queue[dict[str, Any]] = queue.Queue()
    for spec in specs:
        pending.put(spec)
    lock, began = threading.Lock(), time.monotonic()

    def worker(gpu: str) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": gpu, "TORCHINDUCTOR_COMPILE_THREADS": "8"}
        while time.monotonic() - began < limit:
            try:
                spec = pending.get_nowait()
            except queue.Empty:
                return
            if "card" in spec:
                target, arguments = "deskside.probe.card_benchmark:measure_card", {}
            else:
                target, arguments = "deskside.probe.point:measure_point", {"spec": spec}
            left = limit - (time.monotonic() - began)
            outcome = child_process.run(target, arguments, min(LIMIT_SECONDS, max(10.0, left)), environment)
            row = {
                "seed": seed,
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": machine,
                "spec": spec,
                "status": outcome.status,
                "error": outcome.error,
                "seconds": outcome.seconds,
                "result": outcome.value,
            }
            with lock, out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                speed = (outcome.value or {}).get("tokens_per_second")
                print(
                    f"{time.monotonic() - began:5.0f} s  gpu {gpu}  {outcome.status:7}  "
                    f"{outcome.seconds:5.1f} s  "
                    f"{label(spec)}  {f'{speed:,.0f} tok/s' if speed else outcome.error[:150]}",
                    flush=True,
                )
                if outcome.status == "failed":
                    print(outcome.output[-800:], flush=True)

    threads = [threading.Thread(target=worker, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fit(points: Path) -> None:
    """Fit `budget.speed.Efficiency` to the even half of the measured points and print its error on the odd half.

    Iteratively reweighted least squares of relative errors, with weights 1 / sqrt(error) so that outliers count less.
    A weak regularization towards the starting values decides where the data cannot separate two terms.
    """
    rows = [row for row in read_points([points]) if row["seed"] == SEED and row["status"] == "ok"]
    names = list(START)
    table = np.array([[_features(row)[n] / _seconds(row) for n in names] for row in rows])
    even = np.array([is_fitting_row(row) for row in rows])
    for name, chosen in (("even half (shipped)", even), ("odd half", ~even), ("all", even | ~even)):
        times = _solve(table[chosen], np.array(list(START.values())))
        tested = table[~chosen] if (~chosen).any() else table
        error = np.abs(tested @ times - 1)
        print(
            f"{name}: left-out error median {np.median(error):.1%}, nine in ten within "
            f"{np.quantile(error, 0.9):.1%}"
        )
        for term, cost in zip(names, times, strict=True):
            print(f"  {term:18} {cost * 1e-6 if term == 'layer_seconds' else 1 / cost:.4g}")


# Starting value of each term: its cost in units of its floor (for `layer_seconds`: in microseconds).
START = {
    "matmul": 1.1, "head": 1.4, "attention_64": 2.0, "attention_128": 1.6, "traffic": 1.4, "weights": 1.4,
    "optimizer_matmul": 1.5, "optimizer_traffic": 1.4, "layer_seconds": 200.0,
}  # fmt: skip


def _solve(table: np.ndarray, start: np.ndarray) -> np.ndarray:
    weights = np.ones(len(table))
    pull = np.diag(PULL * np.sqrt(len(table)) / start)
    times = start
    for _ in range(30):
        left = np.vstack([table * weights[:, None], pull])
        right = np.concatenate([weights, pull @ start])
        times, *_ = np.linalg.lstsq(left, right, rcond=None)
        weights = 1 / np.sqrt(np.maximum(np.abs(table @ times - 1), 0.01))
    return times


def _features(row: dict[str, Any]) -> dict[str, float]:
    """Return the floor of every term in seconds: FLOPs / matmul rate, bytes / bandwidth of the data sheet."""
    floors = dict.fromkeys(START, 0.0)
    for operator in step_operators(shape_of(row["spec"]), step_spec_of(row["spec"], None, row["result"])):
        group = operator.group
        if group == "layers":
            floors["layer_seconds"] += operator.amount * 1e-6
        elif group in ("matmul", "head", "optimizer_matmul"):
            floors[group] += operator.amount / MATMUL_FLOPS
        elif group == "attention":
            gain = length_factor(row["spec"]["sequence_length"])
            floors[f"attention_{operator.width}"] += operator.amount / (MATMUL_FLOPS * gain)
        else:
            floors["traffic" if group == "loss_traffic" else group] += operator.amount / BANDWIDTH
    return floors


def _seconds(row: dict[str, Any]) -> float:
    return float(row["result"]["step_seconds"]["median"])


def report(
    points: list[Path], gpu: str, probes: Path | None, out: Path | None, later: Sequence[Sequence[Path]] = ()
) -> None:
    """Print the accuracy of the planner and write the whole report to `out`.

    later: later draws, each with the file of its points and the probe store of their card.
    """
    comparison = planner_compare.compare(points, gpu, probes)
    lines = []
    for description, target, errors in [
        *planner_compare.target_errors(comparison),
        *planner_published.target_errors(),
    ]:
        figures = [f"{value:.1%}" for value in (errors.nine_in_ten, errors.median, errors.worst)]
        lines.append(
            [
                description,
                f"{target:.0%}",
                str(len(errors)),
                *figures,
                "met" if errors.meets(target) else "**missed**",
            ]
        )
    headings = (
        "Prediction",
        "Target for nine in ten",
        "Rows",
        "Nine in ten within",
        "Median",
        "Worst",
        "Target",
    )
    overview = planner_tables.table(headings, lines)
    print("\n".join(overview))
    if out is None:
        return
    command = "python -m benchmarks.planner_accuracy compare " + " ".join(map(str, points))
    command += f" --probes {probes}" if probes is not None else ""
    later_lines: list[str] = []
    for draw, its_probes in later:
        command += f" --later {draw} {its_probes}"
        later_lines += planner_section.later_section(planner_compare.compare([draw], gpu, its_probes), draw)
    text = [
        "# Planner accuracy",
        "",
        *planner_tables.prose(
            "Predicted and measured peak memory and tokens per second of whole training steps. The targets come from",
            "issue 3 and apply to nine in ten predictions. Errors are predicted / measured - 1.",
        ),
        "",
        *later_lines,
        *planner_fit.section(),
        "## The step before 2026-11-21",
        "",
        *overview,
        "",
        *planner_tables.prose(
            f"Generated on {datetime.now(UTC).date()} by deskside {code_version()}. "
            "Do not edit; run the command again:",
        ),
        "",
        f"    {command} --gpu {gpu} --out {out}",
        "",
        *planner_tables.prose(
            "The points were measured with `python -m benchmarks.planner_accuracy measure --out FILE [--seed S]`, and",
            "the probe store with `deskside probe --minutes 3`.",
        ),
        "",
        *planner_section.section(comparison),
        "",
        *planner_published.section(),
    ]
    out.write_text("\n".join(text) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--seed", type=int, default=SEED)
    measuring.add_argument("--count", type=int, default=DRAWN)
    measuring.add_argument("--minutes", type=float, default=9.0)
    fitting = commands.add_parser("fit")
    fitting.add_argument("points", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("points", type=Path, nargs="+")
    comparing.add_argument(
        "--probes", type=Path, help="the probe store that `deskside probe` wrote for this card"
    )
    comparing.add_argument(
        "--later",
        type=Path,
        nargs=2,
        metavar=("POINTS", "PROBES"),
        action="append",
        default=[],
        help="a draw with its own probe; can be repeated",
    )
    comparing.add_argument("--gpu", default="h200")
    comparing.add_argument("--out", type=Path, help="without it, only the summary is printed")
    arguments = parser.parse_args()
    if arguments.command == "fit":
        fit(arguments.points)
    if arguments.command == "measure":
        if not 1 <= arguments.count <= DRAWN:
            parser.error(f"--count: use 1 to {DRAWN}")
        specs = [{"card": True}, *configurations(arguments.count, arguments.seed)]
        measure(arguments.seed, specs, arguments.out, 60 * arguments.minutes)
    if arguments.command == "compare":
        report(arguments.points, arguments.gpu, arguments.probes, arguments.out, arguments.later)


if __name__ == "__main__":
    main()
