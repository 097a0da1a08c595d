"""See narrow.py."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deskside.kernels.dependent_launch import launch_options
from deskside.kernels.fused.launch import ACTIVATION_IDS
from deskside.kernels.fused.triton_gated import activation

NO_ACTIVATION = -1


class LinearTile(NamedTuple):
    """The outputs of a program, the channels that it multiplies at once, and its warps."""

    outputs: int
    channels: int
    warps: int


# By number of tokens, rounded up. The weights of two steps and the input of one are in registers, as bfloat16 and for
# the norm as float32. With 1,024 channels they spilled to memory: a decoding step of 124m took 7.5 ms instead of 0.48.
TILES = {16: LinearTile(16, 128, 4), 32: LinearTile(16, 128, 4), 64: LinearTile(16, 64, 4)}


@triton.jit
def _narrow_linear(  # type: ignore[no-untyped-def]
    X, DELTA, SUM, NORM_WEIGHT, WEIGHT, BIAS, OUT, eps, N, K, F,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS columns of OUT (N, F). X, DELTA, SUM: (N, K). WEIGHT: (F, K), or (2F, K) if GATED."""
    f = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.arange(0, ROWS)
    k = tl.arange(0, CHANNELS)
    # The weights of the next step are loaded while those of this one are multiplied, and the first ones before the
    # kernel before this one has finished.
    weights = WEIGHT + f[:, None] * K + k[None, :]
    inside = (f < F)[:, None]
    w = tl.load(weights, inside & (k < K)[None, :], 0.0)
    if GATED:
        weights_up = weights + F.to(tl.int64) * K
        u = tl.load(weights_up, inside & (k < K)[None, :], 0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    total_up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, K, CHANNELS):
        channel = start + k
        mask = (n < N)[:, None] & (channel < K)[None, :]
        offsets = n[:, None] * K + channel[None, :]
        x = tl.load(X + offsets, mask, 0.0)
        if DELTA is not None:
            # Rounded as it is stored: the next norm reads the stored value.
            x = (x.to(tl.float32) + tl.load(DELTA + offsets, mask, 0.0).to(tl.float32)).to(x.dtype)
            if tl.program_id(0) == 0:
                tl.store(SUM + offsets, x, mask)
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            norm_weight = tl.load(NORM_WEIGHT + channel, channel < K, 0.0).to(tl.float32)
            x = (wide * norm_weight[None, :]).to(x.dtype)
        following = (start + CHANNELS + k < K)[None, :] & inside
        next_w = tl.load(weights + start + CHANNELS, following, 0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
        w = next_w
        if GATED:
            next_u = tl.load(weights_up + start + CHANNELS, following, 0.0)
            total_up = tl.dot(x, tl.trans(u), total_up, input_precision=PRECISION)
            u = next_u
    if DELTA is not None:
        rstd = tl.rsqrt(squares / K + eps)[:, None]
        total *= rstd
        total_up *= rstd
    if BIAS is not None:
        total += tl.load(BIAS + f, f < F, 0.0).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(BIAS + F + f, f < F, 0.0).to(tl.float32)[None, :]
    if KIND >= 0:
        total, _ = activation(total, KIND)
    if GATED:
        total *= total_up
    tl.store(
        OUT + n[:, None] * F + f[None, :], total.to(OUT.dtype.element_ty), (n < N)[:, None] & (f < F)[None, :]
    )


def launch(
    x_NK: Tensor,
    weight_FK: Tensor,
    bias_F: Tensor | None = None,
    add_norm: tuple[Tensor, Tensor, float] | None = None,
    function: tuple[str, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x, or its sum with delta, and the output: (N, K), (N, F).

    add_norm: delta, weight and eps of the norm. function: the activation, and whether it is gated.
    """
    x_NK = x_NK.contiguous()
    N, K = x_NK.shape
    delta, norm_weight, eps = (None, None, 0.0) if add_norm is None else add_norm
    name, gated = (None, False) if function is None else function
    F = len(weight_FK) // (2 if gated else 1)
    sums_NK = x_NK if delta is None else torch.empty_like(x_NK)
    out_NF = torch.empty(N, F, dtype=x_NK.dtype, device=x_NK.device)
    rows = max(16, triton.next_power_of_2(N))
    tile = TILES[rows]
    channels = min(tile.channels, triton.next_power_of_2(K))
    if x_NK.dtype == torch.float32:
        channels = min(channels, 32)
    _narrow_linear[(triton.cdiv(F, tile.outputs),)](
        x_NK, None if delta is None else delta.contiguous(), sums_NK, norm_weight, weight_FK, bias_F, out_NF,
        eps, N, K, F,
        ROWS=rows, OUTPUTS=tile.outputs, CHANNELS=channels,
        KIND=NO_ACTIVATION if name is None else ACTIVATION_IDS[name], GATED=gated,
        PRECISION="ieee" if x_NK.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=1, **launch_options(x_NK.device),
    )  # fmt: skip
    return sums_NK, out_NF
