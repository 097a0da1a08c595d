"""Speculative decoding: a small model drafts, the model checks all drafts at once, and the output is the model's own.

The draft model proposes d_1..d_n, each from its distribution q_i. One pass of the model over them gives its own p_i.
d_i is accepted with probability min(1, p_i(d_i) / q_i(d_i)); at the first refusal a token is drawn from what p has and
q lacks, max(0, p_i - q_i) renormalised; if all are accepted, one more comes from p_(n+1). Every token then has exactly
the distribution p (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). p and q are the
distributions after penalty, temperature and filters, so this holds for every setting; greedy is p and q of one token.

Both models keep keys and values for the same pages and lengths. What refused drafts have written lies beyond a row's
length, where nothing reads it.
"""

import torch
from torch import Tensor

from deskside.engine import counter_rng
from deskside.engine.sampling import (
    GREEDY_ONLY,
    NOT_FINITE,
    UNRANKED,
    Settings,
    candidates,
    gumbel_argmax,
    penalise,
    raw_logprobs,
)
from deskside.engine.steps import Forward, How, Output, Slots


def speculate(
    target: Forward,
    draft: Forward,
    slots: Slots,
    lanes_B: Tensor,
    bound: int,
    how: How,
    drafts: int,
) -> Output:
    """1 to `drafts` + 1 more tokens for each lane. `bound` includes them."""
    newest_B, lengths_B, count_B = slots.take(lanes_B)
    table_BN, settings = slots.table_SN[lanes_B], slots.settings[lanes_B]
    seen_BV, width = slots.seen_by(lanes_B, how), how.width
    B, n = len(newest_B), drafts

    fed, seen, q_of = [newest_B], [seen_BV], []
    for step in range(n + 1):  # the last draft is only read into the draft model's cache
        logits_BV = draft.decode(fed[step][:, None], table_BN, lengths_B + step, bound)[:, 0]
        if step == n:
            break
        q_BV = probabilities(logits_BV, settings, width, seen[step])
        fed.append(_drawn(q_BV, settings, count_B + step, counter_rng.PROPOSE))
        q_of.append(q_BV)
        seen.append(_with(seen[step], fed[-1]))

    fed_BT, T = torch.stack(fed, dim=1), n + 1
    logits_BTV = target.decode(fed_BT, table_BN, lengths_B, bound).float()
    each, flat_NV = settings.repeated(T), logits_BTV.flatten(0, 1)
    seen_NV = None if seen_BV is None else torch.stack([s for s in seen if s is not None], 1).flatten(0, 1)
    p_BTV = probabilities(flat_NV, each, width, seen_NV).unflatten(0, (B, T))
    q_BnV, d_Bn1 = torch.stack(q_of, dim=1), fed_BT[:, 1:, None]
    place_n = torch.arange(n, device=newest_B.device)
    u_Bn = counter_rng.uniforms(
        settings.stream_B.repeat_interleave(n), (count_B[:, None] + place_n).flatten(), counter_rng.ACCEPT
    ).view(B, n)
    p_Bn, q_Bn = p_BTV[:, :n].gather(2, d_Bn1)[..., 0], q_BnV.gather(2, d_Bn1)[..., 0]
    accepted_B = (u_Bn * q_Bn < p_Bn).long().cumprod(dim=1).sum(dim=1)

    row_B = torch.arange(B, device=newest_B.device)
    p_BV = p_BTV[row_B, accepted_B]
    q_BV = torch.where((accepted_B < n)[:, None], q_BnV[row_B, accepted_B.clamp(max=n - 1)], 0.0)
    left_BV = (p_BV - q_BV).clamp(min=0)
    left_BV = torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)  # nothing left but rounding
    last_B = _drawn(left_BV, settings, count_B + accepted_B, counter_rng.DRAW)
    # A draft is never accepted by a p that is NaN, so what NaN decides is the last token.
    told_B = torch.where(p_BV.sum(-1).isfinite(), last_B, NOT_FINITE)

    place_T = torch.arange(T, device=newest_B.device)
    drafted_BT = fed_BT.roll(-1, dims=1)
    token_BT = torch.where(place_T < accepted_B[:, None], drafted_BT, last_B[:, None])
    told_BT = torch.where(place_T < accepted_B[:, None], drafted_BT, told_B[:, None])
    slots.put(lanes_B, last_B, lengths_B + accepted_B + 1, count_B + accepted_B + 1)
    if how.penalised:
        real_BT = torch.where(place_T <= accepted_B[:, None], token_BT, last_B[:, None])
        slots.saw(lanes_B[:, None], real_BT)
    if not how.logprobs:
        return Output(told_BT, accepted_B + 1)
    sampled_BT = p_BTV.gather(2, token_BT[..., None])[..., 0].log()
    logprob_BT = raw_logprobs(flat_NV, each, token_BT.flatten()).view(B, T)
    return Output(told_BT, accepted_B + 1, logprob_BT, sampled_BT)


def probabilities(logits_BV: Tensor, settings: Settings, width: int, seen_BV: Tensor | None) -> Tensor:
    """Return the sampling distribution, (B, V) float32 in vocabulary order."""
    logits_BV = logits_BV.float()
    if seen_BV is not None:
        logits_BV = penalise(logits_BV, seen_BV, settings.penalty_B)
    log_p_BW, token_BW = candidates(logits_BV, settings, UNRANKED if width == GREEDY_ONLY else width)
    return torch.zeros_like(logits_BV).scatter(1, token_BW, log_p_BW.exp())


def _drawn(p_BV: Tensor, settings: Settings, count_B: Tensor, purpose: int) -> Tensor:
    token_BV = torch.arange(p_BV.shape[1], device=p_BV.device).expand_as(p_BV)
    return gumbel_argmax(p_BV.log(), settings.stream_B, count_B, purpose, token_BV)


def _with(seen_BV: Tensor | None, token_B: Tensor) -> Tensor | None:
    return None if seen_BV is None else seen_BV.scatter(1, token_B[:, None], True)
