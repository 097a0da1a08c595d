"""The losses of preferences: DPO and its variants on pairs of answers, and KTO on single answers with a label.

Pairs, from the log-probabilities of whole answers. The score s of an answer is log p - log ref, summed over its tokens;
h = s(chosen) - s(rejected). h' has means over tokens instead of sums:

    sigmoid       -log sigmoid(beta h)                      DPO, Rafailov et al. 2023, arXiv 2305.18290
      smoothed      -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), if a label is wrong with probability e
                    (conservative DPO, Mitchell 2023)
    robust        ((1 - e) (-log sigmoid(beta h)) - e (-log sigmoid(-beta h))) / (1 - 2 e): the loss whose mean over
                  labels that are wrong with probability e is DPO's (Chowdhury et al. 2024, arXiv 2403.00409)
    hinge         max(0, 1 - beta h)                        SLiC, Zhao et al. 2023, arXiv 2305.10425; and RSO, Liu et
                                                            al. 2023, arXiv 2309.06657
    ipo           (h' - 1/(2 beta))^2                       IPO, Azar et al. 2023, arXiv 2310.12036
    sigmoid_norm  -log sigmoid(beta h')                     so that long answers do not dominate

IPO uses token means, as in TRL, so its beta has a different scale from DPO's. Without a reference, s is log p:

    cpo           -log sigmoid(beta h)                      CPO, Xu et al. 2024, arXiv 2401.08417
    simpo         -log sigmoid(beta h' - gamma)             SimPO, Meng et al. 2024, arXiv 2405.14734
    orpo          -beta log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p), p the geometric mean of
                  the tokens' probabilities                 ORPO, Hong et al. 2024, arXiv 2403.07691

CPO and ORPO add the negative log-likelihood of the chosen answers (`dpo.py`); it keeps them likely where a reference
would.

KTO (Ethayarajh et al. 2024, arXiv 2402.01306): with z = KL(p || ref), the loss of an answer is
1 - sigmoid(beta (s - z)) if it is desirable, else 1 - sigmoid(beta (z - s)).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.config.align import DpoConfig, KtoConfig

TOKEN_MEANS = ("ipo", "sigmoid_norm", "simpo", "orpo")  # losses that average over the tokens of an answer


@dataclass(frozen=True)
class PairLosses:
    """Losses and implicit rewards of P pairs, each float32 (P,). A reward is beta times the score of an answer."""

    loss_P: Tensor
    chosen_reward_P: Tensor
    rejected_reward_P: Tensor


def pair_losses(
    logprobs_S: Tensor, reference_S: Tensor | None, tokens_S: Tensor, options: DpoConfig
) -> PairLosses:
    """Compute the loss and the implicit rewards of P pairs; answers 2p and 2p + 1 are chosen and rejected.

    logprobs_S, reference_S: summed log-probabilities of the answers under model and reference (None: without a
    reference). tokens_S: their lengths.
    """
    score_S = logprobs_S if reference_S is None else logprobs_S - reference_S
    mean_S = score_S / tokens_S.clamp(min=1)
    # As in TRL, the rewards of IPO and sigmoid_norm are sums.
    reward_S = mean_S if options.reference_free and options.loss in TOKEN_MEANS else score_S
    reward_S = options.beta * reward_S.detach()
    if options.loss in TOKEN_MEANS:
        score_S = mean_S
    if options.loss == "orpo":
        score_S = score_S - _log_one_minus_exp(score_S)
    return PairLosses(_loss_of_margin(score_S[0::2] - score_S[1::2], options), reward_S[0::2], reward_S[1::2])


def _loss_of_margin(h_P: Tensor, options: DpoConfig) -> Tensor:
    """Return the losses (P,) of pairs whose scores differ by h_P, as in the module docstring."""
    beta, smoothing = options.beta, options.label_smoothing
    if options.loss == "ipo":
        return (h_P - 1 / (2 * beta)).square()
    if options.loss == "hinge":
        return F.relu(1 - beta * h_P)
    if options.loss == "orpo":
        return -beta * F.logsigmoid(h_P)
    margin_P = beta * h_P - (options.gamma if options.loss == "simpo" else 0.0)
    loss_P, swapped_loss_P = -F.logsigmoid(margin_P), -F.logsigmoid(-margin_P)
    if options.loss == "robust":
        return ((1 - smoothing) * loss_P - smoothing * swapped_loss_P) / (1 - 2 * smoothing)
    return (1 - smoothing) * loss_P + smoothing * swapped_loss_P


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0. An x that rounds to 0 counts as -1e-7, where the result is finite."""
    return torch.log(-torch.expm1(x.clamp(max=-1e-7)))


def kl_estimate(log_ratio_sum: Tensor, count: float) -> Tensor:
    """Return the estimate of KL(p || ref) that KTO uses, a scalar, at least 0.

    log_ratio_sum: log p - log ref, summed over `count` answers, each after the question of another answer.
    """
    return (log_ratio_sum / count).clamp(min=0)


@dataclass(frozen=True)
class LabelledLosses:
    """Losses and implicit rewards of S labelled answers, each float32 (S,). A reward is beta (log p - log ref)."""

    loss_S: Tensor
    reward_S: Tensor


def labelled_losses(
    logprobs_S: Tensor, reference_S: Tensor, desirable_S: Tensor, kl: Tensor, options: KtoConfig
) -> LabelledLosses:
    """Compute the KTO losses and the implicit rewards of S answers.

    logprobs_S, reference_S: summed log-probabilities of the answers under model and reference. desirable_S: bool, their
    labels. kl: scalar without gradient, the estimate of KL(p || ref).
    """
    score_S = logprobs_S - reference_S
    margin_S = torch.where(desirable_S, score_S - kl, kl - score_S)
    loss_S = torch.sigmoid(-options.beta * margin_S)
    weight_S = torch.where(desirable_S, options.desirable_weight, options.undesirable_weight)
    return LabelledLosses(weight_S * loss_S, options.beta * score_S.detach())
