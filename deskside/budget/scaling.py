"""Scaling of learning rate, weight decay and batch with the model's size and the run's length.

The optimizer settings in `config/optim.py` were tuned at a reference point. From there:

- learning rate of everything ~ sqrt(batch / reference batch): gradient noise falls with the root of the batch, and
  Adam's and Muon's updates do not grow with the gradient (Malladi et al., arXiv 2205.10287).
- learning rate of AdamW's parameters also ~ (hidden size / reference)^-0.5, between the classical and the maximal
  update parametrization; Muon's orthogonal updates need no such factor (Jordan et al. 2024).
- weight decay ~ sqrt(batch / reference) x (reference tokens / tokens). Together with the first rule this keeps
  learning rate x decay x steps constant: weights forget over a fixed share of the run, whatever its length
  (Wang and Aitchison, arXiv 2405.13698; Bergsma et al., arXiv 2505.13738).
- best batch ~ tokens of the run^0.383, independent of the model's size. The exponent is from Bergsma et al. (arXiv
  2505.13738), the reference is our own: of 65,536, 131,072 and 262,144 tokens per step, the smallest was best after 82
  million tokens (1.206, 1.215 and 1.249 bits per byte, 124m with Muon on an H200, docs/log.md). Smaller batches were
  not tried, so the rule may be too high. nanochat's reference, 2^19 tokens at 1.2 billion, gives three times as much.
- tokens for the same loss ~ 1 + batch / critical batch (McCandlish et al., arXiv 1812.06162), with critical batch ~
  tokens of the run^0.462 (Bergsma et al.). The three measurements above and the loss law of `budget/loss.py` give 0.9
  and 0.5 million tokens for the critical batch after 82 million tokens; the reference is their geometric mean.
- default batch of n GPUs ~ sqrt(n), for a run whose tokens are not known yet. In the same time, n GPUs train on n times
  the tokens, for which the best batch is n^0.383 times as large. Part of a step's time does not shrink with n (launches
  of kernels, sums of gradients), which favors larger batches. By the planner's model, `124m` for an hour on 2 to 8 RTX
  4090 then ends within 0.3 % of the lowest loss. The planner knows the tokens and takes the best batch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from deskside.budget.loss import USEFUL_EPOCHS


@dataclass(frozen=True)
class ReferencePoint:
    """The point at which the default settings of an optimizer hold."""

    hidden_size: int
    batch_tokens: int
    total_tokens: int


REFERENCES = {
    # 12 layers, 12 tokens per weight of the blocks and the head.
    "muon": ReferencePoint(hidden_size=768, batch_tokens=2**19, total_tokens=1_200_000_000),
    # The AdamW run of our first 300 s measurement on an H200.
    "adamw": ReferencePoint(hidden_size=768, batch_tokens=2**17, total_tokens=168_000_000),
}
BATCH_EXPONENT = 0.383
BATCH_REFERENCE = (82_000_000, 2**16)  # tokens of the run, best tokens per step
CRITICAL_BATCH_EXPONENT = 0.462
CRITICAL_BATCH_REFERENCE = (82_000_000, 670_000)  # tokens of the run, tokens per step
# Passes of fewer tokens wait for the host (docs/performance.md, "Small passes"): on an H200, 8,192 tokens of `124m` are
# computed in 12 ms and launched in 20.
MIN_TOKENS_PER_GPU = 2**14


@dataclass(frozen=True)
class Scaling:
    """Factors on the configured values.

    embedding_lr: for all parameters that AdamW updates, except norms and biases in a Muon run; lr: for all others.
    """

    lr: float
    embedding_lr: float
    weight_decay: float


def scales(
    hidden_size: int, batch_tokens: int, total_tokens: int, optimizer: Literal["muon", "adamw"] = "muon"
) -> Scaling:
    """Return the factors for a run of `total_tokens` in steps of `batch_tokens`. At the reference, all are 1."""
    sizes = {"hidden_size": hidden_size, "batch_tokens": batch_tokens, "total_tokens": total_tokens}
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} must be above zero, not {value}")
    reference = REFERENCES[optimizer]
    lr = lr_scale(batch_tokens, optimizer)
    return Scaling(
        lr=lr,
        embedding_lr=lr * (hidden_size / reference.hidden_size) ** -0.5,
        weight_decay=lr * reference.total_tokens / total_tokens,
    )


def lr_scale(batch_tokens: float, optimizer: Literal["muon", "adamw"]) -> float:
    """Return the factor of every learning rate in steps of `batch_tokens`."""
    return math.sqrt(batch_tokens / REFERENCES[optimizer].batch_tokens)


def decay_for_epochs(epochs: float, from_epochs: float | None) -> float:
    """Return the factor on the weight decay of a run of `epochs`.

    It is 1 up to `from_epochs`, then proportional to the epochs up to USEFUL_EPOCHS, then constant: no run with more
    was tuned, and with a decay of thousands of times the usual one a model learns nothing.
    """
    return 1.0 if from_epochs is None else max(1.0, min(epochs, USEFUL_EPOCHS) / from_epochs)


def best_batch_tokens(total_tokens: float) -> float:
    """Return the best known tokens per step for a run of `total_tokens`."""
    if total_tokens <= 0:
        raise ValueError(f"total_tokens must be above zero, not {total_tokens}")
    reference_tokens, reference_batch = BATCH_REFERENCE
    return reference_batch * (total_tokens / reference_tokens) ** BATCH_EXPONENT


def batch_token_factor(batch_tokens: float, total_tokens: float) -> float:
    """Return the tokens that a run needs in steps of `batch_tokens`, relative to the best batch, for the same loss.

    total_tokens: of the run. 1 for a batch below the best one: nothing smaller was measured.
    """
    reference_tokens, reference_batch = CRITICAL_BATCH_REFERENCE
    critical = reference_batch * (total_tokens / reference_tokens) ** CRITICAL_BATCH_EXPONENT
    best = 2 ** round(math.log2(best_batch_tokens(total_tokens)))  # the planner takes powers of two
    return max(1.0, (1 + batch_tokens / critical) / (1 + best / critical))


def default_batch_tokens(one_gpu: int, gpus: int) -> float:
    """Return the default tokens per step of several GPUs, from the default of one GPU."""
    return one_gpu * math.sqrt(gpus)


def batch_on_gpus(tokens: float, gpus: int, unit: int, most: float = math.inf) -> int:
    """Return about `tokens` tokens per step: on each GPU a power of two of `unit`, rounded up if in the middle.

    Each GPU has at least MIN_TOKENS_PER_GPU, unless `tokens` are fewer.

    Args:
        gpus: GPUs that read different rows.
        unit: Tokens that a GPU computes at once: of a row, or of a pass if that is set.
        most: Maximum tokens per step, unless one unit on each GPU is more.
    """
    each = max(tokens / gpus, min(tokens, MIN_TOKENS_PER_GPU))
    doublings = math.log2(max(1.0, min(each, most / gpus)) / unit)
    return gpus * unit * 2 ** max(0, math.floor(doublings + 0.5 + 1e-9))
