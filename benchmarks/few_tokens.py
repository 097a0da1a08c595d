"""Time of the linear layers of a decoding step on this GPU: kernels/few_tokens.py against torch's products.

    python -m benchmarks.few_tokens [--models 124m,benchmarks/qwen3-0.6b.toml,1.3b] [--tokens 1,2,4,8,16,32,64]
        [--tiles] [--json FILE]

For the four products of a block (qkv and gate_up with the norm before them, o, and down), in each arm: a CUDA graph of
LAYERS layers with weights of their own, so that few of them are in the L2 cache.

    us      microseconds per product, median over the runs
    GB/s    bytes of its weights per second
    torch   add_norm, torch's product, and the activation, each a kernel

--tiles tries every tile of ONE or MORE too, and names the fastest (outputs, channels, warps, stages).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.step_config import configuration
from deskside.kernels import few_tokens, few_tokens_triton, fused
from deskside.kernels.few_tokens import AddNorm
from deskside.kernels.few_tokens_triton import Tile

LAYERS, RUNS, REPLAYS = 24, 7, 8
ONE = [
    Tile(outputs, channels, warps)
    for outputs in (2, 4, 8)
    for channels in (1024, 2048)
    for warps in (2, 4, 8)
]
MORE = [
    Tile(outputs, channels, 4, stages)
    for outputs in (16, 32)
    for channels, stages in ((64, 6), (64, 8), (128, 3), (128, 4), (128, 6), (256, 3))
]
SHARED_MEMORY = 99 * 1024  # of a consumer card: larger tiles are not tried


def products(preset: str) -> dict[str, tuple[int, int, bool, bool]]:
    """Return inputs, outputs, norm before it, gate and up, of each product of a block."""
    model = configuration({"preset": preset}).model
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    D, hidden = model.hidden_size, model.intermediate_size
    return {
        "qkv": (D, q + 2 * kv, True, False),
        "o": (q, D, False, False),
        "gate_up": (D, hidden, True, True),
        "down": (hidden, D, False, False),
    }


def microseconds(step: Callable[[int], object]) -> float:
    """Return the time of step(layer) within a CUDA graph of all layers, the median over the runs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(2):
            step(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            step(layer)
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPLAYS / LAYERS)
    return statistics.median(times[1:])


def arms(
    tokens: int, inputs: int, outputs: int, norm: bool, gated: bool
) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """Return the product of a layer by torch's kernels and by ours, as functions of the layer."""
    rows = outputs * (2 if gated else 1)
    weights = torch.randn(LAYERS, rows, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
    x, delta = torch.randn(2, tokens, inputs, device="cuda", dtype=torch.bfloat16)
    norm_weight = torch.ones(inputs, device="cuda")
    activation = "silu" if gated else None

    def by_torch(layer: int) -> object:
        normed = fused.add_norm(x, delta, norm_weight, 1e-6)[1] if norm else x
        assert isinstance(normed, Tensor)
        out = F.linear(normed, weights[layer])
        return fused.gated(out, "silu", True) if gated else out

    def ours(layer: int) -> object:
        if norm:
            add_norm = AddNorm(delta, norm_weight, 1e-6)
            return few_tokens.add_norm_linear(x, add_norm, weights[layer], None, activation, gated)
        return few_tokens.linear(x, weights[layer], None, activation, gated)

    return by_torch, ours


def times_of_tiles(ours: Callable[[int], object], tokens: int, gated: bool) -> dict[str, float]:
    """Return the microseconds with each tile that fits, fastest first."""
    rows = few_tokens_triton.padded(tokens)
    found = {}
    for tile in ONE if tokens == 1 else MORE:
        shared = 2 * tile.channels * tile.stages * (rows + tile.outputs * (2 if gated else 1))
        if tokens > 1 and shared > SHARED_MEMORY:
            continue
        with mock.patch.dict(few_tokens_triton.TILES, {(rows, gated): tile}):
            try:
                found[",".join(map(str, tile))] = microseconds(ours)
            except OutOfResources as error:
                print(f"  {tile}: {error}", flush=True)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="124m,benchmarks/qwen3-0.6b.toml,1.3b")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    for model in args.models.split(","):
        for name, (inputs, outputs, norm, gated) in products(model).items():
            for tokens in map(int, args.tokens.split(",")):
                by_torch, ours = arms(tokens, inputs, outputs, norm, gated)
                row: dict[str, object] = {"model": model, "product": name, "tokens": tokens}
                weight_bytes = 2 * inputs * outputs * (2 if gated else 1)
                row["torch_us"] = microseconds(by_torch)
                row["us"] = microseconds(ours)
                if args.tiles:
                    row["tiles"] = tiles = times_of_tiles(ours, tokens, gated)
                    row["best"], row["best_us"] = next(iter(tiles.items()))
                rows.append(row)
                times = {key: value for key, value in row.items() if isinstance(value, float)}
                shown = "  ".join(
                    f"{key} {us:6.2f} ({weight_bytes / us / 1e3:5.0f} GB/s)" for key, us in times.items()
                )
                print(f"{model:>12} {name:>8} {tokens:3}  {shown}  {row.get('best', '')}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
