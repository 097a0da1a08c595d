"""The meaning of a run's validation loss: the part of the text that was scored, and the baselines that it misses.

The terminal, the report and the dashboard use these words.
"""

from collections.abc import Mapping
from typing import Any

from deskside.run.record import number
from deskside.utils.format import percent

# From the name in summary.json to that in a sentence.
BASELINES = {"gzip": "gzip", "unigram": "a unigram model"}


def validation_share(summary: Mapping[str, Any]) -> float:
    """Return the share of the validation text that the final evaluation read: 1 unless the run had no time for all."""
    share = number(summary.get("val_share"))
    return 1.0 if share is None else share


def share_text(share: float) -> str:
    """Return a share below 1 as text, which never says 0 % or 100 %."""
    return "under 1 %" if share < 0.01 else percent(min(share, 0.99), 0)


def partial_text(summary: Mapping[str, Any], whole: str = "the validation text") -> str:
    """Return the part of `whole` that the final evaluation read, such as "6 % of `whole`"; "" if it read all."""
    share = validation_share(summary)
    return "" if share >= 1 else f"{share_text(share)} of {whole}"


def baselines(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the bits per byte of the known baselines on the text that was read, by their names in summary.json."""
    values = {name: number(summary.get(f"{name}_bpb")) for name in BASELINES}
    return {name: value for name, value in values.items() if value is not None}


def not_reached(bpb: float, known: Mapping[str, float]) -> list[str]:
    """Return which of the `baselines` a model with this loss is not better than."""
    return [name for name, value in known.items() if bpb >= value]


def told_baselines(bpb: float, known: Mapping[str, float]) -> dict[str, float]:
    """Return the `baselines` that a short sentence compares with: gzip, and those that the model is not better than."""
    return {name: value for name, value in known.items() if name == "gzip" or name in not_reached(bpb, known)}
