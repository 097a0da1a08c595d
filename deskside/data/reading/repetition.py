"""Epochs of the components of a mixture, and the temperature that keeps them few.

A high temperature (see `mixing`) reads small languages many times: 300M tokens from 73M of English and 17M of eight
Indian languages, drawn with T = 3.33, read those 10 to 22 times, and their validation loss rose from a third of the
run on (docs/indicmoe.md). UniMax (Chung et al. 2023, arXiv 2304.09151) therefore limits the epochs of each language.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from deskside.budget.loss import MAX_EPOCHS
from deskside.config.sections import DataConfig
from deskside.data.reading.mixing import temperature_weights
from deskside.data.reading.shards import read_index
from deskside.data.reading.tags import UNKNOWN_SOURCE


def epochs_at_temperature(sizes: Mapping[str, int], temperature: float, tokens: float) -> dict[str, float]:
    """Return how often each component is read in this number of tokens, before weights are rounded to rows.

    sizes: tokens of each component.
    """
    weights = temperature_weights(np.array(list(sizes.values())), temperature)
    shares = zip(sizes.items(), weights, strict=True)
    return {name: tokens * weight / sum(weights) / size for (name, size), weight in shares}


def highest_temperature(sizes: Mapping[str, int], tokens: float, max_epochs: float) -> float | None:
    """Return the highest temperature, in hundredths, at which no component is read more than `max_epochs` times.

    Infinity if even equal shares do not read one more often, and None if natural shares (T = 1) do.
    """

    def allowed(hundredths: float) -> bool:
        return max(epochs_at_temperature(sizes, hundredths / 100, tokens).values()) <= max_epochs

    if allowed(math.inf):
        return math.inf
    low, high = 100, 200
    if not allowed(low):
        return None
    while allowed(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low / 100


def planned_epochs(data: DataConfig, tokens: float) -> tuple[dict[str, float], dict[str, int]]:
    """Return the epochs of each language or source that a temperature of this configuration draws, and their tokens.

    Both are empty without a temperature. Raises UsageError or RunError if the prepared data cannot be read.
    """
    key = data.temperature_key
    if not key or data.path is None:
        return {}, {}
    index = read_index(Path(data.path).expanduser())
    split = index.splits["train"]
    if key == "language_temperature":
        sizes = {name: amount.tokens for name, amount in split.counts_by_language(index.tags).items()}
    else:
        sizes = {}
        for tag, (_, amount) in split.counts_by_tag().items():
            name = index.tags[tag].source or UNKNOWN_SOURCE
            sizes[name] = sizes.get(name, 0) + amount
    return epochs_at_temperature(sizes, getattr(data, key), tokens), sizes


def describe_epochs(
    epochs: Mapping[str, float], key: str = "", sizes: Mapping[str, int] | None = None
) -> str:
    """Return a line about the planned epochs of a mixture, with a warning about components that are read too often.

    key: the option with the temperature, if there is one, for which the warning names a lower value. sizes: tokens of
    each component.
    """
    listed = ", ".join(f"{name} {number:.2f}" for name, number in epochs.items())
    line = f"planned epochs of each part of the mixture: {listed}"
    often = [name for name, number in epochs.items() if number > MAX_EPOCHS]
    if not often:
        return line
    line += f"; beyond {MAX_EPOCHS}, repeated text teaches less than new text: {', '.join(often)}"
    if not key or sizes is None:
        return line
    tokens = sum(number * sizes[name] for name, number in epochs.items())
    if (temperature := highest_temperature(sizes, tokens, MAX_EPOCHS)) is None:
        return (
            f"{line}; at every temperature some text is read more often, so give more text or a shorter run"
        )
    return f"{line}; --data.{key} {temperature:g} reads none more often"
