"""Choose the tiles of the fused kernels by a trial on this GPU, at the shape of the model.

A kernel is tried with other tiles only if that can pay off: if the first tile takes clearly longer than the memory
traffic, and the run is long enough to win back what compiling the others takes. A tile must give the same bits as the
first.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from deskside.kernels.compile_ahead import compile_ahead
from deskside.kernels.device_time import device_seconds
from deskside.kernels.fused.reference import Cast, Fp8
from deskside.kernels.fused.tiles import CANDIDATES, Tile, temporarily, use_tile
from deskside.utils.trials import TrialCache

KIND = "tiles"
# Elements of the MLP's hidden layer in the trial: 128 MiB with a gate in BF16, more than any card's L2 cache.
ELEMENTS = 2**25
WORTH = 1.1  # a kernel whose first tile takes at most this multiple of the memory traffic's time keeps it
COMPILE_SECONDS = 2.0  # for the other tiles of all kernels, in threads
TRIAL_SECONDS = 5.0  # no further kernel is tried after this time, in which nothing is compiled
TIE_MARGIN = 0.02  # relative difference in time that counts as a tie; the first tile is kept then


@dataclass(frozen=True)
class MlpShape:
    """The sizes that the kernels see: tokens, and the channels of the stream and of the MLP's hidden layer.

    scaling: that of the recipe (`config.recipes.Operand`), which determines the kernels that run.
    """

    tokens: int
    hidden_size: int
    intermediate_size: int
    activation: str
    has_gate: bool
    dtype: torch.dtype
    scaling: str


@dataclass(frozen=True)
class Problem:
    """A launch of a kernel on random data, and the bytes that it must read and write."""

    run: Callable[[], tuple[Tensor, ...]]
    traffic: int


def trial_tokens(intermediate_size: int) -> int:
    """Return the tokens of a trial, a multiple of 64."""
    return max(64, ELEMENTS // intermediate_size // 64 * 64)


def choose_tiles(
    shape: MlpShape, device: torch.device, passes: float, cache: TrialCache
) -> dict[str, dict[str, Any]]:
    """Choose the tiles of all kernels that a step runs, and return the choices for plan.json (see `use_tiles`).

    passes: forward and backward passes of one layer over `shape.tokens` in the run. Only for GPUs.
    """
    spec = {**asdict(shape), "dtype": str(shape.dtype), "candidates": [*map(repr, CANDIDATES.values())]}
    kept = cache.find(KIND, spec)
    if kept is not None and (kept.result["complete"] or passes <= kept.result["passes"]):
        return {kernel: {**choice, "trial": "cached"} for kernel, choice in kept.result["tiles"].items()}
    began = time.perf_counter()
    problems = problems_of(shape, device)
    chosen, complete = choose(problems, bandwidth(device), passes, device)
    result = {"name": _summary(chosen), "tiles": chosen, "complete": complete, "passes": passes}
    cache.keep(KIND, spec, result, time.perf_counter() - began)
    return {kernel: {**choice, "trial": "measured"} for kernel, choice in chosen.items()}


def use_tiles(choices: Mapping[str, Mapping[str, Any]]) -> None:
    """Launch the kernels with the chosen tiles from now on."""
    for kernel, choice in choices.items():
        use_tile(kernel, Tile(*choice["tile"]))


def choose(
    problems: Mapping[str, Problem], bytes_per_second: float, passes: float, device: torch.device
) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the choice for each kernel, and False if more tiles could be worth trying in a longer run."""
    from triton.errors import TritonError

    with compile_ahead(device):
        for problem in problems.values():
            problem.run()
    first = {kernel: device_seconds(problem.run, device) for kernel, problem in problems.items()}
    floor = {kernel: problem.traffic / bytes_per_second for kernel, problem in problems.items()}
    slow = [kernel for kernel in problems if first[kernel] > WORTH * floor[kernel]]
    worth = passes * sum(first[kernel] - floor[kernel] for kernel in slow) > COMPILE_SECONDS
    if worth:
        with compile_ahead(device):
            for kernel in slow:
                for tile in CANDIDATES[kernel][1:]:
                    # A tile that this GPU cannot run raises here if an earlier trial of this process compiled it.
                    with temporarily(kernel, tile), contextlib.suppress(RuntimeError, TritonError):
                        problems[kernel].run()
    began, chosen = time.perf_counter(), {}
    for kernel, problem in problems.items():
        times = {CANDIDATES[kernel][0]: first[kernel]}
        if worth and kernel in slow and time.perf_counter() - began < TRIAL_SECONDS:
            times |= _try_tiles(kernel, problem, device)
        best = min(times, key=times.__getitem__)
        if times[best] > (1 - TIE_MARGIN) * first[kernel]:
            best = CANDIDATES[kernel][0]
        chosen[kernel] = {
            "tile": list(astuple(best)),
            "microseconds": {" x ".join(map(str, astuple(t))): round(s * 1e6, 2) for t, s in times.items()},
            "traffic_microseconds": round(floor[kernel] * 1e6, 2),
        }
    return chosen, worth or not slow


def _try_tiles(kernel: str, problem: Problem, device: torch.device) -> dict[Tile, float]:
    """Return the seconds of the other tiles that this GPU can run, and that give the same bits as the first."""
    from triton.errors import TritonError

    expected = problem.run()
    times = {}
    for tile in CANDIDATES[kernel][1:]:
        with temporarily(kernel, tile):
            try:
                results = problem.run()
                if all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True)):
                    times[tile] = device_seconds(problem.run, device)
            except (RuntimeError, TritonError):  # too much shared memory, or too many registers
                continue
    return times


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / device_seconds(lambda: target.copy_(source), device)


def problems_of(shape: MlpShape, device: torch.device) -> dict[str, Problem]:
    """Return the launches of a step's kernels that have more than one tile."""
    from deskside.kernels.fused import launch

    N, D, F = shape.tokens, shape.hidden_size, shape.intermediate_size
    width = 2 * F if shape.has_gate else F
    generator = torch.Generator(device).manual_seed(0)
    x_ND, x_NW, grad_NF = (
        torch.randn(N, size, generator=generator, device=device).to(shape.dtype) for size in (D, width, F)
    )
    scales = torch.rand(max(N, D), generator=generator, device=device) + 1.0
    activation, size = (shape.activation, shape.has_gate), x_ND.element_size()

    def cast(dtype: torch.dtype) -> Cast:
        return Cast(dtype, scales[0], torch.zeros((), device=device))

    def with_amax(run: Callable[[Cast], Any], dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
        def launched() -> tuple[Tensor, ...]:
            made = cast(dtype)
            return *_bits(run(made)), made.amax

        return launched

    E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
    back = N * (size * (F + width))
    problems = {}
    if shape.scaling == "delayed":
        problems["gated_fp8"] = Problem(
            with_amax(lambda c: launch.gated(x_NW, *activation, c), E4M3), N * (size * width + 2 * F)
        )
        problems["gated_backward_fp8"] = Problem(
            with_amax(lambda c: launch.gated_backward(grad_NF, x_NW, *activation, c), E5M2),
            back + 2 * N * width,
        )
    else:
        problems["gated"] = Problem(lambda: _bits(launch.gated(x_NW, *activation)), N * size * (width + F))
        problems["gated_backward"] = Problem(
            lambda: _bits(launch.gated_backward(grad_NF, x_NW, *activation)), back + N * size * width
        )
    if shape.scaling in ("delayed", "tensor"):
        problems["cast_fp8"] = Problem(
            with_amax(lambda c: launch.cast_fp8(x_ND, c), E4M3), N * D * (size + 2)
        )
    if shape.scaling == "row":
        problems["row_col_amax"] = Problem(lambda: launch.row_col_amax(x_ND), N * D * size)
        problems["cast_both"] = Problem(
            lambda: _bits(launch.cast_both(x_ND, E4M3, scales[:N], scales[:D])), N * D * (size + 2)
        )
    return problems


def _bits(result: Tensor | Fp8) -> tuple[Tensor, ...]:
    """Return the tensors of a result, FP8 as bytes, which torch can compare."""
    if isinstance(result, Tensor):
        return (result,)
    return result.rows.view(torch.uint8), result.columns.view(torch.uint8)


def _summary(chosen: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{kernel} {' x '.join(map(str, choice['tile']))}" for kernel, choice in chosen.items())
