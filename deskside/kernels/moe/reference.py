"""The operators of a mixture of experts in plain torch: for CPUs, and the reference of the Triton kernels.

Every token chooses k of E experts. `route` sorts the S = N k choices by expert, stably, so that each expert reads
contiguous rows; `Routing` says which token each sorted row belongs to, and in which sorted rows a token's choices are.
The second map makes the way back a sum over k gathered rows: no atomics, so the result does not depend on their order.

Low-precision products sum over blocks of an expert's rows, so each expert's rows can be padded to a multiple of
`align`. A padding row has the token -1: it is gathered as zeros, it has weight 0, and no token reads it.

Suffixes: N tokens, k choices per token, S sorted rows (N k and padding), E experts, D hidden size, F intermediate size,
R = 2 E + 2 router statistics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.kernels.functional import at_least_float32
from deskside.kernels.fused import reference as dense

# Added to sums of sigmoid scores before a division, as in transformers, because all scores may underflow.
TINY = 1e-20


@dataclass(slots=True)
class Routing:
    """The choices of N tokens, sorted by expert.

    experts_Nk: the experts each token chose, int32, the one with the highest (biased) score first.
    slots_Nk: the sorted row of each choice, int32. tokens_S: the token of each sorted row, int32, or -1.
    weights_S: the router's weight of each sorted row, float32 (float64 for float64 logits).
    ends_E: the first row after those of each expert, padding included, int32. The last one is S.
    statistics_R: see `router_statistics`.
    """

    experts_Nk: Tensor
    slots_Nk: Tensor
    tokens_S: Tensor
    weights_S: Tensor
    ends_E: Tensor
    statistics_R: Tensor


def sorted_rows(choices: int, experts: int, align: int) -> int:
    """Return the number of sorted rows S of `choices` = N k choices.

    With `align` > 1, this is the largest number that they can need: each expert's rows are padded to a multiple of
    `align`, and an expert without a token has `align` rows of padding, because not every grouped product accepts an
    empty group.
    """
    return choices if align == 1 else (choices + experts * align) // align * align


def router_scores(logits_NE: Tensor, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Return the scores and the probabilities (N, E) of a router's logits, which are in float32 or float64.

    Softmax: both are the softmax. Sigmoid (DeepSeek-V3, arXiv 2412.19437): the score of an expert does not depend on
    the other experts, and the probabilities are the scores divided by their sum.
    """
    if not sigmoid:
        probabilities_NE = torch.softmax(logits_NE, dim=-1)
        return probabilities_NE, probabilities_NE
    scores_NE = torch.sigmoid(logits_NE)
    return scores_NE, scores_NE / (scores_NE.sum(dim=-1, keepdim=True) + TINY)


def router_statistics(logits_NE: Tensor, probabilities_NE: Tensor, counts_E: Tensor) -> Tensor:
    """Return sums over the tokens (R,): the choices of each expert, the probabilities of each, entropy, squared LSE.

    The entropy is that of a token's probabilities, in nats. LSE is the logarithm of the sum of exp(logits) of a token;
    its square is the router z-loss (ST-MoE, arXiv 2202.08906). Choices and entropy have no gradient.
    """
    fixed_NE = probabilities_NE.detach()
    entropy = torch.special.entr(fixed_NE).sum()
    squared_lse = torch.logsumexp(logits_NE, dim=-1).square().sum()
    sums_E = probabilities_NE.sum(dim=0)
    return torch.cat((counts_E.to(sums_E.dtype), sums_E, torch.stack((entropy, squared_lse))))


def route(
    logits_NE: Tensor,
    experts_per_token: int,
    normalise: bool,
    align: int = 1,
    sigmoid: bool = False,
    bias_E: Tensor | None = None,
) -> Routing:
    """Choose experts by the router's scores, and sort the choices by expert.

    normalise: the weights of a token's choices are divided by their sum. align: each expert has a positive multiple of
    this many rows, so that S does not depend on the choices; the last expert has the rest. sigmoid: see
    `router_scores`. bias_E: added to the scores for choosing only, not to the weights; float32.
    """
    wide_NE = logits_NE.to(at_least_float32(logits_NE))
    scores_NE, probabilities_NE = router_scores(wide_NE, sigmoid)
    experts_Nk = (scores_NE if bias_E is None else scores_NE + bias_E).topk(experts_per_token, dim=-1).indices
    weights_Nk = scores_NE.gather(1, experts_Nk)
    if normalise:
        weights_Nk = weights_Nk / (weights_Nk.sum(dim=-1, keepdim=True) + (TINY if sigmoid else 0.0))
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
        router_statistics(wide_NE, probabilities_NE, counts_E),
    )


def route_backward(
    grad_weights_S: Tensor,
    grad_statistics_R: Tensor | None,
    logits_NE: Tensor,
    routing: Routing,
    normalise: bool,
    sigmoid: bool = False,
) -> Tensor:
    """Return the gradient of the logits (N, E), from those of `Routing.weights_S` and `Routing.statistics_R`.

    grad_statistics_R None is zero. Choices and entropy in the statistics have no gradient, nor has a bias.
    """
    wide_NE = logits_NE.to(at_least_float32(logits_NE))
    scores_NE, probabilities_NE = router_scores(wide_NE, sigmoid)
    tiny = TINY if sigmoid else 0.0
    grad_weights_Nk = grad_weights_S[routing.slots_Nk.long()].to(wide_NE.dtype)
    experts_Nk = routing.experts_Nk.long()
    if normalise:
        chosen_Nk = scores_NE.gather(1, experts_Nk)
        total_N1 = chosen_Nk.sum(dim=-1, keepdim=True) + tiny
        mean_N1 = (grad_weights_Nk * chosen_Nk).sum(dim=-1, keepdim=True) / total_N1
        grad_weights_Nk = (grad_weights_Nk - mean_N1) / total_N1
    grad_scores_NE = torch.zeros_like(scores_NE).scatter(1, experts_Nk, grad_weights_Nk)
    E = logits_NE.shape[1]
    grad_sums_E = None if grad_statistics_R is None else grad_statistics_R[E : 2 * E]
    if sigmoid:
        if grad_sums_E is not None:
            total_N1 = scores_NE.sum(dim=-1, keepdim=True) + tiny
            mean_N1 = (grad_sums_E * probabilities_NE).sum(dim=-1, keepdim=True)
            grad_scores_NE = grad_scores_NE + (grad_sums_E - mean_N1) / total_N1
        grad_NE = grad_scores_NE * scores_NE * (1 - scores_NE)
    else:
        if grad_sums_E is not None:
            grad_scores_NE = grad_scores_NE + grad_sums_E
        mean_N1 = (grad_scores_NE * probabilities_NE).sum(dim=-1, keepdim=True)
        grad_NE = probabilities_NE * (grad_scores_NE - mean_N1)
    if grad_statistics_R is not None:
        lse_N1 = torch.logsumexp(wide_NE, dim=-1, keepdim=True)
        grad_NE = grad_NE + 2 * grad_statistics_R[-1] * lse_N1 * torch.softmax(wide_NE, dim=-1)
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


def gathered_gated(x_ND: Tensor, weight: Tensor, routing: Routing, activation: str, has_gate: bool) -> Tensor:
    """Return the hidden values of all experts, (S, F): `dispatch`, `grouped_matmul` and `weighted_gated`.

    weight: (E, 2F, D), gate and up, or (E, F, D) without `has_gate`.
    """
    inner = grouped_matmul(dispatch(x_ND, routing.tokens_S), weight, routing.ends_E, True)
    return weighted_gated(inner, routing.weights_S, activation, has_gate)


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
