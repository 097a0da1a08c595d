"""CUDA graphs of engine steps, and the sizes to which steps are padded so that few graphs cover all of them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UP = 2  # steps that run before a graph is captured
LANES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # numbers of lanes; multiples of 32 above
# Numbers of tokens in a prefill pass; multiples of the last one above. Padding is at most half of a pass, and a third
# from 256 tokens on, where it begins to cost time.
TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def bucket(lanes: int) -> int:
    """Return the number of lanes after padding."""
    return next((size for size in LANES if lanes <= size), -(-lanes // 32) * 32)


def token_bucket(tokens: int) -> int:
    """Return the number of tokens of a prefill pass after padding."""
    return next((size for size in TOKENS if tokens <= size), -(-tokens // TOKENS[-1]) * TOKENS[-1])


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: Tensor


class Graphs:
    """CUDA graphs of steps: the host launches one graph instead of a few hundred kernels.

    A graph is captured for each kind of step: each bucket of lanes or tokens with each `EngineStepOptions`. The first
    steps of a kind run without a graph, because kernels cannot be compiled during a capture. All graphs share one
    memory pool: they run one after the other, and each output is copied to the host before the next graph runs. The
    memory is released with this object.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, _Captured] = {}
        self._runs: dict[Hashable, int] = {}

    def run(self, kind: Hashable, inputs: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        """Return step(inputs), the packed output, from the graph of this kind if it is captured.

        `step` must be the same computation in every call of one kind. The next replay overwrites the output.
        """
        captured = self._captured.get(kind)
        if captured is None:
            runs = self._runs[kind] = self._runs.get(kind, 0) + 1
            if runs <= WARM_UP:
                return step(inputs)
            captured = self._captured[kind] = self._capture(inputs, step)
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.output

    def _capture(self, inputs: Tensor, step: Callable[[Tensor], Tensor]) -> _Captured:
        static_inputs = inputs.clone()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as a server's, may use the device during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step(static_inputs)
        return _Captured(graph, static_inputs, output)
