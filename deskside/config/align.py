"""Objectives other than pretraining: the options of `deskside sft`, `dpo` and `grpo`.

`RunConfig.align` holds one of them, and its `name` says which objective the training loop gets. Everything else of a
run (model, batch, schedule, precision ...) is configured as for pretraining.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from deskside.config.align_dpo import DpoConfig
from deskside.config.align_grpo import GrpoConfig
from deskside.config.base import DataKind, Part

Spec = Annotated[str, Field(min_length=1)]


class SftConfig(Part):
    """Supervised fine-tuning on conversations: the next token, where an assistant speaks."""

    data_kind: ClassVar[DataKind] = "conversations"

    name: Literal["sft"] = Field("sft", description="which objective")
    data: tuple[Spec, ...] = Field(
        (), description="conversations: .jsonl[.gz|.zst], .parquet, a directory, hf:owner/name"
    )
    val: tuple[Spec, ...] = Field((), description="held-out conversations; none: a share of `data`")
    val_fraction: Annotated[float, Field(gt=0, lt=0.5)] | None = Field(
        None, description="share of `data` that is held out; unset: 0.02, and of few conversations up to 0.1"
    )
    template: str | None = Field(
        None, min_length=1, description="a chat template (.jinja) instead of the tokenizer's own"
    )
    turns: Literal["all", "last"] = Field("all", description="assistant turns to learn from")

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> "SftConfig":
        if self.val and self.val_fraction is not None:
            raise ValueError("val_fraction: has no effect with val: give one of them")
        return self


AlignConfig = Annotated[SftConfig | DpoConfig | GrpoConfig, Field(discriminator="name")]
