"""BF16 products computed by the optional package quack-kernels, with the activation of a gated MLP in their epilogues.

cuBLAS has no epilogue with a gate, so another kernel has to read and write what a product wrote
(`kernels/fused/triton_gated.py`). The package (github.com/Dao-AILab/quack) builds products in CuTe DSL, with an
epilogue that is a Python function of the accumulator. In its "ping-pong" schedule, one warp group multiplies while
another runs its epilogue, which also makes plain products with a short sum faster.

The two values of a pair have to be neighbors in the accumulator. So the rows of gate and up alternate in the weight
(`interleave`), and with them the columns of the first layer's output and of its gradient.

The package is imported, and its kernels are compiled, at the first call; they are cached in the user's cache directory
(or in QUACK_CACHE_DIR). `choose_matmul.py` checks and times them.

Suffixes: N tokens, D hidden size, F intermediate size.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deskside.kernels.cute_dsl import keep_compiled_kernels

PACKAGE = "quack"
# What the package and its compiler raise where a product is not supported, or has another interface.
MISUSE = (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True)
class MatmulTile:
    """The part of an output that a block computes, its schedule, and the blocks that share loaded operands."""

    rows: int
    columns: int
    pingpong: bool
    cluster: int


# By the major compute capability. The first is tried first.
TILES: dict[int, tuple[MatmulTile, ...]] = {
    9: (MatmulTile(128, 192, True, 2), MatmulTile(128, 128, True, 2)),
    10: (MatmulTile(256, 256, False, 2), MatmulTile(128, 256, False, 1)),
    12: (MatmulTile(128, 128, True, 1), MatmulTile(128, 128, False, 1)),
}

SUPPORTED_GPUS = f"compute capability {', '.join(map(str, [*TILES][:-1]))} or {[*TILES][-1]}"


def tiles_of(device: torch.device) -> tuple[MatmulTile, ...]:
    """Return the tiles for a device; none if it has no kernels or the package is not installed."""
    if device.type != "cuda" or importlib.util.find_spec(PACKAGE) is None:
        return ()
    return TILES.get(torch.cuda.get_device_capability(device)[0], ())


def interleave(weight_WD: Tensor) -> Tensor:
    """Return a weight of gate and up, (2F, D), with their rows alternating: gate 0, up 0, gate 1, up 1, ..."""
    return weight_WD.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def deinterleave(weight_WD: Tensor) -> Tensor:
    """Return the rows of all gates, then those of all ups. The inverse of `interleave`."""
    return weight_WD.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def matmul(a: Tensor, b: Tensor, tile: MatmulTile) -> Tensor:
    """Return a @ b in the dtype of `a`. b: contiguous, or the transpose of a contiguous matrix."""
    out = a.new_empty(len(a), b.shape[1])
    _launch("plain", tile, a, b, out={"D": out})
    return out


def gated_matmul(x_ND: Tensor, weight_WD: Tensor, tile: MatmulTile) -> tuple[Tensor, Tensor]:
    """Return x @ weight.T, (N, 2F), and silu(gate) * up of it, (N, F). weight_WD: interleaved.

    The activation is computed from the sums before they are rounded.
    """
    N, W = len(x_ND), len(weight_WD)
    inner, hidden = x_ND.new_empty(N, W), x_ND.new_empty(N, W // 2)
    _launch("gate", tile, x_ND, weight_WD.T, out={"D": inner, "hidden": hidden})
    return inner, hidden


def gated_matmul_gradient(grad_ND: Tensor, weight_DF: Tensor, inner_NW: Tensor, tile: MatmulTile) -> Tensor:
    """Return the gradient of `gated_matmul`'s first result, (N, 2F), from that of the MLP's output.

    weight_DF: of the second layer, so grad @ weight is the gradient of `gated_matmul`'s second result.
    """
    grad_inner = torch.empty_like(inner_NW)
    _launch("gate_gradient", tile, grad_ND, weight_DF, inner_NW, out={"D": grad_inner})
    return grad_inner


def _launch(name: str, tile: MatmulTile, *operands: Tensor, out: dict[str, Tensor]) -> None:
    """Launch the product with this epilogue. Raises RuntimeError if the package does not support it."""
    products, refusals = load()
    try:
        products[name](*operands, out=out, config=_config(tile))
    except refusals as error:
        raise RuntimeError(f"quack-kernels: {error}") from error


@cache
def load() -> tuple[dict[str, Callable[..., Any]], tuple[type[Exception], ...]]:
    """Return the products by their epilogue, and the exceptions of unsupported ones.

    Raises RuntimeError if the package does not import, or is another version than this module is written for.
    """
    keep_compiled_kernels()
    try:
        refusal = import_module("cutlass.base_dsl.common").DSLBaseError
        sigmoid, epilogue = import_module("quack.activation").sigmoid, import_module("quack.epilogue")
        products = _products(epilogue.gemm_epilogue, sigmoid, epilogue.pack, epilogue.unpack)
    except (ImportError, OSError, *MISUSE) as error:
        raise RuntimeError(f"quack-kernels cannot be used: {error}") from error
    return products, (*MISUSE, refusal)


def _products(
    gemm_epilogue: Callable[..., Any],
    sigmoid: Callable[..., Any],
    pack: Callable[..., Any],
    unpack: Callable[..., Any],
) -> dict[str, Callable[..., Any]]:
    def plain(acc):  # type: ignore[no-untyped-def]
        return {"D": acc}

    def gate(acc):  # type: ignore[no-untyped-def]
        gate, up = unpack(acc)
        return {"D": pack(gate, up), "hidden": gate * sigmoid(gate) * up}

    def gate_gradient(acc, c):  # type: ignore[no-untyped-def]
        gate, up = unpack(c)
        s = sigmoid(gate)
        value = gate * s
        return {"D": pack(acc * up * (s + value * (1.0 - s)), acc * value)}

    return {
        "plain": gemm_epilogue()(plain),
        "gate": gemm_epilogue(outputs=("hidden",), mode="acc_pair")(gate),
        # vectorize: on compute capability 10, the package's own documentation warns of a value in both lanes of `pack`.
        "gate_gradient": gemm_epilogue(mode="packed_cd_b16x2", vectorize=False)(gate_gradient),
    }


@cache
def _config(tile: MatmulTile) -> Any:
    major = torch.cuda.get_device_capability()[0]
    return import_module("quack.gemm_config").GemmConfig(
        tile_m=tile.rows,
        tile_n=tile.columns,
        pingpong=tile.pingpong,
        cluster_m=tile.cluster,
        device_capacity=major,
        is_dynamic_persistent=major != 9,
    )
