"""Memory and traffic of rows that GPUs share (`parallel.context`): gathered keys and values, and their gradients.

See kernels/attention/gathered.py. Everything else of a step follows from the tokens of one GPU, because all parts of a
row are equal work.
"""

from deskside.budget.sizes import Sizes


def gathered_bytes(s: Sizes) -> float:
    """Return the bytes that one layer's backward adds on a GPU.

    They hold the keys and values of the whole rows of a pass, the parts as they arrive, and the gradients.
    """
    return 0.0 if s.spec.context == 1 else 3 * s.spec.context * _own_bytes(s)


def exchanged_bytes(s: Sizes) -> float:
    """Return the bytes that a GPU receives per step: in each layer and pass, c - 1 times its own keys and values.

    They are gathered in the forward and again in the backward, which returns as many bytes of gradients, and once more
    where attention is recomputed. Nothing else runs meanwhile, so all of this time is exposed.
    """
    times = 4 if s.spec.activation_checkpointing in ("attention", "block") else 3
    return times * (s.spec.context - 1) * _own_bytes(s) * s.layers * s.passes


def _own_bytes(s: Sizes) -> float:
    """Return the bytes of a layer's keys and values for the tokens of a pass on one GPU."""
    return 2 * (4 if s.spec.precision == "fp32" else 2) * s.pass_tokens * s.keys
