"""Comparison of deskside with other trainers: the same workload, on the same device, in the same call.

    python -m benchmarks.peers --folder DIR [--preset 124m] [--tokens 65536] [--sequence 2048] [--steps 50]
        [--only litgpt,prototype] [--deskside bf16,fp8-delayed] [--rows N] [--json FILE]

Run it in the root of the repository. DIR contains the repositories `litgpt` and `nanochat` (benchmarks/README.md). A
peer whose folder or package is missing is reported in one line.

The workload is 65,536 random Zipf tokens per optimizer step in rows of 2048, a vocabulary of 32,768, the shape of
`124m`, BF16 matmuls with float32 weights, gradients clipped at 1, and fused AdamW. Every peer runs in its own process.
The first steps compile; then --steps are timed on the device (CUDA events, end to end), and the median is reported.

    transformers         Qwen3ForCausalLM, BF16 autocast, torch.compile of model and loss
    transformers-liger   the same, eager, with Liger's kernels
    litgpt               litgpt.GPT, BF16 autocast, torch.compile of model and loss
    nanochat             nanochat's GPT of the same depth and width with its Muon and AdamW
    nanochat-fp8         the same with its FP8 layers
    prototype            peers_prototype.py: a compact trainer
    prototype-torchao    the same with torchao's tensorwise FP8 (head in BF16)
    deskside ...         this project, through benchmarks.step

Differences: nanochat supports only its own model and optimizer (6 heads of 128, ReLU^2, value embeddings, more
parameters, Muon, no clipping); its sliding windows need FlashAttention-3, without which it runs full attention.
transformers shifts the labels itself, which leaves one target less per row. litgpt's own loss works in chunks of 128
tokens; here it uses the plain loss, compiled, which is faster. The micro-batch of each peer is the best one on a large
GPU (16 or 32 rows of 2048), halved until it fits; deskside finds its own. Data loading is excluded for all.
"""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import step
from benchmarks.step_config import configuration
from deskside.utils import child_process
from deskside.utils.errors import UsageError

TARGET = "benchmarks.peers_train:measure"
CHILD_SECONDS = 400.0
# The best micro-batch of each peer on a large GPU, in rows. The names are repeated here because the parent process
# imports no torch; a test checks that they equal those of `peers_models.PEERS`.
ROWS = {
    "transformers": 16,
    "transformers-liger": 16,
    "litgpt": 16,
    "nanochat": 32,
    "nanochat-fp8": 32,
    "prototype": 32,
    "prototype-torchao": 32,
}
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every available arm ran, 1 if one failed, 2 for wrong usage."""
    try:
        options = arguments(sys.argv[1:] if argv is None else argv)
        chosen = [] if not options.deskside else step.arms(options.deskside)
        configuration({**vars(options), "sequence_length": options.sequence, "micro_tokens": None})
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)
        if options.json:  # after every peer, so that a killed benchmark keeps the finished ones
            options.json.write_text(json.dumps({"benchmark": "peers", "rows": rows}, indent=1), "utf-8")

    print(HEAD)
    for name in options.only:
        add(run_peer(name, options))
    for arm, precision in chosen:
        add(run_deskside(arm, precision, options))
    print("\n" + ratios(rows))
    for row in rows:
        for note in row.get("notes", []):
            print(textwrap.fill(f"{row['name']}: {note}", 80, subsequent_indent="  "))
        if row["status"] not in ("ok", "missing") and row.get("stderr"):
            print(f"{row['name']}: {row['stderr'][-1500:]}", file=sys.stderr)
    return int(any(row["status"] not in ("ok", "missing") for row in rows))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, with `only` as a tuple of names. Raises UsageError."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--folder", type=Path, help="folder with litgpt and nanochat")
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--tokens", type=int, help="per optimizer step; default: the preset's")
    parser.add_argument("--sequence", type=int, help="default: the preset's")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rows", type=int, help="rows of a micro-batch, for every peer")
    parser.add_argument("--only", default=",".join(ROWS), help="peers, separated by commas; '' for none")
    parser.add_argument("--deskside", default="bf16,fp8-delayed", help="arms of benchmarks.step")
    parser.add_argument("--micro-tokens", default="auto", help="micro-batch of deskside in tokens")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write the results to this file after every peer")
    options = parser.parse_args(argv)
    options.only = tuple(filter(None, options.only.split(",")))
    unknown = [name for name in options.only if name not in ROWS]
    if unknown:
        raise UsageError(f"--only: there is no peer {unknown[0]}; use {', '.join(ROWS)}")
    if options.steps < 1 or options.warmup < 1:
        raise UsageError("--steps and --warmup must be at least 1")
    return options


def run_peer(name: str, options: argparse.Namespace) -> Row:
    """Run one peer, halving its micro-batch until it fits in memory."""
    spec = {
        "peer": name,
        "preset": options.preset,
        "tokens": options.tokens,
        "sequence_length": options.sequence,
        "steps": options.steps,
        "warmup": options.warmup,
        "rows": options.rows or ROWS[name],
        "folder": str(options.folder) if options.folder else None,
        "device": options.device,
    }
    while True:
        outcome = child_process.run(TARGET, {"spec": {**spec, "began": time.monotonic()}}, CHILD_SECONDS)
        if outcome.status != "oom" or spec["rows"] == 1:
            break
        spec["rows"] //= 2
    if outcome.status == "ok":
        return {"name": name, "status": "ok", "error": "", **outcome.value}
    if outcome.error.startswith("UsageError: "):
        reason = outcome.error.removeprefix("UsageError: ").removeprefix(f"{name}: ")
        return {"name": name, "status": "missing", "error": reason}
    return {"name": name, "status": outcome.status, "error": outcome.error, "stderr": outcome.output}


def run_deskside(arm: str, precision: dict[str, Any], options: argparse.Namespace) -> Row:
    """Run one arm of `benchmarks.step` and return a row like that of a peer."""
    words = ["--preset", options.preset, "--device", options.device, "--micro-tokens", options.micro_tokens]
    words += ["--steps", str(options.steps), "--warmup", str(options.warmup)]
    for name in ("tokens", "sequence"):
        if getattr(options, name) is not None:
            words += [f"--{name}", str(getattr(options, name))]
    parsed, config = step.arguments(words)
    result = step.run(step.specification(parsed, precision, config))
    row: Row = {"name": f"deskside {arm}", "status": result["status"], "error": result["error"]}
    if result["status"] != "ok":
        return {**row, "stderr": result["stderr"] if step.should_show_stderr(result) else ""}
    value = result["value"]
    short = value["phases"]["short"]
    return {
        **row,
        "tokens_per_second": short["tokens_per_second"],
        "step_ms": short["step_ms"],
        "peak_allocated_gib": value["peak_allocated_gib"],
        "first_step_seconds": value["cold_start"]["first step done"],
        "micro_rows": value["micro_tokens"] // value["sequence_length"],
        "accumulation": value["accumulation"],
        "params": value["params"],
        "finite": value["finite"],
        "loss_first": value["loss_first"],
        "loss_last": value["loss_last"],
        "notes": value["notes"],
        "full": value,
    }


HEAD = f"{'trainer':<24}{'M params':>9}{'rows':>8}{'ms':>8}{'p90':>8}{'tokens/s':>10}{'GiB':>6}{'1st s':>7}"


def line(row: Row) -> str:
    """Return a line of the table, at most 80 columns wide; for a trainer that did not run, it has the reason."""
    if row["status"] != "ok":
        text = f"{row['name']:<24}{row['status']}: {row['error']}"
        return text if len(text) <= 80 else text[:77] + "..."
    batch = f"{row['accumulation']} x {row['micro_rows']}"
    memory = row["peak_allocated_gib"]
    return (
        f"{row['name'][:23]:<24}{row['params'] / 1e6:>9.1f}{batch:>8}{row['step_ms']['median']:>8.1f}"
        f"{row['step_ms']['p90']:>8.1f}{row['tokens_per_second']:>10,.0f}"
        f"{'-' if memory is None else f'{memory:.1f}':>6}{row['first_step_seconds']:>7.1f}"
        f"{'' if row['finite'] else ' NaN'}"
    )


def ratios(rows: Sequence[Row]) -> str:
    """Return the tokens/s of every deskside arm relative to every peer."""
    deskside_rows = [r for r in rows if r["status"] == "ok" and r["name"].startswith("deskside ")]
    peers = [r for r in rows if r["status"] == "ok" and not r["name"].startswith("deskside ")]
    if not deskside_rows or not peers:
        return "no ratios: they need a deskside arm and a peer that both ran"
    lines = ["tokens/s over the peer's" + "".join(f"{r['name'].split()[1][:17]:>18}" for r in deskside_rows)]
    for peer in peers:
        shares = (f"{r['tokens_per_second'] / peer['tokens_per_second']:>17.2f}x" for r in deskside_rows)
        lines.append(f"{peer['name']:<24}" + "".join(shares))
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
