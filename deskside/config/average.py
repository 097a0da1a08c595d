"""Averaging of the weights over the last part of a run."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from deskside.config.base import Part


def _parse_blend(value: Any) -> Any:
    """Return "auto", or the value as a number, so that a wrong one is reported with the range of numbers only."""
    if isinstance(value, str) and value != "auto":
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"must be auto or a number above 0 and at most 1, not {value!r}") from None
    if value != "auto" and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1
    ):
        raise ValueError(f"must be auto or a number above 0 and at most 1, not {value!r}")
    return value


class AverageConfig(Part):
    """Average of the weights over steps, in float32. A run with an average evaluates and exports it.

    Training continues from the weights of the last step, which checkpoints contain too. All trained parameters are
    averaged, including the biases of routers, which belong to the routers' weights.
    """

    name: Literal["none", "ema", "tail"] = Field(
        "none",
        description="ema: exponential moving average (Polyak and Juditsky 1992); tail: mean of all weights since "
        "`start` (arXiv 1803.05407, 2306.03241)",
    )
    half_life: float = Field(
        0.03, gt=0, le=1, description="ema: share of the run after which weights count half as much"
    )
    start: float = Field(0.8, ge=0, lt=1, description="progress (0 to 1) at which averaging begins")
    every: PositiveInt = Field(1, description="steps between two updates of the average")
    blend: Annotated[Literal["auto"] | float, BeforeValidator(_parse_blend)] = Field(
        1.0,
        description="share of the average in the final weights, the rest is the last step's; auto: the one of six "
        "shares from 0 to 1 with the lowest loss on evaluate.tokens of the validation split",
    )
    offload: bool = Field(False, description="keep the average in host memory instead of on the GPU")

    def per_step(self) -> float:
        """Return the updates per step, averaged over the run."""
        return 0.0 if self.name == "none" else (1 - self.start) / self.every
