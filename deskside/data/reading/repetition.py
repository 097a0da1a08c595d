"""Epochs of the components of a mixture, and the temperature that keeps them few.

A high temperature (see `mixing`) reads small languages many times: 300M tokens from 73M of English and 17M of eight
Indian languages, drawn with T = 3.33, read those 10 to 23 times, and their validation loss rose from a third of the
run on (docs/languages.md). UniMax (Chung et al. 2023, arXiv 2304.09151) therefore limits the epochs of each language.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from deskside.budget.loss import MAX_EPOCHS
from deskside.config.sections import DataConfig
from deskside.data.reading.index import read_index
from deskside.data.reading.mixing import Mixture, temperature_weights

Sizes = Mapping[str, int]  # tokens of each component


def epochs_at_temperature(
    sizes: Sizes, temperature: float, total: float, rows: Sizes | None = None
) -> dict[str, float]:
    """Return how often each component is read, with weights that are rounded to the rows of a period (`Mixture`).

    total: tokens that are read of all components; with `rows`, the rows of each component, it is in rows.
    """
    counts = Mixture.of(temperature_weights(np.array(list(sizes.values())), temperature)).count
    shares = counts / counts.sum()
    named = zip(sizes.items(), shares, strict=True)
    return {name: total * float(share) / (rows or sizes)[name] for (name, _), share in named}


def highest_temperature(
    sizes: Sizes, total: float, max_epochs: float, rows: Sizes | None = None
) -> float | None:
    """Return the highest temperature, in hundredths, at which no component is read more than `max_epochs` times.

    Infinity if this holds even for equal shares, and None if it does not hold for natural shares (T = 1). As weights
    are rounded to rows, a slightly higher one may be possible too. Arguments: see `epochs_at_temperature`.
    """

    def allowed(hundredths: float) -> bool:
        return max(epochs_at_temperature(sizes, hundredths / 100, total, rows).values()) <= max_epochs

    if allowed(math.inf):
        return math.inf
    low, high = 100, 200
    if not allowed(low):
        return None
    while high < 2**60 and allowed(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low / 100


def component_sizes(directory: Path, key: str) -> dict[str, int]:
    """Return the tokens of each component that a temperature draws from prepared data.

    key: the name of the temperature (`DataConfig.temperature_key`). Raises UsageError or RunError if the data cannot be
    read.
    """
    index = read_index(directory)
    split = index.splits["train"]
    if key == "language_temperature":
        return {name: amount.tokens for name, amount in split.counts_by_language(index.tags).items()}
    sizes: dict[str, int] = {}
    for tag, (_, tokens) in split.counts_by_tag().items():
        name = index.tags[tag].source_name
        sizes[name] = sizes.get(name, 0) + tokens
    return sizes


def describe_epochs(
    epochs: Mapping[str, float], data: DataConfig, sizes: Sizes | None = None, rows: Sizes | None = None
) -> str:
    """Return a line about the planned epochs of a mixture, with a warning about components that are read too often.

    If the mixture has a temperature, and a lower one helps, the warning names it. Sizes and rows: those of each
    component, as in `epochs_at_temperature`.
    """
    listed = ", ".join(f"{name} {number:.2f}" for name, number in epochs.items())
    line = f"planned epochs of each part of the mixture: {listed}"
    often = [name for name, number in epochs.items() if number > MAX_EPOCHS]
    if not often:
        return line
    line += f"; beyond {MAX_EPOCHS}, repeated text teaches less than new text: {', '.join(often)}"
    key = data.temperature_key
    if not key or sizes is None:
        return line
    total = sum(number * (rows or sizes)[name] for name, number in epochs.items())
    highest = highest_temperature(sizes, total, MAX_EPOCHS, rows)
    if highest is None:
        return (
            f"{line}; at every temperature some text is read more often, so give more text or a shorter run"
        )
    return (
        line if highest >= getattr(data, key) else f"{line}; --data.{key} {highest:g} reads none more often"
    )
