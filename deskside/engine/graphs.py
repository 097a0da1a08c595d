"""CUDA graphs of a step: queued by the host in one call, instead of one call for each of its few hundred kernels.

A graph is captured for each number of lanes, rounded up to a bucket, and each way to draw. The first steps of a kind
run as they are written: that compiles the kernels, which a capture may not do. Graphs share one pool of memory, because
they run one after the other and what comes out of one is copied to the host before the next begins.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UP = 2  # steps of a kind that are not captured
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)

Step = Callable[[Tensor], Tensor]  # lanes -> packed output


def bucket(lanes: int) -> int:
    """The number of lanes that a step with so many rows is run for."""
    return next((size for size in BUCKETS if lanes <= size), -(-lanes // 32) * 32)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    lanes_B: Tensor
    output: Tensor


class Graphs:
    """Steps by their kind. Captured memory lives as long as this object."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, _Captured] = {}
        self._runs: dict[Hashable, int] = {}

    def run(self, kind: Hashable, lanes_B: Tensor, step: Step) -> Tensor:
        """`step(lanes)`, from its graph where there is one. `step` must do the same for every call of this kind."""
        captured = self._captured.get(kind)
        if captured is None:
            runs = self._runs[kind] = self._runs.get(kind, 0) + 1
            if runs <= WARM_UP:
                return step(lanes_B)
            captured = self._captured[kind] = self._capture(lanes_B, step)
        captured.lanes_B.copy_(lanes_B)
        captured.graph.replay()
        return captured.output

    def _capture(self, lanes_B: Tensor, step: Step) -> _Captured:
        mine_B = lanes_B.clone()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as a server's do.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step(mine_B)
        return _Captured(graph, mine_B, output)
