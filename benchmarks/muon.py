"""Time of one Muon step on this GPU for all block matrices of a model, by Newton-Schulz method, with its floor.

    python -m benchmarks.muon [--models 124m,124m:8x1024,1.3b] [--json FILE]

models: presets; `124m:8x1024` has 8 experts of intermediate size 1024 in place of the MLP. Weights and gradients are
random. With torch's products and with symmetric ones, which only matrices of enough columns get:

    ms        device time of `Muon.step`, median; the host has launched it before it begins
    host ms   time that the host takes to launch it
    kernels   number of kernels and copies of one step
    deviation the largest difference of a singular value from the same iteration in float64, for random matrices of
              every shape up to 1024 columns, and for some of which the singular values fall from 1 to 1e-6

The floor is the FLOPs of symmetric products at the matmul rate of this GPU, and 30 bytes per weight at
the bandwidth of a large copy: 14 before the iteration, 4 for the division by the norm, 2 for the mean squares of the
rows, 10 after.

Then symmetric products run with other steps (depth, stages, warps) than those of the kernel, of which some need more
shared memory than consumer cards have.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from deskside.config import merge, presets
from deskside.config.optim import MuonConfig
from deskside.kernels import newton_schulz_triton
from deskside.kernels.fused.choose_tiles import bandwidth
from deskside.kernels.matmul_peak import measure_matmul_peak
from deskside.kernels.newton_schulz import (
    MIN_SYMMETRIC,
    SAFETY,
    Coefficients,
    coefficients,
    iteration_flops,
    orthogonalize,
)
from deskside.model.transformer import Transformer
from deskside.optim import muon
from deskside.optim.groups import ParameterInfo, classify_parameters
from deskside.optim.muon import Muon

DEVICE, RUNS = "cuda", 10
SLEEP = 40_000_000  # clock cycles: longer than the host takes to launch a step
BYTES = 30
STEPS = ((64, 3, 4), (32, 4, 4), (32, 4, 8), (64, 4, 8), (128, 2, 8))
Shape = tuple[int, int, int]


def infos(model: str) -> list[ParameterInfo]:
    """Return the matrices of a model's blocks with random weights and gradients on the GPU."""
    preset, _, experts = model.partition(":")
    shape: dict[str, Any] = {}
    if experts:
        count, width = (int(number) for number in experts.split("x"))
        shape = {"num_experts": count, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    config = merge.build([*presets.layers(preset), {"model": shape}])
    with torch.device("meta"):
        parameters = classify_parameters(Transformer(config.model))
    found = []
    for info in parameters:
        if info.role == "matrix":
            weight = nn.Parameter(0.02 * torch.randn(info.parameter.shape, device=DEVICE))
            weight.grad = 1e-4 * torch.randn(info.parameter.shape, device=DEVICE)
            found.append(dataclasses.replace(info, parameter=weight))
    return found


def stacks(optimizer: Muon) -> list[Shape]:
    """Return (batch, rows, columns) of the stacks."""
    return [(len(s.slices) * s.slices[0].experts, *s.slices[0].tall_shape) for s in optimizer._stacks]


def exact(x: Tensor, polynomials: Coefficients) -> Tensor:
    """Return the result of the iteration in float64."""
    x = x.double()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) * SAFETY)
    for a, b, c in polynomials:
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x


def deviation(shape: tuple[int, int], symmetric: bool) -> float:
    """Return the largest difference of a singular value from that in float64."""
    polynomials = coefficients("polar_express", 5)
    torch.manual_seed(0)
    x = torch.randn(2, *shape, device=DEVICE)
    u, _, v = torch.linalg.svd(x[1], full_matrices=False)
    x[1] = u @ torch.diag(torch.logspace(-6, 0, shape[1], device=DEVICE)) @ v
    x = x.bfloat16()
    result = orthogonalize(x.clone(), polynomials, symmetric and shape[1] >= MIN_SYMMETRIC)
    values = torch.linalg.svdvals(exact(x, polynomials))
    return float((torch.linalg.svdvals(result.double()) - values).abs().max())


def measure(optimizer: Muon, symmetric: bool) -> dict[str, Any]:
    """Return the times and the number of kernels of a step."""
    skip = torch.zeros((), device=DEVICE)
    optimizer.clip_coefficient = torch.full((), 0.5, device=DEVICE)
    times, host = [], []
    columns = MIN_SYMMETRIC if symmetric else sys.maxsize
    with torch.no_grad(), mock.patch.object(muon, "MIN_SYMMETRIC", columns):
        for number in range(RUNS + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP)
            began = time.perf_counter()
            begin.record()
            optimizer.step(skip)
            end.record()
            launched = time.perf_counter() - began
            end.synchronize()
            if number >= 3:
                times.append(begin.elapsed_time(end))
                host.append(1e3 * launched)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            optimizer.step(skip)
            torch.cuda.synchronize()
    kernels = [(event.name, event.time_range.elapsed_us()) for event in trace.events()]
    by_name: dict[str, float] = {}
    for name, microseconds in kernels:
        by_name[name[:60]] = by_name.get(name[:60], 0.0) + microseconds / 1e3
    longest = sorted(by_name.items(), key=lambda entry: -entry[1])[:8]
    return {
        "ms": statistics.median(times),
        "host_ms": statistics.median(host),
        "kernels": len(kernels),
        "longest": dict(longest),
    }


def floor_ms(shapes: list[Shape], flops_per_s: float, bytes_per_s: float) -> float:
    """Return the floor in milliseconds."""
    flops = sum(5 * batch * iteration_flops(rows, columns, True) for batch, rows, columns in shapes)
    weights = sum(batch * rows * columns for batch, rows, columns in shapes)
    return 1e3 * (flops / flops_per_s + BYTES * weights / bytes_per_s)


def main() -> None:
    """Measure the models one after the other, and print a table for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="124m,124m:8x1024,1.3b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates = measure_matmul_peak(DEVICE, torch.float16), bandwidth(torch.device(DEVICE))
    print(f"{torch.cuda.get_device_name()}: {rates[0] / 1e12:.0f} TFLOP/s, copy {rates[1] / 1e12:.2f} TB/s")
    results: dict[str, Any] = {}
    for model in options.models.split(","):
        optimizer = Muon(infos(model), MuonConfig())
        optimizer.lr, optimizer.weight_decay = 0.01, 0.1
        shapes = stacks(optimizer)
        floor = floor_ms(shapes, *rates)
        print(f"\n{model}: stacks {shapes}; floor {floor:.2f} ms")
        results[model] = {"shapes": shapes, "floor_ms": floor, "methods": {}}
        for method in ("torch", "symmetric"):
            found = measure(optimizer, method == "symmetric")
            sides = {(rows, columns) for _, rows, columns in shapes if columns <= 1024}
            found["deviation"] = max((deviation(side, method == "symmetric") for side in sides), default=None)
            results[model]["methods"][method] = found
            away = "-" if found["deviation"] is None else f"{found['deviation']:.4f}"
            print(
                f"  {method:10} {found['ms']:8.2f} ms  host {found['host_ms']:6.2f} ms  "
                f"{found['kernels']:4} kernels  deviation {away}"
            )
            for name, ms in found["longest"].items():
                print(f"      {ms:7.3f} ms  {name}")
        for depth, stages, warps in STEPS:
            step = {"DEPTH": depth, "STAGES": stages, "WARPS": warps}
            with mock.patch.multiple(newton_schulz_triton, **step):
                ms = measure(optimizer, True)["ms"]
            results[model]["methods"][f"symmetric {depth} {stages} {warps}"] = {"ms": ms}
            print(f"  symmetric, depth {depth}, {stages} stages, {warps} warps: {ms:.2f} ms")
        if options.json:
            options.json.write_text(json.dumps(results, indent=1), "utf-8")
        del optimizer


if __name__ == "__main__":
    main()
