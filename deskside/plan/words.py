"""Numbers as a person reads them."""

import math
from collections.abc import Sequence


def scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return three significant digits in the largest unit that leaves at least one before the point.

    units: (suffix, size), the largest first. The unit is chosen after rounding: 999.6 million is 1B, not 1000M or
    1e+03M. Below the smallest unit the number is plain; beyond the largest thousands are apart.
    """
    for place, (suffix, size) in enumerate(units):
        digits = 2 - math.floor(math.log10(abs(value) / size)) if value else 2
        rounded = round(value / size, digits)
        if abs(rounded) >= 1 or place == len(units) - 1:
            return _plain(rounded, digits) + suffix
    raise ValueError("units must not be empty")


def _plain(value: float, digits: int) -> str:
    """Return a number with so many digits after the point, without zeros at the end and without an exponent."""
    text = f"{value:,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(value: float) -> str:
    """Three significant digits, thousands apart, no exponent."""
    if value == int(value) or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return _plain(value, 2 - math.floor(math.log10(abs(value))))


def span(interval: tuple[float, float]) -> str:
    """`28`, or `50 to 100`."""
    low, high = interval
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def gib(size: float) -> str:
    """Bytes in GiB, small ones in MiB."""
    return f"{size / 2**30:.1f} GiB" if abs(size) >= 2**30 - 2**19 else f"{size / 2**20:.0f} MiB"


def flops(value: float) -> str:
    """FLOPs with a prefix."""
    prefixes = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1.0))
    return scaled(value, [(f" {prefix}FLOP", size) for prefix, size in prefixes])


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would use."""
    for unit, size in (("years", 365.25 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{number(round(seconds / size, 1) if seconds / size < 100 else round(seconds / size))} {unit}"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"


def count(value: float) -> str:
    """Tokens and parameters: 3.95B, 371M."""
    if round(abs(value)) < 1e6 and f"{abs(value):.3g}" != "1e+06":
        return f"{value:,.0f}"
    return scaled(value, (("T", 1e12), ("B", 1e9), ("M", 1e6)))


def dollars(value: float) -> str:
    """Cents below ten dollars."""
    return f"${value:,.2f}" if value < 10 else f"${value:,.0f}"
