"""The reasons of a plan: sentences for people, each marked with what it explains, so that no code reads them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# against: why the verdict is "no"; text: about the size of the text and the forecast of the loss
ReasonKind = Literal["against", "text", "other"]


@dataclass(frozen=True)
class Reason:
    """A sentence that explains a plan, and what it explains."""

    text: str
    kind: ReasonKind = "other"


def reasons_of(kind: ReasonKind, texts: Iterable[str]) -> list[Reason]:
    """Return texts as reasons of one kind."""
    return [Reason(text, kind) for text in texts]
