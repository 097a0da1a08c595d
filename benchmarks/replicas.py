"""Speed of several GPUs that train replicas, relative to as many times one GPU.

    python -m benchmarks.replicas --data DIR [--preset 124m] [--gpus 2] [--tokens 65536] [--steps 60] [--warmup 20]
        [--rounds 2] [--optimizers adamw,muon] [--gradient-dtypes float32] [--folder DIR] [--json FILE]
        [options of deskside train]

For each optimizer and format in which gradients are sent, runs of one and of several GPUs take turns (A B, then B A,
...). Every GPU has `--tokens` tokens per step in all of them. A run's speed is that of its median step after
`--warmup`.

NCCL reads its environment: with NCCL_P2P_DISABLE=1, what GPUs send each other passes through host memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deskside.probe.point import quantile


def run(options: argparse.Namespace, arm: dict[str, str], gpus: int, folder: Path) -> list[float]:
    """Train, and return the tokens per second of each step after the first `options.warmup`.

    Raises CalledProcessError if the run fails.
    """
    name = f"{arm['optim.name']}-{arm['parallel.gradient_dtype']}-{gpus}-{len(list(folder.iterdir()))}"
    keys = {
        **arm,
        "data.path": options.data,
        "batch.tokens": gpus * options.tokens,
        "steps": options.steps,
        "gpus": gpus,
        "runs": folder,
        "name": name,
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "deskside", "train", options.preset, *words, *options.others]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row["tokens_per_second"] for row in rows if row["step"] > options.warmup]


def measure(options: argparse.Namespace, arm: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the speeds of all steps of an arm by number of GPUs, and the efficiency of the larger number."""
    speeds: dict[int, list[float]] = {1: [], options.gpus: []}
    for number in range(options.rounds):
        for gpus in (1, options.gpus) if number % 2 == 0 else (options.gpus, 1):
            speeds[gpus] += run(options, arm, gpus, folder)
    efficiency = statistics.median(speeds[options.gpus]) / (options.gpus * statistics.median(speeds[1]))
    return {**arm, "tokens_per_second": speeds, "efficiency": efficiency}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", required=True, help="prepared dataset directory")
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per step on each GPU")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=20, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument("--gradient-dtypes", default="float32")
    parser.add_argument(
        "--folder", type=Path, help="the folder to write in; default: that for temporary files"
    )
    parser.add_argument("--json", type=Path)
    options, others = parser.parse_known_args(argv)
    options.others = others
    results = []
    for optimizer in options.optimizers.split(","):
        for dtype in options.gradient_dtypes.split(","):
            arm = {"optim.name": optimizer, "parallel.gradient_dtype": dtype}
            with tempfile.TemporaryDirectory(prefix="deskside-replicas-", dir=options.folder) as folder:
                results.append(measure(options, arm, Path(folder)))
            print(f"{optimizer}, gradients sent in {dtype}:")
            for gpus, speeds in results[-1]["tokens_per_second"].items():
                low, high = quantile(speeds, 0.1), quantile(speeds, 0.9)
                print(f"  {gpus} GPUs: {statistics.median(speeds):,.0f} tokens/s ({low:,.0f} to {high:,.0f})")
            print(f"  {results[-1]['efficiency']:.1%} of {options.gpus} times one", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
