"""Choice of the prompt parts that a step computes, and the tensor that holds them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.engine.requests import RowState


def choose_parts(unfinished: Sequence[RowState], budget: int) -> list[tuple[RowState, int]]:
    """Return the rows of the next prefill pass with their numbers of tokens, at most `budget` in all.

    unfinished: rows whose prompt is not complete in the cache, oldest first; at least one. The oldest row gets half of
    the budget, so a long prompt always makes progress. The rest goes to the others, least remaining tokens first, so
    short prompts do not wait for long ones. What they leave goes to the oldest row too.
    """
    oldest, *others = unfinished
    others.sort(key=lambda row: row.prompt_left)
    left = budget - sum(row.prompt_left for row in others)
    parts = [(oldest, min(oldest.prompt_left, max(left, -(-budget // 2))))]
    budget -= parts[0][1]
    for row in others:
        if budget == 0:
            break
        parts.append((row, min(row.prompt_left, budget)))
        budget -= parts[-1][1]
    return parts


@dataclass(frozen=True)
class PackedPrompts:
    """Parts of prompts, packed as in kernels/prefill.py. All are views of one int64 tensor, copied to the GPU at once.

    Attributes:
        lanes_L: The slot of each row; the dummy for padding, which has no tokens.
        complete_L: 1 if this is the last part of the prompt, else 0.
        cu_seqlens: (L + 1,).
        tokens_1N: The tokens of all rows, then padding.
    """

    lanes_L: Tensor
    complete_L: Tensor
    cu_seqlens: Tensor
    tokens_1N: Tensor

    @property
    def lanes_N(self) -> Tensor:
        """The slot of each token; of padding, that of the last row."""
        place_N = torch.arange(self.tokens_1N.shape[1], device=self.cu_seqlens.device)
        row_N = torch.searchsorted(self.cu_seqlens[1:].contiguous(), place_N, right=True)
        return self.lanes_L[row_N.clamp(max=len(self.lanes_L) - 1)]

    @staticmethod
    def of(packed: Tensor, lanes: int) -> "PackedPrompts":
        """Return the views of a tensor that `pack` returned, (3 L + 1 + N,)."""
        L = lanes
        return PackedPrompts(
            packed[:L], packed[L : 2 * L], packed[2 * L : 3 * L + 1], packed[None, 3 * L + 1 :]
        )


def pack(parts: Sequence[tuple[RowState, int]], lanes: int, tokens: int, dummy: int) -> Tensor:
    """Return the parts as one tensor on the host. See `PackedPrompts`.

    lanes, tokens: L and N after padding. dummy: the slot of lanes without a row. The rows' `prefilled` is that after
    this pass.
    """
    padding = lanes - len(parts)
    packed = array("q", [row.slot for row, _ in parts] + [dummy] * padding)
    packed.extend([int(row.prefill_done) for row, _ in parts] + [0] * padding)
    starts = [0]
    for _, count in parts:
        starts.append(starts[-1] + count)
    packed.extend(starts + starts[-1:] * padding)
    for row, count in parts:
        packed.extend(row.prompt_tokens[row.prefilled - count : row.prefilled])
    packed.frombytes(bytes(8 * (tokens - starts[-1])))
    return torch.frombuffer(packed, dtype=torch.int64)
