"""Measure steps of small passes, whose time is limited by the host.

    python -m benchmarks.planner_host --out FILE [--device cpu] [--seconds 100]

Rows have the format of `benchmarks/step.py --json`. All run one after another in this process, because importing torch
would take longer than the measurement. Nothing else may use the machine in the meantime. Rows that do not start within
--seconds are skipped with a message.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_measure import measure

STEPS, WARMUP = 12, 4
# (preset, recipe, sequence length, tokens per pass, passes, optimizer), the most useful first.
SPECS = (
    ("124m", "bf16", 512, 2048, 8, "adamw"),
    ("124m", "fp8-rowwise", 512, 2048, 8, "adamw"),
    ("124m", "fp8-delayed", 512, 2048, 8, "adamw"),
    ("124m", "fp8-tensorwise", 512, 2048, 8, "adamw"),
    ("124m", "bf16", 512, 2048, 1, "muon"),
    ("340m", "bf16", 512, 2048, 4, "adamw"),
    ("124m", "fp8-delayed", 2048, 16384, 4, "adamw"),
    ("124m", "fp8-tensorwise", 2048, 65536, 1, "adamw"),
    ("124m", "fp8-rowwise", 2048, 32768, 2, "adamw"),
    ("124m", "bf16", 2048, 32768, 2, "muon"),
    ("124m", "bf16", 2048, 8192, 8, "adamw"),
    ("340m", "fp8-delayed", 512, 2048, 4, "adamw"),
    ("124m", "nvfp4", 512, 2048, 4, "adamw"),
    ("124m", "bf16", 512, 2048, 1, "adamw"),
    ("340m", "bf16", 2048, 16384, 2, "muon"),
)  # fmt: skip


def specification(row: tuple[str, str, int, int, int, str], device: str) -> dict[str, Any]:
    """Return the argument of `step_measure.measure`."""
    preset, recipe, sequence, micro, passes, optimizer = row
    return {
        "preset": preset,
        "precision": recipe,
        "tokens": micro * passes,
        "micro_tokens": micro,
        "sequence_length": sequence,
        "attention": "auto",
        "compile": "auto",
        "optimizer": optimizer,
        "device": device,
        "steps": STEPS,
        "warmup": WARMUP,
        "config": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="start no measurement after this many seconds"
    )
    options = parser.parse_args()
    began, results = time.monotonic(), []
    for row in SPECS:
        if time.monotonic() - began > options.seconds:
            print(f"left out, no time: {row}", flush=True)
            continue
        spec = specification(row, options.device) | {"began": time.monotonic()}
        try:
            result: dict[str, Any] = {"arm": row[1], "status": "ok", "error": "", "value": measure(spec)}
        except (RuntimeError, ValueError, AssertionError) as error:
            # A recipe that does not run here must not stop the others; the row records the error.
            result = {"arm": row[1], "status": "failed", "error": str(error), "value": None, "spec": spec}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        results.append(result)
        options.out.write_text(json.dumps({"benchmark": "step", "results": results}, indent=1), "utf-8")
        short = result["value"]["phases"]["short"] if result["value"] else {}
        told = short.get("step_ms", {}).get("median", result["error"])
        print(f"{time.monotonic() - began:5.0f} s  {row}: {told}", flush=True)


if __name__ == "__main__":
    main()
