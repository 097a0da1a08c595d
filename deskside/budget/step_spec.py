"""Specification of an optimizer step: all that its memory and time depend on, except the model's shape."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from deskside.budget.format_costs import ALL_NATIVE, LowFormat, Precision

Checkpointing = Literal["none", "attention", "mlp", "block"]
OptimizerName = Literal["muon", "adamw"]
CopyLifetime = Literal["pass", "step", "use"]
StateFormat = Literal["float32", "bfloat16", "8bit", "4bit"]
QUANTIZED_STATES: tuple[StateFormat, ...] = ("8bit", "4bit")  # in blocks, each with a scale
WeightFormat = Literal["float32", "bfloat16", "24bit"]
GradientFormat = Literal["float32", "bfloat16"]
AveragePlace = Literal["none", "device", "host"]
GradientPlace = Literal["device", "host", "released"]
GraphMode = Literal["off", "on", "auto"]


@dataclass(frozen=True)
class AdapterSpec:
    """LoRA adapters: their rank, the adapted projections, and the format of the frozen base weights.

    dora: rows have trained magnitudes too. tables: those of "embed_tokens" and "lm_head" that train whole.
    """

    rank: int
    targets: tuple[str, ...]
    base: Literal["bf16", "int8", "nf4"]
    dora: bool = False
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a step that do not depend on its batch.

    Attributes:
        context: GPUs that share every row, each with a part of its tokens (`parallel.context`).
        flash_chunks: Attention of shared rows runs in torch's FlashAttention, and not in cuDNN as whole rows may.
        sharded: Weights, gradients and optimizer states are spread over the GPUs (FSDP). Otherwise each GPU holds all.
        native: Formats below 16 bits that the tensor cores support. The others are emulated.
        kept_weights: Share of a quantized block's weights in projections that stay in BF16.
        fp8_head: The output head is multiplied in FP8.
        copies: Lifetime of the converted weights. "pass": autograd keeps them from forward to backward, but a cache
            keeps quantized ones as for "step"; "step": a cache keeps them until the weights change; "use": no copies
            are kept.
        activation_offloading: What recomputed blocks save waits in host memory for the backward.
        mlp_chunk_tokens: Tokens whose inner activations of a recomputed dense MLP exist at the same time; None: all of
            a pass.
        compiled: Blocks without fused sublayers are compiled by torch.compile.
        loss_chunk_tokens: Tokens whose logits exist at the same time.
        weights: Format of the stored weights; norms and biases are always float32. Gradients are in float32 with
            float32 weights, else in bfloat16.
        states: Format of the optimizer states.
        offload_optimizer: Optimizer states are in host memory and are streamed through the GPU at each step.
        master_weights: Offloaded states have float32 copies of the weights.
        gradients: Where the gradients of whole weights wait for the optimizer: on the GPU, in host memory, or nowhere,
            because each weight is updated ("released") as soon as the backward has computed its gradient.
        row_sums: Muon reads each weight and its update once more (`optim.row_floor`, `optim.radial_brake`).
        ema_updates: Interpolations of all weights per step, averaged over the run (`optim.ema_nesterov`).
        gradient_dtype: Format in which replicas send gradients to sum them.
        average: Where the average of the weights is, if there is one.
        averages_per_step: Its updates per step, averaged over the run.
        dropout: Values of the embedding and of each sublayer's output are dropped.
        future_targets: Later tokens that each token predicts too (`multi_token.weights`).
        graphs: Passes are replayed as CUDA graphs (`compute.cuda_graph`); "auto": if the host would limit the step.
        adapter: The adapters to train over frozen weights; None to train all weights.
    """

    gpus: int = 1
    context: int = 1
    flash_chunks: bool = False
    sharded: bool = False
    optimizer: OptimizerName = "muon"
    precision: Precision = "bf16"
    native: frozenset[LowFormat] = ALL_NATIVE
    kept_weights: float = 0.0
    fp8_head: bool = False
    copies: CopyLifetime = "pass"
    activation_checkpointing: Checkpointing = "none"
    activation_offloading: bool = False
    mlp_chunk_tokens: int | None = None
    compiled: bool = True
    loss_chunk_tokens: int = 8192
    weights: WeightFormat = "float32"
    states: StateFormat = "float32"
    offload_optimizer: bool = False
    master_weights: bool = False
    gradients: GradientPlace = "device"
    row_sums: bool = False
    ema_updates: float = 0.0
    gradient_dtype: GradientFormat = "float32"
    average: AveragePlace = "none"
    averages_per_step: float = 0.0
    dropout: bool = False
    future_targets: int = 0
    graphs: GraphMode = "off"
    adapter: AdapterSpec | None = None

    def options(self) -> dict[str, Any]:
        """Return the fields of this class, by name."""
        return {name: getattr(self, name) for name in OPTION_NAMES}


OPTION_NAMES = tuple(field.name for field in fields(StepOptions))


@dataclass(frozen=True)
class StepSpec(StepOptions):
    """One optimizer step. Raises ValueError for sizes below 1 or that do not divide evenly.

    tokens: tokens per step, over all GPUs; micro_tokens: tokens per forward pass on one GPU, its share of whole rows of
    `sequence_length`; kept_blocks: blocks that stay in BF16 when the precision is quantized.
    """

    sequence_length: int
    tokens: int
    micro_tokens: int
    kept_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("sequence_length", "tokens", "micro_tokens", "gpus", "context", "loss_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.micro_tokens * self.context % self.sequence_length:
            raise ValueError(
                f"micro_tokens: {self.micro_tokens} on {self.context} GPUs is not a multiple of the sequence length "
                f"{self.sequence_length}"
            )
        if self.tokens % (self.micro_tokens * self.gpus):
            raise ValueError(
                f"tokens: {self.tokens} is not a multiple of {self.gpus} x {self.micro_tokens} micro-batch tokens"
            )

    def quantized_share(self, layers: int) -> float:
        """Return the share of the block weights that a quantized precision converts."""
        return (1 - self.kept_blocks / layers) * (1 - self.kept_weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, without a residual of 24 bits, and of its gradient."""
        return 4 if self.weights == "float32" else 2

    @property
    def fused(self) -> bool:
        """True if fused sublayers compute the blocks. Only in other blocks does autograd keep converted weights."""
        return self.copies != "pass"

    @property
    def accumulation(self) -> int:
        """Forward and backward passes per optimizer step on one GPU."""
        return self.tokens // (self.micro_tokens * self.gpus)
