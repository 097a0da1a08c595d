"""Speculative decoding: a small draft model proposes tokens, and the target model verifies them in one forward pass.

The draft model samples d_1..d_n from its distributions q_1..q_n. One forward pass of the target model yields
p_1..p_(n+1). d_i is accepted with probability min(1, p_i(d_i) / q_i(d_i)). At the first rejection, a token is sampled
from max(0, p_i - q_i), renormalized; if all are accepted, one more is sampled from p_(n+1). Every token then has
the target's exact distribution (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). p and q
are the distributions after adjustments, temperature and filters, so this holds for all settings; greedy distributions
are one-hot.

Both models have a KV cache with the same pages and lengths. The entries of rejected drafts lie beyond a row's length,
where they are never read.

A step with a row that has a grammar does not speculate: the tokens that the grammar allows after a draft are known only
when the draft is.
"""

import torch
from torch import Tensor

from deskside.engine import counter_rng
from deskside.engine.adjustments import Adjustments
from deskside.engine.sampling import (
    GREEDY_ONLY,
    UNRANKED,
    SamplingTensors,
    candidates,
    gumbel_argmax,
    ranked,
    raw_logprobs,
)
from deskside.engine.steps import CachedModel, EngineStepOptions, Slots, StepOutput
from deskside.kernels.decode_step import NOT_FINITE


def speculate(
    target: CachedModel,
    draft: CachedModel,
    slots: Slots,
    lanes_B: Tensor,
    bound: int,
    options: EngineStepOptions,
    num_drafts: int,
) -> StepOutput:
    """Generate 1 to `num_drafts` + 1 tokens for each lane. `bound`: maximum length of a row, including them."""
    newest_B, lengths_B, count_B = slots.read(lanes_B)
    table_BN, settings = slots.table_SN[lanes_B], slots.settings[lanes_B]
    first, width = slots.adjustments_of(lanes_B, options), options.width
    B, n = len(newest_B), num_drafts

    inputs, adjustments, draft_probs = [newest_B], [first], []  # by position
    for step in range(n + 1):
        logits_BV = draft.decode(inputs[step][:, None], table_BN, lengths_B + step, bound)[:, 0]
        if step == n:
            break  # this pass only wrote the last draft into the draft model's cache
        q_BV = probabilities(
            _adjusted(logits_BV, settings, adjustments[step], count_B + step), settings, width
        )
        inputs.append(_sample(q_BV, settings, count_B + step, counter_rng.PROPOSE))
        draft_probs.append(q_BV)
        adjusted = adjustments[step]
        adjustments.append(None if adjusted is None else adjusted.after(inputs[-1]))

    input_BT, T = torch.stack(inputs, dim=1), n + 1
    adapter_B = slots.adapters_of(lanes_B, options)
    target.choose(None if adapter_B is None else adapter_B.repeat_interleave(T))
    logits_BTV = target.decode(input_BT, table_BN, lengths_B, bound).float()
    settings_N, logits_NV = settings.repeated(T), logits_BTV.flatten(0, 1)
    place_T = torch.arange(T, device=newest_B.device)
    each = None if first is None else Adjustments.interleaved([a for a in adjustments if a is not None])
    adjusted_NV = _adjusted(logits_NV, settings_N, each, (count_B[:, None] + place_T).flatten())
    p_BTV = probabilities(adjusted_NV, settings_N, width).unflatten(0, (B, T))
    q_BnV, d_Bn1 = torch.stack(draft_probs, dim=1), input_BT[:, 1:, None]
    u_Bn = counter_rng.uniforms(
        settings.stream_B.repeat_interleave(n), (count_B[:, None] + place_T[:n]).flatten(), counter_rng.ACCEPT
    ).view(B, n)
    p_Bn, q_Bn = p_BTV[:, :n].gather(2, d_Bn1)[..., 0], q_BnV.gather(2, d_Bn1)[..., 0]
    accepted_B = (u_Bn * q_Bn < p_Bn).long().cumprod(dim=1).sum(dim=1)

    row_B = torch.arange(B, device=newest_B.device)
    p_BV = p_BTV[row_B, accepted_B]
    q_BV = torch.where((accepted_B < n)[:, None], q_BnV[row_B, accepted_B.clamp(max=n - 1)], 0.0)
    residual_BV = (p_BV - q_BV).clamp(min=0)
    # The residual can be zero only by rounding, if p equals q.
    residual_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, p_BV)
    last_B = _sample(residual_BV, settings, count_B + accepted_B, counter_rng.DRAW)
    # Where p is NaN no draft is accepted, so only the last token can come from a p that is not finite.
    output_last_B = torch.where(p_BV.sum(-1).isfinite(), last_B, NOT_FINITE)

    drafted_BT = input_BT.roll(-1, dims=1)
    token_BT = torch.where(place_T < accepted_B[:, None], drafted_BT, last_B[:, None])
    output_BT = torch.where(place_T < accepted_B[:, None], drafted_BT, output_last_B[:, None])
    slots.write(lanes_B, last_B, lengths_B + accepted_B + 1, count_B + accepted_B + 1)
    if options.adjusted:
        slots.count_tokens(lanes_B, token_BT, accepted_B + 1)
    if not options.logprobs:
        return StepOutput(output_BT, accepted_B + 1)
    sampled_BT = p_BTV.gather(2, token_BT[..., None])[..., 0].log()
    logprob_BT = raw_logprobs(logits_NV, settings_N, token_BT.flatten()[:, None]).view(B, T)
    if not options.top:
        return StepOutput(output_BT, accepted_B + 1, logprob_BT, sampled_BT)
    top_NK = ranked(logits_NV, options.top)
    top_logprob_NK = raw_logprobs(logits_NV, settings_N, top_NK)
    tops = top_NK.unflatten(0, (B, T)), top_logprob_NK.unflatten(0, (B, T))
    return StepOutput(output_BT, accepted_B + 1, logprob_BT, sampled_BT, *tops)


def probabilities(logits_BV: Tensor, settings: SamplingTensors, width: int) -> Tensor:
    """Return the sampling distribution of adjusted logits, (B, V) float32 in vocabulary order."""
    logits_BV = logits_BV.float()
    log_p_BW, token_BW = candidates(logits_BV, settings, UNRANKED if width == GREEDY_ONLY else width)
    return torch.zeros_like(logits_BV).scatter(1, token_BW, log_p_BW.exp())


def _adjusted(
    logits_BV: Tensor, settings: SamplingTensors, adjustments: Adjustments | None, length_B: Tensor
) -> Tensor:
    return logits_BV if adjustments is None else adjustments.apply(logits_BV, settings, length_B)


def _sample(p_BV: Tensor, settings: SamplingTensors, count_B: Tensor, purpose: int) -> Tensor:
    token_BV = torch.arange(p_BV.shape[1], device=p_BV.device).expand_as(p_BV)
    return gumbel_argmax(p_BV.log(), settings.stream_B, count_B, purpose, token_BV)
