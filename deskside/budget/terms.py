"""Numbers that carry the formula that computed them, so that each formula is written once and can be printed.

`budget/` computes memory and time with ordinary arithmetic. With plain numbers, formulas have little overhead; the
planner's search evaluates them thousands of times. With `Term`s, they return the same value and two texts: the formula
in words, and the formula with the numbers filled in. `deskside plan --explain` prints both:

    >>> parameters, shards = leaf("parameters", 124_000_000), leaf("shards", 4)
    >>> bytes = 4 * parameters / shards
    >>> bytes.formula, bytes.filled
    ('4 x parameters / shards', '4 x 124,000,000 / 4')

Long formulas are split into steps. `named` gives an intermediate result a name: later formulas show the name, and the
formula of the intermediate result becomes a separate line before them.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

SUM, PRODUCT, POWER, ATOM = range(4)  # precedence of a formula's outermost operator


@dataclass(frozen=True)
class Line:
    """One line of an explanation: "what = formula = filled = value unit"."""

    what: str
    formula: str
    filled: str
    value: float
    unit: str


class Term(float):
    """A float with its formula in words, its formula in numbers, and the lines of the intermediate results it uses."""

    formula: str
    filled: str
    precedence: int
    steps: tuple[Line, ...]

    def __add__(self, other: float) -> float:
        return _combined(self, "+", other, float(self) + float(other), SUM)

    def __radd__(self, other: float) -> float:
        return _combined(other, "+", self, float(other) + float(self), SUM)

    def __sub__(self, other: float) -> float:
        return _combined(self, "-", other, float(self) - float(other), SUM)

    def __rsub__(self, other: float) -> float:
        return _combined(other, "-", self, float(other) - float(self), SUM)

    def __mul__(self, other: float) -> float:
        return _combined(self, "x", other, float(self) * float(other), PRODUCT)

    def __rmul__(self, other: float) -> float:
        return _combined(other, "x", self, float(other) * float(self), PRODUCT)

    def __truediv__(self, other: float) -> float:
        return _combined(self, "/", other, float(self) / float(other), PRODUCT)

    def __rtruediv__(self, other: float) -> float:
        return _combined(other, "/", self, float(other) / float(self), PRODUCT)

    def __pow__(self, other: float, mod: None = None) -> float:
        return _combined(self, "^", other, float(self) ** float(other), POWER)

    def __rpow__(self, other: float, mod: None = None) -> float:
        return _combined(other, "^", self, float(other) ** float(self), POWER)

    def __neg__(self) -> "Term":
        return _term(-float(self), f"-({self.formula})", f"-({self.filled})", PRODUCT, self.steps)


def _term(value: float, formula: str, filled: str, precedence: int, steps: tuple[Line, ...] = ()) -> Term:
    term = Term(value)
    term.formula, term.filled, term.precedence, term.steps = formula, filled, precedence, steps
    return term


def leaf(name: str, value: float) -> Term:
    """Return a named number without a formula: a leaf of the expression tree."""
    return _term(value, name, formatted(value), ATOM)


def named(what: str, value: float, unit: str = "bytes") -> float:
    """Name an intermediate result, so that its formula is a separate line. Plain numbers and leaves are unchanged."""
    if not isinstance(value, Term) or value.precedence == ATOM:
        return value
    result = leaf(what, value)
    result.steps = (*value.steps, Line(what, value.formula, value.filled, float(value), unit))
    return result


def exp(value: float) -> float:
    """Return e to the power of `value`."""
    if not isinstance(value, Term):
        return math.exp(value)
    base = _term(math.e, "e", f"{math.e:.9f}", ATOM)
    return _combined(base, "^", value, math.exp(value), POWER)


def explained(what: str, value: float, unit: str, nothing: str = "none") -> list[Line]:
    """Return the lines that lead to a value; the last one is its own. `nothing` is the formula shown for a plain 0."""
    if isinstance(value, Term):
        return [*value.steps, Line(what, value.formula, value.filled, float(value), unit)]
    return [Line(what, "as given" if value else nothing, formatted(value), value, unit)]


def traced(instance: Any, **names: str) -> Any:
    """Return a copy of a dataclass with all numbers as `Term`s, named like their fields unless `names` renames them."""
    numbers = {}
    for field in fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[field.name] = leaf(names.get(field.name, field.name.replace("_", " ")), value)
    return replace(instance, **numbers)


def formatted(value: float) -> str:
    """Return a number as text: integers below 10^15 in full, others with six significant digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"


def _combined(left: float, operator: str, right: float, value: float, precedence: int) -> float:
    # "+ 0", "- 0", "x 1", "/ 1", "^ 1" and "x 0" are not shown.
    neutral = 0 if operator in "+-" else 1
    if not isinstance(right, Term) and (right == neutral or (right == 0 and operator == "x")):
        return left if right == neutral else 0.0
    if not isinstance(left, Term) and operator in "+x" and (left == neutral or left == 0):
        return right if left == neutral else 0.0
    # Operands of equal precedence need parentheses in a - (b - c), a / (b x c) and (a ^ b) ^ c, not in a + (b + c).
    strict_left, strict_right = operator == "^", operator in "-/^"
    steps = getattr(left, "steps", ())
    return _term(
        value,
        f"{_text(left, 'formula', precedence, strict_left)} {operator} "
        f"{_text(right, 'formula', precedence, strict_right)}",
        f"{_text(left, 'filled', precedence, strict_left)} {operator} "
        f"{_text(right, 'filled', precedence, strict_right)}",
        precedence,
        (*steps, *(line for line in getattr(right, "steps", ()) if line not in steps)),
    )


def _text(value: float, attribute: str, outer: int, strict: bool) -> str:
    """Return an operand's formula or filled formula, in parentheses if the outer operator needs them."""
    if not isinstance(value, Term):
        return formatted(value) if value >= 0 else f"({formatted(value)})"
    inner = getattr(value, attribute)
    return f"({inner})" if value.precedence < outer or (strict and value.precedence == outer) else str(inner)
