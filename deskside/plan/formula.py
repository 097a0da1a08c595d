"""A line of arithmetic: a formula in words, the same with numbers, and what it comes to."""

from collections.abc import Sequence


class Line:
    """what = formula = filled = value [unit]. filled: text, or numbers that are joined with `joiner`."""

    def __init__(
        self,
        what: str,
        formula: str,
        filled: str | Sequence[float],
        value: float,
        unit: str,
        joiner: str = " ",
    ):
        self.what, self.formula, self.value, self.unit = what, formula, value, unit
        self.filled = filled if isinstance(filled, str) else joiner.join(plain(number) for number in filled)


def plain(value: float) -> str:
    """A number exact enough to compute with: whole numbers whole, others with six digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"


def product(*factors: float) -> str:
    """2 x 3 x 4, as text."""
    return " x ".join(plain(factor) for factor in factors)
