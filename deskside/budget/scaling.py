"""Scaling of learning rate, weight decay and batch with the model's size and the run's length.

Every optimizer setting in `config/optim.py` holds at a reference point. From there:

- learning rate of everything ~ sqrt(batch / reference batch): gradient noise falls with the root of the batch, and
  Adam's and Muon's updates do not grow with the gradient (Malladi et al., arXiv 2205.10287).
- learning rate of AdamW's parameters also ~ (hidden size / reference)^-0.5, between the classical and the maximal
  update parametrization; Muon's orthogonal updates need no such factor (Jordan et al. 2024).
- weight decay ~ sqrt(batch / reference) x (reference tokens / tokens). Together with the first rule this keeps
  learning rate x decay x steps constant: weights forget over a fixed share of the run, whatever its length
  (Wang and Aitchison, arXiv 2405.13698; Bergsma et al., arXiv 2505.13738).
- the best batch ~ tokens^0.383, whatever the model's size: the exponent is Bergsma et al.'s (arXiv 2505.13738), the
  reference is ours: of 65,536, 131,072 and 262,144 tokens per step the smallest was best after 82 million tokens
  (1.206, 1.215 and 1.249 bits per byte, 124m with Muon on an H200, docs/log.md). Smaller ones were not tried, so the
  rule may still be too high. nanochat's reference, 2^19 tokens at 1.2 billion, gives about three times as much.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Reference:
    """Reference point at which an optimizer's defaults hold: hidden size, tokens per step, tokens of the run."""

    hidden_size: int
    batch_tokens: int
    total_tokens: int


REFERENCES = {
    "muon": Reference(
        768, 2**19, 1_200_000_000
    ),  # 12 layers of 768, 12 tokens per matrix weight and head weight
    "adamw": Reference(768, 2**17, 168_000_000),  # the AdamW row of our first 300 s measurement on an H200
}
BATCH_EXPONENT = 0.383
BATCH_REFERENCE = (82_000_000, 2**16)  # tokens of the run, best tokens per step


@dataclass(frozen=True)
class Scaling:
    """Factors on the configured values. `embedding_lr` is for everything AdamW updates except vectors under Muon."""

    lr: float
    embedding_lr: float
    weight_decay: float


def scales(
    hidden_size: int, batch_tokens: int, total_tokens: int, optimizer: Literal["muon", "adamw"] = "muon"
) -> Scaling:
    """Return the factors for a run of `total_tokens` in steps of `batch_tokens`: all one at the optimizer's
    reference."""
    sizes = {"hidden_size": hidden_size, "batch_tokens": batch_tokens, "total_tokens": total_tokens}
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} must be above zero, not {value}")
    reference = REFERENCES[optimizer]
    batch = math.sqrt(batch_tokens / reference.batch_tokens)
    return Scaling(
        lr=batch,
        embedding_lr=batch * (hidden_size / reference.hidden_size) ** -0.5,
        weight_decay=batch * reference.total_tokens / total_tokens,
    )


def best_batch_tokens(total_tokens: int) -> int:
    """Return the best known tokens per step for a run of `total_tokens`: a power of two."""
    if total_tokens <= 0:
        raise ValueError(f"total_tokens must be above zero, not {total_tokens}")
    reference_tokens, reference_batch = BATCH_REFERENCE
    best = math.log2(reference_batch) + BATCH_EXPONENT * math.log2(total_tokens / reference_tokens)
    return int(2 ** max(round(best), 0))
