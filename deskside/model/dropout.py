"""Residual dropout, attached to a model from outside: on the embedding, and on what each sublayer adds to the residual.

These are `embd_pdrop` and `resid_pdrop` of transformers' GPT-2 (Srivastava et al. 2014; Radford et al. 2019). Attention
probabilities are not dropped: kernels of attention never write them.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from deskside.kernels.dropout import dropout
from deskside.model.block import Block
from deskside.model.transformer import Transformer


class ResidualDropout:
    """The dropout of all sublayers of a model and of its embedding. It drops nothing outside of `passing`.

    The masks are a function of the seed, the sublayer, the step and the token's number in the step, so checkpoints need
    not contain them (kernels/dropout.py).
    """

    def __init__(self, model: Transformer, rate: float, seed: int):
        places: list[torch.nn.Module] = [model]
        for block in model.layers:
            assert isinstance(block, Block)
            places += [block.attn, block.mlp]
        # A row per stream. It is a tensor, because torch.compile would recompile whenever a Python number changes.
        self.positions_S4 = torch.zeros(len(places), 4, dtype=torch.int64)
        self.positions_S4[:, 0] = seed
        self.positions_S4[:, 1] = torch.arange(len(places))
        self.positions_S4 = self.positions_S4.to(model.embed.weight.device)
        self.rate, self.active = rate, False
        for place, position in zip(places, self.positions_S4.unbind(), strict=True):
            place.dropout = partial(self._drop, position)  # type: ignore[assignment]

    def _drop(self, position: Tensor, x_BTD: Tensor) -> Tensor:
        return dropout(x_BTD, position, self.rate) if self.active else x_BTD

    def begin_step(self, step: int) -> None:
        """Begin step number `step`."""
        self.positions_S4[:, 2] = step

    @contextlib.contextmanager
    def passing(self, first_token: int) -> Iterator[None]:
        """Context manager for a forward and its backward. first_token: the number of its first token in the step."""
        self.positions_S4[:, 3] = first_token
        self.active = True
        try:
            yield
        finally:
            self.active = False
