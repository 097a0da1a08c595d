"""One AdamW update of one tensor, with moments in float32, bfloat16, 8 or 4 bits: Triton on CUDA, torch elsewhere.

Library kernels do not fit: bitsandbytes' takes the step number from the host, so skipping a bad step would need a
synchronization; torchao's AdamW8bit compiles for seconds in the first step, and its state is a tensor subclass.
"""

import torch
from torch import Tensor

from deskside.kernels import adamw_4bit
from deskside.kernels.adamw_state import (
    EXP_AVG,
    EXP_AVG_MAX,
    EXP_AVG_SQ,
    EXP_AVG_SQ_MAX,
    AdamWHyperparameters,
    bits_of,
    dequantize,
    quantize,
)
from deskside.kernels.functional import at_least_float32
from deskside.kernels.weights_24bit import joined, store_


def adamw_update(
    p: Tensor,
    g: Tensor,
    state: dict[str, Tensor],
    step: Tensor,
    skip: Tensor,
    hparams: AdamWHyperparameters,
    fused: bool,
    factor: Tensor | None = None,
    seed: int = 0,
    first: int = 0,
    residual: Tensor | None = None,
) -> None:
    """Update the flat weights `p` and their moments in place.

    Weights in 24 bits and in bfloat16 are rounded stochastically.

    p, g: weights and gradient, (n,), contiguous.
    state: EXP_AVG and EXP_AVG_SQ (n,), in float32 (float64 for float64 weights) or bfloat16; or uint8 codes with
        EXP_AVG_MAX and EXP_AVG_SQ_MAX in float32, one per block: 8-bit codes (n,) and (ceil(n / 256),) blocks, or
        4-bit codes, two in a byte, (ceil(n / 2),) and (ceil(n / 128),) blocks. With codes, n > 1: otherwise
        the number of bytes would not tell 4 from 8 bits.
    step: number of updates including this one, a float32 scalar on the device.
    skip: float32 scalar on the device; 1 leaves weights and moments unchanged.
    fused: run the Triton kernel.
    factor: float32 scalar on the device that the gradient is multiplied by first; None is 1.
    seed: of the rounding (`stochastic_rounding.py`). first: the index of p[0] in its tensor.
    residual: of weights in 24 bits (`weights_24bit.py`), (n,) int8, updated in place.
    """
    if fused:
        from deskside.kernels.adamw_triton import launch

        launch(p, g, state, step, skip, hparams, factor, seed, first, residual)
        torch.autograd.graph.increment_version(p)  # so that cached conversions of the weight are renewed
        return
    n = p.numel()
    bits = bits_of(state[EXP_AVG], n)
    if bits == 4:
        m = adamw_4bit.dequantize_first(state[EXP_AVG], state[EXP_AVG_MAX], n)
        v = adamw_4bit.dequantize_second(state[EXP_AVG_SQ], state[EXP_AVG_SQ_MAX], n)
    elif bits == 8:
        m = dequantize(state[EXP_AVG], state[EXP_AVG_MAX], signed=True)
        v = dequantize(state[EXP_AVG_SQ], state[EXP_AVG_SQ_MAX], signed=False)
    else:
        m, v = (state[key].to(at_least_float32(p)) for key in (EXP_AVG, EXP_AVG_SQ))
    g = g.to(m.dtype) if factor is None else g.to(m.dtype) * factor
    m = torch.lerp(m, g, 1 - hparams.betas[0])
    v = torch.lerp(v, g * g, 1 - hparams.betas[1])
    bias_correction1, bias_correction2 = (1 - torch.pow(beta, step.double()) for beta in hparams.betas)
    update = (m / bias_correction1) / ((v / bias_correction2).sqrt() + hparams.eps)
    skipped = skip > 0
    decay = hparams.lr * hparams.weight_decay
    new = joined(p, residual, m.dtype)
    if hparams.cautious:
        new = new - torch.where(update * new >= 0, decay * new, 0.0) - hparams.lr * update
    else:
        new = new * (1 - decay) - hparams.lr * update
    store_(p, residual, new, skipped, seed, first)
    new_state = {EXP_AVG: m, EXP_AVG_SQ: v}
    if bits == 4:
        new_state[EXP_AVG], new_state[EXP_AVG_MAX] = adamw_4bit.quantize_first(m)
        new_state[EXP_AVG_SQ], new_state[EXP_AVG_SQ_MAX] = adamw_4bit.quantize_second(v)
    elif bits == 8:
        new_state[EXP_AVG], new_state[EXP_AVG_MAX] = quantize(m, signed=True)
        new_state[EXP_AVG_SQ], new_state[EXP_AVG_SQ_MAX] = quantize(v, signed=False)
    for key, value in new_state.items():
        state[key].copy_(torch.where(skipped, state[key], value.to(state[key].dtype)))
