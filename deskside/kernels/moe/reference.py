"""The operators of a mixture of experts in plain torch: for CPUs, and the reference of the Triton kernels.

Every token chooses k of E experts. `route` sorts the S = N k choices by expert, stably, so that each expert reads
contiguous rows; `Routing` says which token each sorted row belongs to, and in which sorted rows a token's choices are.
The second map makes the way back a sum over k gathered rows: no atomics, so the result does not depend on their order.

Low-precision products sum over blocks of an expert's rows, so each expert's rows can be padded to a multiple of
`align`. A padding row has the token -1: it is gathered as zeros, it has weight 0, and no token reads it.

Suffixes: N tokens, k choices per token, S sorted rows (N k and padding), E experts, D hidden size, F intermediate size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.kernels.functional import at_least_float32
from deskside.kernels.fused import reference as dense


@dataclass(slots=True)
class Routing:
    """The choices of N tokens, sorted by expert.

    experts_Nk: the experts each token chose, int32, the one with the highest probability first.
    slots_Nk: the sorted row of each choice, int32. tokens_S: the token of each sorted row, int32, or -1.
    weights_S: the router's weight of each sorted row, float32 (float64 for float64 logits).
    ends_E: the first row after those of each expert, padding included, int32. The last one is S.
    statistics_2E: number of tokens that chose each expert, and the sum of its probabilities over all tokens.
    """

    experts_Nk: Tensor
    slots_Nk: Tensor
    tokens_S: Tensor
    weights_S: Tensor
    ends_E: Tensor
    statistics_2E: Tensor


def sorted_rows(choices: int, experts: int, align: int) -> int:
    """Return the number of sorted rows S of `choices` = N k choices.

    With `align` > 1, this is the largest number that they can need: each expert's rows are padded to a multiple of
    `align`, and an expert without a token has `align` rows of padding, because not every grouped product accepts an
    empty group.
    """
    return choices if align == 1 else (choices + experts * align) // align * align


def route(logits_NE: Tensor, experts_per_token: int, normalise: bool, align: int = 1) -> Routing:
    """Choose experts by the softmax of the router's logits, and sort the choices by expert.

    normalise: the weights of a token's choices are divided by their sum. align: each expert has a positive multiple of
    this many rows, so that S does not depend on the choices; the last expert has what is left.
    """
    probabilities_NE = torch.softmax(logits_NE.to(at_least_float32(logits_NE)), dim=-1)
    weights_Nk, experts_Nk = probabilities_NE.topk(experts_per_token, dim=-1)
    if normalise:
        weights_Nk = weights_Nk / weights_Nk.sum(dim=-1, keepdim=True)
    experts_S = experts_Nk.flatten()
    order_S = experts_S.argsort(stable=True)
    counts_E = torch.bincount(experts_S, minlength=logits_NE.shape[1])
    rows_E = counts_E if align == 1 else ((counts_E + align - 1) // align).clamp(min=1) * align
    ends_E = rows_E.cumsum(0)
    # Rows of padding before those of each expert.
    padding_E = (ends_E - rows_E) - (counts_E.cumsum(0) - counts_E)
    rows = sorted_rows(len(order_S), len(counts_E), align)
    ends_E[-1] = rows
    places_S = torch.arange(len(order_S), device=order_S.device) + padding_E[experts_S[order_S]]
    slots_S = torch.empty_like(order_S)
    slots_S[order_S] = places_S
    tokens_S = order_S.new_full((rows,), -1)
    tokens_S[places_S] = order_S // experts_per_token
    weights_S = weights_Nk.new_zeros(rows)
    weights_S[places_S] = weights_Nk.flatten()[order_S]
    return Routing(
        experts_Nk.int(),
        slots_S.view_as(experts_Nk).int(),
        tokens_S.int(),
        weights_S,
        ends_E.int(),
        torch.stack((counts_E.to(probabilities_NE.dtype), probabilities_NE.sum(dim=0))),
    )


def route_backward(
    grad_weights_S: Tensor,
    grad_statistics_2E: Tensor | None,
    logits_NE: Tensor,
    routing: Routing,
    normalise: bool,
) -> Tensor:
    """Return the gradient of the logits (N, E), from those of `Routing.weights_S` and `Routing.statistics_2E`.

    The counts in the statistics have no gradient. grad_statistics_2E None is zero.
    """
    dtype = at_least_float32(logits_NE)
    probabilities_NE = torch.softmax(logits_NE.to(dtype), dim=-1)
    grad_weights_Nk = grad_weights_S[routing.slots_Nk.long()].to(dtype)
    experts_Nk = routing.experts_Nk.long()
    if normalise:
        chosen_Nk = probabilities_NE.gather(1, experts_Nk)
        total_N1 = chosen_Nk.sum(dim=-1, keepdim=True)
        mean_N1 = (grad_weights_Nk * chosen_Nk).sum(dim=-1, keepdim=True) / total_N1
        grad_weights_Nk = (grad_weights_Nk - mean_N1) / total_N1
    grad_NE = torch.zeros_like(probabilities_NE).scatter(1, experts_Nk, grad_weights_Nk)
    if grad_statistics_2E is not None:
        grad_NE = grad_NE + grad_statistics_2E[1]
    grad_NE = probabilities_NE * (grad_NE - (grad_NE * probabilities_NE).sum(dim=-1, keepdim=True))
    return grad_NE.to(logits_NE.dtype)


def dispatch(x_ND: Tensor, tokens_S: Tensor) -> Tensor:
    """Return the row of x that each sorted row reads, (S, D); zeros for padding."""
    return x_ND[tokens_S.long()].masked_fill((tokens_S < 0)[:, None], 0)


def combine(y_SD: Tensor, slots_Nk: Tensor, addend_ND: Tensor | None = None) -> Tensor:
    """Return the sum of each token's sorted rows, (N, D), added up in float32 in the order of its choices.

    addend_ND: added first.
    """
    rows_NkD = y_SD[slots_Nk.long()].to(at_least_float32(y_SD))
    total_ND = torch.zeros_like(rows_NkD[:, 0]) if addend_ND is None else addend_ND.to(rows_NkD.dtype)
    for rows_ND in rows_NkD.unbind(1):
        total_ND = total_ND + rows_ND
    return total_ND.to(y_SD.dtype)


def weighted_gated(x: Tensor, weights_S: Tensor, activation: str, has_gate: bool) -> Tensor:
    """Return weight * activation(gate) * up, (S, F), for x = [gate, up] (S, 2F); without `has_gate` of x (S, F).

    The down projection is linear, so the router's weight may be applied before it.
    """
    hidden = dense.gated(x.to(at_least_float32(x)), activation, has_gate)
    assert isinstance(hidden, Tensor)
    return (hidden * weights_S[:, None]).to(x.dtype)


def weighted_gated_backward(
    grad: Tensor, x: Tensor, weights_S: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of the weights (S,), and the output of `weighted_gated` again.

    grad: (S, F), that of the output.
    """
    wide = x.to(at_least_float32(x))
    hidden = dense.gated(wide, activation, has_gate)
    assert isinstance(hidden, Tensor)
    grad_hidden = grad.to(wide.dtype)
    grad_x = dense.gated_backward(grad_hidden * weights_S[:, None], wide, activation, has_gate)
    assert isinstance(grad_x, Tensor)
    grad_weights_S = (grad_hidden * hidden).sum(dim=-1)
    return grad_x.to(x.dtype), grad_weights_S, (hidden * weights_S[:, None]).to(x.dtype)


def grouped_matmul(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    """Return x_e W_e^T for the rows x_e of each expert, (S, M), for weights (E, M, K); x_e W_e if not `transpose`.

    In the second case the weights are (E, K, M).
    """
    starts = [0, *ends_E.tolist()[:-1]]
    out = x_SK.new_empty(len(x_SK), weight.shape[1 if transpose else 2])
    for matrix, start, stop in zip(weight, starts, ends_E.tolist(), strict=True):
        torch.mm(x_SK[start:stop], matrix.T if transpose else matrix, out=out[start:stop])
    return out


def grouped_weight_gradient(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Return g_e^T x_e for the rows of each expert, (E, M, K) in `dtype`; zeros for an expert without rows."""
    starts = [0, *ends_E.tolist()[:-1]]
    pieces = zip(starts, ends_E.tolist(), strict=True)
    return torch.stack([(g_SM[start:stop].T @ x_SK[start:stop]).to(dtype) for start, stop in pieces])
