"""One AdamW update of one tensor, with moments in float32, bfloat16 or 8 bits: Triton on CUDA, torch elsewhere.

Why own code: bitsandbytes' kernel takes the step number from the host, and so cannot skip a bad step without a
synchronization; torchao's AdamW8bit compiles for seconds in the first step, and its state is not a plain tensor.
"""

import torch
from torch import Tensor

from deskside.kernels.adamw_state import FIRST, FIRST_MAX, SECOND, SECOND_MAX, Rule, dequantize, quantize


def adamw_update(
    p: Tensor,
    g: Tensor,
    state: dict[str, Tensor],
    step: Tensor,
    skip: Tensor,
    rule: Rule,
    fused: bool,
    factor: Tensor | None = None,
) -> None:
    """Update the flat weights `p` and their moments in place.

    p, g: (n,), contiguous. state: FIRST and SECOND (n,), in the parameter's dtype or bfloat16; or uint8 codes with
    FIRST_MAX and SECOND_MAX (blocks of 256,) float32. step: float32 scalar on the device, including this update. skip:
    float32 scalar on the device; if it is 1, nothing changes. fused: run the Triton kernel. factor: a float32 scalar on
    the device that the gradient is multiplied by first; None is 1.
    """
    if fused:
        from deskside.kernels.adamw_triton import launch

        launch(p, g, state, step, skip, rule, factor)
        torch.autograd.graph.increment_version(p)  # converted copies of the weight are keyed by its version
        return
    if state[FIRST].dtype != torch.uint8:
        m, v = state[FIRST].to(p.dtype), state[SECOND].to(p.dtype)
    else:
        m = dequantize(state[FIRST], state[FIRST_MAX], signed=True)
        v = dequantize(state[SECOND], state[SECOND_MAX], signed=False)
    g = g.to(m.dtype) if factor is None else g.to(m.dtype) * factor
    m = torch.lerp(m, g, 1 - rule.betas[0])
    v = torch.lerp(v, g * g, 1 - rule.betas[1])
    b1, b2 = (1 - torch.pow(beta, step.double()) for beta in rule.betas)
    update = (m / b1) / ((v / b2).sqrt() + rule.eps)
    keep = skip > 0
    p.copy_(torch.where(keep, p, p * (1 - rule.lr * rule.weight_decay) - rule.lr * update))
    new = {FIRST: m, SECOND: v}
    if state[FIRST].dtype == torch.uint8:
        new[FIRST], new[FIRST_MAX] = quantize(m, signed=True)
        new[SECOND], new[SECOND_MAX] = quantize(v, signed=False)
    for key, value in new.items():
        state[key].copy_(torch.where(keep, state[key], value.to(state[key].dtype)))
