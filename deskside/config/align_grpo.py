"""Options of `deskside grpo` itself; see config/align.py. `align/policy.py` explains those of the objective."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from deskside.config.base import DataKind, Part

Spec = Annotated[str, Field(min_length=1)]


class GrpoConfig(Part):
    """Group-relative policy optimisation on questions whose answers can be checked.

    A row of the batch is a sampled answer with its question: batch.tokens / batch.sequence_length answers a step.
    """

    data_kind: ClassVar[DataKind] = "questions"

    name: Literal["grpo"] = Field("grpo", description="which objective")
    data: tuple[Spec, ...] = Field((), description="questions: .jsonl[.gz|.zst], .parquet, hf:owner/name")
    val: tuple[Spec, ...] = Field((), description="held-out questions; none: a share of `data`")
    val_fraction: Annotated[float, Field(gt=0, lt=0.5)] | None = Field(
        None, description="share of `data` that is held out; unset: 0.05, at most 200 questions"
    )
    template: str | None = Field(
        None, min_length=1, description="a chat template (.jinja) instead of the tokenizer's own"
    )
    system: str | None = Field(None, min_length=1, description="a system message before every question")
    reward: str = Field(
        "number",
        min_length=1,
        description="number, format, code, a sum such as 0.9*number+0.1*format, or file.py:function",
    )
    group: Annotated[int, Field(ge=2)] = Field(8, description="answers to each question")
    answer_tokens: PositiveInt = Field(256, description="tokens that an answer may have")
    temperature: Annotated[float, Field(gt=0, le=5)] = Field(
        1.0, description="of sampling, and of the policy"
    )
    scale_rewards: bool = Field(
        True, description="divide by the group's standard deviation; Dr.GRPO does not"
    )
    ratio: Literal["token", "sequence"] = Field("token", description="what is clipped; sequence is GSPO")
    average: Literal["sequence", "token", "fixed"] = Field(
        "token", description="over what the loss is a mean: GRPO's, DAPO's, Dr.GRPO's"
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="how far a ratio may fall")
    clip_high: PositiveFloat = Field(0.28, description="how far a ratio may rise")
    kl: NonNegativeFloat = Field(
        0.0, description="weight of the divergence from the model that the run starts with"
    )
    steps_per_rollout: PositiveInt = Field(
        1, description="optimizer steps from one round of sampling, before the next round by the new weights"
    )
    learn_truncated: bool = Field(
        True, description="false: answers that ran out of tokens count in no loss (DAPO's overlong filtering)"
    )

    @model_validator(mode="after")
    def _agree(self) -> "GrpoConfig":
        if self.val and self.val_fraction is not None:
            raise ValueError("val_fraction: has no effect with val: give one of them")
        return self
