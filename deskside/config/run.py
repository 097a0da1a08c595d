"""RunConfig: the complete configuration of a training run.

Each part validates itself; `run_checks.py` checks that the parts fit together. `config/merge.py` merges presets and
overrides as plain dicts before validation, so that it can record which layer set a key, and drop keys that a higher
layer makes meaningless.
"""

import math
from typing import Annotated

from pydantic import Field, model_validator

from deskside.budget.scaling import lr_scale
from deskside.config.align import AlignConfig
from deskside.config.average import AverageConfig
from deskside.config.base import DataKind, Part
from deskside.config.dimensions import NATIVE_FP4_UNIT
from deskside.config.model import INITIALIZER_RANGE, ModelConfig
from deskside.config.optim import EMBEDDING_STD, MuonConfig, OptimConfig
from deskside.config.run_checks import check_parts_together, check_run_dimensions
from deskside.config.schedule import ScheduleConfig, Stage, WsdConfig, grown
from deskside.config.sections import (
    AdapterConfig,
    BatchConfig,
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    EvaluateConfig,
    GuardConfig,
    MultiTokenConfig,
    ParallelConfig,
    PrecisionConfig,
    TrackConfig,
)

SCHEMA_VERSION = 1


class RunConfig(Part):
    """The resolved configuration of one run; written into run.json."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        1, description="random seed of the run, for example of its initial weights and data order"
    )
    deterministic: bool = Field(
        False, description="use only deterministic kernels, so that a GPU run is reproducible bit for bit"
    )
    dropout: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="share of the values of the embedding and of each sublayer's output that are zero in a training "
        "pass (Srivastava et al. 2014), for many epochs over a small corpus; GPT-2 and slowrun have 0.1",
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = MuonConfig(name="muon")
    schedule: ScheduleConfig = WsdConfig(name="wsd")
    batch: BatchConfig = BatchConfig()
    compute: ComputeConfig = ComputeConfig()
    multi_token: MultiTokenConfig = MultiTokenConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    average: AverageConfig = AverageConfig()
    guard: GuardConfig = GuardConfig()
    parallel: ParallelConfig = ParallelConfig()
    track: TrackConfig = TrackConfig()
    align: AlignConfig | None = None
    adapter: AdapterConfig | None = None

    @property
    def data_kind(self) -> DataKind:
        """Kind of the data in the folder `data.path`."""
        return "text" if self.align is None else self.align.data_kind

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the run; without `schedule.stages`, one stage for the whole run.

        `schedule.batch_growth` divides them further, into stages with their own batches.
        """
        given = self.schedule.stages or (Stage(until=1.0, sequence_length=self.batch.sequence_length),)
        return given if self.schedule.batch_growth == 1 else grown(self.schedule, given, self.batch.tokens)

    def stage_tokens(self, stage: Stage) -> int:
        """Return the tokens per optimizer step in a stage."""
        return stage.batch_tokens or self.batch.tokens

    def batch_lr_factor(self, step_tokens: int) -> float:
        """Return the factor of the learning rate in steps of `step_tokens`, by `schedule.batch_lr`."""
        return math.sqrt(step_tokens / self.mean_step_tokens()) if self.schedule.batch_lr == "sqrt" else 1.0

    def mean_step_tokens(self) -> float:
        """Return the tokens per optimizer step, averaged over the run."""
        mean, start = 0.0, 0.0
        for stage in self.stages():
            mean += (stage.until - start) * self.stage_tokens(stage)
            start = stage.until
        return mean

    def embedding_std(self) -> float:
        """Return the standard deviation of new embeddings: `model.initializer_range`, or its default.

        The first updates of the blocks are nearly the same for every token. If they are much larger than the
        embeddings, all tokens look alike to the blocks that follow, and a mixture of experts sends them to the same
        experts. So embeddings begin about half as large as the first updates of all sublayers together, within
        INITIALIZER_RANGE and EMBEDDING_STD. Other sizes are compared in docs/log.md (2026-11-30, 2026-12-01).
        """
        model, optim = self.model, self.optim
        if model.initializer_range is not None:
            return model.initializer_range
        # A tied embedding is the head too: beginning at 1, its logits would be near sqrt(hidden_size). With the rate of
        # the matrices, embeddings of 1 would hardly move.
        if model.tie_word_embeddings or self.schedule.tied_until > 0 or optim.embedding_lr is None:
            return INITIALIZER_RANGE
        std = EMBEDDING_STD
        if isinstance(optim, MuonConfig):
            # An update with singular values of 1 gives an output about as large as its input, times the learning rate:
            # 2 * lr for the two sublayers of a layer.
            lr = optim.lr * (lr_scale(self.mean_step_tokens(), "muon") if optim.scale else 1.0)
            std = min(std, model.num_hidden_layers * model.residual_multiplier * lr)
        return max(INITIALIZER_RANGE, std / model.embedding_multiplier)

    @model_validator(mode="after")
    def _check_parts_together(self) -> "RunConfig":
        check_parts_together(self)
        return self

    def native_fp4_problem(self) -> str | None:
        """Return which dimension prevents NVFP4 products from using the tensor cores, as a message, or None."""
        if "nvfp4" not in self.precision.recipe().formats:
            return None
        try:
            check_run_dimensions(self, NATIVE_FP4_UNIT)
        except ValueError as error:
            return str(error)
        return None
