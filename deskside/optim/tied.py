"""An embedding that equals the output head for the first part of a run, and is free after it.

modded-nanogpt (PR 178) ties both for two thirds of a run: the gradient of an embedding is sparse, and profits from that
of the head early on, but the best tables for reading and for writing differ later. As there, the model has both tables
from the start, so that it is saved and exported like any untied model. While they are tied, the head is updated by the
sum of both gradients, and its weights and moments are copied to the embedding. So untying needs no extra work, and a
resumed run needs no record of it. The copies take less than a thousandth of a usual step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from deskside.optim.groups import ParameterInfo
from deskside.optim.sharded import gradient_of
from deskside.utils.errors import UsageError


class TiedTables:
    """The embedding and the head of a model, tied until the progress `until`."""

    def __init__(self, parameters: list[ParameterInfo], until: float):
        self.until = until
        self.embedding, self.head = (
            next(info for info in parameters if info.role == role) for role in ("embedding", "head")
        )
        self.tied = True

    def set_progress(self, progress: float) -> None:
        """Tie or untie the tables for the next step."""
        self.tied = progress < self.until

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Move the embedding's gradient into that of the head, if they are tied. A second call does nothing."""
        if self.tied and self.embedding.parameter.grad is not None:
            gradient_of(self.head).add_(self.embedding.parameter.grad)
            self.embedding.parameter.grad = None

    @torch.no_grad()
    def copy(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the head's weights and moments to the embedding, if they are tied. state: by parameter and key."""
        if self.tied:
            self.embedding.parameter.copy_(self.head.parameter)
            for key, tensor in state[self.embedding.name].items():
                tensor.copy_(state[self.head.name][key])


@torch.no_grad()
def begin_tied(embedding: Tensor, head: Tensor, trained: bool) -> None:
    """Give the head the weights of the embedding, as in a tied model. Raises UsageError for trained weights."""
    if trained:
        raise UsageError("schedule.tied_until: is for runs from random weights; leave it or --init out")
    head.copy_(embedding)
