"""Transfers of a step that nothing hides: between GPUs, and to and from host memory.

`budget/speed.py` computes those that overlap a forward or a backward, which take time only if they last longer.
"""

from deskside.budget.host_memory import host_gradient_bytes
from deskside.budget.operators.operator import Operator
from deskside.budget.replicas import exchange
from deskside.budget.shared_rows import exchanged_bytes
from deskside.budget.sizes import Sizes
from deskside.budget.states import state_bytes, trained_weights


def transfers(s: Sizes) -> list[Operator]:
    """Return the communication between GPUs, and the transfers to and from host memory."""
    operators, spec = [], s.spec
    weights = 4.0 * trained_weights(s)
    share = (s.gpus - 1) / s.gpus
    if spec.gpus > 1 and spec.sharded:
        # Every pass gathers the blocks twice (forward and backward) and the root (embedding, head) once. Gradients are
        # scattered in the last pass only.
        gathers = s.passes * (2 * weights - 4.0 * s.root_weights)
        operators.append(Operator("FSDP", "communication", (gathers + weights) * share))
        if spec.optimizer == "muon":
            operators.append(Operator("Muon, gathered", "communication", 2.0 * s.block_weights * share))
    elif spec.gpus > 1:
        exposed = exchange(s, trained_weights(s)).exposed
        operators.append(Operator("replicas, after the backward", "communication", exposed))
    if spec.context > 1:
        operators.append(Operator("keys and values of shared rows", "communication", exchanged_bytes(s)))
    if spec.gradients == "host":
        operators.append(Operator("gradients, up for the update", "offload", host_gradient_bytes(s)))
    # Beside the backward if each weight is updated there (`speed.exposed_seconds`).
    if spec.offload_optimizer and spec.gradients != "released":
        operators.append(
            Operator("optimizer states, up and down at once", "offload", state_bytes(s).streamed)
        )
    return operators
