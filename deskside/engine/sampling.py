"""From logits to the next token.

Everything here is a pure function: randomness enters as one uniform number per row (`u_B`), so the same numbers give
the same tokens, whatever else stands in the batch. A draw inverts the cumulative distribution over the candidates in
falling order of probability.

The filters are applied one after another, each on what the one before left, renormalised:

    temperature  logits / temperature; 0 is greedy and ignores every filter
    top_k        the k most probable tokens
    top_p        the smallest set of most probable tokens that holds at least this probability
                 (nucleus sampling, Holtzman et al., 2020, arXiv:1904.09751)
    min_p        tokens with at least this share of the best token's probability
                 (Nguyen et al., 2024, arXiv:2407.01082)

Equal logits are ordered by token id, so top_k keeps exactly k.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deskside.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. None switches a filter off. Raises UsageError for values out of range."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-30 <= self.temperature < float("inf"):
            raise UsageError(
                f"temperature: {self.temperature} must be 0 (greedy) or more, from 1e-30; try 0.8"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k: {self.top_k} must be at least 1; leave it out to keep every token")
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not 0 < share <= 1:
                raise UsageError(
                    f"{name}: {share} must be above 0 and at most 1; leave it out to switch it off"
                )


GREEDY = Sampling(temperature=0.0)


def candidates(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn and their probabilities: (p_BV, token_BV), most probable first.

    Probabilities are float32 and sum to one in each row; a token that a filter removed has probability 0. Temperature 0
    leaves the whole probability on the best token.
    """
    logits_BV = logits_BV.float()
    if sampling.temperature > 0:
        # The largest logit is taken off first, so that a tiny temperature cannot overflow.
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature
    sorted_BV, token_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if sampling.temperature == 0:
        keep_BV[:, 1:] = False
    else:
        if sampling.top_k is not None:
            keep_BV[:, sampling.top_k :] = False
        if sampling.top_p is not None:
            p_BV = _probabilities(sorted_BV, keep_BV)
            # A token stays while the tokens before it hold less than top_p; the first always stays.
            before_BV = p_BV.double().cumsum(-1) - p_BV.double()
            keep_BV &= before_BV < sampling.top_p
        if sampling.min_p is not None:
            p_BV = _probabilities(sorted_BV, keep_BV)
            keep_BV &= p_BV >= sampling.min_p * p_BV[:, :1]
    return _probabilities(sorted_BV, keep_BV), token_BV


def choose(logits_BV: Tensor, sampling: Sampling, u_B: Tensor) -> Tensor:
    """The next token of each row, int64 token_B, from logits_BV and one uniform number in [0, 1) per row."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    p_BV, token_BV = candidates(logits_BV, sampling)
    cumulative_BV = p_BV.double().cumsum(-1)
    drawn_B1 = u_B.to(cumulative_BV)[:, None] * cumulative_BV[:, -1:]
    index_B1 = torch.searchsorted(cumulative_BV, drawn_B1, right=True)
    # Rounding could carry a draw past the last candidate, onto a removed token.
    last_B1 = (p_BV > 0).sum(-1, keepdim=True) - 1
    return token_BV.gather(-1, torch.minimum(index_B1, last_B1))[:, 0]


class Uniforms:
    """One stream of uniform numbers per row: row i depends only on (seed, i), not on the rows beside it."""

    def __init__(self, seed: int, rows: int) -> None:
        if seed < 0:
            raise UsageError(f"seed: {seed} must be 0 or more")
        self._streams = [np.random.default_rng((seed, row)) for row in range(rows)]

    def draw(self, rows: list[int]) -> Tensor:
        """The next number of each given row: u_B, float64, on the CPU."""
        return torch.tensor([self._streams[row].random() for row in rows], dtype=torch.float64)


def _probabilities(sorted_BV: Tensor, keep_BV: Tensor) -> Tensor:
    return sorted_BV.masked_fill(~keep_BV, -torch.inf).softmax(-1)
