"""Grouped products of experts on a GPU: the choice of a backend, and the launches. Imported only for tensors on a GPU.

    torch    `torch._grouped_mm`: CUTLASS kernels for bfloat16 on compute capability 9.x and 10.x (and CK on AMD). On
             other GPUs it copies `ends_E` to the host and loops over the experts, so it is not used there.
    triton   the kernels of triton_grouped.py, for bfloat16 and float16 on NVIDIA GPUs from 8.0 on
    loop     reference.py: one product per expert. Waits for the device.

`grouped_backend` chooses one: the first in order of speed that supports the operands and agrees with float64 on this
GPU. The choice does not depend on a measurement, so that a resumed run repeats it.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from triton.errors import TritonError

from deskside.kernels.fused.launch import ceil_div, next_power_of_2
from deskside.kernels.moe import reference, triton_grouped
from deskside.kernels.nvfp4.matmul import TileConfig, tile_config

Backend = Literal["torch", "triton", "loop"]
FEW_ROWS = 32  # of an average expert: fewer leave most of a tile of torch's kernels empty
SMALLEST_TILE = 16  # rows of the smallest product of a tensor core
DTYPES = (torch.bfloat16, torch.float16)
# Of a product of the self-check. One rounding to bfloat16 is 1.7e-3; a wrong row gives more than 1e-1.
TOLERANCE = 5e-3


def grouped_matmul(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    """See `reference.grouped_matmul`. All tensors are contiguous."""
    multiply, _ = PRODUCTS[grouped_backend((x_SK, weight), len(ends_E))]
    return multiply(x_SK, weight, ends_E, transpose)


def grouped_weight_gradient(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.grouped_weight_gradient`. All tensors are contiguous."""
    _, multiply = PRODUCTS[grouped_backend((g_SM, x_SK), len(ends_E))]
    return multiply(g_SM, x_SK, ends_E, dtype)


def grouped_backend(operands: tuple[Tensor, Tensor], experts: int) -> Backend:
    """Return the backend for a product of these operands, the first of which has the rows of `experts` experts."""
    x, other = operands
    sizes = (*x.shape[1:], *other.shape[1:])
    few = len(x) <= FEW_ROWS * experts
    order: tuple[Backend, ...] = ("triton", "torch") if few else ("torch", "triton")
    for backend in order:
        supported = x.dtype == other.dtype and supports(backend, x.device, x.dtype, sizes)
        if supported and agrees(backend, x.device, x.dtype):
            return backend
    return "loop"


def supports(backend: Backend, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Return True if a backend, not the loop, is made for this device, dtype, and sizes (without those of rows)."""
    amd = torch.version.hip is not None
    if backend == "torch":
        aligned = all(size % 8 == 0 for size in sizes)  # rows of a multiple of 16 bytes
        return dtype is torch.bfloat16 and aligned and (amd or capability(device)[0] in (9, 10))
    return dtype in DTYPES and not amd and capability(device) >= (8, 0)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or 8.9 for a CPU (Triton's interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 9)


@cache
def agrees(backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the products of a backend agree with float64 on this device; otherwise warn. Takes milliseconds
    once compiled.

    The groups are uneven, one is empty, and the sizes are no multiples of a tile.
    """
    ends = (150, 150, 153, 420)
    for rows in (ends[-1], 21):  # large tiles and small ones
        ends_E = torch.tensor([end * rows // ends[-1] for end in ends], dtype=torch.int32, device=device)
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((rows, 200), (rows, 136), (len(ends), 136, 200))
        x, g, w = (torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)
        multiply, weight_gradient = PRODUCTS[backend]
        truth = (
            reference.grouped_matmul(x.double(), w.double(), ends_E, True),
            reference.grouped_matmul(g.double(), w.double(), ends_E, False),
            reference.grouped_weight_gradient(g.double(), x.double(), ends_E, torch.float64),
        )
        try:
            results = (
                multiply(x, w, ends_E, True),
                multiply(g, w, ends_E, False),
                weight_gradient(g, x, ends_E, torch.float32),
            )
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, truth, strict=True)]
            # False for NaN, too.
            problem = "" if all(error <= TOLERANCE for error in errors) else f"relative errors {errors}"
        except torch.OutOfMemoryError:
            raise  # not a fault of the backend
        except (RuntimeError, TritonError) as error:
            problem = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if problem:
            warnings.warn(f"grouped products by {backend} are not used on {device}: {problem}", stacklevel=2)
            return False
    return True


def _torch_matmul(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    return torch._grouped_mm(x_SK, weight.transpose(1, 2) if transpose else weight, offs=ends_E)


def _torch_weight_gradient(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._grouped_mm(g_SM.T, x_SK, offs=ends_E).to(dtype)


def grouped_tiles(capability: tuple[int, int], rows: int) -> TileConfig:
    """Return the tile sizes for experts with `rows` rows on average, within the shared memory of each architecture.

    With few rows, reading the weights takes all the time: small tiles give more programs, and deep ones more bytes in
    flight.
    """
    if rows <= FEW_ROWS:
        height = max(SMALLEST_TILE, next_power_of_2(max(rows, 1)))
        return TileConfig(height, 64, 128, warps=4, stages=4, descriptors=False)
    tiles = tile_config(capability)
    return replace(tiles, L=min(tiles.L, next_power_of_2(rows)), descriptors=False)


def triton_matmul(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    """`reference.grouped_matmul` with the kernel of triton_grouped.py."""
    (S, K), E = x_SK.shape, len(ends_E)
    M = weight.shape[1 if transpose else 2]
    out = torch.empty(S, M, dtype=x_SK.dtype, device=x_SK.device)
    if not out.numel():
        return out
    tiles = grouped_tiles(capability(x_SK.device), ceil_div(S, E))
    row_tiles = min(
        S, (S + E * (tiles.L - 1)) // tiles.L
    )  # each expert may leave up to L - 1 rows of a tile empty
    triton_grouped.grouped_matmul[(row_tiles * ceil_div(M, tiles.R),)](
        x_SK, weight, out, ends_E, row_tiles, M, K, E,
        transpose, next_power_of_2(E), tiles.L, tiles.R, tiles.S, tiles.group, K % tiles.S == 0,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def triton_weight_gradient(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.grouped_weight_gradient` with the kernel of triton_grouped.py."""
    (M, K), E = (g_SM.shape[1], x_SK.shape[1]), len(ends_E)
    out = torch.empty(E, M, K, dtype=dtype, device=x_SK.device)
    tiles = tile_config(capability(x_SK.device))
    triton_grouped.grouped_weight_gradient[(ceil_div(M, tiles.L) * ceil_div(K, tiles.R), E)](
        g_SM, x_SK, out, ends_E, M, K,
        tiles.L, tiles.R, tiles.S, tiles.group,
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
