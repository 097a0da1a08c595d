"""Host-side state of a row, and of a step that is still running on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deskside.engine.pages import Key
from deskside.engine.requests import Request
from deskside.engine.sampling import Settings
from deskside.engine.text import TextStream


@dataclass(eq=False)
class RowState:
    """One sample of a request, from its submission to its end."""

    number: int  # of the request
    sample: int
    request: Request
    end: int  # tokens that it may have in all
    keys: list[Key]  # of the prompt's full pages
    stream: TextStream | None
    settings: Settings  # one row, on the host
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    done: int = 0  # tokens of the prompt that are in the cache, or queued to be
    learned: int = 0  # pages whose content is known to others
    tokens: list[int] = field(default_factory=list)
    flying: int = 0  # steps that are queued, and whose tokens the host has not seen
    ended: bool = False

    @property
    def prompted(self) -> bool:
        """True if the whole prompt is in the cache."""
        return self.done == len(self.request.prompt)

    @property
    def wants_more(self) -> bool:
        """True if another token is allowed even if every queued step yields as many as it can."""
        return len(self.request.prompt) + len(self.tokens) + self.flying < self.end


@dataclass
class PendingBatch:
    """A queued step: the rows whose tokens it brings, None for a lane that brings nothing, and where they arrive."""

    rows: Sequence[RowState | None]
    packed: Tensor  # see `steps.Output`, on the host
    logprobs: bool
    arrived: torch.cuda.Event | None
