"""Options of the fine-tuning objectives: `deskside sft`, `dpo`, `kto` and `grpo`.

`RunConfig.align` is one of these classes, or None for pretraining; its `name` selects the objective of the training
loop. Everything else (model, batch, schedule, precision ...) is configured as for pretraining.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from deskside.config.base import DataKind, Part, UserPath

DataSources = tuple[Annotated[str, Field(min_length=1)], ...]
PairLoss = Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "orpo", "simpo", "cpo"]
HeldOutFraction = Annotated[float, Field(gt=0, lt=0.5)] | None


class _Objective(Part):
    """Options of every objective."""

    data_kind: ClassVar[DataKind]

    name: str
    data: DataSources = ()
    val: DataSources = ()
    val_fraction: HeldOutFraction = None
    template: UserPath | None = Field(
        None, description="a chat template (.jinja) instead of the tokenizer's own"
    )

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        if self.val and self.val_fraction is not None:
            raise ValueError("val_fraction: has no effect with val; give one of them")
        return self


class SftConfig(_Objective):
    """Supervised fine-tuning on conversations, with the loss on the assistant's tokens."""

    data_kind = "conversations"

    name: Literal["sft"] = Field("sft", description="the training objective")
    data: DataSources = Field(
        (), description="conversations: .jsonl[.gz|.zst], .parquet, a directory, hf:owner/name"
    )
    val: DataSources = Field((), description="held-out conversations; default: a share of `data`")
    val_fraction: HeldOutFraction = Field(
        None,
        description="share of `data` that is held out; default: 0.02, or up to 0.1 of few conversations",
    )
    turns: Literal["all", "last"] = Field("all", description="assistant turns that the loss is computed on")


class DpoConfig(_Objective):
    """Direct preference optimization (DPO) on pairs of answers."""

    data_kind = "preference"

    name: Literal["dpo"] = Field("dpo", description="the training objective")
    data: DataSources = Field((), description="pairs: .jsonl[.gz|.zst], .parquet, hf:owner/name")
    val: DataSources = Field((), description="held-out pairs; default: a share of `data`")
    val_fraction: HeldOutFraction = Field(
        None,
        description="share of `data` that is held out; default: 0.05, up to 0.1 of few pairs, at most 500 pairs",
    )
    loss: PairLoss = Field(
        "sigmoid",
        description="sigmoid: DPO; robust, hinge, ipo: its variants; sigmoid_norm: DPO with log-probabilities per "
        "token, as in IPO; orpo, simpo, cpo: without a reference model",
    )
    beta: PositiveFloat = Field(
        0.1,
        description="strength of the pull to the initial model, or without one of the margin; simpo: 2 unless given; "
        "ipo and sigmoid_norm need larger values, about 1; orpo: weight of the odds ratio",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="assumed share of pairs with a wrong label")
    gamma: NonNegativeFloat = Field(0.0, description="margin that simpo demands; simpo: 1 unless given")
    nll_weight: NonNegativeFloat = Field(
        0.0,
        description="weight of the negative log-likelihood of the chosen answers, per token (orpo: of the questions "
        "too); cpo and orpo: 1 unless given",
    )

    @property
    def reference_free(self) -> bool:
        """Return True if the loss needs no reference model."""
        return self.loss in ("orpo", "simpo", "cpo")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults_of_loss(cls, data: object) -> object:
        if isinstance(data, Mapping) and isinstance(loss := data.get("loss"), str):
            return {**_DEFAULTS_OF_LOSS.get(loss, {}), **data}
        return data

    @model_validator(mode="after")
    def _check_options_of_loss(self) -> Self:
        if self.loss in ("ipo", "hinge", "orpo") and self.label_smoothing:
            raise ValueError(
                f"label_smoothing: has no effect with loss {self.loss}; remove it, or use --align.loss sigmoid"
            )
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError(
                "loss: robust needs the share of wrong labels; give --align.label_smoothing 0.1, for example"
            )
        if self.loss != "simpo" and self.gamma:
            raise ValueError(
                f"gamma: has no effect with loss {self.loss}; remove it, or use --align.loss simpo"
            )
        return self


# Defaults that differ from those of the other losses, from the papers (align/preference_losses.py).
_DEFAULTS_OF_LOSS: dict[str, dict[str, float]] = {
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "cpo": {"nll_weight": 1.0},
    "orpo": {"nll_weight": 1.0},
}


class KtoConfig(_Objective):
    """Kahneman-Tversky optimization (KTO) on single answers, each labelled desirable or not."""

    data_kind = "labelled"

    name: Literal["kto"] = Field("kto", description="the training objective")
    data: DataSources = Field((), description="labelled answers: .jsonl[.gz|.zst], .parquet, hf:owner/name")
    val: DataSources = Field((), description="held-out labelled answers; default: a share of `data`")
    val_fraction: HeldOutFraction = Field(
        None,
        description="share of `data` that is held out; default: 0.05, up to 0.1 of few answers, at most 500 answers",
    )
    beta: PositiveFloat = Field(0.1, description="strength of the pull to the initial model")
    desirable_weight: PositiveFloat = Field(1.0, description="weight of the desirable answers in the loss")
    undesirable_weight: PositiveFloat = Field(
        1.0, description="weight of the undesirable answers in the loss"
    )


class GrpoConfig(_Objective):
    """Group-relative policy optimization (GRPO) on questions whose answers can be checked (see `align/policy_loss.py`).

    A row of the batch is a question with a sampled answer, so a step has batch.tokens / batch.sequence_length answers.
    """

    data_kind = "questions"

    name: Literal["grpo"] = Field("grpo", description="the training objective")
    data: DataSources = Field((), description="questions: .jsonl[.gz|.zst], .parquet, hf:owner/name")
    val: DataSources = Field((), description="held-out questions; default: a share of `data`")
    val_fraction: HeldOutFraction = Field(
        None,
        description="share of `data` that is held out; default: 0.05, up to 0.1 of few, at most 200 questions",
    )
    system: str | None = Field(None, min_length=1, description="a system message before every question")
    reward: UserPath = Field(
        "number",
        description="number, exact, format, code, a sum such as 0.9*number+0.1*format, file.py:function, or the URL of "
        "a server, http://...",
    )
    columns: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="further fields of the records that the reward function or server gets"
    )
    reward_timeout: PositiveFloat | None = Field(
        None, description="seconds that a request to the reward server may take; default: 60"
    )
    tools: UserPath | None = Field(
        None, description="functions that the model may call: my_tools.py:search,add"
    )
    tool_turns: PositiveInt | None = Field(
        None, description="turns of an answer that may call tools; default: 4"
    )
    group: int = Field(8, ge=2, description="answers sampled for each question")
    answer_tokens: PositiveInt = Field(
        256, description="maximum tokens of an answer, with the results of tools"
    )
    temperature: float = Field(
        1.0, gt=0, le=5, description="temperature of sampling, and of the policy in the loss"
    )
    scale_rewards: bool = Field(
        True, description="divide advantages by the group's standard deviation; Dr.GRPO does not"
    )
    ratio: Literal["token", "sequence"] = Field(
        "token", description="probability ratio that is clipped: of each token, or of the sequence (GSPO)"
    )
    average: Literal["sequence", "token", "fixed"] = Field(
        "token",
        description="mean of the loss: per sequence (GRPO), per token (DAPO), over a fixed length (Dr.GRPO)",
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: PositiveFloat = Field(0.28, description="the ratio is clipped above 1 + clip_high")
    kl: NonNegativeFloat = Field(0.0, description="weight of the KL divergence from the initial model")
    steps_per_rollout: PositiveInt = Field(
        1, description="optimizer steps on the answers of one round of sampling"
    )
    learn_truncated: bool = Field(
        True,
        description="false: leave answers that reach answer_tokens out of the loss (DAPO's overlong filtering)",
    )

    @property
    def reward_is_server(self) -> bool:
        """Return True if the reward comes from a server."""
        return self.reward.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def _check_reward_and_tools(self) -> Self:
        if self.reward_timeout is not None and not self.reward_is_server:
            raise ValueError("reward_timeout: has no effect without a reward server; remove it")
        if self.tool_turns is not None and self.tools is None:
            raise ValueError("tool_turns: has no effect without tools; remove it, or give --align.tools")
        if taken := {"prompt", "completion", "answer"}.intersection(self.columns):
            raise ValueError(f"columns: the reward gets {sorted(taken)[0]} anyway; remove it")
        return self


AlignConfig = Annotated[SftConfig | DpoConfig | KtoConfig | GrpoConfig, Field(discriminator="name")]
