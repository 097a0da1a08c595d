"""Selective activation checkpointing, applied to the model from outside by wrapping the forward of its submodules.

Each level recomputes more in the backward pass and keeps less: nothing, the attention of every block, its MLP, or whole
blocks (Chen et al. 2016, arXiv 1604.06174). Fused sublayers recompute by themselves (`QuantizedModel.recompute`): their
state lives outside autograd's saved tensors, so `torch.utils.checkpoint` could not free it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(
    blocks: Iterable[Any], what: str, by_hand: Callable[[nn.Module], bool] = lambda half: False
) -> None:
    """Wrap the chosen part of every block: "none", "attention", "mlp" or "block".

    by_hand: whether a half has hand-written gradients in some steps. A block with such a half is wrapped half by half,
    and each is left alone while it has an execution of its own.
    """
    for block in blocks:
        halves = {"attention": block.attn, "mlp": block.mlp}
        chosen = [half for kind, half in halves.items() if what in (kind, "block")]
        if what == "block" and not any(by_hand(half) for half in chosen):
            chosen = [block]
        for part in chosen:
            _wrap(part)


def _wrap(module: Any) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if getattr(module, "execution", None) is not None:
            return original(*args, **kwargs)
        # preserve_rng_state is off because nothing in a block draws random numbers.
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = forward
