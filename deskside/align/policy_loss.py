"""The loss of GRPO and its variants, from the log-probabilities of the tokens of sampled answers.

    GRPO     Shao et al. 2024, arXiv 2402.03300     DAPO     Yu et al. 2025, arXiv 2503.14476
    Dr.GRPO  Liu et al. 2025, arXiv 2503.20783      GSPO     Zheng et al. 2025, arXiv 2507.18071

With the ratio r = p(token) / p_sampled(token), the advantage A of the token's answer, and clipping to [1 - low, 1 +
high], the loss of a token is -min(r A, clip(r) A) + kl * k3. The variants are options:

    advantage  (reward - mean of the group) / its standard deviation, or without the division (Dr.GRPO: dividing favors
               questions that are nearly always or nearly never solved)
    ratio      per token, or the geometric mean over the answer (GSPO)
    clip_high  a value above clip_low lets unlikely tokens grow further (DAPO: 0.28 and 0.2)
    average    "sequence": mean over an answer's tokens, then over answers (GRPO)
               "token": mean over all tokens of the step (DAPO)
               "fixed": sum divided by the maximum answer length, then mean over answers (Dr.GRPO: no length bias)

k3 = exp(ref - p) - (ref - p) - 1 is a non-negative, unbiased estimate of KL(p || ref) for tokens sampled from p
(Schulman 2020, "Approximating KL divergence").
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.config.align import GrpoConfig

STD_EPSILON = 1e-4  # added to a group's standard deviation, as in TRL


def advantages(rewards_GS: Tensor, scale: bool) -> Tensor:
    """Convert the rewards of G groups of S answers to advantages (G, S), zero in groups with equal rewards.

    scale: divide by the group's sample standard deviation (S - 1). Raises ValueError for groups of one.
    """
    if rewards_GS.shape[1] < 2:
        raise ValueError("a group needs at least two answers")
    centred_GS = rewards_GS - rewards_GS.mean(1, keepdim=True)
    # The mean of equal numbers may differ from them by rounding.
    same_G1 = rewards_GS.amax(1, keepdim=True) == rewards_GS.amin(1, keepdim=True)
    centred_GS = centred_GS.masked_fill(same_G1, 0.0)
    return centred_GS / (rewards_GS.std(1, keepdim=True) + STD_EPSILON) if scale else centred_GS


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of a micro-batch of sampled answers.

    loss: a sum, to be divided by the step's number of answers, or of tokens if `average` is "token". clipped_SL: bool,
    tokens whose ratio is clipped, so that only k3 has a gradient. kl_SL: k3, zero without a reference.
    """

    loss: Tensor
    clipped_SL: Tensor
    kl_SL: Tensor


def policy_loss(
    logprobs_SL: Tensor,
    sampled_SL: Tensor,
    advantage_S: Tensor,
    mask_SL: Tensor,
    options: GrpoConfig,
    reference_SL: Tensor | None = None,
) -> PolicyLoss:
    """Return the loss of S answers of up to L tokens.

    Args:
        logprobs_SL: Log-probabilities of the model in training.
        sampled_SL: Log-probabilities of the weights that sampled the answers, at the same temperature.
        mask_SL: bool, the tokens that count in the loss.
        reference_SL: Log-probabilities of the reference, for options.kl > 0.
    """
    logprobs_SL = logprobs_SL.masked_fill(~mask_SL, 0.0)
    sampled_SL = sampled_SL.masked_fill(~mask_SL, 0.0)
    tokens_S1 = mask_SL.sum(1, keepdim=True).clamp(min=1)
    log_ratio_SL = logprobs_SL - sampled_SL
    if options.ratio == "sequence":
        log_ratio_SL = (log_ratio_SL.sum(1, keepdim=True) / tokens_S1).expand_as(log_ratio_SL)
    ratio_SL, advantage_S1 = log_ratio_SL.exp(), advantage_S[:, None]
    clipped_ratio_SL = ratio_SL.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss_SL = -torch.minimum(ratio_SL * advantage_S1, clipped_ratio_SL * advantage_S1)
    clipped_SL = ((ratio_SL < 1 - options.clip_low) & (advantage_S1 < 0)) | (
        (ratio_SL > 1 + options.clip_high) & (advantage_S1 > 0)
    )
    kl_SL = torch.zeros_like(loss_SL)
    if reference_SL is not None:
        reference_log_ratio_SL = reference_SL.masked_fill(~mask_SL, 0.0) - logprobs_SL
        kl_SL = reference_log_ratio_SL.exp() - reference_log_ratio_SL - 1
        if options.kl:
            loss_SL = loss_SL + options.kl * kl_SL
    weighted_SL = loss_SL * mask_SL
    if options.average == "sequence":
        weighted_SL = weighted_SL / tokens_S1
    elif options.average == "fixed":
        weighted_SL = weighted_SL / options.answer_tokens
    return PolicyLoss(weighted_SL.sum(), clipped_SL & mask_SL, kl_SL.detach() * mask_SL)
