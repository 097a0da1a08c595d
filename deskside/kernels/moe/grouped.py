"""Grouped products of experts on a GPU: the choice of a backend, and the launches. Imported only for tensors on a GPU.

    torch    `torch._grouped_mm`: CUTLASS kernels for bfloat16 on compute capability 9.x and 10.x (and CK on AMD). On
             other GPUs it copies `ends_E` to the host and loops over the experts, so it is not used there.
    triton   the kernels of triton_grouped.py, on NVIDIA GPUs from 8.0 on, for bfloat16, float16, and few float32 rows
    loop     reference.py: one product per expert. Waits for the device.

`grouped_backend` chooses one: the first in order of speed that supports the operands and agrees with float64 on this
GPU. The choice does not depend on a measurement, so that a resumed run repeats it.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from triton.errors import TritonError

from deskside.kernels.fused.launch import ACTIVATION_IDS, capability, ceil_div, next_power_of_2
from deskside.kernels.moe import moe_launch, reference, triton_grouped
from deskside.kernels.moe.reference import Routing
from deskside.kernels.nvfp4.matmul import TileConfig, tile_config
from deskside.utils.errors import first_line

Backend = Literal["torch", "triton", "loop"]
FEW_ROWS = 32  # of an average expert; with fewer, most of a tile of torch's kernels is empty
SMALLEST_TILE = 16  # rows of the smallest product of a tensor core
# Error of a product that the self-check allows, by dtype that `triton` supports. One rounding to bfloat16 is 1.7e-3; a
# wrong row gives more than 1e-1.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-5}


def grouped_matmul(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    """See `reference.grouped_matmul`. All tensors are contiguous."""
    multiply, _ = PRODUCTS[grouped_backend(x_SK.device, x_SK.dtype, weight.shape, len(x_SK))]
    return multiply(x_SK, weight, ends_E, transpose)


def grouped_weight_gradient(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.grouped_weight_gradient`. All tensors are contiguous."""
    shape = (len(ends_E), g_SM.shape[1], x_SK.shape[1])
    _, multiply = PRODUCTS[grouped_backend(x_SK.device, x_SK.dtype, shape, len(x_SK))]
    return multiply(g_SM, x_SK, ends_E, dtype)


def gathered_gated(x_ND: Tensor, weight: Tensor, routing: Routing, activation: str, has_gate: bool) -> Tensor:
    """See `reference.gathered_gated`. All tensors are contiguous. For few rows, it is one kernel."""
    rows = len(routing.tokens_S)
    backend = grouped_backend(x_ND.device, x_ND.dtype, weight.shape, rows)
    if backend == "triton" and few(rows, len(weight)):
        return triton_gathered_gated(x_ND, weight, routing, activation, has_gate)
    x_SD = moe_launch.dispatch(x_ND, routing.tokens_S)
    inner = grouped_matmul(x_SD, weight, routing.ends_E, True)
    return moe_launch.weighted_gated(inner, routing.weights_S, activation, has_gate)


def few(rows: int, experts: int) -> bool:
    """Return True if experts have so few rows on average that reading their weights takes most of a product's time."""
    return rows <= FEW_ROWS * experts


def grouped_backend(device: torch.device, dtype: torch.dtype, shape: Sequence[int], rows: int) -> Backend:
    """Return the backend for products in `dtype` with weights (E, M, K), or for their gradient.

    rows: of all experts together. If products with this number of rows do not wait for the device, neither do those
    with fewer rows.
    """
    experts, *sizes = shape
    order: tuple[Backend, ...] = ("torch", "triton")
    if few(rows, experts):
        order = ("triton", "torch")
    elif dtype is torch.float32:
        return "loop"  # whose products are cuBLAS's; Triton's in full float32 are slow
    for backend in order:
        if supports(backend, device, dtype, sizes) and agrees(backend, device, dtype):
            return backend
    return "loop"


def supports(backend: Backend, device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """Return True if a backend other than the loop supports this device, dtype, and size of weights (M, K)."""
    amd = torch.version.hip is not None
    if backend == "torch":
        aligned = all(size % 8 == 0 for size in sizes)  # rows of a multiple of 16 bytes
        return dtype is torch.bfloat16 and aligned and (amd or capability(device)[0] in (9, 10))
    return dtype in TOLERANCE and not amd and capability(device) >= (8, 0)


@cache
def agrees(backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the products of a backend agree with float64 on this device; otherwise warn. Takes milliseconds
    once compiled."""
    sizes = (20,) if dtype is torch.float32 else (420, 20)
    try:
        errors = [error for rows in sizes for error in _errors(backend, device, dtype, rows)]
    except torch.OutOfMemoryError:
        raise  # not a fault of the backend
    except (RuntimeError, TritonError) as error:
        problem = first_line(error)
    else:
        if all(error <= TOLERANCE[dtype] for error in errors):  # false for NaN
            return True
        problem = f"relative errors of {', '.join(f'{error:.1e}' for error in errors)}"
    warnings.warn(f"grouped products by {backend} are not used on {device}: {problem}", stacklevel=2)
    return False


def _errors(backend: Backend, device: torch.device, dtype: torch.dtype, rows: int) -> list[float]:
    """Return the errors of a backend's products relative to float64.

    The groups are uneven, one is empty, and the sizes are no multiples of a tile. Every second row is gathered.
    """
    generator = torch.Generator(device).manual_seed(0)
    ends_E = torch.tensor([rows // 4, rows // 4, rows // 4 + 1, rows], dtype=torch.int32, device=device)
    shapes = ((rows, 200), (rows, 136), (len(ends_E), 136, 200))
    x, g, w = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    multiply, weight_gradient = PRODUCTS[backend]
    results = [
        (multiply(x, w, ends_E, True), reference.grouped_matmul(x.double(), w.double(), ends_E, True)),
        (multiply(g, w, ends_E, False), reference.grouped_matmul(g.double(), w.double(), ends_E, False)),
        (
            weight_gradient(g, x, ends_E, torch.float32),
            reference.grouped_weight_gradient(g.double(), x.double(), ends_E, torch.float64),
        ),
    ]
    if backend == "triton" and few(rows, len(ends_E)):
        tokens = torch.arange(0, 2 * rows, 2, dtype=torch.int32, device=device) % rows
        weights = torch.rand(rows, generator=generator, device=device)
        routing = Routing(tokens, tokens, tokens, weights, ends_E, weights)  # only three of them are read
        truth = reference.gathered_gated(x.double(), w.double(), routing, "silu", True)
        results.append((triton_gathered_gated(x, w, routing, "silu", True), truth))
    return [float((a.double() - b).norm() / b.norm()) for a, b in results]


def _torch_matmul(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    return torch._grouped_mm(x_SK, weight.transpose(1, 2) if transpose else weight, offs=ends_E)


def _torch_weight_gradient(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._grouped_mm(g_SM.T, x_SK, offs=ends_E).to(dtype)


def grouped_tiles(device: torch.device, dtype: torch.dtype, rows: int | None = None) -> TileConfig:
    """Return the tile sizes for experts with `rows` rows on average, within the shared memory of each architecture.

    With few rows, reading the weights takes all the time: small tiles give more programs, and deep ones more bytes in
    flight. rows None: the rows are summed over.
    """
    tiles = tile_config(capability(device))
    if rows is not None and rows <= FEW_ROWS:
        height = max(SMALLEST_TILE, next_power_of_2(max(rows, 1)))
        tiles = TileConfig(height, 64, 128, warps=4, stages=4, descriptors=False)
    elif rows is not None:
        tiles = replace(tiles, L=min(tiles.L, next_power_of_2(rows)))
    return tiles if dtype.itemsize == 2 else replace(tiles, S=tiles.S // 2)


def _row_tiles(rows: int, experts: int, height: int) -> int:
    """Return the most row tiles that a routing can need: every expert's last tile may lack height - 1 rows."""
    return min(rows, (rows + experts * (height - 1)) // height)


def triton_matmul(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    """`reference.grouped_matmul` with the kernel of triton_grouped.py."""
    (S, K), E = x_SK.shape, len(ends_E)
    M = weight.shape[1 if transpose else 2]
    out = torch.empty(S, M, dtype=x_SK.dtype, device=x_SK.device)
    if not out.numel():
        return out
    tiles = grouped_tiles(x_SK.device, x_SK.dtype, ceil_div(S, E))
    # If rows of the result are not aligned, larger tiles spill registers to store them.
    if M % SMALLEST_TILE:
        tiles = replace(tiles, R=min(tiles.R, 64))
    row_tiles = _row_tiles(S, E, tiles.L)
    triton_grouped.grouped_matmul[(row_tiles * ceil_div(M, tiles.R),)](
        x_SK, weight, out, ends_E, row_tiles, M, K, E,
        transpose, next_power_of_2(E), tiles.L, tiles.R, tiles.S, tiles.group, K % tiles.S == 0, "ieee",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def triton_gathered_gated(
    x_ND: Tensor, weight: Tensor, routing: Routing, activation: str, has_gate: bool
) -> Tensor:
    """`reference.gathered_gated` with the kernel of triton_grouped.py, for few rows."""
    S, (E, width, K) = len(routing.tokens_S), weight.shape
    F = width // (2 if has_gate else 1)
    out = torch.empty(S, F, dtype=x_ND.dtype, device=x_ND.device)
    if not out.numel():
        return out
    tiles = grouped_tiles(x_ND.device, x_ND.dtype, min(ceil_div(S, E), FEW_ROWS))
    tiles = replace(tiles, R=tiles.R // 2)  # of the gate, and as many of up
    row_tiles = _row_tiles(S, E, tiles.L)
    triton_grouped.gathered_gated[(row_tiles * ceil_div(F, tiles.R),)](
        x_ND, routing.tokens_S, weight, routing.weights_S, out, routing.ends_E, row_tiles, F, K, E,
        ACTIVATION_IDS[activation], has_gate, next_power_of_2(E), tiles.L, tiles.R, tiles.S, tiles.group,
        K % tiles.S == 0, "ieee", num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def triton_weight_gradient(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.grouped_weight_gradient` with the kernel of triton_grouped.py."""
    (M, K), E = (g_SM.shape[1], x_SK.shape[1]), len(ends_E)
    out = torch.empty(E, M, K, dtype=dtype, device=x_SK.device)
    tiles = grouped_tiles(x_SK.device, x_SK.dtype)
    triton_grouped.grouped_weight_gradient[(ceil_div(M, tiles.L) * ceil_div(K, tiles.R), E)](
        g_SM, x_SK, out, ends_E, M, K,
        tiles.L, tiles.R, tiles.S, tiles.group, "ieee",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


Matmul = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
WeightGradient = Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]
PRODUCTS: dict[Backend, tuple[Matmul, WeightGradient]] = {
    "torch": (_torch_matmul, _torch_weight_gradient),
    "triton": (triton_matmul, triton_weight_gradient),
    "loop": (reference.grouped_matmul, reference.grouped_weight_gradient),
}
