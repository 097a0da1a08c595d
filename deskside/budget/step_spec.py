"""What one optimiser step does, apart from the model's shape: everything that its memory and its time depend on."""

from dataclasses import dataclass
from typing import Literal

from deskside.budget.formats import ALL_NATIVE, LowKind, Precision

Checkpointing = Literal["none", "attention", "mlp", "block"]
OptimizerName = Literal["muon", "adamw"]
CopiesKept = Literal["pass", "step", "use"]
StateFormat = Literal["float32", "bfloat16", "8bit"]


@dataclass(frozen=True)
class AdapterSpec:
    """What trains beside frozen weights: rank of the adapters, the projections that have one, format of the weights."""

    rank: int
    targets: tuple[str, ...]
    base: Literal["bf16", "int8", "nf4"]


@dataclass(frozen=True)
class StepSpec:
    """One optimiser step. Raises ValueError for sizes that do not divide.

    tokens: of the step, over all GPUs; micro_tokens: of one forward pass on one GPU; sharded: weights, gradients and
    optimizer states are spread over the GPUs (FSDP), else every GPU holds them; loss_chunk_tokens: tokens whose logits
    exist at one time; native: formats below 16 bits that the tensor cores run, the others are emulated; kept_blocks:
    that stay in BF16 when precision is quantised; kept_weights: share of the other blocks' weights that does so
    too, where single projections are kept (what they read and write goes by their weights); fp8_head: the head's
    products are in FP8; copies: how long BF16 copies of weights are kept, "pass": from forward to backward
    (autograd), "step": from pass to pass (the cache, as formats below 16 bits always have it), "use": not at all;
    states: format of the optimizer states; offload_optimizer: they lie on the host and are streamed through the GPU
    at each step; adapter: only adapters train, beside weights that are frozen.
    """

    sequence_length: int
    tokens: int
    micro_tokens: int
    gpus: int = 1
    sharded: bool = False
    optimizer: OptimizerName = "muon"
    precision: Precision = "bf16"
    native: frozenset[LowKind] = ALL_NATIVE
    kept_blocks: int = 0
    kept_weights: float = 0.0
    fp8_head: bool = False
    copies: CopiesKept = "pass"
    activation_checkpointing: Checkpointing = "none"
    compiled: bool = True
    loss_chunk_tokens: int = 8192
    states: StateFormat = "float32"
    offload_optimizer: bool = False
    adapter: AdapterSpec | None = None

    def __post_init__(self) -> None:
        for name in ("sequence_length", "tokens", "micro_tokens", "gpus", "loss_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.micro_tokens % self.sequence_length:
            raise ValueError(
                f"micro_tokens: {self.micro_tokens} is no multiple of the sequence length {self.sequence_length}"
            )
        if self.tokens % (self.micro_tokens * self.gpus):
            raise ValueError(
                f"tokens: {self.tokens} is no multiple of {self.gpus} x {self.micro_tokens} micro-batch tokens"
            )

    def quantized_share(self, layers: int) -> float:
        """Of the weights of all blocks, those that are not kept in BF16 when precision is quantised."""
        return (1 - self.kept_blocks / layers) * (1 - self.kept_weights)

    @property
    def fused(self) -> bool:
        """Whether the hand-written halves compute the blocks: they alone convert weights for themselves."""
        return self.copies != "pass"

    @property
    def rows(self) -> int:
        """Rows of one forward pass on one GPU."""
        return self.micro_tokens // self.sequence_length

    @property
    def accumulation(self) -> int:
        """Forward and backward passes per optimiser step on one GPU."""
        return self.tokens // (self.micro_tokens * self.gpus)
