"""The unchecked options of `deskside plan`, and the counts among them."""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from deskside.utils.errors import UsageError

SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(kw_only=True)
class PlanQuestion:
    """The unchecked options of `deskside plan`. Counts may be text such as 3B or 1.5e9."""

    gpu: str | None = None
    here: bool = False
    hours: float | None = None
    tokens: str | float | None = None
    flops: float | None = None
    loss: float | None = None
    preset: str | None = None
    depth: int | None = None
    params: str | float | None = None
    init: str | None = None
    gpus: int = 1
    host_gib: float | None = None
    precision: str | None = None
    sequence: int | None = None
    unique_tokens: str | float | None = None
    own_corpus: bool = False
    price_kwh: float | None = None
    rent_per_hour: float | None = None
    probes: str = "probes"


def count(option: str, given: Any) -> float:
    """Parse a positive whole number, written as 3000000, 3M, 1.5B or 2e9. Raises UsageError."""
    text = str(given).strip().lower().replace(",", "").replace("_", "")
    scale = SUFFIXES.get(text[-1:], 1)
    try:
        value = Decimal(text[:-1] if scale > 1 else text) * scale
    except InvalidOperation:
        raise UsageError(f"{option}: '{given}' is not a count; write it as 3B, 350M or 1500000") from None
    if not value.is_finite() or value <= 0:
        raise UsageError(f"{option}: must be above zero, not {given}")
    if value.adjusted() > 18:
        raise UsageError(f"{option}: {given} is too large; give less than 1e19")
    if value != value.to_integral_value():
        unit = f"; did you mean {given}B or {given}M?" if scale == 1 and "e" not in text else ""
        raise UsageError(f"{option}: {given} is not a whole number{unit}")
    return float(value)
