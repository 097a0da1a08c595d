"""How well the planner predicts memory and speed: measure configurations, then compare.

    python -m benchmarks.planner_accuracy measure --out points.jsonl            on a machine with GPUs
    python -m benchmarks.planner_accuracy fit points.jsonl                      the constants of budget/speed.py
    python -m benchmarks.planner_accuracy compare points.jsonl [--probes DIR]   docs/planner-accuracy.md

The configurations are drawn by a fixed seed from a grid of shapes, sequence lengths, micro-batches, optimisers and
rungs of activation checkpointing, so that nobody chose the ones that come out well. A measured configuration that
stands in the probe store which calibrates the planner is left out of the comparison.
"""

import argparse
import json
import queue
import random
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from deskside.budget.operators import step_operators
from deskside.budget.work import Work
from deskside.probe import child
from deskside.probe.point import configuration

SEED = 20261120
DRAWN = 64  # even ones gave the constants in budget/speed.py, odd ones are compared
MATMUL_FLOPS, BANDWIDTH = (
    790e12,
    4.8e12,
)  # of the H200 that the constants were fitted on, from the data sheet table
PULL = 0.03
LIMIT_SECONDS = 200.0
# (layers, hidden, head_dim, ffn): 50M to 3B parameters.
SHAPES = (
    (8, 512, 64, 1408), (10, 640, 64, 1728), (12, 768, 128, 2048), (12, 896, 64, 2432), (16, 1024, 128, 2816),
    (24, 1024, 64, 2816), (20, 1280, 128, 3456), (36, 1280, 64, 3456), (24, 1536, 128, 4096), (24, 2048, 128, 5632),
    (48, 1536, 64, 4096), (32, 2560, 128, 6912), (26, 3072, 128, 8192),
)  # fmt: skip
GROUPS = (1, 2, 4)  # query heads per key-value head
LENGTHS = (512, 1024, 2048, 4096, 8192)
VOCABULARIES = (32768, 32768, 50304)
MICRO = (8192, 16384, 32768, 65536)
RUNGS = ("none", "none", "none", "attention", "mlp", "block")
ACTIVATION_LIMIT = 9e10  # bytes, roughly, above which a configuration is not drawn


def configurations(count: int) -> list[dict[str, Any]]:
    """`count` different point specs, every shape in turn."""
    draw = random.Random(SEED)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        layers, hidden, head_dim, ffn = SHAPES[len(found) % len(SHAPES)]
        heads = hidden // head_dim
        group = draw.choice([g for g in GROUPS if heads % g == 0])
        length, rung, micro = draw.choice(LENGTHS), draw.choice(RUNGS), draw.choice(MICRO)
        large = layers * hidden > 40_000
        # Without checkpointing a block keeps about 40 bytes per token and channel.
        if rung == "none" and 40 * layers * hidden * micro > ACTIVATION_LIMIT:
            continue
        spec = {
            "model": {
                "vocab_size": draw.choice(VOCABULARIES),
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": heads // group,
                "head_dim": head_dim,
                "intermediate_size": ffn,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": draw.random() < 0.25,
            },
            "sequence_length": length,
            "tokens": max(micro, 32768 if large else 65536) * draw.choice((1, 1, 2)),
            "micro_tokens": micro,
            "optimizer": draw.choice(("muon", "adamw")),
            "activation_checkpointing": rung,
        }
        if spec not in found:
            found.append(spec)
    return found


def measure(specs: list[dict[str, Any]], out: Path, limit: float) -> None:
    """Run every point in a process of its own, on all GPUs at once; append each result as it comes."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    gpus = len(listed.strip().splitlines())
    work: queue.Queue[dict[str, Any]] = queue.Queue()
    for spec in specs:
        work.put(spec)
    lock, began = threading.Lock(), time.monotonic()

    def worker(gpu: int) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": str(gpu), "TORCHINDUCTOR_COMPILE_THREADS": "8"}
        while time.monotonic() - began < limit:
            try:
                spec = work.get_nowait()
            except queue.Empty:
                return
            if "card" in spec:
                target, arguments = "deskside.probe.card:measure_card", {}
            else:
                target, arguments = "deskside.probe.point:measure_point", {"spec": spec}
            left = limit - (time.monotonic() - began)
            outcome = child.run(target, arguments, min(LIMIT_SECONDS, max(10.0, left)), environment)
            row = {
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
                    f"{time.monotonic() - began:5.0f} s  gpu {gpu}  {outcome.status:7}  {outcome.seconds:5.1f} s  "
                    f"{_label(spec)}  {f'{speed:,.0f} tok/s' if speed else outcome.error[:150]}",
                    flush=True,
                )
                if outcome.status == "failed":
                    print(outcome.stderr[-800:], flush=True)

    threads = [threading.Thread(target=worker, args=(gpu,)) for gpu in range(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _label(spec: dict[str, Any]) -> str:
    if "card" in spec:
        return "card"
    m = spec["model"]
    return (
        f"{m['num_hidden_layers']}x{m['hidden_size']} {m['num_attention_heads']}/{m['num_key_value_heads']}x"
        f"{m['head_dim']} V{m['vocab_size']} T{spec['sequence_length']} micro {spec['micro_tokens']} of "
        f"{spec['tokens']} {spec['optimizer']} {spec['activation_checkpointing']}"
    )


def fit(points: Path) -> None:
    """Fit `budget.speed.Efficiency` to the even half of measured points, and say how well it predicts the odd half.

    Least squares of relative errors, repeated with weights 1 / sqrt(error) so that single misses count less, and a weak
    pull towards the starting values where the data cannot tell two terms apart.
    """
    rows = _measured(points)
    names = list(START)
    table = np.array([[_features(row)[n] / _seconds(row) for n in names] for row in rows])
    even = np.array([row["index"] % 2 == 0 for row in rows])
    for label, chosen in (("even half (ships)", even), ("odd half", ~even), ("all", even | ~even)):
        times = _solve(table[chosen], np.array(list(START.values())))
        error = np.abs(table[~chosen] @ times - 1) if (~chosen).any() else np.abs(table @ times - 1)
        print(
            f"{label}: left-out error median {np.median(error):.1%}, nine in ten within {np.quantile(error, 0.9):.1%}"
        )
        for name, time_ in zip(names, times, strict=True):
            print(f"  {name:18} {time_ * 1e-6 if name == 'layer_seconds' else 1 / time_:.4g}")


# What a term costs in units of its floor (of `layer_seconds`: microseconds) before the data speaks.
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
    """The floor of every term in seconds: FLOPs over the card's matmul rate, bytes over its data sheet's bandwidth."""
    found = dict.fromkeys(START, 0.0)
    for operator in step_operators(configuration(row["spec"]).model, work_of(row["spec"])):
        group = operator.group
        if group == "layers":
            found["layer_seconds"] += operator.amount * 1e-6
        elif group in ("matmul", "head", "optimizer_matmul"):
            found[group] += operator.amount / MATMUL_FLOPS
        elif group == "attention":
            found[f"attention_{operator.width}"] += operator.amount / MATMUL_FLOPS
        else:
            found["traffic" if group == "loss_traffic" else group] += operator.amount / BANDWIDTH
    return found


def work_of(spec: dict[str, Any]) -> Work:
    """The step of a measured configuration."""
    return Work(
        spec["sequence_length"],
        spec["tokens"],
        spec["micro_tokens"],
        optimizer=spec["optimizer"],
        activation_checkpointing=spec["activation_checkpointing"],
    )


def _measured(points: Path) -> list[dict[str, Any]]:
    drawn = configurations(DRAWN)
    rows = [json.loads(line) for line in points.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["status"] == "ok" and "card" not in row["spec"]]
    for row in rows:
        row["index"] = drawn.index(row["spec"])
    return sorted(rows, key=lambda row: int(row["index"]))


def _seconds(row: dict[str, Any]) -> float:
    return float(row["result"]["step_seconds"]["median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--count", type=int, default=DRAWN)
    measuring.add_argument("--minutes", type=float, default=9.0)
    fitting = commands.add_parser("fit")
    fitting.add_argument("points", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "fit":
        fit(arguments.points)
    if arguments.command == "measure":
        measure([{"card": True}, *configurations(arguments.count)], arguments.out, 60 * arguments.minutes)


if __name__ == "__main__":
    main()
