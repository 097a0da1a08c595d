"""One type for every length and interval: `24h`, `1.5B tokens`, `2000 steps`, `3 epochs`.

A duration is a number and a unit. Time is stored in seconds, so `90m` equals `1h30m`. Tokens and steps are whole
numbers. The canonical string (`str(duration)`) parses back to an equal duration.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, get_args

from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Unit = Literal["seconds", "tokens", "steps", "epochs"]

ACCEPTED = (
    "write it as 24h, 1h30m, 10 min, 300s, 1.5B tokens, 2000 steps, 3 epochs, or a whole number of steps"
)

_SECONDS_PER_UNIT = {
    "d": 86400, "day": 86400, "days": 86400,
    "h": 3600, "hr": 3600, "hour": 3600, "hours": 3600,
    "m": 60, "min": 60, "mins": 60, "minute": 60, "minutes": 60,
    "s": 1, "sec": 1, "secs": 1, "second": 1, "seconds": 1,
}  # fmt: skip
_COUNTED_UNITS: dict[str, Unit] = {
    "token": "tokens", "tokens": "tokens", "step": "steps", "steps": "steps",
    "epoch": "epochs", "epochs": "epochs",
}  # fmt: skip
_MULTIPLIERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = r"(?:\d[\d_,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_COUNT = re.compile(rf"({_NUMBER})\s*([kmbt]?)\s*({'|'.join(_COUNTED_UNITS)})")
_TIME_PART = re.compile(rf"({_NUMBER})\s*([a-z]+)\s*")


@dataclass(frozen=True)
class Duration:
    """A length or interval: `value` in `unit`.

    `value` is finite and above zero: an int for tokens and steps, a float for seconds and epochs. Raises ValueError,
    which lists the accepted forms, for any other value.
    """

    value: float
    unit: Unit

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ValueError(
                f"unknown unit '{self.unit}' of a duration; use one of {', '.join(get_args(Unit))}"
            )
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"a duration's value must be a number, not {value!r}; {ACCEPTED}")
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"a duration must be above zero and finite, not {value} {self.unit}; {ACCEPTED}")
        if self.unit in ("tokens", "steps"):
            if value >= 2**63:
                raise ValueError(f"{value} {self.unit} are too many for a duration; {ACCEPTED}")
            if value != int(value):
                raise ValueError(f"{value} {self.unit} is not a whole number; {ACCEPTED}")
            object.__setattr__(self, "value", int(value))
        else:
            object.__setattr__(self, "value", float(value))

    @classmethod
    def parse(cls, given: "str | int | float | Duration") -> "Duration":
        """Return the duration for a text, a whole number (of steps) or a Duration. Raises ValueError."""
        if isinstance(given, Duration):
            return given
        if isinstance(given, bool) or not isinstance(given, (str, int, float)):
            raise ValueError(f"{given!r} is not a duration; {ACCEPTED}")
        if isinstance(given, (int, float)):
            return cls(given, "steps")
        text = given.strip().lower()
        if re.fullmatch(r"\d[\d_,]*", text):
            return cls(int(_number(text, given)), "steps")
        count = _COUNT.fullmatch(text)
        if count:
            unit = _COUNTED_UNITS[count[3]]
            value = _number(count[1], given) * _MULTIPLIERS[count[2]]
            if unit in ("tokens", "steps"):
                if value != value.to_integral_value():
                    raise ValueError(f"'{given}' is not a whole number of {unit}; {ACCEPTED}")
                return cls(int(value), unit)
            return cls(float(value), unit)
        return cls(_seconds(text, given), "seconds")

    def __str__(self) -> str:
        if self.unit == "seconds":
            return _time_text(self.value)
        if self.unit == "epochs":
            return f"{_number_text(self.value)} epoch{'' if self.value == 1 else 's'}"
        if self.unit == "tokens":
            for letter, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
                # At most three decimals: 1.5B reads well, 0.131072M does not.
                if self.value >= scale and (int(self.value) * 1000) % scale == 0:
                    return f"{_number_text(Decimal(int(self.value)) / scale)}{letter} tokens"
        return f"{self.value} {self.unit if self.value != 1 else self.unit[:-1]}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accepts str, int and Duration; serializes to the canonical string."""
        return core_schema.no_info_before_validator_function(
            cls.parse,
            core_schema.is_instance_schema(cls),
            serialization=core_schema.plain_serializer_function_ser_schema(
                str, return_schema=core_schema.str_schema()
            ),
            json_schema_input_schema=core_schema.str_schema(),
        )


def parse_hours(text: str) -> float:
    """Return the hours in a text: a plain number, or a time with units (2h, 90m, 1h30m). Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        duration = Duration.parse(text)
    except ValueError:
        duration = None
    if duration is None or duration.unit != "seconds":
        raise ValueError(f"'{text}' is not a time; write hours as 2 or 0.5, or with a unit as 2h, 90m, 1h30m")
    return duration.value / 3600


def _validate_hours(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_hours(value)
    except ValueError:
        raise ValueError("input should be a number of hours, or a time such as 2h or 1h30m") from None


HOURS = BeforeValidator(_validate_hours)  # for options in hours that also accept a time with units


def _number(text: str, given: str) -> Decimal:
    try:
        value = Decimal(text.replace(",", "").replace("_", ""))
    except InvalidOperation:
        raise ValueError(f"'{given}' is not a duration; {ACCEPTED}") from None
    if value.adjusted() > 30:  # int(1e999999) would take forever and fill the memory
        raise ValueError(f"'{given}' is too large for a duration; {ACCEPTED}")
    return value


def _seconds(text: str, given: str) -> float:
    """Return the seconds of a text such as 1h30m. given: the text as it was typed, for errors."""
    total, position, previous_unit = Decimal(0), 0, math.inf
    while position < len(text):
        part = _TIME_PART.match(text, position)
        if not part or part[2] not in _SECONDS_PER_UNIT:
            raise ValueError(f"'{given}' is not a duration; {ACCEPTED}")
        unit = _SECONDS_PER_UNIT[part[2]]
        if unit >= previous_unit:  # 30m1h and 1h1h are probably mistakes
            raise ValueError(f"'{given}' must go from larger to smaller units, each once; {ACCEPTED}")
        previous_unit = unit
        total += _number(part[1], given) * unit
        position = part.end()
    if not text:
        raise ValueError(f"the duration is empty; {ACCEPTED}")
    return float(total)


def _time_text(seconds: float) -> str:
    if seconds != int(seconds) or seconds >= 2**53:
        return f"{_number_text(seconds)}s"
    remaining, parts = int(seconds), []
    for letter, size in (("h", 3600), ("m", 60), ("s", 1)):
        amount, remaining = divmod(remaining, size)
        if amount:
            parts.append(f"{amount}{letter}")
    return "".join(parts)


def _number_text(value: float | Decimal) -> str:
    """Return the shortest text that parses back to the same number, without a trailing .0."""
    text = f"{value.normalize():f}" if isinstance(value, Decimal) else repr(value)
    return text[:-2] if text.endswith(".0") else text
