"""The metrics of a trial (one run: one arm of a study with one seed), which are stored under these keys."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One metric of a trial.

    Attributes:
        better: The preferred direction; None for a descriptive number.
        digits: Displayed decimals.
        scale: Factor from the stored number to `unit`.
        about: Explanation for a tooltip or footnote.
    """

    key: str
    label: str
    unit: str
    better: Literal["lower", "higher"] | None
    digits: int
    scale: float = 1.0
    about: str = ""

    @property
    def heading(self) -> str:
        """The label with its unit, for axes and columns."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    def text(self, stored: float) -> str:
        """Return a stored number in `unit`, without the unit."""
        return f"{stored * self.scale:,.{self.digits}f}"


METRICS: tuple[Metric, ...] = (
    Metric("val_bpb", "validation loss", "bits per byte", "lower", 4, about="at the end, whole validation split"),
    Metric(
        "val_bpb_equal_tokens",
        "validation loss at equal tokens",
        "bits per byte",
        "lower",
        4,
        about="interpolated at the most tokens that all finished trials with the same baseline reached",
    ),
    Metric("val_loss", "validation loss", "nats per token", "lower", 4, about="at the end, whole validation split"),
    Metric("perplexity", "perplexity", "per token", "lower", 2, about="exp of the validation loss"),
    Metric("train_loss", "training loss", "nats per token", "lower", 4, about="mean of the last 5 % of the steps"),
    Metric("tokens_per_second", "speed", "tokens/s", "higher", 0, about="training steps alone"),
    Metric("mfu", "model FLOPs utilization", "%", "higher", 1, 100.0, "against the measured BF16 matmul peak"),
    Metric("peak_memory_gib", "peak memory", "GiB", "lower", 2, about="allocated; resident set on a CPU"),
    Metric("peak_reserved_gib", "reserved memory", "GiB", "lower", 2, about="held by the allocator; GPU only"),
    Metric("watts", "power", "W", "lower", 0, about="mean after the first seconds; GPU only"),
    Metric("joules_per_token", "energy", "mJ per token", "lower", 3, 1000.0, "mean power divided by speed; GPU only"),
    Metric("gpu_shared", "GPU shared", "% of the time", None, 0, 100.0, "while another process computed on the GPU"),
    Metric("parameters", "parameters", "M", None, 1, 1e-6),
    Metric("parameters_quantized", "parameters in quantized products", "M", None, 1, 1e-6),
    Metric("micro_tokens", "micro-batch", "tokens", None, 0, about="per forward pass"),
    Metric("tokens", "tokens trained on", "M", None, 1, 1e-6),
    Metric("steps", "optimizer steps", "", None, 0),
    Metric("seconds", "training time", "s", None, 1, about="compile, evaluation and checkpoints excluded"),
    Metric("total_seconds", "time of the whole trial", "s", None, 1, about="lifetime of its processes"),
)  # fmt: skip

BY_KEY = {metric.key: metric for metric in METRICS}

# Emulating a number format changes these metrics, so emulated values do not apply to hardware with the format.
SPEED_AND_POWER = ("tokens_per_second", "mfu", "watts", "joules_per_token", "seconds", "total_seconds")

QUALITY, SPEED, MEMORY, ENERGY = "val_bpb", "tokens_per_second", "peak_memory_gib", "joules_per_token"
PRIMARY = (QUALITY, SPEED, MEMORY)


def metric_named(key: str) -> Metric:
    """Return a metric by its key. For an unknown key, the metric shows the stored number without a unit."""
    return BY_KEY.get(key) or Metric(key, key.replace("_", " "), "", None, 4)
