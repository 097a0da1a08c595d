"""Bytes of optimizer state by format, and how many of them are on the GPU when the state is offloaded to the host.

    bytes per weight     AdamW, two moments    Muon, one momentum
    float32                      8                     4
    bfloat16                     4                     2
    8bit                   2 + 8/256               1 + 4/256
    4bit                   1 + 8/128               1 + 4/256 (8 bits)

Vectors (norms, biases) keep float32 state on the GPU; `optim/adamw.py` explains why. BUFFERS and PIECE repeat the
constants of `optim/offload.py`; a test compares them.
"""

from dataclasses import dataclass

from deskside.budget.adapters import trained_params
from deskside.budget.replicas import update_shares
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import StateFormat

BUFFERS, PIECE = 3, 2**22  # streaming buffers on the GPU, and weights per buffer
# Bytes per weight.
ADAMW_STATE_BYTES: dict[StateFormat, float] = {
    "float32": 8,
    "bfloat16": 4,
    "8bit": 2 + 8 / 256,
    "4bit": 1 + 8 / 128,
}
MUON_STATE_BYTES: dict[StateFormat, float] = {
    "float32": 4,
    "bfloat16": 2,
    "8bit": 1 + 4 / 256,
    "4bit": 1 + 4 / 256,
}
EMA_BYTES = 4  # per trained weight: the moving average of EMA-Nesterov is in float32, on the GPU
AVERAGE_BYTES = 4  # per trained weight: the average of the weights is in float32
MASTER_BYTES = 4  # more per weight with float32 copies of weights in bfloat16, for AdamW
RESIDUAL_BYTES = 1  # more per weight in 24 bits: the part that bfloat16 cannot hold, always on the GPU


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one GPU's optimizer state of block matrices, tables (embeddings, head) and vectors (norms, biases).

    ema: the moving average of all weights for EMA-Nesterov. matrix_residuals, table_residuals: of weights in 24 bits.
    """

    matrices: float
    tables: float
    vectors: float
    max_bytes_per_weight: float
    ema: float = 0.0
    matrix_residuals: float = 0.0
    table_residuals: float = 0.0

    @property
    def total(self) -> float:
        return self.matrices + self.tables + self.on_gpu

    @property
    def on_gpu(self) -> float:
        """Bytes that stay on the GPU when the state is offloaded, without the streaming buffers."""
        return self.vectors + self.ema + self.matrix_residuals + self.table_residuals

    @property
    def streamed(self) -> float:
        """Bytes that travel to the host and back in each step when the state is offloaded."""
        return self.matrices + self.tables

    @property
    def buffers(self) -> float:
        """Bytes of the streaming buffers on the GPU."""
        return min(BUFFERS * PIECE * self.max_bytes_per_weight, BUFFERS * self.streamed)


def state_bytes(sizes: Sizes) -> StateBytes:
    """Return the optimizer state of one GPU. If adapters are trained, only they have state; they count as matrices."""
    spec = sizes.spec
    adamw = ADAMW_STATE_BYTES[spec.states] + (MASTER_BYTES if spec.master_weights else 0)
    if spec.adapter is not None:
        trained = sizes.leaf("parameters of the adapters", trained_params(sizes.shape, spec.adapter))
        return StateBytes(
            matrices=adamw * trained,
            tables=0.0,
            vectors=0.0,
            max_bytes_per_weight=adamw,
            ema=_ema_bytes(sizes),
        )
    residual = RESIDUAL_BYTES if spec.weights == "24bit" else 0
    per_matrix_weight = MUON_STATE_BYTES[spec.states] if spec.optimizer == "muon" else adamw
    return StateBytes(
        matrices=per_matrix_weight * sizes.block_weights / (sizes.shards * update_shares(spec)),
        tables=adamw * sizes.root_weights / sizes.shards,
        vectors=8 * sizes.leaf("weights of norms and biases", sizes.vectors) / sizes.shards,
        max_bytes_per_weight=sizes.leaf("bytes of a weight's state", max(per_matrix_weight, adamw)),
        ema=_ema_bytes(sizes),
        matrix_residuals=residual * sizes.block_weights / (sizes.shards * update_shares(spec)),
        table_residuals=residual * sizes.root_weights / sizes.shards,
    )


def _ema_bytes(sizes: Sizes) -> float:
    return EMA_BYTES * trained_weights(sizes) / sizes.shards if sizes.spec.ema_updates else 0.0


def gpu_state_bytes(sizes: Sizes) -> float:
    """Return the bytes of optimizer state on one GPU. Offloaded state counts only with its streaming buffers."""
    state = state_bytes(sizes)
    return state.on_gpu + state.buffers if sizes.spec.offload_optimizer else state.total


def average_bytes(sizes: Sizes) -> float:
    """Return the bytes of one GPU's average of the weights, wherever it is; 0 if there is none."""
    if sizes.spec.average == "none":
        return 0.0
    return AVERAGE_BYTES * trained_weights(sizes) / sizes.shards


def gpu_average_bytes(sizes: Sizes) -> float:
    """Return the bytes of the average on one GPU. An average in host memory counts only with its streaming buffers."""
    size = average_bytes(sizes)
    return min(BUFFERS * PIECE * AVERAGE_BYTES, BUFFERS * size) if sizes.spec.average == "host" else size


def trained_weights(sizes: Sizes) -> float:
    """Return the number of parameters that are trained."""
    if sizes.spec.adapter is None:
        return sizes.parameters
    return sizes.leaf("parameters of the adapters", trained_params(sizes.shape, sizes.spec.adapter))
