"""Average of a model's weights over the steps of a run (`config/average.py`).

Both averages have the same update, a <- a + w (x - a), and differ in its weight w. It is 1 for the first update; then

    tail    w = 1 / (number of updates so far + 1)             the mean of all x (SWA, arXiv 1803.05407)
    ema     w = 1 - 0.5^(progress since the last / half-life)   the window is a share of the run, not a number of steps

The average is in float32 even if the weights are in bfloat16. With bfloat16's 8 significant bits, x - a would have to
exceed a / 256 / w to change it: with w = 0.001, an average in bfloat16 would hardly move. Of weights in 24 bits, the
bfloat16 part is averaged. The average costs 4 bytes per weight, on the GPU or in host memory, and an update moves 12
bytes per weight (or 4 up and 4 down over the bus).

Replicas hold the same weights, so each computes the same average. With sharded weights, each process averages its
shard.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deskside.config.average import AverageConfig
from deskside.optim.offload import OffloadJob, Streamer, host_zeros, pieces
from deskside.optim.sharded import local
from deskside.utils.errors import RunError

OPTION = "average.offload"


class WeightAverage:
    """The average of `weights`, the trained parameters by name. The memory is allocated here.

    Attributes:
        tensors: The average by name. Call `wait` before the host reads it.
        updates: Number of updates. Before the first one there is no average.
        blend: Share of the average in `tensors`, after `blend_in` has mixed the weights of the last step into them.
        by_blend: The validation loss of each blend that was tried at the end, None if it is not finite, with the
            average's share as "blend".
    """

    def __init__(self, weights: Mapping[str, Tensor], config: AverageConfig, device: torch.device):
        self.weights, self.config = weights, config
        self.updates, self.blend = 0, 1.0
        self.by_blend: list[dict[str, Any]] = []
        self._progress = 0.0  # at the last update
        self._streamer = Streamer(device) if config.offload else None
        self.tensors: dict[str, Tensor] = {
            name: host_zeros(weight.shape, torch.float32, device, OPTION)
            if config.offload
            else torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
            for name, weight in weights.items()
        }

    def due(self, step: int, progress: float) -> bool:
        """Return True if the average is updated after step number `step`. progress: as in `update`."""
        return progress >= self.config.start and step % self.config.every == 0

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Average the current weights in. Does not wait for the device.

        progress: the completed share of the run when the step began. (When it ends, a revision of the plan can still
        change the share, and a resumed run repeats steps with the revised plan.)
        """
        weight = self._weight(progress)
        self.updates, self._progress = self.updates + 1, progress
        pairs = [(local(self.tensors[name]), local(x)) for name, x in self.weights.items()]
        if self._streamer is not None:
            self._streamer.run([job for average, x in pairs for job in _jobs(average, x, weight)])
            return
        same = [(average, x) for average, x in pairs if x.dtype == average.dtype and x.numel()]
        if same:
            torch._foreach_lerp_([average for average, _ in same], [x for _, x in same], weight)
        for average, x in pairs:
            if x.dtype != average.dtype:
                average.lerp_(x.to(average.dtype), weight)

    def _weight(self, progress: float) -> float:
        """Return the weight of the next update."""
        if not self.updates:
            return 1.0
        if self.config.name == "tail":
            return 1 / (self.updates + 1)
        return float(1 - 0.5 ** ((progress - self._progress) / self.config.half_life))

    def wait(self) -> None:
        """Wait until the average in host memory is complete."""
        if self._streamer is not None:
            self._streamer.wait()

    @contextlib.contextmanager
    def applied(self, blend: float, on_device: bool) -> Iterator[None]:
        """Context manager in which the model has `blend` parts of the average and 1 - blend of its own weights.

        The model's weights are restored exactly. on_device: keep them on the GPU meanwhile, else in host memory.
        """
        self.wait()
        kept: dict[str, Tensor] = {}
        try:
            with torch.no_grad():
                for name, weight in self.weights.items():
                    x = local(weight)
                    kept[name] = x.clone() if on_device else x.to("cpu", copy=True)
                    x.copy_(self._blended(name, blend))
            yield
        finally:
            with torch.no_grad():
                for name, x in kept.items():
                    local(self.weights[name]).copy_(x)

    @torch.no_grad()
    def blend_in(self, blend: float) -> None:
        """Replace the average by its blend with the weights of the last step. The run ends with it."""
        self.wait()
        for name, average in self.tensors.items():
            local(average).copy_(self._blended(name, blend))
        self.blend = blend

    def _blended(self, name: str, blend: float) -> Tensor:
        average, x = local(self.tensors[name]), local(self.weights[name])
        if blend == 1:
            return average
        return x.to(average.dtype).lerp(average.to(x.device), blend)

    def state(self) -> dict[str, Any]:
        """Return the JSON data that a checkpoint needs in addition to `tensors`."""
        return {
            "updates": self.updates,
            "progress": self._progress,
            "blend": self.blend,
            "by_blend": self.by_blend,
        }

    def summary(self) -> dict[str, Any]:
        """Return the entry of summary.json: what was averaged, and the validation loss of each blend."""
        return {
            "name": self.config.name,
            "updates": self.updates,
            "blend": self.blend,
            "by_blend": self.by_blend,
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's average. Raises RunError if it is of another model."""
        self.wait()
        if tensors.keys() != self.tensors.keys():
            raise RunError(
                f"the average of the weights has other names than the weights, such as "
                f"'{min(tensors.keys() ^ self.tensors.keys())}'; is it of another model?"
            )
        for name, average in self.tensors.items():
            if tensors[name] is not average:
                average.copy_(tensors[name])
        self.updates, self._progress = state["updates"], state["progress"]
        self.blend, self.by_blend = state["blend"], state["by_blend"]

    @torch.no_grad()
    def clear(self) -> None:
        """Forget the average: the run went back to a step before the first update."""
        self.wait()
        for average in self.tensors.values():
            local(average).zero_()  # the first update multiplies it by 0, and 0 times NaN is NaN
        self.updates, self._progress, self.blend, self.by_blend = 0, 0.0, 1.0, []


def _jobs(average: Tensor, x: Tensor, weight: float) -> Iterator[OffloadJob]:
    """Yield the update of an average in host memory by the weights x, piece by piece."""
    flat_average, flat_x = average.view(-1), x.view(-1)

    def update(part: slice, on_device: Sequence[Tensor]) -> None:
        on_device[0].lerp_(flat_x[part].to(on_device[0].dtype), weight)

    for part in pieces(flat_x.numel()):
        yield OffloadJob([flat_average[part]], partial(update, part))
