"""Launches of the kernels of a mixture of experts. Imported only for tensors on a GPU."""

import torch
from torch import Tensor

from deskside.kernels.fused.launch import ACTIVATION_IDS, ceil_div, next_power_of_2
from deskside.kernels.moe import triton_routing, triton_rows
from deskside.kernels.moe.reference import Routing, sorted_rows

# Tokens of a program, and tokens x experts (rounded up to a power of two) that its registers hold.
ROUTED_TOKENS, ROUTED = 128, 4096


def _routing_blocks(experts: int) -> tuple[int, int]:
    """Return the number of tokens per program, and of experts rounded up to a power of two."""
    columns = max(next_power_of_2(experts), 2)
    return max(min(ROUTED_TOKENS, ROUTED // columns), 1), columns


def route(
    logits_NE: Tensor,
    experts_per_token: int,
    normalise: bool,
    align: int = 1,
    sigmoid: bool = False,
    bias_E: Tensor | None = None,
) -> Routing:
    """See `reference.route`. logits_NE, bias_E: contiguous."""
    (N, E), k, device = logits_NE.shape, experts_per_token, logits_NE.device
    S = sorted_rows(N * k, E, align)
    block_n, block_e = _routing_blocks(E)
    programs = ceil_div(N, block_n)
    integers = torch.empty(2 * N * k + S + 2 * programs * E + E, dtype=torch.int32, device=device)
    experts, slots, tokens, counts, starts, ends = integers.split(
        [N * k, N * k, S, programs * E, programs * E, E]
    )
    sizes = [N * k, S, programs * E, 2 * programs, 2 * E + 2]
    floats = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    weights, sorted_weights, sums, token_sums, statistics = floats.split(sizes)
    if align > 1:  # `place` does not write padding
        tokens.fill_(-1)
        sorted_weights.zero_()
    if programs == 1:
        block_n = min(block_n, max(next_power_of_2(N), 16))
        triton_routing.route_at_once[(1,)](
            logits_NE, bias_E, experts, weights, counts, sums, token_sums, starts, ends, statistics, slots, tokens,
            sorted_weights, N, S,
            E, k, normalise, sigmoid, bias_E is not None, align, block_n, block_e, num_warps=4,
        )  # fmt: skip
    else:
        triton_routing.choose[(programs,)](
            logits_NE, bias_E, experts, weights, counts, sums, token_sums, N,
            E, k, normalise, sigmoid, bias_E is not None, block_n, block_e, num_warps=4,
        )  # fmt: skip
        triton_routing.offsets[(1,)](
            counts, sums, token_sums, starts, ends, statistics, programs, S,
            E, align, block_n, block_e, num_warps=4,
        )  # fmt: skip
        triton_routing.place[(programs,)](
            experts, weights, starts, slots, tokens, sorted_weights, N, E, k, block_n, block_e, num_warps=4
        )
    return Routing(experts.view(N, k), slots.view(N, k), tokens, sorted_weights, ends, statistics)


def route_backward(
    grad_weights_S: Tensor,
    grad_statistics_R: Tensor | None,
    logits_NE: Tensor,
    routing: Routing,
    normalise: bool,
    sigmoid: bool = False,
) -> Tensor:
    """See `reference.route_backward`. All tensors are contiguous."""
    (N, E), k = logits_NE.shape, routing.experts_Nk.shape[1]
    block_n, block_e = _routing_blocks(E)
    out = torch.empty_like(logits_NE)
    triton_routing.route_backward[(ceil_div(N, block_n),)](
        grad_weights_S, grad_statistics_R, logits_NE, routing.experts_Nk, routing.slots_Nk, out, N,
        E, k, normalise, sigmoid, grad_statistics_R is not None, block_n, block_e, num_warps=4,
    )  # fmt: skip
    return out


def dispatch(x_ND: Tensor, tokens_S: Tensor) -> Tensor:
    """See `reference.dispatch`. x_ND: contiguous."""
    S, D = len(tokens_S), x_ND.shape[1]
    out = torch.empty(S, D, dtype=x_ND.dtype, device=x_ND.device)
    block = min(next_power_of_2(D), 2048)
    triton_rows.dispatch[(S, ceil_div(D, block))](x_ND, tokens_S, out, D, block, num_warps=_warps(block))
    return out


def combine(y_SD: Tensor, slots_Nk: Tensor, addend_ND: Tensor | None = None) -> Tensor:
    """See `reference.combine`. y_SD, addend_ND: contiguous."""
    (N, k), D = slots_Nk.shape, y_SD.shape[1]
    out = torch.empty(N, D, dtype=y_SD.dtype, device=y_SD.device)
    block = min(next_power_of_2(D), 2048)
    triton_rows.combine[(N, ceil_div(D, block))](
        y_SD, slots_Nk, addend_ND, out, D, k, addend_ND is not None, block, num_warps=_warps(block)
    )
    return out


def weighted_gated(x: Tensor, weights_S: Tensor, activation: str, has_gate: bool) -> Tensor:
    """See `reference.weighted_gated`. x: contiguous."""
    S, F = len(x), x.shape[1] // (2 if has_gate else 1)
    out = torch.empty(S, F, dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(F), 2048)
    triton_rows.weighted_gated[(S, ceil_div(F, block))](
        x, weights_S, out, S, F, ACTIVATION_IDS[activation], has_gate, block, num_warps=_warps(block)
    )
    return out


def weighted_gated_backward(
    grad: Tensor, x: Tensor, weights_S: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.weighted_gated_backward`. grad, x: contiguous."""
    S, F = grad.shape
    grad_x, hidden = torch.empty_like(x), torch.empty_like(grad)
    grad_weights = torch.empty(S, dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(F), 1024)
    triton_rows.weighted_gated_backward[(S,)](
        grad, x, weights_S, grad_x, grad_weights, hidden, S, F, ACTIVATION_IDS[activation], has_gate, block,
        num_warps=_warps(block),
    )  # fmt: skip
    return grad_x, grad_weights, hidden


def _warps(block: int) -> int:
    return 4 if block >= 1024 else 2
