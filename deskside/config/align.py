"""Objectives other than pretraining: the options of `deskside sft`, `dpo` and `grpo`.

`RunConfig.align` holds one of them, and its `name` says which objective the training loop gets. Everything else of a
run (model, batch, schedule, precision ...) is configured as for pretraining.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from deskside.config.base import DataKind, Part

Specs = tuple[Annotated[str, Field(min_length=1)], ...]
Fraction = Annotated[float, Field(gt=0, lt=0.5)] | None


class _Objective(Part):
    """Options that all three have."""

    data_kind: ClassVar[DataKind]

    name: str
    data: Specs = ()
    val: Specs = ()
    val_fraction: Fraction = None
    template: str | None = Field(
        None, min_length=1, description="a chat template (.jinja) instead of the tokenizer's own"
    )

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> Self:
        if self.val and self.val_fraction is not None:
            raise ValueError("val_fraction: has no effect with val: give one of them")
        return self


class SftConfig(_Objective):
    """Supervised fine-tuning on conversations: the next token, where an assistant speaks."""

    data_kind = "conversations"

    name: Literal["sft"] = Field("sft", description="which objective")
    data: Specs = Field(
        (), description="conversations: .jsonl[.gz|.zst], .parquet, a directory, hf:owner/name"
    )
    val: Specs = Field((), description="held-out conversations; none: a share of `data`")
    val_fraction: Fraction = Field(
        None,
        description="share of `data` that is held out; if unset: 0.02, and of few conversations up to 0.1",
    )
    turns: Literal["all", "last"] = Field("all", description="assistant turns to learn from")


class DpoConfig(_Objective):
    """Direct preference optimisation on pairs of answers."""

    data_kind = "preference"

    name: Literal["dpo"] = Field("dpo", description="which objective")
    data: Specs = Field((), description="pairs: .jsonl[.gz|.zst], .parquet, hf:owner/name")
    val: Specs = Field((), description="held-out pairs; none: a share of `data`")
    val_fraction: Fraction = Field(
        None, description="share of `data` that is held out; if unset: 0.05, at most 500 pairs"
    )
    loss: Literal["sigmoid", "ipo", "sigmoid_norm"] = Field(
        "sigmoid", description="sigmoid is DPO; sigmoid_norm counts per token, as ipo does"
    )
    beta: PositiveFloat = Field(
        0.1,
        description="how strongly the model is held to where it starts; ipo and sigmoid_norm want more, about 1",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of pairs whose label is taken to be wrong"
    )

    @model_validator(mode="after")
    def _smoothing_has_effect(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing: has no effect on ipo; remove it, or use --align.loss sigmoid")
        return self


class GrpoConfig(_Objective):
    """Group-relative policy optimisation on questions whose answers can be checked (see `align/losses.py`).

    A row of the batch is a sampled answer with its question: batch.tokens / batch.sequence_length answers a step.
    """

    data_kind = "questions"

    name: Literal["grpo"] = Field("grpo", description="which objective")
    data: Specs = Field((), description="questions: .jsonl[.gz|.zst], .parquet, hf:owner/name")
    val: Specs = Field((), description="held-out questions; none: a share of `data`")
    val_fraction: Fraction = Field(
        None, description="share of `data` that is held out; if unset: 0.05, at most 200 questions"
    )
    system: str | None = Field(None, min_length=1, description="a system message before every question")
    reward: str = Field(
        "number",
        min_length=1,
        description="number, format, code, a sum such as 0.9*number+0.1*format, or file.py:function",
    )
    group: int = Field(8, ge=2, description="answers to each question")
    answer_tokens: PositiveInt = Field(256, description="tokens that an answer may have")
    temperature: float = Field(1.0, gt=0, le=5, description="of sampling, and of the policy")
    scale_rewards: bool = Field(
        True, description="divide by the group's standard deviation; Dr.GRPO does not"
    )
    ratio: Literal["token", "sequence"] = Field("token", description="what is clipped; sequence is GSPO")
    average: Literal["sequence", "token", "fixed"] = Field(
        "token", description="over what the loss is a mean: GRPO's, DAPO's, Dr.GRPO's"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="how far a ratio may fall")
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


AlignConfig = Annotated[SftConfig | DpoConfig | GrpoConfig, Field(discriminator="name")]
