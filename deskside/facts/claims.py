"""Published claims about training on consumer GPUs, read from `claims.toml` in this folder and validated.

A "measured" claim compares two arms of a study. An "arithmetic" claim is answered by a formula. An "open" claim cannot
be judged by deskside; its `why` gives the reason. The comment at the top of `claims.toml` explains the keys, and
`deskside.study.claims.claim_results` judges the claims.
"""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from deskside.facts.data_files import toml_file
from deskside.utils.errors import UsageError

Kind = Literal["measured", "arithmetic", "open"]
Direction = Literal["lower", "higher", "none", "about", "at most", "at least"]
VALUE_DIRECTIONS = ("about", "at most", "at least")  # directions of a claim with a `value`
Show = Literal["percent", "times"]
Span = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """One claim. Its fields are the keys of claims.toml. Raises ValueError for unknown words and contradictions.

    Attributes:
        claimed_on: Hardware of the document, such as "RTX 5090".
        size: Claimed change of `quantity` relative to `against` as (from, to); -0.3 is 30 % less. None: only a
            direction or a `value` is claimed.
        value: (from, to) in `unit`, for a claim that compares no arms.
        tolerance: Share by which a result may miss the claim; claims.toml gives the details.
        needs: Requirements on the machine, such as "gpu" or "fp8". A measurement without them does not count.
        note: How the claim was interpreted.
        explanation: Why the claim is wrong. Shown only if the result contradicts it.
        why: Why deskside cannot judge an open claim, and what a check would need.
    """

    id: str
    text: str
    source: str
    kind: Kind
    claimed_on: str
    quantity: str = ""
    direction: Direction = "about"
    size: Span | None = None
    value: Span | None = None
    unit: str = ""
    tolerance: float = 0.5
    show: Show = "percent"
    group: str = ""
    arm: Mapping[str, str] = field(default_factory=dict)
    against: Mapping[str, str] = field(default_factory=dict)
    formula: str = ""
    needs: tuple[str, ...] = ()
    note: str = ""
    explanation: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(f"claim {self.id}: {problem}")

    def _problem(self) -> str:
        if self.kind not in get_args(Kind) or self.direction not in get_args(Direction):
            return f"unknown kind {self.kind} or direction {self.direction}"
        if (self.kind == "open") != bool(self.why):
            return "an open claim must have `why`, and no other claim may have it"
        if self.kind == "open":
            numbers = self.quantity or self.size is not None or self.value is not None
            compared = self.group or self.arm or self.against or self.formula
            return (
                "an open claim must not have a quantity, numbers, arms or a formula"
                if numbers or compared
                else ""
            )
        if not self.quantity:
            return "quantity is missing"
        if self.show not in get_args(Show):
            return f"show must be {' or '.join(get_args(Show))}, not {self.show}"
        if self.tolerance < 0:
            return "tolerance must be 0 or more"
        if (self.kind == "measured") != bool(self.group and self.arm) or self.arm == self.against != {}:
            return "a measured claim must name a group and two different arms of it, and no other claim may"
        if (self.kind == "arithmetic") != bool(self.formula):
            return "an arithmetic claim must name a formula, and no other claim may"
        if (self.direction in VALUE_DIRECTIONS) != (self.value is not None) or (self.value and not self.unit):
            return "a value needs a unit and the direction about, at most or at least"
        if self.kind == "measured" and self.value is not None:
            return "a measured claim must have a size, not a value"
        if self.size is not None:
            low, high = self.size
            if not -1 < low <= high:
                return "the two numbers of a size must be above -1 and in ascending order"
            if (self.direction, low > 0, high < 0) not in (("higher", True, False), ("lower", False, True)):
                return f"the size and the direction {self.direction} contradict each other"
        return ""

    @property
    def claimed_text(self) -> str:
        """The claimed change or value as tables show it: "-30 %", "0.24 times", "less", "450 W"."""
        if self.kind == "open":
            return "as it says"
        if self.value is not None:
            sign = {"about": "", "at most": "at most ", "at least": "at least "}[self.direction]
            amount = _span(*self.value)
            return sign + (f"${amount}" if self.unit == "$" else f"{amount} {self.unit}")
        if self.direction == "none":
            return f"no change (within {100 * self.tolerance:.2g} %)"
        if self.size is None:
            return {"lower": "less", "higher": "more"}[self.direction]
        low, high = self.size
        if self.show == "times":
            return f"{_span(1 + low, 1 + high)} times"
        ends = sorted((100 * low, 100 * high), key=abs)
        texts = list(dict.fromkeys(f"{end:+.3g} %" for end in ends))
        return " to ".join(texts)


def _span(low: float, high: float) -> str:
    texts = list(dict.fromkeys(_number(end) for end in (low, high)))
    return " to ".join(texts)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@cache
def claims() -> tuple[Claim, ...]:
    """Return every claim, in the order of the file. Raises the errors of `parse_claim`."""
    data = toml_file("claims.toml")
    return tuple(parse_claim(entry, data["sources"]) for entry in data["claim"])


def matching_ids(patterns: Sequence[str], known: Sequence[Claim]) -> set[str]:
    """Return the ids of the claims that match any of these patterns (with * and ?).

    Raises UsageError for a pattern without a match.
    """
    ids = [claim.id for claim in known]
    matches: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(ids, pattern)
        if not matched:
            near = difflib.get_close_matches(pattern, ids, n=1)
            hint = f"did you mean {near[0]}?" if near else 'facts/claims.toml lists them; "*" selects all'
            raise UsageError(f"claims: {pattern}: there is no such claim; {hint}")
        matches.update(matched)
    return matches


def parse_claim(entry: Mapping[str, Any], sources: Mapping[str, str]) -> Claim:
    """Parse one entry of claims.toml. Raises ValueError, KeyError or TypeError if it is invalid.

    Args:
        sources: Short name -> title of each document.
    """
    document, section = entry["source"]
    fields = {**entry, "source": f"{sources[document]}, {section}", "needs": tuple(entry.get("needs", ()))}
    for key in ("size", "value"):
        if key in fields:
            given = fields[key]
            low, high = given if isinstance(given, list) else (given, given)
            fields[key] = (float(low), float(high))
    return Claim(**fields)
