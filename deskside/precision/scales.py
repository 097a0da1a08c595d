"""Delayed scaling: a tensor's FP8 scale is computed from its largest magnitudes (amax) in the last steps.

The scale is known before the tensor, so the kernel that produces the tensor can write it in FP8 directly. Each cast has
a slot, in which it records its amax during a step. `end_step` moves these into the history and sets the next scales to
format_max / max(history). Values beyond the expected amax saturate.

In the first two steps, scales are computed from the tensors themselves (current scaling). It takes two steps because
projections that write to the residual stream start at zero, so everything before them receives its first nonzero
gradient in the second step. More such steps, or BF16 steps before them, make no measurable difference:
docs/precision.md, "Delayed scales at the start of training". (Micikevicius et al. 2022, arXiv 2209.05433;
transformer-engine takes the maximum of its history too, by default of 1024 steps.)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deskside.kernels.fused import Cast
from deskside.utils.errors import RunError

CURRENT_SCALING_STEPS = 2  # steps in which scales are computed from the tensors themselves


class DelayedScales:
    """Amax histories and scales of a model, with one slot per cast. Call `add_slot` for all casts, then `allocate`."""

    def __init__(self, history: int):
        self._length = history
        self._dtypes: list[torch.dtype] = []
        self.steps = 0  # recorded steps, of which the history has the last `_length`

    def add_slot(self, dtype: torch.dtype) -> int:
        """Add a slot for casts to `dtype` and return its number."""
        self._dtypes.append(dtype)
        return len(self._dtypes) - 1

    def allocate(self, device: torch.device) -> None:
        """Create the tensors of all slots."""
        self.device = device
        slots = len(self._dtypes)
        limits = [float(torch.finfo(dtype).max) for dtype in self._dtypes]
        self._limit = torch.tensor(limits, device=device)
        self.history = torch.zeros(self._length, slots, device=device)
        # Four floats per slot, because cuBLAS needs scales aligned to 16 bytes and Triton specializes on the alignment.
        self.amax = torch.zeros(slots, 4, device=device)[:, 0]
        self.scale = torch.ones(slots, 4, device=device)[:, 0]
        self.inverse = torch.ones(slots, 4, device=device)[:, 0]
        # Indexing costs time, so it is done once here and not in every cast.
        self._casts = [Cast(dtype, self.scale[i], self.amax[i]) for i, dtype in enumerate(self._dtypes)]
        self._inverses = [self.inverse[i] for i in range(slots)]

    @property
    def ready(self) -> bool:
        """True once enough steps are in the history for scales to be meaningful."""
        return self.steps >= CURRENT_SCALING_STEPS

    def cast(self, slot: int) -> Cast:
        """Return the cast of a slot, with its current scale."""
        return self._casts[slot]

    def inverse_of(self, slot: int) -> Tensor:
        """Return the inverse scale of a slot. The tensor stays at its address when the scale changes."""
        return self._inverses[slot]

    def all_reduce_amax(self, all_reduce_max: Callable[[Tensor], Tensor]) -> None:
        """Replace each amax by its maximum over all processes. NaN becomes infinity, because a maximum over processes
        may ignore NaN."""
        if self._dtypes:
            self.amax.copy_(all_reduce_max(torch.where(self.amax.isnan(), float("inf"), self.amax)))

    def zero_or_nan(self) -> Tensor:
        """Return 0, or NaN if a cast of this step saw a non-finite value (which saturation hides in its output)."""
        return (self.amax * 0).sum() if len(self.amax) else self.amax.sum()

    def end_step(self, keep: bool = True) -> None:
        """Move this step's amaxes into the history, or discard them if `keep` is False."""
        if keep and self._dtypes:
            torch.nan_to_num(self.amax, nan=0.0, posinf=0.0, out=self.history[self.steps % self._length])
            self.steps += 1
            self._set_scales()
        self.amax.zero_()

    def reset(self) -> None:
        """Clear the amax history, so that the next steps use current scaling."""
        self.steps = 0
        self.history.zero_()
        self.amax.zero_()

    def _set_scales(self) -> None:
        # There are only a few hundred numbers, so the time depends only on the number of kernel launches.
        amax = self.history.amax(0)
        torch.div(self._limit, amax, out=self.scale)
        self.scale.masked_fill_(amax == 0, 1.0).clamp_(max=torch.finfo(torch.float32).max)
        torch.reciprocal(self.scale, out=self.inverse)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the history and the number of recorded steps, or nothing if there are no slots."""
        return {"history": self.history, "steps": torch.tensor(self.steps)} if self._dtypes else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`. Raises RunError if its shapes are those of another recipe or model."""
        if not self._dtypes and not state:
            return
        if state.keys() != {"history", "steps"} or state["history"].shape != self.history.shape:
            raise RunError(
                "the checkpoint contains the FP8 scales of another recipe or model; resume with the recipe and model "
                "of the checkpoint"
            )
        self.history.copy_(state["history"])
        self.steps = int(state["steps"])
        self._set_scales()
