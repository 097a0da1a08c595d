"""The small parts of a run's configuration: data, batch, compute, precision, adapters, checkpoints, guards ..."""

from dataclasses import replace
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from deskside.config.base import Part
from deskside.config.duration import Duration
from deskside.config.recipes import ALIASES, Recipe, recipe_named


def _interval(duration: Duration) -> Duration:
    # An epoch is no place in a run whose stages pack the data differently.
    if duration.unit == "epochs":
        raise ValueError(
            f"an interval is counted in steps, tokens or time, not in epochs: write 500 steps, 10m or 100M tokens, "
            f"not {duration}"
        )
    return duration


Every = Annotated[Duration, AfterValidator(_interval)]


class DataConfig(Part):
    """Source of the tokens. `path` is a directory made by `deskside data prepare`."""

    path: str | None = Field(None, min_length=1, description="prepared dataset directory")
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="prepared into `path` first when that does not exist yet"
    )
    val_fraction: Annotated[float, Field(gt=0, lt=0.5)] | None = Field(
        None, description="share held out when `sources` are prepared; default: as `deskside data prepare`"
    )
    document_mask: bool = Field(False, description="attention stops at document borders inside a packed row")
    weights: dict[str, float] = Field({}, description="mixture weights per source or language tag")
    prefetch: PositiveInt = Field(2, le=64, description="optimizer steps prepared ahead by the loader")


class BatchConfig(Part):
    """Batch sizes in tokens. The effective batch is `tokens`, whatever fits on the card."""

    sequence_length: PositiveInt = Field(2048, description="tokens per row")
    tokens: PositiveInt = Field(65536, description="tokens per optimizer step, over all GPUs")
    micro_tokens: PositiveInt | Literal["auto"] = Field(
        "auto", description="tokens per forward pass on one GPU; auto: fitted"
    )

    @model_validator(mode="after")
    def _whole_rows(self) -> "BatchConfig":
        check_rows("batch.tokens", self.tokens, self.sequence_length)
        if self.micro_tokens != "auto":
            check_rows("batch.micro_tokens", self.micro_tokens, self.sequence_length)
            if self.tokens % self.micro_tokens:
                raise ValueError(
                    f"micro_tokens: {self.micro_tokens} does not divide batch.tokens = {self.tokens}"
                )
        return self


def check_rows(key: str, tokens: int, sequence_length: int) -> None:
    """Raise ValueError unless `tokens` is a whole number of rows."""
    if tokens % sequence_length:
        near = max(1, round(tokens / sequence_length)) * sequence_length
        raise ValueError(
            f"{key}: {tokens} is not a multiple of the sequence length {sequence_length}; use {near}"
        )


class ComputeConfig(Part):
    """Execution of the step. Nothing here changes the result, except for rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda when there is one")
    compile: Literal["auto", "fused", "off", "block", "model"] = Field(
        "auto",
        description="fused: hand-written kernels and gradients; block, model: torch.compile; auto: fused on a GPU "
        "where it covers the model, else block; off on a CPU, unless the precision needs fused",
    )
    attention: str = Field(
        "auto", description="attention backend; auto: fastest that passes a check at this shape"
    )
    activation_checkpointing: Literal["none", "attention", "mlp", "block"] = Field(
        "none", description="what is recomputed in the backward pass instead of kept"
    )
    loss_chunk_tokens: PositiveInt = Field(8192, description="tokens whose logits exist at one time")
    z_loss: float = Field(
        0.0, ge=0, description="weight of the squared log-partition, which keeps logits small"
    )


PrecisionName = Literal[
    "auto", "fp32", "bf16", "fp8", "fp8-tensorwise", "fp8-delayed", "fp8-rowwise",
    "nvfp4", "nvfp4-4o6", "nvfp4-unbiased", "nvfp4-eden", "fp8-nvfp4",
]  # fmt: skip
Share = Annotated[float, Field(ge=0, lt=1)]

# What the other backends have of the recipes of config/recipes.py: torchao 0.18 deleted delayed scaling, and
# transformer-engine 2.20 keeps four over six for inference and post-training.
BACKEND_RECIPES = {
    "torchao": ("fp8-tensorwise", "fp8-rowwise"),
    "transformer-engine": ("fp8-delayed", "fp8-tensorwise", "nvfp4"),
}

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)


class PrecisionConfig(Part):
    """The number formats of the matrix products (`config/recipes.py`). Weights stay in float32."""

    name: PrecisionName = Field(
        "auto", description="auto: bf16 where the self-check passes on a GPU, else fp32; fp8: fp8-delayed"
    )
    keep_first: Share | None = Field(
        None, description="share of the blocks, from the front, that stays in BF16; None: the recipe's"
    )
    keep_last: Share | None = Field(
        None, description="share of the blocks, from the back, that stays in BF16; None: the recipe's"
    )
    keep: tuple[Projection, ...] = Field(
        (),
        description="projections that stay in BF16 in every block, such as o_proj, where a cast costs what it saves",
    )
    head: Literal["bf16", "fp8"] = Field("bf16", description="format of the output head's three products")
    warmup_steps: NonNegativeInt = Field(0, description="steps in BF16 before the recipe begins")
    bf16_from: float | None = Field(
        None, gt=0, lt=1, description="progress (0 to 1) from which the run goes on in BF16; None: never"
    )
    weight_cache: bool = Field(
        True, description="convert weights once per optimizer step, not once per pass; costs their memory"
    )
    accumulate: Literal["native", "fused"] = Field(
        "native", description="weight gradients are added up in FP32 by autograd, or inside their product"
    )
    native: Literal["auto", "never"] = Field(
        "auto",
        description="auto: tensor cores of the format where the self-check passes; never: always emulated",
    )
    backend: Literal["deskside", "torchao", "transformer-engine"] = Field(
        "deskside", description="whose layers carry the recipe out"
    )

    @property
    def quantized(self) -> bool:
        """True if any product is in less than 16 bits."""
        return self.name not in ("auto", "fp32", "bf16")

    def recipe(self, name: str | None = None) -> Recipe:
        """Return the recipe with the kept blocks asked for here. name: the precision that "auto" resolved to.

        Raises UsageError for a recipe that does not exist, "auto" among them.
        """
        recipe = recipe_named(name or self.name)
        first = recipe.keep_first if self.keep_first is None else self.keep_first
        last = recipe.keep_last if self.keep_last is None else self.keep_last
        return replace(recipe, keep_first=first, keep_last=last)

    @model_validator(mode="after")
    def _backend_has_it(self) -> "PrecisionConfig":
        if self.quantized and self.backend != "deskside":
            known = BACKEND_RECIPES[self.backend]
            if ALIASES.get(self.name, self.name) not in known:
                raise ValueError(
                    f"backend: {self.backend} has no recipe {self.name}; use one of {', '.join(known)}, or backend "
                    f"deskside"
                )
        return self


class AdapterConfig(Part):
    """LoRA on a model whose own weights do not change (Hu et al. 2021, arXiv 2106.09685).

    A projection y = x W^T becomes y = x W^T + scale (x A^T) B^T, where A is (rank, in), B is (out, rank) and W is
    frozen, in 16, 8 or 4 bits. scale is alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv
    2312.03732), which keeps the size of what an adapter learns the same for every rank.
    """

    rank: PositiveInt = Field(16, le=4096, description="inner size of the adapters")
    alpha: PositiveFloat = Field(32.0, description="what adapters add is scaled by alpha / rank")
    rank_stabilised: bool = Field(False, description="scale by alpha / sqrt(rank) instead (rsLoRA)")
    targets: Literal["all"] | tuple[Projection, ...] = Field(
        "all",
        description="projections with an adapter, by their Hugging Face names; all: every one of the blocks",
    )
    dropout: Share = Field(0.0, description="share of an adapter's input that is dropped in training")
    base: Literal["bf16", "int8", "nf4"] = Field(
        "bf16", description="format of the frozen weights: bf16, int8 (half) or nf4 (a quarter)"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        """Return one message for whatever is wrong: a union has one for each of its members."""
        several = isinstance(value, list | tuple) and value and all(name in PROJECTIONS for name in value)
        if value != "all" and not several:
            raise ValueError(
                f"adapter.targets: {value!r} is neither all nor a list of {', '.join(PROJECTIONS)}"
            )
        return value

    @property
    def scale(self) -> float:
        """The factor on (x A^T) B^T."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class CheckpointConfig(Part):
    """Intervals of checkpoints. A checkpoint is written atomically, with checksums."""

    every: Every = Field(Duration.parse("10m"), description="500 (steps), 10m, 100M tokens")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    keep_every: Every | None = Field(None, description="checkpoints at this interval are kept for good")


class EvaluateConfig(Part):
    """Validation bits per byte during training; the whole validation split is evaluated at the end."""

    every: Every | None = Field(Duration.parse("10m"), description="None: only at the end")
    tokens: PositiveInt = Field(1_000_000, description="validation tokens during training")


class ParallelConfig(Part):
    """More than one process, started by torchrun."""

    mode: Literal["auto", "replicate", "shard"] = Field(
        "auto", description="replicate: every process holds the model; shard: FSDP2; auto: replicate"
    )


class GuardConfig(Part):
    """Handling of steps with a non-finite loss or a gradient-norm spike."""

    spike_factor: float = Field(
        10.0,
        gt=1,
        description="a step is skipped when its gradient norm exceeds this times the 90th percentile of recent norms",
    )
    window: PositiveInt = Field(64, description="recent steps that the percentile is taken over")
    max_skips: PositiveInt = Field(
        5, description="consecutive skipped steps before going back to the last checkpoint"
    )
    max_rollbacks: int = Field(2, ge=0, description="times a run may go back before it stops with an error")


class TrackConfig(Part):
    """Trackers beside metrics.jsonl; off by default, each needs its own package."""

    tensorboard: bool = Field(False, description="write TensorBoard events into the run directory")
    wandb: str | None = Field(None, description="Weights & Biases project")
    trackio: str | None = Field(None, description="trackio project")
