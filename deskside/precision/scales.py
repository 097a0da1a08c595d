"""Delayed scaling: a tensor's FP8 scale comes from the largest magnitudes of the last steps.

So it is known before the tensor is, and the kernel that produces the tensor can write it in FP8 at once. Each place
where a tensor is cast owns a slot. During a step every cast notes its largest magnitude in its slot; `end_step` moves
them into the history and sets the next scales. A value beyond what was expected saturates.
Before there is a history a tensor's scale is its own. That lasts for two steps: projections that write to the stream
begin as zero, so what lies before them has its first gradient in the second step.
More such steps, or BF16 ones before, change nothing that was seen: docs/precision.md, "The start of delayed scales".
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
        # Four numbers apart: cuBLAS wants a scale aligned to 16 bytes, and Triton compiles anew for one that is not.
        self.amax = torch.zeros(slots, 4, device=device)[:, 0]
        self.scale = torch.ones(slots, 4, device=device)[:, 0]
        self.inverse = torch.ones(slots, 4, device=device)[:, 0]
        # Each is taken out of its tensor once, and not in every cast.
        self._casts = [Cast(dtype, self.scale[i], self.amax[i]) for i, dtype in enumerate(self._dtypes)]
        self._inverses = [self.inverse[i] for i in range(slots)]

    @property
    def ready(self) -> bool:
        """Whether enough steps have been noted, so that scales mean something."""
        return self.steps >= OWN_STEPS

    def cast(self, slot: int) -> Cast:
        """The cast of a slot, with its present scale."""
        return self._casts[slot]

    def inverse_of(self, slot: int) -> Tensor:
        """What a slot's values are multiplied with, one number that stays where it is when its scale changes."""
        return self._inverses[slot]

    def agree(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Take the largest magnitudes of all processes; `largest` finds them in place. NaN becomes infinity, which a
        maximum keeps."""
        if self._dtypes:
            self.amax.copy_(largest(torch.where(self.amax.isnan(), float("inf"), self.amax)))

    def trouble(self) -> Tensor:
        """0, or NaN when a cast of this step saw a value that is not finite, which saturation hides."""
        return (self.amax * 0).sum() if len(self.amax) else self.amax.sum()

    def end_step(self, keep: bool = True) -> None:
        """Take this step's magnitudes into the history (`keep`), or forget them."""
        if keep and self._dtypes:
            torch.nan_to_num(self.amax, nan=0.0, posinf=0.0, out=self.history[self.steps % self._length])
            self.steps += 1
            self._set_scales()
        self.amax.zero_()

    def reset(self) -> None:
        """As after `build`."""
        self.steps = 0
        self.history.zero_()
        self.amax.zero_()

    def _set_scales(self) -> None:
        # All of it is a few hundred numbers: what counts is how many launches they take.
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
