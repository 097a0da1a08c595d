"""Milliseconds and TFLOP/s of every attention backend, forward and backward, over shapes, windows and documents.

    python benchmarks/attention.py [--shapes 12x3x64 6x2x128] [--batch 32] [--tokens 2048] [--windows none 512 1024]
        [--documents no yes] [--backends cudnn flash fa4 ...] [--runs 20] [--json FILE]

A shape is query heads x key-value heads x head dimension. The kernels are called in the same way as by blocks with
hand-written gradients (`attention_forward`, `attention_backward`), with q, k and v as views of one projection. TFLOP/s
count only visible pairs of query and key: 4 C FLOPs per pair and head in the forward pass, 10 C in the backward pass.
Device times are between events, after a kernel that keeps the device busy while the host queues the work. `host` is the
time in which the host queued the forward and backward pass. `prepare` is the work done once per forward pass of the
model and window. Prints a table per problem, then one line of JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from deskside.kernels.attention import (
    BACKENDS,
    AttentionContext,
    Requirements,
    attention_backward,
    attention_forward,
    prepare,
)
from deskside.utils.errors import first_line

MEAN_DOCUMENT = 600  # mean tokens of a document (exponential distribution), close to an English web corpus
FORWARD, BACKWARD = 4, 10  # FLOPs per visible pair, head and channel: two matmuls and five
WARM_UP_RUNS = 3
DELAY_CYCLES = 4_000_000  # device clock cycles, at least 2 ms: longer than the host takes to queue one run


@dataclass(frozen=True)
class Timing:
    """Medians in milliseconds. `prepare` is measured by the host's clock and includes the device's work."""

    forward: float
    backward: float
    host: float
    prepare: float


def documents(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Return int32 boundaries of random documents in full rows, padded with empty documents as in the loader."""
    generator = torch.Generator().manual_seed(0)
    ends = [0]
    for row in range(batch):
        position = 0
        while position < tokens:
            length = 1 + int(torch.empty(1).exponential_(1 / MEAN_DOCUMENT, generator=generator))
            position = min(tokens, position + length)
            ends.append(row * tokens + position)
    return torch.tensor(ends + ends[-1:] * (len(ends) // 4), dtype=torch.int32, device=device)


def visible_pairs(need: Requirements, cu_seqlens: Tensor | None) -> int:
    """Return the number of query-key pairs per head, over all rows, that the causal mask and the window leave."""
    lengths = [need.tokens] * need.batch if cu_seqlens is None else cu_seqlens.diff().tolist()
    windows = [(n, n if need.window is None else min(need.window, n)) for n in lengths]
    return sum(w * (w + 1) // 2 + (n - w) * w for n, w in windows)


def measure(need: Requirements, backend: str, cu_seqlens: Tensor | None, runs: int) -> Timing:
    """Time one backend on one problem.

    Raises UsageError for a feature that the backend does not declare; errors of the backend itself propagate.
    """
    inputs, grad = _inputs(need)
    context = AttentionContext(window=need.window, cu_seqlens=cu_seqlens, backend=backend)
    prepared = prepare(context, need)
    rows = [_once(inputs, grad, prepared, need.device) for _ in range(WARM_UP_RUNS + runs)][WARM_UP_RUNS:]
    forward, backward, host = (statistics.median(column) for column in zip(*rows, strict=True))
    prepare_seconds = [
        _seconds(lambda: prepare(context, need), need.device) for _ in range(WARM_UP_RUNS + 3)
    ][WARM_UP_RUNS:]
    return Timing(forward, backward, host, 1e3 * statistics.median(prepare_seconds))


def _inputs(need: Requirements) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v as views of one projection, and the gradient of the output."""
    generator = torch.Generator(need.device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        shape = (need.batch, need.tokens, heads * need.head_dim)
        return torch.randn(shape, generator=generator, device=need.device, dtype=need.dtype)

    sizes = [heads * need.head_dim for heads in (need.heads, need.kv_heads, need.kv_heads)]
    parts = normal(need.heads + 2 * need.kv_heads).split(sizes, dim=-1)
    views = [part.unflatten(-1, (-1, need.head_dim)) for part in parts]
    return views, normal(need.heads).unflatten(-1, (-1, need.head_dim))


def _once(
    inputs: list[Tensor], grad: Tensor, context: AttentionContext, device: torch.device
) -> tuple[float, float, float]:
    """Return the milliseconds of the forward pass, of the backward pass, and of the host for both."""
    q, k, v = inputs
    with torch.no_grad():
        if device.type == "cpu":
            began = time.perf_counter()
            _, saved = attention_forward(q, k, v, context)
            middle = time.perf_counter()
            attention_backward(saved, grad)
            ended = time.perf_counter()
            return 1e3 * (middle - began), 1e3 * (ended - middle), 1e3 * (ended - began)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY_CYCLES)
        began = time.perf_counter()
        events[0].record()
        _, saved = attention_forward(q, k, v, context)
        events[1].record()
        attention_backward(saved, grad)
        events[2].record()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2]), 1e3 * host


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def results(need: Requirements, backends: list[str], runs: int) -> Iterator[dict[str, Any]]:
    """Yield one row per backend: its times and rates, or the reason why there are none."""
    cu_seqlens = documents(need.batch, need.tokens, need.device) if need.documents else None
    flops = visible_pairs(need, cu_seqlens) * need.heads * need.head_dim
    for name in backends:
        row: dict[str, Any] = {"backend": name}
        reason = BACKENDS[name].unsupported_reason(need)
        if reason is None:
            try:
                timing = measure(need, name, cu_seqlens, runs)
            except (RuntimeError, ValueError, TypeError) as error:
                reason = first_line(error)
            else:
                both = timing.forward + timing.backward
                row |= {f"{part}_ms": round(ms, 4) for part, ms in asdict(timing).items()}
                row |= {
                    "both_ms": round(both, 4),
                    "forward_tflops": round(FORWARD * flops / timing.forward / 1e9, 1),
                    "backward_tflops": round(BACKWARD * flops / timing.backward / 1e9, 1),
                    "both_tflops": round((FORWARD + BACKWARD) * flops / both / 1e9, 1),
                }
        yield row if reason is None else {**row, "reason": reason}


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows, fastest first."""
    table = Table(title=title, title_justify="left")
    heads = ["forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "both ms", "TFLOP/s", "host ms", "prepare ms"]
    keys = ["forward_ms", "forward_tflops", "backward_ms", "backward_tflops", "both_ms", "both_tflops"]
    keys += ["host_ms", "prepare_ms"]
    table.add_column("backend")
    for head in heads:
        table.add_column(head, justify="right")
    for row in sorted(rows, key=lambda row: row.get("both_ms", float("inf"))):
        if "reason" not in row:
            digits = [1 if key.endswith("tflops") else 3 for key in keys]
            table.add_row(row["backend"], *(f"{row[k]:.{n}f}" for k, n in zip(keys, digits, strict=True)))
    console.print(table)
    for row in rows:
        if "reason" in row:
            console.print(f"  {row['backend']}: {row['reason']}", highlight=False, markup=False)


def problems(options: argparse.Namespace) -> Iterator[Requirements]:
    """Yield every requested combination of shape, window and documents."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for shape in options.shapes:
        heads, kv_heads, head_dim = (int(number) for number in shape.split("x"))
        base = Requirements(options.batch, options.tokens, heads, kv_heads, head_dim, dtype, device)
        for window in options.windows:
            for masked in options.documents:
                size = None if window == "none" else int(window)
                yield replace(base, window=size, documents=masked == "yes")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    fast = sorted(name for name in BACKENDS if name not in {"reference", "chunked"})
    parser.add_argument("--shapes", nargs="+", default=["12x3x64", "6x2x128"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--windows", nargs="+", default=["none", "512", "1024"])
    parser.add_argument("--documents", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    parser.add_argument("--backends", nargs="+", choices=sorted(BACKENDS), default=fast)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(stderr=True, width=140)
    results_by_problem = []
    for need in problems(options):
        torch.compiler.reset()  # FlexAttention is compiled for each problem, and torch stops recompiling at a limit
        rows = list(results(need, options.backends, options.runs))
        shape = {"heads": need.heads, "kv_heads": need.kv_heads, "head_dim": need.head_dim}
        problem: dict[str, Any] = {**shape, "batch": need.batch, "tokens": need.tokens}
        problem |= {"window": need.window, "documents": need.documents}
        show(console, ", ".join(f"{key} {value}" for key, value in problem.items()), rows)
        results_by_problem.append({**problem, "backends": rows})
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    text = json.dumps(
        {"benchmark": "attention", "device": name, "torch": torch.__version__, "problems": results_by_problem}
    )
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
