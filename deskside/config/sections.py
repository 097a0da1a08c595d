"""The smaller parts of a run's configuration: data, batch, compute, precision, adapters, checkpoints, guards ..."""

from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from deskside.config.base import Part, UserPath
from deskside.config.duration import Duration
from deskside.config.recipes import ALIASES, Recipe, recipe_named


def _check_interval(duration: Duration) -> Duration:
    # Stages may pack the data into different numbers of rows, so that an epoch has no fixed number of steps.
    if duration.unit == "epochs":
        raise ValueError(
            f"an interval is counted in steps, tokens or time, not in epochs; write 500 steps, 10m or 100M tokens, "
            f"not {duration}"
        )
    return duration


Interval = Annotated[Duration, AfterValidator(_check_interval)]


TEMPERATURES = ("language_temperature", "source_temperature")  # of `DataConfig`


class DataConfig(Part):
    """Source of the training data."""

    path: UserPath | None = Field(None, description="prepared dataset directory")
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="sources to prepare into `path` if it does not exist yet"
    )
    val_fraction: Annotated[float, Field(gt=0, lt=0.5)] | None = Field(
        None, description="share of `sources` that is held out; default: as in deskside data prepare"
    )
    document_mask: bool = Field(
        False, description="tokens attend only within their document, not to others in the row"
    )
    weights: dict[str, float] = Field({}, description="mixture weights per source or language tag")
    language_temperature: float | None = Field(
        None,
        ge=1,
        le=1000,
        description="draw a language with n tokens in proportion to n^(1/temperature), so that above 1 small languages "
        "are repeated; mT5 used 3.33; default: every document once an epoch",
    )
    source_temperature: float | None = Field(
        None,
        ge=1,
        le=1000,
        description="the same for sources: draw a source with n tokens in proportion to n^(1/temperature)",
    )
    packing: Literal["best-fit", "shuffled"] = Field(
        "best-fit",
        description="best-fit: few documents are cut (arXiv 2404.10830), and rows have the same documents in every "
        "epoch; shuffled: documents in a new order in each epoch, cut at the ends of rows, so that they get other "
        "neighbors and cuts, for many epochs over a small corpus (slowrun)",
    )
    prefetch: PositiveInt = Field(2, le=64, description="optimizer steps that the data loader reads ahead")

    @model_validator(mode="after")
    def _check_one_mixture(self) -> "DataConfig":
        given = ["weights"] if self.weights else []
        given += [n for n in TEMPERATURES if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[-1]}: data.{given[0]} sets the mixture too; remove one of them")
        return self

    @property
    def temperature_key(self) -> str:
        """Name of the temperature that is set; "" without one."""
        return next((n for n in TEMPERATURES if getattr(self, n) is not None), "")


class BatchConfig(Part):
    """Batch sizes in tokens. Gradients are accumulated over micro-batches until a step has seen `tokens`."""

    sequence_length: PositiveInt = Field(2048, description="tokens per row")
    tokens: PositiveInt = Field(65536, description="tokens per optimizer step, over all GPUs")
    micro_tokens: PositiveInt | Literal["auto"] = Field(
        "auto", description="tokens per forward pass on one GPU; auto: chosen to fit into memory"
    )

    @model_validator(mode="after")
    def _check_whole_rows(self) -> "BatchConfig":
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
        nearest = max(1, round(tokens / sequence_length)) * sequence_length
        raise ValueError(
            f"{key}: {tokens} is not a multiple of the sequence length {sequence_length}; use {nearest}"
        )


def can_share_rows(processes: int, sequence_length: int) -> bool:
    """Return True if these processes can share rows (`parallel.context`), of which each holds two equal parts."""
    return processes == 1 or sequence_length % (2 * processes) == 0


Device = Literal["auto", "cpu", "cuda"]
# auto, and the names in `kernels.attention.BACKENDS`
AttentionBackendName = Literal[
    "auto", "cudnn", "flash", "fa4", "efficient", "sdpa", "varlen", "flex", "chunked", "unplanned", "reference",
    "gathered", "gathered-cudnn", "gathered-flash",
]  # fmt: skip


class ComputeConfig(Part):
    """Execution of the training step. Except for `z_loss`, the options change results only by rounding."""

    device: Device = Field("auto", description="auto: cuda if it is available")
    compile: Literal["auto", "fused", "off", "block", "model"] = Field(
        "auto",
        description="fused: hand-written kernels and gradients; block, model: torch.compile; auto: fused on a GPU "
        "or below 16 bits, if it covers the model; else block on a GPU in 16 or 32 bits; else off",
    )
    attention: AttentionBackendName = Field(
        "auto", description="attention backend; auto: the fastest that passes a check at this shape"
    )
    matmul: Literal["torch", "quack", "auto"] = Field(
        "torch",
        description="BF16 products of fused dense blocks; torch: cuBLAS; quack: each product by the package "
        "quack-kernels if a trial finds that faster; auto: quack if it can be used and the run is long enough for a "
        "trial; a resumed run keeps the choice of its start",
    )
    activation_checkpointing: Literal["none", "attention", "mlp", "block"] = Field(
        "none", description="part of each block that is recomputed in the backward pass instead of kept"
    )
    activation_offloading: bool = Field(
        False,
        description="keep what recomputed blocks save in host memory until the backward pass; needs "
        "activation_checkpointing block and fused kernels",
    )
    cuda_graph: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: replay each pass as a CUDA graph, which saves the host's time in small passes; needs fused "
        "kernels, a dense model with float32 weights, and at least 8 bits; auto: on if the run can, the host limits "
        "its steps, and there is memory",
    )
    gpu_budget: float | None = Field(
        None, gt=0, le=1e6, description="memory of each GPU that the run may use, in GiB; default: all of it"
    )
    mlp_chunk_tokens: PositiveInt | None = Field(
        None,
        description="tokens whose inner activations of a dense MLP exist at a time, in forward and backward; default: "
        "those of a pass; needs activation_checkpointing mlp or block, fused kernels and 16 or 32 bits",
    )
    loss_chunk_tokens: PositiveInt = Field(8192, description="tokens whose logits are computed at a time")
    z_loss: float = Field(
        0.0, ge=0, description="weight in the loss of log(sum(exp(logits)))^2, which keeps logits small"
    )


class MultiTokenConfig(Part):
    """Multi-token prediction without parameters: a token's logits also predict the tokens after the next one.

    These losses are added to that of the next token with weights that decay to 0 one after the other, the farthest
    token's first: with n weights, each decays linearly in its own n-th of the run up to `until`. Weights 0.5, 0.25 and
    until 0.667 are the schedule of modded-nanogpt (github.com/KellerJordan/modded-nanogpt, train_gpt.py). Gloeckle et
    al. 2024 (arXiv 2404.19737) use one head per token instead. The trained model has no additional parts.
    """

    weights: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (),
        max_length=4,
        description="weights of the losses of the second, third, ... token ahead, such as [0.5, 0.25]; the next token "
        "has 1 (modded-nanogpt); default: only the next token",
    )
    until: float = Field(
        0.667, gt=0, le=1, description="progress (0 to 1) at which the last of these weights reaches 0"
    )

    @field_validator("weights")
    @classmethod
    def _check_sum(cls, weights: tuple[float, ...]) -> tuple[float, ...]:
        if sum(weights) > 2:  # the gradients of an FP8 head are scaled for values up to 3.5
            raise ValueError(f"the sum of the weights is {sum(weights):g}; use at most 2")
        return weights

    def at(self, progress: float) -> tuple[float, ...]:
        """Return the weights at this progress of the run (0 to 1)."""
        count = len(self.weights)
        elapsed = progress / self.until * count
        return tuple(
            weight * min(1.0, max(0.0, count - place - elapsed)) for place, weight in enumerate(self.weights)
        )


PrecisionName = Literal[
    "auto", "fp32", "bf16", "fp8", "fp8-tensorwise", "fp8-delayed", "fp8-rowwise",
    "nvfp4", "nvfp4-4o6", "nvfp4-unbiased", "nvfp4-eden", "fp8-nvfp4",
]  # fmt: skip
Share = Annotated[float, Field(ge=0, lt=1)]

# Recipes of config/recipes.py that the other backends implement. torchao 0.18 removed delayed scaling, and
# transformer-engine 2.20 supports four over six only for inference and post-training.
BACKEND_RECIPES = {
    "torchao": ("fp8-tensorwise", "fp8-rowwise"),
    "transformer-engine": ("fp8-delayed", "fp8-tensorwise", "nvfp4"),
}

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
ATTENTION_PROJECTIONS = PROJECTIONS[:4]


class PrecisionConfig(Part):
    """Number formats of the matrix products (`config/recipes.py`). Trained weights are stored in float32."""

    name: PrecisionName = Field(
        "auto", description="auto: bf16 on a GPU that passes its self-check, else fp32; fp8: fp8-delayed"
    )
    keep_first: Share | None = Field(
        None, description="share of the blocks, from the first one, that stays in BF16; default: the recipe's"
    )
    keep_last: Share | None = Field(
        None, description="share of the blocks, from the last one, that stays in BF16; default: the recipe's"
    )
    keep: tuple[Projection, ...] = Field(
        (),
        description="projections that stay in BF16 in all blocks, for example if casting takes longer than FP8 saves",
    )
    head: Literal["bf16", "fp8"] = Field(
        "bf16", description="format of the three products with the output head"
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps in BF16 before the recipe begins")
    bf16_from: float | None = Field(
        None, gt=0, lt=1, description="progress (0 to 1) at which the run switches to BF16; default: never"
    )
    weight_cache: bool = Field(
        True,
        description="convert weights once per optimizer step instead of at each use; uses memory for the copies",
    )
    accumulate: Literal["native", "fused"] = Field(
        "native",
        description="sum of weight gradients in FP32: native: by autograd; fused: by the matrix product",
    )
    native: Literal["auto", "never"] = Field(
        "auto",
        description="auto: the format's tensor cores if their self-check passes; never: always emulated",
    )
    backend: Literal["deskside", "torchao", "transformer-engine"] = Field(
        "deskside", description="library whose layers implement the recipe"
    )

    @property
    def quantized(self) -> bool:
        """True if the recipe has products in less than 16 bits."""
        return self.name not in ("auto", "fp32", "bf16")

    def recipe(self, name: str | None = None) -> Recipe:
        """Return the recipe, with this configuration's `keep_first` and `keep_last` if they are set.

        name: used instead of `self.name`, such as the precision that "auto" was resolved to. Raises UsageError if
        there is no such recipe, which includes "auto".
        """
        recipe = recipe_named(name or self.name)
        first = recipe.keep_first if self.keep_first is None else self.keep_first
        last = recipe.keep_last if self.keep_last is None else self.keep_last
        return replace(recipe, keep_first=first, keep_last=last)

    @model_validator(mode="after")
    def _check_backend(self) -> "PrecisionConfig":
        if self.quantized and self.backend != "deskside":
            supported = BACKEND_RECIPES[self.backend]
            if ALIASES.get(self.name, self.name) not in supported:
                raise ValueError(
                    f"backend: {self.backend} has no recipe {self.name}; use one of {', '.join(supported)}, or backend "
                    f"deskside"
                )
        return self


class AdapterConfig(Part):
    """Low-rank adapters (LoRA) on frozen weights.

    A projection y = x W^T becomes y = x W^T + scale (x A^T) B^T, where A is (rank, in), B is (out, rank) and W is
    frozen, in 16, 8 or 4 bits (Hu et al. 2021, arXiv 2106.09685). scale is alpha / rank, or alpha / sqrt(rank) (rsLoRA,
    Kalajdzievski 2023, arXiv 2312.03732).
    """

    rank: PositiveInt = Field(
        16, le=4096, description="rank of the adapters; there are none unless an option of adapter is given"
    )
    alpha: PositiveFloat = Field(32.0, description="the output of an adapter is scaled by alpha / rank")
    rank_stabilised: bool = Field(False, description="scale by alpha / sqrt(rank) instead (rsLoRA)")
    targets: Literal["all"] | tuple[Projection, ...] = Field(
        "all",
        description="projections that get an adapter, by their Hugging Face names; all: every projection of the "
        "blocks; each expert has its own",
    )
    dora: bool = Field(
        False, description="train a magnitude for each row of an adapted weight too (DoRA, arXiv 2402.09353)"
    )
    modules_to_save: tuple[Literal["embed_tokens", "lm_head"], ...] = Field(
        (), description="tables that train whole beside the adapters, in float32; a tied head is embed_tokens"
    )
    dropout: Share = Field(0.0, description="dropout probability of an adapter's input in training")
    base: Literal["bf16", "int8", "nf4"] = Field(
        "bf16", description="format of the frozen weights: bf16, int8 (half the memory) or nf4 (a quarter)"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _check_targets(cls, value: object) -> object:
        # Checked before validation, since pydantic reports one error for each member of a union.
        is_list = isinstance(value, list | tuple) and value and all(name in PROJECTIONS for name in value)
        if value != "all" and not is_list:
            raise ValueError(
                f"adapter.targets: {value!r} is neither all nor a list of {', '.join(PROJECTIONS)}"
            )
        return value

    @property
    def scale(self) -> float:
        """Factor by which (x A^T) B^T is multiplied."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class CheckpointConfig(Part):
    """Intervals of checkpoints. A checkpoint is written atomically, with checksums."""

    every: Interval = Field(Duration.parse("10m"), description="interval: 500 (steps), 10m or 100M tokens")
    keep: PositiveInt = Field(2, description="number of newest checkpoints that are kept")
    keep_every: Interval | None = Field(None, description="checkpoints at this interval are never deleted")
    keep_best: bool = Field(
        False,
        description="also keep the checkpoint with the lowest validation loss, and end with its weights if they are "
        "better than the last ones",
    )
    background: bool | Literal["auto"] = Field(
        "auto",
        description="write a checkpoint from a copy in host memory while training goes on; auto: if it fits there",
    )


class EvaluateConfig(Part):
    """Validation bits per byte during training; the whole validation split is evaluated at the end."""

    every: Interval | None = Field(
        Duration.parse("10m"), description="interval such as 10m; none: evaluate only at the end"
    )
    tokens: PositiveInt = Field(1_000_000, description="validation tokens of each evaluation during training")
    stop_early: bool = Field(
        False,
        description="end the run soon, with a decayed learning rate, once its validation loss rises over seven "
        "evaluations while its training loss falls",
    )


DEFAULT_BUCKET_MIB = 16.0


class ParallelConfig(Part):
    """Division of the work among the processes of --gpus, one for each GPU."""

    mode: Literal["auto", "replicate", "shard"] = Field(
        "auto", description="replicate: each process holds the whole model; shard: FSDP2; auto: replicate"
    )
    context: PositiveInt = Field(
        1,
        le=64,
        description="processes that share every row, for rows that are too long for one GPU; batch.micro_tokens are "
        "then the tokens of a pass on all of them",
    )
    gradient_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="format in which processes send gradients to sum them; bfloat16 halves the traffic and rounds each "
        "gradient and each sum",
    )
    bucket_mib: float = Field(
        DEFAULT_BUCKET_MIB,
        gt=0,
        description="MiB of float32 gradients that are summed by one collective; more are sent faster, but begin later",
    )


MIN_NORMS = 16  # gradient norms of earlier steps without which no spike is detected


class GuardConfig(Part):
    """Handling of steps with a non-finite loss or a gradient-norm spike."""

    spike_factor: float = Field(
        10.0,
        gt=1,
        description="skip a step whose gradient norm exceeds this times the 90th percentile of recent norms",
    )
    window: int = Field(
        64, ge=MIN_NORMS, description=f"recent steps that the percentile is taken over; at least {MIN_NORMS}"
    )
    max_skips: PositiveInt = Field(
        5, description="consecutive skipped steps before the run goes back to the last checkpoint"
    )
    max_rollbacks: int = Field(2, ge=0, description="times a run may go back before it stops with an error")


class TrackConfig(Part):
    """Experiment trackers in addition to metrics.jsonl. Each needs its own package."""

    tensorboard: bool = Field(False, description="write TensorBoard events into the run directory")
    wandb: str | None = Field(None, description="log to this Weights & Biases project; true: deskside")
    trackio: str | None = Field(None, description="log to this trackio project; true: deskside")

    @field_validator("wandb", "trackio", mode="before")
    @classmethod
    def _project(cls, value: Any) -> Any:
        """Return the project's name for true, and None for false, also as text of an option."""
        switch = value.lower() if isinstance(value, str) else value
        if switch in (True, "true"):
            return "deskside"
        return None if switch in (False, "false", "") else value
