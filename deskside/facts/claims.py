"""Published claims as data: `claims.toml` beside this file, each entry checked as it is read.

A claim is about an arm of a study against another ("measured"), about something that arithmetic answers
("arithmetic"), or deskside cannot judge it and `why` gives the reason ("open"). Its keys are explained at the head of
the file. `deskside.study.claims.claim_results` judges them.
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
ABSOLUTE = ("about", "at most", "at least")
Show = Literal["percent", "times"]
Span = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """One claim. Raises ValueError for what cannot be judged.

    size: (from, to), the change of `quantity` relative to `against`, -0.3 for 30 % less; None: only a direction.
    value: (from, to) in `unit`, of claims that compare nothing. tolerance: see claims.toml. needs: what a machine must
    have before its measurement can speak to the claim. note: how it was read. explanation: why it is not so. why: what
    a check of an open claim would need.
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
            return f"there is no kind {self.kind} or direction {self.direction}"
        if (self.kind == "open") != bool(self.why):
            return "an open claim, and no other, says why nothing here can speak to it"
        if self.kind == "open":
            numbers = self.quantity or self.size is not None or self.value is not None
            compared = self.group or self.arm or self.against or self.formula
            return "an open claim compares and computes nothing" if numbers or compared else ""
        if not self.quantity:
            return "it names no quantity"
        if self.show not in get_args(Show):
            return f"show is {' or '.join(get_args(Show))}, not {self.show}"
        if self.tolerance < 0:
            return "tolerance is a share, 0 or more"
        if (self.kind == "measured") != bool(self.group and self.arm) or self.arm == self.against != {}:
            return "a measured claim, and no other, names a group and two arms of it"
        if (self.kind == "arithmetic") != bool(self.formula):
            return "an arithmetic claim, and no other, names a formula"
        if (self.direction in ABSOLUTE) != (self.value is not None) or (self.value and not self.unit):
            return "a value goes with about, at most or at least, and with a unit"
        if self.kind == "measured" and self.value is not None:
            return "a measured claim is about a change"
        if self.size is not None:
            low, high = self.size
            if not -1 < low <= high:
                return "a size rises from its first to its second number, above -1"
            if (self.direction, low > 0, high < 0) not in (("higher", True, False), ("lower", False, True)):
                return f"the size and the direction {self.direction} contradict each other"
        return ""

    @property
    def claimed(self) -> str:
        """Return the claim as a table shows it: "-30 %", "0.24 times", "less", "450 W", "no change (2 %)"."""
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
    """Return every claim, in the order of the file. Raises ValueError for an entry that cannot be judged."""
    data = toml_file("claims.toml")
    return tuple(claim(entry, data["sources"]) for entry in data["claim"])


def chosen(ids: Sequence[str], known: Sequence[Claim]) -> set[str]:
    """Return the ids of the claims that these patterns (with * and ?) mean. Raises UsageError for one that means
    none."""
    names = [claim.id for claim in known]
    found: set[str] = set()
    for pattern in ids:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]}?" if near else 'they are in facts/claims.toml; "*" is all of them'
            raise UsageError(f"claims: {pattern}: there is no such claim; {hint}")
        found.update(matched)
    return found


def claim(entry: Mapping[str, Any], sources: Mapping[str, str]) -> Claim:
    """Return one entry of the file. sources: short name -> title of the document. Raises ValueError, KeyError or
    TypeError."""
    document, section = entry["source"]
    plain = {**entry, "source": f"{sources[document]}, {section}", "needs": tuple(entry.get("needs", ()))}
    for key in ("size", "value"):
        if key in plain:
            given = plain[key]
            low, high = given if isinstance(given, list) else (given, given)
            plain[key] = (float(low), float(high))
    return Claim(**plain)
