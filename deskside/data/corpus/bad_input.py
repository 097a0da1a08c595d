"""Input that cannot be read: counted by reason, or refused."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deskside.utils.errors import UsageError

OnBad = Literal["skip", "refuse"]
_EXAMPLES = 5  # places that are kept for each kind of bad input

# Kinds of bad input, as shown to the user.
NOT_UTF8 = "not UTF-8"
EMPTY = "empty document"
DAMAGED_FILE = "truncated or damaged file"
BAD_JSON = "JSON that does not parse"
NO_FIELD = "JSON without the field"
NOT_TEXT = "the field is not text"
NO_COLUMN = "parquet without the column"
REPEATED_COLUMN = "parquet with several columns of one name"
MISSING = "missing or unreadable file or folder"
TOO_LONG = "longer than the limit (see --max-line-mb)"
BINARY = "binary data, not text"


def short_reason(error: Exception) -> str:
    """Return the first sentence of a library's error message, cut between words after about 150 characters."""
    text = " ".join(str(error).split())
    return textwrap.shorten(text.split(". ")[0].rstrip("."), 150, placeholder=" ...")


def field_hint(keys: Sequence[object], wanted: str, option: str = "--field") -> str:
    """Return a hint for a record without the wanted field: its `keys`, and the option that names the field."""
    if not keys:
        return f"wanted {wanted!r}, has nothing"
    name = str(keys[0]) if len(keys) == 1 else "NAME"
    return f"wanted {wanted!r}, has {', '.join(map(str, list(keys)[:6]))}; name it with {option} {name}"


@dataclass
class BadInputLog:
    """Counts bad input by reason and keeps the first few places, or refuses bad input."""

    on_bad: OnBad = "skip"
    remedy: str = "Fix it, or skip and count such input with --on-bad skip."
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, origin: str, detail: str = "") -> None:
        """Count bad input at the place `origin`. Raises UsageError if `on_bad` is "refuse"."""
        where = f"{origin} ({detail})" if detail else origin
        if self.on_bad == "refuse":
            raise UsageError(f"{where}: {reason}. {self.remedy}")
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(where)

    @property
    def total(self) -> int:
        """Number of items of bad input."""
        return sum(self.counts.values())

    def summary(self) -> str:
        """Return one line with every reason, its count and its first place."""
        return "; ".join(
            f"{n} x {reason}, first {self.examples[reason][0]}" for reason, n in self.counts.items()
        )

    def why_nothing_is_usable(self, if_empty: str) -> str:
        """Return the end of a message that no document or conversation was found. if_empty: used without bad input."""
        return f"that can be used ({self.summary()})" if self.total else f"({if_empty})"

    def as_dict(self) -> dict[str, Any]:
        """Return the `bad_input` entry of index.json: {reason: {count, first places}}."""
        return {
            reason: {"count": n, "first": self.examples[reason]} for reason, n in sorted(self.counts.items())
        }
