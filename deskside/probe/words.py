"""How numbers are written for a person."""


def count(number: float) -> str:
    """With three digits and a unit: 125M, 1.56B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= 0.9995 * size:
            scaled = number / size
            digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{scaled:.{digits}f}{unit}"
    return f"{number:.0f}"


def hours(number: float) -> str:
    """0.42, 12.3 or 1,204 hours."""
    return f"{number:.2f}" if number < 10 else f"{number:,.1f}" if number < 100 else f"{number:,.0f}"
