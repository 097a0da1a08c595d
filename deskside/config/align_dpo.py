"""Options of `deskside dpo` itself; see config/align.py."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, model_validator

from deskside.config.base import DataKind, Part

Spec = Annotated[str, Field(min_length=1)]


class DpoConfig(Part):
    """Direct preference optimisation on pairs of answers."""

    data_kind: ClassVar[DataKind] = "preference"

    name: Literal["dpo"] = Field("dpo", description="which objective")
    data: tuple[Spec, ...] = Field((), description="pairs: .jsonl[.gz|.zst], .parquet, hf:owner/name")
    val: tuple[Spec, ...] = Field((), description="held-out pairs; none: a share of `data`")
    val_fraction: Annotated[float, Field(gt=0, lt=0.5)] | None = Field(
        None, description="share of `data` that is held out; unset: 0.05, at most 500 pairs"
    )
    template: str | None = Field(
        None, min_length=1, description="a chat template (.jinja) instead of the tokenizer's own"
    )
    loss: Literal["sigmoid", "ipo", "sigmoid_norm"] = Field(
        "sigmoid", description="sigmoid is DPO; sigmoid_norm counts per token, as ipo does"
    )
    beta: PositiveFloat = Field(
        0.1,
        description="how strongly the model is held to where it starts; ipo and sigmoid_norm want more, about 1",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="share of pairs whose label is taken to be wrong"
    )

    @model_validator(mode="after")
    def _agree(self) -> "DpoConfig":
        if self.val and self.val_fraction is not None:
            raise ValueError("val_fraction: has no effect with val: give one of them")
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing: has no effect on ipo; remove it, or use --align.loss sigmoid")
        return self
