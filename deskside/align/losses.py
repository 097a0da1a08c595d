"""Losses on preference pairs, from the log-probabilities of whole answers.

h = (log p(chosen) - log ref(chosen)) - (log p(rejected) - log ref(rejected)), each summed over an answer's tokens:

    sigmoid       -log sigmoid(beta h)                      DPO, Rafailov et al. 2023, arXiv 2305.18290
      smoothed      with probability e a pair's label is wrong: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
                    (conservative DPO, Mitchell 2023)
    ipo           (h' - 1/(2 beta))^2, h' of token means    IPO, Azar et al. 2023, arXiv 2310.12036
    sigmoid_norm  -log sigmoid(beta h')                     so that long answers do not dominate

IPO uses means, as in its authors' results and in TRL, so its beta has another scale than DPO's.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

PairLoss = Literal["sigmoid", "ipo", "sigmoid_norm"]


@dataclass(frozen=True)
class PairScores:
    """Results of P pairs, each (P,) float32: the loss, and the implicit rewards beta (log p - log ref) of both
    answers.
    """

    loss_P: Tensor
    chosen_reward_P: Tensor
    rejected_reward_P: Tensor


def pair_scores(
    chosen_P: Tensor,
    rejected_P: Tensor,
    chosen_reference_P: Tensor,
    rejected_reference_P: Tensor,
    chosen_tokens_P: Tensor,
    rejected_tokens_P: Tensor,
    *,
    loss: PairLoss,
    beta: float,
    label_smoothing: float = 0.0,
) -> PairScores:
    """Compute the loss and the implicit rewards of P pairs.

    chosen_P ...: summed log-probabilities of the answers under model and reference. tokens: their lengths.
    """
    chosen_ratio_P, rejected_ratio_P = chosen_P - chosen_reference_P, rejected_P - rejected_reference_P
    rewards = beta * chosen_ratio_P.detach(), beta * rejected_ratio_P.detach()
    if loss != "sigmoid":
        chosen_ratio_P = chosen_ratio_P / chosen_tokens_P.clamp(min=1)
        rejected_ratio_P = rejected_ratio_P / rejected_tokens_P.clamp(min=1)
    h_P = chosen_ratio_P - rejected_ratio_P
    if loss == "ipo":
        return PairScores((h_P - 1 / (2 * beta)).square(), *rewards)
    right_P, wrong_P = -F.logsigmoid(beta * h_P), -F.logsigmoid(-beta * h_P)
    return PairScores((1 - label_smoothing) * right_P + label_smoothing * wrong_P, *rewards)
