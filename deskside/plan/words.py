"""Numbers as a person reads them."""


def number(value: float) -> str:
    """Three significant digits, thousands apart, no exponent."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def span(interval: tuple[float, float]) -> str:
    """`28`, or `50 to 100`."""
    low, high = interval
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def gib(size: float) -> str:
    """Bytes in GiB, small ones in MiB."""
    return f"{size / 2**30:.1f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.0f} MiB"


def flops(value: float) -> str:
    """FLOPs with a prefix."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}FLOP"
    return f"{value:.3g} FLOP"


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
    for letter, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:,.0f}"


def dollars(value: float) -> str:
    """Cents below ten dollars."""
    return f"${value:,.2f}" if value < 10 else f"${value:,.0f}"
