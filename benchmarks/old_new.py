"""Compare the speed and the losses of two checkouts of deskside on one machine, in turn.

    python -m benchmarks.old_new OLD NEW [--job "step --preset 124m ..."]... [--json FILE]

OLD and NEW are folders of checkouts. A job is a benchmark with its arguments, which both must know (presets go by their
former names, such as 355m). `step` and `decode` run as `python -m benchmarks.step ...` in each checkout, in the order
old, new, new, old, so that a slow drift of the clocks cancels; the medians are compared.

`losses` takes the arguments of `step`, trains --steps steps with deterministic kernels in each checkout, and compares
every loss and the final weights bit by bit. Give it an attention backend and a micro-batch, because each run may choose
others from its own measurements. If something differs, the old checkout runs again, which shows if it is deterministic.
The exit code is 1 if a job failed or losses differ. On a CPU that others use too, set OMP_NUM_THREADS=1.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ORDER = ("old", "new", "new", "old")
STEP = "--preset 124m --tokens 65536 --micro-tokens 32768"
JOBS = (
    f"losses {STEP} --precision bf16,fp8-delayed:head=fp8 --attention flash --steps 50",
    f"losses {STEP} --precision bf16 --attention flash --optimizer muon --steps 50",
    f"step {STEP} --precision bf16,fp8-delayed:head=fp8 --attention cudnn",
    f"step {STEP} --precision bf16 --attention cudnn --steps 20 --compute.activation_checkpointing block",
    f"step {STEP} --precision bf16 --attention cudnn --steps 10 --warmup 2 --cold-start",
    'decode --preset 124m --batch 1,16 --peers ""',
)
# Runs in each checkout, so it may use only functions of benchmarks.step and step_measure that both checkouts have.
LOSSES = """
import hashlib, json, os, sys, time
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
from benchmarks import step, step_measure
torch.use_deterministic_algorithms(True)
options, config = step.arguments(sys.argv[2:])
found = {}
for arm, precision in step.arms(options.precision):
    spec = step.specification(options, precision, config) | {"began": time.monotonic()}
    ready, timer = step_measure._build(spec, {})
    timer.run(0.0, options.steps)
    digest = hashlib.sha256()
    for weight in ready.stepper.model.parameters():
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    found[arm] = {"losses": [loss.hex() for loss in timer.losses], "weights": digest.hexdigest()}
    del ready, timer
json.dump(found, open(sys.argv[1], "w"))
"""


def run(checkout: Path, job: str) -> dict[str, Any]:
    """Run a job in a checkout and return its JSON output. Raises RuntimeError with the end of stderr."""
    kind, *arguments = shlex.split(job)
    with tempfile.TemporaryDirectory(prefix="deskside-") as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-c", LOSSES, str(out), *arguments]
        if kind != "losses":
            command = [sys.executable, "-m", f"benchmarks.{kind}", *arguments, "--json", str(out)]
        # The checkout comes before other folders, which may have the packages that both checkouts need.
        python_path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": python_path}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if done.returncode != 0 or not out.exists():
            raise RuntimeError((done.stderr or done.stdout).strip()[-1500:])
        content: dict[str, Any] = json.loads(out.read_text("utf-8"))
        return content


def figures(kind: str, content: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that are compared, by name."""
    numbers: dict[str, float] = {}
    for row in content["results"]:
        if kind == "decode":
            name = f"batch {row['batch']}"
            numbers |= {f"{name} step ms": row["step_ms"], f"{name} first ms": 1e3 * row["first_seconds"]}
            continue
        value, arm = row["value"], row["arm"]
        numbers |= {
            f"{arm} step ms": value["phases"]["short"]["step_ms"]["median"],
            f"{arm} optimizer ms": value["optimizer_ms"],
            f"{arm} first step s": value["cold_start"]["first step done"],
            f"{arm} peak GiB": value["peak_allocated_gib"],  # None on a CPU
        }
        for state, marks in row.get("cold_starts", {}).items():
            if isinstance(marks, dict):  # otherwise the reason of a failure
                numbers[f"{arm} first step s, {state} caches"] = marks["first step done"]
    return {name: number for name, number in numbers.items() if number is not None}


def compare(job: str, runs: list[tuple[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return the median of each number on both sides, and new / old."""
    rows = []
    for name in runs[0][1]:
        by_side = {
            side: [numbers[name] for run_side, numbers in runs if run_side == side] for side in ("old", "new")
        }
        old, new = (statistics.median(values) for values in by_side.values())
        rows.append({"job": job, "name": name, "old": old, "new": new, "ratio": new / old, "runs": by_side})
        print(f"  {name:44} old {old:10.4g}  new {new:10.4g}  new/old {new / old:.4f}")
    return rows


def equal_losses(job: str, sides: dict[str, Path]) -> list[dict[str, Any]]:
    """Return, for each arm, the first step whose loss differs (or None), and whether the weights are equal."""
    old, new = run(sides["old"], job), run(sides["new"], job)
    again = old if old == new else run(sides["old"], job)
    rows = []
    for arm, ours in old.items():
        pairs = list(zip(ours["losses"], new[arm]["losses"], strict=True))
        first = next((step for step, (a, b) in enumerate(pairs, 1) if a != b), None)
        equal, repeats = ours["weights"] == new[arm]["weights"], again[arm] == ours
        rows.append({"job": job, "arm": arm, "first_difference": first, "weights_equal": equal})
        rows[-1] |= {"old_repeats": repeats, "old_and_new": pairs}
        print(
            f"  {arm}: {len(pairs)} losses, first difference {first}, equal weights {equal}, repeats {repeats}"
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--job", action="append", help="can be repeated; default: JOBS, for an H200")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sides = {"old": options.old.resolve(), "new": options.new.resolve()}
    report: dict[str, Any] = {"compared": [], "losses": [], "failed": []}
    for job in options.job or JOBS:
        kind = job.split()[0]
        print(job, flush=True)
        try:
            if kind == "losses":
                report["losses"] += equal_losses(job, sides)
            else:
                report["compared"] += compare(job, [(s, figures(kind, run(sides[s], job))) for s in ORDER])
        except RuntimeError as error:
            report["failed"].append({"job": job, "error": str(error)})
            print(f"  failed: {error}")
        if options.json:
            options.json.write_text(json.dumps(report, indent=1), "utf-8")
    differ = any(r["first_difference"] is not None or not r["weights_equal"] for r in report["losses"])
    return int(differ or bool(report["failed"]))


if __name__ == "__main__":
    sys.exit(main())
