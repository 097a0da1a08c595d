"""Adapters: small trained matrices beside frozen weights (LoRA, Hu et al. 2021, arXiv 2106.09685).

A projection y = x W^T becomes y = x W^T + scale (x A^T) B^T, where A is (rank, in), B is (out, rank) and W is frozen,
in 16, 8 or 4 bits. scale is alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732), which
keeps the size of what an adapter learns the same for every rank.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from deskside.config.base import Part

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Base = Literal["bf16", "int8", "nf4"]
PROJECTIONS: tuple[Projection, ...] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip


class AdapterConfig(Part):
    """LoRA on a model whose own weights do not change."""

    rank: PositiveInt = Field(16, le=4096, description="inner size of the adapters")
    alpha: PositiveFloat = Field(32.0, description="what adapters add is scaled by alpha / rank")
    rank_stabilised: bool = Field(False, description="scale by alpha / sqrt(rank) instead (rsLoRA)")
    targets: Literal["all"] | tuple[Projection, ...] = Field(
        "all",
        description="projections with an adapter, by their Hugging Face names; all: every one of the blocks",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of an adapter's input that is dropped in training"
    )
    base: Base = Field(
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
