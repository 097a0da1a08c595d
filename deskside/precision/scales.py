"""Delayed scaling: a tensor's FP8 scale comes from the largest magnitudes of the last steps.

The scale is therefore known before the tensor, and the kernel that produces the tensor can write it in FP8 directly.
Each cast owns a slot. During a step it records its amax in the slot; `end_step` moves the amaxes into the history and
sets the next scales to format_max / max(history). A value beyond the expected amax saturates. Without a history, a
tensor's scale comes from the tensor itself. This lasts for two steps: projections that write to the residual stream
start at zero, so everything before them receives its first nonzero gradient in the second step. More of these steps,
or BF16 steps before them, make no measurable difference: docs/precision.md, "The start of delayed scales".
(Micikevicius et al. 2022, arXiv 2209.05433; the history of 16 and its maximum are transformer-engine's defaults.)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deskside.kernels.fused import Cast
from deskside.utils.errors import RunError

OWN_STEPS = 2  # steps in which every tensor has its own scale


class DelayedScales:
    """The slots of a model. `add` all of them first, then `build`."""

    def __init__(self, history: int):
        self._length = history
        self._dtypes: list[torch.dtype] = []
        self.steps = 0  # steps in the history

    def add(self, dtype: torch.dtype) -> int:
        """A new slot for casts to `dtype`; returns its number."""
        self._dtypes.append(dtype)
        return len(self._dtypes) - 1

    def build(self, device: torch.device) -> None:
        self.device = device
        slots = len(self._dtypes)
        limits = [float(torch.finfo(dtype).max) for dtype in self._dtypes]
        self._limit = torch.tensor(limits, device=device)
        self.history = torch.zeros(self._length, slots, device=device)
        # Four floats apart: cuBLAS needs scales aligned to 16 bytes, and Triton specializes on the alignment.
        self.amax = torch.zeros(slots, 4, device=device)[:, 0]
        self.scale = torch.ones(slots, 4, device=device)[:, 0]
        self.inverse = torch.ones(slots, 4, device=device)[:, 0]
        # Indexing costs time, so it is done once here and not in every cast.
        self._casts = [Cast(dtype, self.scale[i], self.amax[i]) for i, dtype in enumerate(self._dtypes)]
        self._inverses = [self.inverse[i] for i in range(slots)]

    @property
    def ready(self) -> bool:
        """True once enough steps are in the history for scales to be meaningful."""
        return self.steps >= OWN_STEPS

    def cast(self, slot: int) -> Cast:
        """The cast of a slot, with its present scale."""
        return self._casts[slot]

    def inverse_of(self, slot: int) -> Tensor:
        """Return the inverse scale of a slot. The tensor stays at its address when the scale changes."""
        return self._inverses[slot]

    def agree(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Take the amax over all processes; `largest` computes it in place. NaN becomes infinity, because a maximum
        over processes need not propagate NaN."""
        if self._dtypes:
            self.amax.copy_(largest(torch.where(self.amax.isnan(), float("inf"), self.amax)))

    def trouble(self) -> Tensor:
        """Return 0, or NaN if a cast of this step saw a non-finite value, which saturation hides."""
        return (self.amax * 0).sum() if len(self.amax) else self.amax.sum()

    def end_step(self, keep: bool = True) -> None:
        """Move this step's amaxes into the history, or discard them (`keep` is False)."""
        if keep and self._dtypes:
            torch.nan_to_num(self.amax, nan=0.0, posinf=0.0, out=self.history[self.steps % self._length])
            self.steps += 1
            self._set_scales()
        self.amax.zero_()

    def reset(self) -> None:
        """Reset the amax history."""
        self.steps = 0
        self.history.zero_()
        self.amax.zero_()

    def _set_scales(self) -> None:
        # These are a few hundred numbers, so only the number of launches matters.
        amax = self.history.amax(0)
        torch.div(self._limit, amax, out=self.scale)
        self.scale.masked_fill_(amax == 0, 1.0).clamp_(max=torch.finfo(torch.float32).max)
        torch.reciprocal(self.scale, out=self.inverse)

    def state_dict(self) -> dict[str, Tensor]:
        """The history and how many steps it has seen; nothing where there are no slots."""
        return {"history": self.history, "steps": torch.tensor(self.steps)} if self._dtypes else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises RunError for the state of another recipe or model."""
        if not self._dtypes and not state:
            return
        if state.keys() != {"history", "steps"} or state["history"].shape != self.history.shape:
            raise RunError(
                "the checkpoint holds the FP8 scales of another recipe or model; resume with its own"
            )
        self.history.copy_(state["history"])
        self.steps = int(state["steps"])
        self._set_scales()
