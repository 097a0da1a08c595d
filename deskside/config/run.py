"""RunConfig: everything that decides what a training run computes, validated as a whole.

Each part checks itself; the checks that need two parts are here. Presets and overrides are merged as plain dicts before
validation (`config/merge.py`), which is how it is known whether an option was set explicitly.
"""

from typing import Annotated

from pydantic import Field, model_validator

from deskside.config.align import AlignConfig
from deskside.config.base import DataKind, Part
from deskside.config.dimensions import NATIVE_FP4_UNIT, UNIT, adaptable, check_dimensions, projections
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig, MuonConfig, OptimConfig
from deskside.config.schedule import ScheduleConfig, Stage, WsdConfig
from deskside.config.sections import (
    AdapterConfig,
    BatchConfig,
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    EvaluateConfig,
    GuardConfig,
    ParallelConfig,
    PrecisionConfig,
    TrackConfig,
    check_rows,
)

SCHEMA_VERSION = 1


class RunConfig(Part):
    """The resolved configuration of one run; written into run.json."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        1, description="decides initial weights and the order of the data"
    )
    deterministic: bool = Field(
        False, description="only deterministic kernels, so that a GPU run repeats to the last bit"
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = MuonConfig(name="muon")
    schedule: ScheduleConfig = WsdConfig(name="wsd")
    batch: BatchConfig = BatchConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    guard: GuardConfig = GuardConfig()
    parallel: ParallelConfig = ParallelConfig()
    track: TrackConfig = TrackConfig()
    align: AlignConfig | None = None
    adapter: AdapterConfig | None = None

    @property
    def data_kind(self) -> DataKind:
        """The kind of data in the folder `data.path`."""
        return "text" if self.align is None else self.align.data_kind

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the run; one that covers everything when none are given."""
        return self.schedule.stages or (Stage(until=1.0, sequence_length=self.batch.sequence_length),)

    def stage_tokens(self, stage: Stage) -> int:
        """Return the tokens per optimizer step in a stage."""
        return stage.batch_tokens or self.batch.tokens

    def mean_step_tokens(self) -> float:
        """Return the tokens per optimizer step, averaged over the run."""
        stages = self.stages()
        starts = (0.0, *(stage.until for stage in stages))
        return sum((s.until - start) * self.stage_tokens(s) for s, start in zip(stages, starts, strict=False))

    @model_validator(mode="after")
    def _agree(self) -> "RunConfig":
        if self.model.window_pattern is None and any(stage.window for stage in self.schedule.stages):
            raise ValueError(
                "schedule.stages: a stage's window has no effect on a model without window layers; remove it, "
                "or set model.window_pattern and model.sliding_window"
            )
        longest, limit = self.batch.sequence_length, self.model.max_position_embeddings
        for stage in self.schedule.stages:
            longest = max(longest, stage.sequence_length)
            check_rows("schedule.stages", self.stage_tokens(stage), stage.sequence_length)
            if self.batch.micro_tokens != "auto":
                check_rows("batch.micro_tokens", self.batch.micro_tokens, stage.sequence_length)
                if self.stage_tokens(stage) % self.batch.micro_tokens:
                    raise ValueError(
                        f"batch.micro_tokens: {self.batch.micro_tokens} does not divide a stage of "
                        f"{self.stage_tokens(stage)} tokens per step"
                    )
        if longest > limit:
            raise ValueError(
                f"batch.sequence_length: {longest} is longer than the model's {limit} positions; "
                f"raise --model.max_position_embeddings or shorten the sequence"
            )
        if self.adapter is not None:
            self._adaptable(self.adapter)
        if self.align is not None and not self.data.document_mask:
            raise ValueError(
                "data.document_mask: conversations in one row never see each other; leave it out, or set it to true"
            )
        if self.align is not None and self.data.sources:
            raise ValueError("data.sources: has no effect here; conversations are given with --data")
        if self.precision.quantized:
            self._quantizable()
        return self

    def _adaptable(self, adapter: AdapterConfig) -> None:
        """Raise ValueError if adapters cannot be trained in this run: by name, and with the remedy."""
        if not isinstance(self.optim, AdamWConfig):
            raise ValueError(
                "optim.name: muon is for whole matrices, adapters are trained by adamw; use --optim.name adamw"
            )
        if self.precision.quantized:
            raise ValueError(
                f"precision.name: adapters are trained in bf16, and {self.precision.name} products of frozen weights "
                f"are not there; use --precision.name bf16, and adapter.base for the weights' format"
            )
        if self.parallel.mode == "shard":
            raise ValueError(
                "parallel.mode: adapters and frozen weights are not sharded; use --parallel.mode replicate"
            )
        if self.compute.compile == "fused":
            raise ValueError(
                "compute.compile: the hand-written halves have no adapters; use auto, and blocks run as written"
            )
        if adapter.dropout and self.compute.activation_checkpointing != "none":
            raise ValueError(
                "adapter.dropout: what is recomputed would drop other values; use --adapter.dropout 0, or "
                "--compute.activation_checkpointing none"
            )
        if self.model.num_experts and adapter.base != "bf16":
            raise ValueError(f"adapter.base: experts cannot be frozen in {adapter.base}; use bf16")
        there = adaptable(self.model)
        for name in () if adapter.targets == "all" else adapter.targets:
            if name not in there:
                raise ValueError(
                    f"adapter.targets: this model has no {name} that could be adapted; choose from {', '.join(there)}"
                )

    def _quantizable(self) -> None:
        """Raise ValueError if the recipe cannot do this run: by name, and with the remedy."""
        name, layers = self.precision.name, self.model.num_hidden_layers
        first, last = self.precision.recipe().kept_blocks(layers)
        if first + last >= layers:
            raise ValueError(
                f"precision.name: {name} keeps the first {first} and the last {last} of {layers} blocks in BF16, so "
                f"nothing is quantized; set --precision.keep_first 0 --precision.keep_last 0, or use bf16"
            )
        # Projections that share a weight stay in BF16 together.
        if all(set(weight) & set(self.precision.keep) for weight in projections(self.model)):
            raise ValueError(
                f"precision.keep: with {', '.join(self.precision.keep)} in BF16 nothing is left to quantize; take "
                f"some out, or use precision.name bf16"
            )
        length = self.schedule.length
        if length is not None and length.unit == "steps" and self.precision.warmup_steps >= length.value:
            raise ValueError(
                f"precision.warmup_steps: {self.precision.warmup_steps} BF16 steps are the whole run of {length}; "
                f"lower it, or use precision.name bf16"
            )
        if self.compute.compile in ("block", "model") and self.precision.backend == "deskside":
            raise ValueError(
                f"compute.compile: {name} has its own kernels, which {self.compute.compile} cannot compile; use auto"
            )
        if self.parallel.mode == "shard":
            raise ValueError(
                f"parallel.mode: sharded weights cannot be trained in {name} yet; use --parallel.mode replicate, "
                f"or --precision.name bf16"
            )
        if self.model.num_experts:
            raise ValueError(
                f"precision.name: {name} has no products for a mixture of experts yet; use bf16, or a dense model "
                f"(model.num_experts 0)"
            )
        self._check_dimensions(UNIT)

    def _check_dimensions(self, unit: int) -> None:
        check_dimensions(
            self.precision.recipe(),
            self.model,
            head=self.precision.head == "fp8",
            sequence_lengths=[stage.sequence_length for stage in self.stages()],
            micro_tokens=None if self.batch.micro_tokens == "auto" else self.batch.micro_tokens,
            chunk_tokens=self.compute.loss_chunk_tokens,
            unit=unit,
        )

    def not_for_native_fp4(self) -> str | None:
        """Which size keeps this run's NVFP4 products off tensor cores, with the nearest that would not; else None."""
        if "nvfp4" not in self.precision.recipe().formats:
            return None
        try:
            self._check_dimensions(NATIVE_FP4_UNIT)
        except ValueError as error:
            return str(error)
        return None
