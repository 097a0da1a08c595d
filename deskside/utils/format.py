"""Values as text: counts, durations, bytes, money, percentages and intervals.

Commands, reports and charts share these functions, so that one quantity is written in one way.
"""

import math
import re
from collections.abc import Sequence
from datetime import datetime, timedelta

UNKNOWN = "not known"
GIB = 2**30


def scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return at most three significant digits in the largest unit that leaves at least one digit before the point.

    `units` holds (suffix, size), the largest first. The unit is chosen after rounding, so 999.6 million is 1B and not
    1000M or 1e+03M. 1,000 and more of the largest unit get thousands separators.
    """
    for index, (suffix, size) in enumerate(units):
        digits = 2 - math.floor(math.log10(abs(value) / size)) if value else 2
        rounded = round(value / size, digits)
        if abs(rounded) >= 1 or index == len(units) - 1:
            return _fixed(rounded, digits) + suffix
    raise ValueError("units must not be empty")


def _fixed(value: float, digits: int) -> str:
    """Return a number with at most `digits` decimals, without trailing zeros and without an exponent."""
    text = f"{value:,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(value: float) -> str:
    """Return a number with thousands separators, without an exponent, and with at most three significant digits.

    Whole numbers, and numbers from 1,000, have all the digits before the decimal point.
    """
    if value == int(value) or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return _fixed(value, 2 - math.floor(math.log10(abs(value))))


def span(interval: tuple[float, float]) -> str:
    """Return an interval of numbers as `50 to 100`, or as `28` if both ends are equal."""
    low, high = interval
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def count(value: float | None) -> str:
    """Return a number of tokens, parameters or steps: 12,345 or 371M or 3.95B; `UNKNOWN` for None."""
    if value is None:
        return UNKNOWN
    if round(abs(value)) < 1e6 and f"{abs(value):.3g}" != "1e+06":
        return f"{value:,.0f}"
    return scaled(value, (("T", 1e12), ("B", 1e9), ("M", 1e6)))


def tick_text(value: float) -> str:
    """Return the label of a tick of an axis: 0.05, 200, 20k, 1.5M."""
    return scaled(value, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)))


def plural(amount: int, noun: str) -> str:
    """Return an amount with its noun: `1 trial`, `2 trials`, `3 directories`, `2 searches`."""
    if amount != 1:
        ending = "ies" if re.search("[^aeiou]y$", noun) else "es" if noun.endswith("ch") else "s"
        noun = (noun[:-1] if ending == "ies" else noun) + ending
    return f"{amount:,} {noun}"


def gib(size: float) -> str:
    """Return a size in bytes as `12.3 GiB`, or as `420 MiB` below one GiB."""
    if abs(size) >= GIB - 2**19:  # from half a MiB below one GiB on, which would round to 1024 MiB
        return f"{size / GIB:.1f} GiB"
    return f"{size / 2**20:.0f} MiB"


def gib_range(low: float, high: float) -> str:
    """Return a range of sizes with the unit once, `12.3 to 14.0 GiB`, or twice if the units differ."""
    (first, unit), last = gib(low).split(" "), gib(high)
    return f"{first} to {last}" if last.endswith(unit) else f"{first} {unit} to {last}"


def bits_per_byte(value: float) -> str:
    """Return bits per byte with two decimals, as a reader rounds the three of tables (0.8748 is 0.875, and so 0.88)."""
    return f"{math.floor(round(value, 3) * 100 + 0.5 + 1e-9) / 100:.2f}"


def gib_digits(size: float) -> str:
    """Return bytes in GiB, with at most two decimals and without the unit, for narrow tables: 0.42, 12.3, 141."""
    value = size / GIB
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def flops(value: float) -> str:
    """Return floating-point operations with an SI prefix."""
    prefixes = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1.0))
    return scaled(value, [(f" {prefix}FLOP", size) for prefix, size in prefixes])


def dollars(value: float) -> str:
    """Return an amount in dollars, with cents below ten dollars."""
    return f"${value:,.2f}" if value < 10 else f"${value:,.0f}"


def hours(value: float) -> str:
    """Return a number of hours without the unit, for tables: 0.42, 12.3, 1,204."""
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Return an estimated time in one unit: 45 ms, 12 s, 3.5 h, 40 days."""
    for unit, size in (("years", 365.25 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            amount = seconds / size
            return f"{number(round(amount, 1) if amount < 100 else round(amount))} {unit}"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if 0 < seconds < 1e-6:
        return "less than 1 us"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"


def elapsed(seconds: float | None) -> str:
    """Return a measured time in one or two units: 3.2 s, 4 min 05 s, 2 h 07 min, 3 d 04 h; `UNKNOWN` for None."""
    if seconds is None:
        return UNKNOWN
    if seconds < 99.95:
        return f"{seconds:.3g} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100 * 60:
        unit, size, small_unit, small_size = "min", 60, "s", 1
    elif whole < 100 * 3600:
        unit, size, small_unit, small_size = "h", 3600, "min", 60
    else:
        unit, size, small_unit, small_size = "d", 86400, "h", 3600
    amount, rest = divmod(round(whole / small_size) * small_size, size)
    return f"{amount} {unit} {rest // small_size:02d} {small_unit}"


def end_time(seconds: float, now: datetime | None = None) -> str:
    """Return when something ends that takes this many seconds more: at 21:32, in 12 min; or with the day if not today.

    now: local time; default: the clock of this machine.
    """
    now = now or datetime.now()
    end = now + timedelta(seconds=seconds)
    day = "" if end.date() == now.date() else f"{end:%a %d %b} "
    return f"at {day}{end:%H:%M}, in {duration(seconds)}"


def percent_digits(*shares: float) -> int:
    """Return the number of decimals for shares that are shown together as percentages.

    The largest share decides: 123 %, 12.3 %, 1.23 %, 0.012 %.
    """
    largest = max((abs(100 * share) for share in shares if math.isfinite(share)), default=0.0)
    if largest >= 100:
        return 0
    if largest >= 10:
        return 1
    return 2 if largest >= 0.1 or largest == 0 else 3


def percent(share: float, decimals: int, signed: bool = False) -> str:
    """Return a share, where 1 is the whole, as `12.3 %`, or `+12.3 %`. A zero has no sign."""
    text = f"{100 * share:{'+' if signed else ''},.{decimals}f}"
    return ("0" if not text.strip("+-0.,") else text) + " %"


def percent_range(low: float, high: float, decimals: int, signed: bool = False) -> str:
    """Return an interval of shares: `11.9 to 12.7 %`."""
    return f"{percent(low, decimals, signed).removesuffix(' %')} to {percent(high, decimals, signed)}"


def value_text(value: object) -> str:
    """Return any JSON value as short text: true, none, 0.0003, `1, 2`, `key: value`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 10_000 else f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(value_text(item) for item in value) or "(empty)"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {value_text(item)}" for key, item in value.items()) or "(empty)"
    return str(value)


def printable(text: str) -> str:
    r"""Replace control characters except \n and \t, and lone surrogates, which UTF-8 cannot encode; \r\n becomes \n."""
    text = text.replace("\r\n", "\n").encode("utf-8", errors="replace").decode("utf-8")
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "\ufffd" for c in text)
