"""Activation checkpointing as a ladder, applied to the model from outside.

Each rung recomputes more in the backward pass and keeps less: nothing, the attention half of every block, the MLP half,
or whole blocks (Chen et al. 2016, arXiv 1604.06174). The model is not changed; its submodules' forwards are wrapped.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(blocks: Iterable[nn.Module], what: str) -> None:
    """Wrap the chosen part of every block: "none", "attention", "mlp" or "block"."""
    for block in blocks:
        if what == "attention":
            _wrap(block.attn)
        elif what == "mlp":
            _wrap(block.mlp)
        elif what == "block":
            _wrap(block)


def _wrap(module: Any) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # preserve_rng_state is off because nothing in a block draws random numbers.
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = forward
