"""Scaling of rotary frequencies, for rows longer than those that the weights were first trained on."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from deskside.config.base import Part

# The limit is larger than the sizes of any model; products of two sizes fit into int64.
Size = Annotated[int, Field(gt=0, le=1 << 27)]

# The fields that each kind reads in addition to factor; those in capitals below must be given.
_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
_REQUIRED = ("original_max_position_embeddings", "short_factor", "long_factor")


class RopeScaling(Part):
    """The scaling of rotary frequencies, with the fields of Hugging Face's `rope_parameters`; see ops/rope.py.

    linear: all are divided by `factor` (position interpolation, Chen et al. 2023, arXiv 2306.15595). yarn: Peng et al.
    2023, arXiv 2309.00071. llama3: that of Llama 3.1. longrope: Ding et al. 2024, arXiv 2402.13753; a model whose
    max_position_embeddings exceed original_max_position_embeddings has the long factors in all rows, any other the
    short ones.
    """

    rope_type: Literal["yarn", "linear", "llama3", "longrope"] = Field(
        "yarn", description="the kind of scaling"
    )
    factor: float = Field(ge=1, description="longest row / original_max_position_embeddings")
    original_max_position_embeddings: Size | None = Field(
        None, description="longest row that the weights were first trained on; needed by all kinds but linear"
    )
    attention_factor: PositiveFloat | None = Field(
        None, description="factor of queries and keys (yarn, longrope); default: from factor"
    )
    beta_fast: PositiveFloat = Field(
        32.0, description="turns in the original length that keep a frequency (yarn)"
    )
    beta_slow: PositiveFloat = Field(
        1.0, description="turns in the original length that divide it by factor (yarn)"
    )
    mscale: float | None = Field(None, ge=0, description="slope of the attention factor, numerator (yarn)")
    mscale_all_dim: float | None = Field(None, ge=0, description="the same, denominator (yarn)")
    truncate: bool = Field(True, description="round the range of interpolated pairs to whole pairs (yarn)")
    low_freq_factor: PositiveFloat = Field(
        1.0, description="turns in the original length up to which a frequency is divided by factor (llama3)"
    )
    high_freq_factor: PositiveFloat = Field(
        4.0, description="turns in the original length from which a frequency is kept (llama3)"
    )
    short_factor: tuple[PositiveFloat, ...] | None = Field(
        None, description="divisor of each frequency in models of the original length (longrope)"
    )
    long_factor: tuple[PositiveFloat, ...] | None = Field(
        None, description="divisor of each frequency in models of longer rows (longrope)"
    )

    @model_validator(mode="after")
    def _check_fields_of_the_kind(self) -> "RopeScaling":
        read = _FIELDS[self.rope_type]
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in ("rope_type", "factor"):
                continue
            if name in read and name in _REQUIRED and value is None:
                raise ValueError(f"{name}: is missing; rope_type {self.rope_type} needs it")
            if name not in read and value != field.default:
                raise ValueError(f"{name}: has no effect with rope_type {self.rope_type}; remove it")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast: {self.beta_fast} is below beta_slow = {self.beta_slow}; exchange them"
            )
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor: {self.low_freq_factor} is not below high_freq_factor = {self.high_freq_factor}"
            )
        return self

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines: attention_factor or, as in transformers, its default."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            assert self.original_max_position_embeddings is not None
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
        if self.rope_type != "yarn":
            return 1.0

        def scale(slope: float) -> float:
            return 0.1 * slope * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def in_hf_form(self) -> dict[str, Any]:
        """Return Hugging Face's `rope_parameters` without the base: the fields that this kind reads."""
        names = {"rope_type", "factor", *_FIELDS[self.rope_type]}
        return self.model_dump(mode="json", include=names, exclude_none=True)
