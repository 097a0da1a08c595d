"""Context parallelism: rows that are divided among processes, so that each holds a part of every row.

A row of T tokens is cut into 2 c chunks for c processes, and process r holds chunks r and 2 c - 1 - r. In causal
attention a late token sees more keys than an early one; together, an early and a late chunk are the same work on every
process. Only attention and the statistics of a router need tokens of other processes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextRanks:
    """The `size` processes that share rows, and the number of this one among them. group: their process group."""

    group: Any
    rank: int
    size: int

    def chunks(self, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (start, stop) of this process's two chunks in rows of `tokens`, a multiple of 2 c."""
        chunk = tokens // (2 * self.size)
        late = 2 * self.size - 1 - self.rank
        return (self.rank * chunk, (self.rank + 1) * chunk), (late * chunk, (late + 1) * chunk)

    def local(self, x_BT: Tensor) -> Tensor:
        """Return this process's tokens, (B, T / c), of whole rows (B, T)."""
        return torch.cat([x_BT[:, start:stop] for start, stop in self.chunks(x_BT.shape[1])], dim=1)

    def gather(self, x_BLKC: Tensor) -> Tensor:
        """Return the whole rows (B, T, K, C) from every process's part (B, T / c, K, C)."""
        parts = [torch.empty_like(x_BLKC, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x_BLKC.contiguous(), group=self.group)
        halves = [part.chunk(2, dim=1) for part in parts]
        return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim=1)

    def sum_parts(self, x_BTKC: Tensor) -> Tensor:
        """Return this process's part (B, T / c, K, C) of the sum over all processes of whole rows (B, T, K, C)."""
        chunks = x_BTKC.chunk(2 * self.size, dim=1)
        parts = [torch.cat((chunks[rank], chunks[-1 - rank]), dim=1) for rank in range(self.size)]
        result = torch.empty_like(parts[0])
        dist.reduce_scatter(result, parts, group=self.group)
        return result

    def sum_with_own_gradient(self, x: Tensor) -> Tensor:
        """Return the sum over all processes. Its gradient passes to this process's term unchanged.

        Every process computes the same function of the sum. The gradient of its term is then what it contributes to the
        parameters' gradients, which are summed over all processes at the end of a step.
        """
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total + (x - x.detach())
