"""Bits per byte by position: whether a model predicts better with more context (Kaplan et al., arXiv 2001.08361).

The target at position p is predicted from p + 1 tokens: those of its row, or of its document if attention is masked
between documents. A model that uses long context has lower bits per byte at later positions. If they rise beyond some
position, attention or the rotary frequencies do not reach that far.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FIRST_EDGE = 1024  # the buckets end at 1024, 2048, 4096, ... and at the length of the rows


@dataclass(frozen=True)
class PositionBucket:
    """The tokens of text at positions start to stop - 1.

    nats: sum of -ln p. bytes: their bytes of text, 0 if the bytes of the tokenizer's tokens are unknown.
    """

    start: int
    stop: int
    nats: float
    bytes: int
    tokens: int

    @property
    def bpb(self) -> float | None:
        """Bits per byte, None if the bytes are unknown."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    def as_dict(self) -> dict[str, Any]:
        """Return the bucket for JSON. loss: nats per token."""
        return {
            "start": self.start,
            "stop": self.stop,
            "bpb": self.bpb,
            "loss": self.nats / self.tokens,
            "tokens": self.tokens,
        }


class PositionSums:
    """Sums over the text tokens of each bucket. totals_K3: (nats, bytes, tokens) of K buckets, float64 on the CPU."""

    def __init__(self, length: int) -> None:
        """length: tokens per row."""
        edges = [FIRST_EDGE << n for n in range(length.bit_length()) if FIRST_EDGE << n < length]
        self._edges = [0, *edges, length]
        self.totals_K3 = torch.zeros(len(edges) + 1, 3, dtype=torch.float64)

    def add(self, losses_BT: Tensor, bytes_BT: Tensor, text_BT: Tensor, positions_BT: Tensor | None) -> None:
        """Add a batch. text_BT: bool, the targets that are text. positions_BT: None is 0..T-1 in each row."""
        if positions_BT is None:
            positions_BT = torch.arange(losses_BT.shape[1], device=losses_BT.device).expand_as(losses_BT)
        sums = []
        for start, stop in zip(self._edges, self._edges[1:], strict=False):
            chosen_BT = text_BT & (positions_BT >= start) & (positions_BT < stop)
            parts = (losses_BT * chosen_BT, bytes_BT * chosen_BT, chosen_BT)
            sums.append(torch.stack([part.double().sum() for part in parts]))
        self.totals_K3 += torch.stack(sums).cpu()

    def buckets(self) -> tuple[PositionBucket, ...]:
        """Return the buckets that have tokens."""
        ranges = zip(self._edges, self._edges[1:], self.totals_K3.tolist(), strict=False)
        return tuple(
            PositionBucket(start, stop, nats, int(num_bytes), int(tokens))
            for start, stop, (nats, num_bytes, tokens) in ranges
            if tokens
        )
