"""Bytes of page-locked host memory that a step needs, item by item: data that is kept there instead of on the GPU.

optimizer states    of matrices and tables, if they are offloaded
gradients           one sum per weight, in the weights' format, if gradients are in host memory
average             of the weights, if it is offloaded
activations         what recomputed blocks save in a pass, of all blocks but the last, if activations are offloaded

A checkpoint that is written while training continues also needs a copy of weights, optimizer states and average
(`checkpoint_bytes`): in one process, or a share in each process if weights are sharded.
"""

from collections.abc import Mapping

from deskside.budget.adapters import trained_params
from deskside.budget.replicas import update_shares
from deskside.budget.shape import Shape
from deskside.budget.sizes import Sizes
from deskside.budget.states import average_bytes, state_bytes
from deskside.budget.step_spec import StepSpec

HOST_SHARE = 0.9  # of the host's memory that may be page-locked; the process itself needs the rest


def host_memory(shape: Shape, spec: StepSpec) -> dict[str, int]:
    """Return the bytes of page-locked memory of one process, by item; only items that are not zero."""
    s = Sizes(shape, spec)
    items = {
        "optimizer states": state_bytes(s).streamed if spec.offload_optimizer else 0.0,
        "gradients": host_gradient_bytes(s) if spec.gradients == "host" else 0.0,
        "average": average_bytes(s) if spec.average == "host" else 0.0,
        "activations": offloaded_activation_bytes(s) if spec.activation_offloading else 0.0,
    }
    return {item: int(size) for item, size in items.items() if size}


def fits_host(items: Mapping[str, int], host_bytes: int | None) -> bool:
    """Return True if these items fit in the memory of a host, or if its size is unknown."""
    return host_bytes is None or sum(items.values()) <= HOST_SHARE * host_bytes


def checkpoint_bytes(shape: Shape, spec: StepSpec) -> int:
    """Return the bytes of a checkpoint's tensors in one process: trained weights, optimizer states and average."""
    s = Sizes(shape, spec)
    if spec.adapter is not None:
        weights: float = 4 * trained_params(shape, spec.adapter)
    else:
        weights = spec.weight_bytes * (s.block_weights + s.root_weights) + 4 * s.vectors
    states = state_bytes(s)
    own = states.matrices + states.matrix_residuals
    others = own * (update_shares(spec) - 1)  # of matrices that other replicas update
    return int(weights / s.shards + states.total + others + average_bytes(s))


def host_gradient_bytes(s: Sizes) -> float:
    """Return the bytes of all gradients but those of norms and biases, which stay on the GPU."""
    return s.spec.weight_bytes * (s.block_weights + s.root_weights)


def offloaded_activation_bytes(s: Sizes) -> float:
    """Return the bytes of one pass's activations that wait in host memory: what all blocks but the last save.

    Only for steps with `activation_offloading`.
    """
    width = 4 if s.spec.precision == "fp32" else 2
    return 2 * width * s.pass_tokens * s.hidden * (s.layers - 1)  # residual and delta
