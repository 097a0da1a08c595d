"""Throughput of the data loader without a model, in tokens per second.

    python benchmarks/loader.py data/english [--sequence 2048] [--rows 128] [--micro 32] [--seconds 5] [--threads 2]

Prints a table, then one line of JSON. The requirement is 5 million tokens/s in one process on two cores at T = 2048.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from rich.console import Console
from rich.table import Table

from deskside.data.reading.loader import Loader, LoaderOptions
from deskside.data.reading.rows import PackedDataset

REQUIRED = 5e6  # tokens/s


def measure(loader: Loader, seconds: float) -> tuple[int, float]:
    """Load batches for some seconds and return (valid tokens, seconds). Each batch is summed, so that it is read."""
    next(loader)
    tokens, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for batch in next(loader):
            batch.tokens_BT.sum()
            batch.targets_BT.sum()
            tokens += batch.num_valid
    if loader.device.type == "cuda":
        torch.cuda.synchronize(loader.device)
    return tokens, time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--sequence", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rows", type=int, default=128, help="rows of a step")
    parser.add_argument("--micro", type=int, default=32, help="rows of a micro-batch")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    table = Table(title=f"{options.data}: {len(cores)} cores, {options.rows} rows per step, {options.device}")
    for head in ("sequence", "rows", "filled", "opened in s", "million tokens/s"):
        table.add_column(head, justify="right")
    results = []
    for sequence in options.sequence:
        begin = time.perf_counter()
        dataset = PackedDataset(options.data, "train", sequence)
        opened = time.perf_counter() - begin
        with Loader(
            dataset, LoaderOptions(0, 0, options.rows, options.micro, device=torch.device(options.device))
        ) as loader:
            tokens, seconds = measure(loader, options.seconds)
        speed = tokens / seconds
        results.append(
            {
                "sequence_length": sequence,
                "tokens_per_second": round(speed),
                "utilisation": dataset.utilisation,
                "open_seconds": round(opened, 3),
            }
        )
        filled = f"{dataset.utilisation:.2%}"
        table.add_row(str(sequence), f"{dataset.num_rows:,}", filled, f"{opened:.2f}", f"{speed / 1e6:.1f}")
    Console().print(table)
    ok = all(r["tokens_per_second"] >= REQUIRED for r in results)
    print(
        json.dumps(
            {
                "benchmark": "loader",
                "cores": len(cores),
                "device": options.device,
                "ok": ok,
                "results": results,
            }
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
