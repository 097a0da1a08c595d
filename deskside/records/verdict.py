"""The comparison of new runs with a record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deskside.facts.records import LossRecord
from deskside.study.stats.statistics import MeanInterval, interval_of_new_mean, mean_interval

Kind = Literal["within", "better", "worse", "no interval", "not comparable"]


@dataclass(frozen=True)
class ReplayVerdict:
    """The result of comparing the mean of new runs with a record.

    low, high: the interval in which the mean of as many new runs lies with 95 %; None if it is not known. `kind` is "no
    interval" if the record has one seed, and "not comparable" if the card is another.
    """

    kind: Kind
    mean: float
    low: float | None
    high: float | None


def spread(record: LossRecord) -> MeanInterval:
    """Return the mean of a record with its 95 % interval, which one seed does not have."""
    return mean_interval(record.bits_per_byte)


def judge(record: LossRecord, values: Sequence[float], card: str) -> ReplayVerdict:
    """Compare the bits per byte of new runs on `card` with a record."""
    mean = mean_interval(values).mean
    low, high = interval_of_new_mean(record.bits_per_byte, len(values))
    kind: Kind
    if card != record.card:
        kind = "not comparable"
    elif low is None or high is None:
        kind = "no interval"
    else:
        kind = "better" if mean < low else "worse" if mean > high else "within"
    return ReplayVerdict(kind, mean, low, high)
