"""Bytes of optimiser state: by format, and what of it stays on the GPU when it lies in the host's memory.

    bytes per weight     AdamW, two moments    Muon, one momentum
    float32                      8                     4
    bfloat16                     4                     2
    8bit                   2 + 8/256                   2 (bfloat16)

Vectors (norms, biases) keep float32 state on the GPU: `optim/adamw.py` says why. The numbers of the streaming buffers
are those of `optim/offload.py`; a test holds them equal.
"""

from dataclasses import dataclass

from deskside.budget.adapters import adapter_params
from deskside.budget.shape import Shape, block_matrices, num_params, root_params
from deskside.budget.step_spec import StateFormat, StepSpec

BUFFERS, PIECE = 3, 2**22
ADAMW_STATE: dict[StateFormat, float] = {"float32": 8, "bfloat16": 4, "8bit": 2 + 8 / 256}
MUON_STATE: dict[StateFormat, float] = {"float32": 4, "bfloat16": 2, "8bit": 2}


@dataclass(frozen=True)
class StateBytes:
    """matrices: of block weights; tables: of embeddings and head; vectors: of everything else. Of one GPU."""

    matrices: float
    tables: float
    vectors: float
    largest_per_weight: float

    @property
    def total(self) -> float:
        return self.matrices + self.tables + self.vectors

    @property
    def streamed(self) -> float:
        """What travels up and down at each step when state is offloaded."""
        return self.matrices + self.tables

    @property
    def buffers(self) -> float:
        """What streaming holds on the GPU."""
        return min(BUFFERS * PIECE * self.largest_per_weight, BUFFERS * self.streamed)


def state_bytes(shape: Shape, spec: StepSpec) -> StateBytes:
    """Of one GPU's optimiser. Adapters are matrices, and all that trains."""
    if spec.adapter is not None:
        each = ADAMW_STATE[spec.states]
        return StateBytes(each * adapter_params(shape, spec.adapter), 0.0, 0.0, each)
    shards = spec.gpus if spec.sharded else 1
    matrices, tables = block_matrices(shape), root_params(shape)
    vectors = num_params(shape) - matrices - tables
    adamw = ADAMW_STATE[spec.states]
    per_matrix = MUON_STATE[spec.states] if spec.optimizer == "muon" else adamw
    return StateBytes(
        matrices * per_matrix / shards, tables * adamw / shards, 8 * vectors / shards, max(per_matrix, adamw)
    )


def on_gpu(shape: Shape, spec: StepSpec) -> float:
    """Bytes of optimiser state, or of the buffers in its place, that stay on one GPU."""
    state = state_bytes(shape, spec)
    return state.vectors + state.buffers if spec.offload_optimizer else state.total
