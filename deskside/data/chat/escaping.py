"""Reversible escapes for special tokens that occur in untrusted text.

A text is escaped before a chat template mixes it with the template's own special tokens, and unescaped after those
have been found. An escaped text contains no special token of the tokenizer:

    special token number n  ->  ESCAPE + the character U+F0000 + n (private use)
    ESCAPE                  ->  ESCAPE ESCAPE

`unescape(escape(text)) == text` holds for every text. Whole tokens are replaced, so tokens of one character and
tokens that are parts of others are covered as well.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deskside.utils.errors import UsageError

FIRST, MOST = 0xF0000, 0xFFFD  # Supplementary Private Use Area-A
ESCAPES = [chr(0xE000 + number) for number in range(64)]


class Escaping:
    """Escapes for one set of special tokens. pattern: finds them, longer ones first."""

    def __init__(self, special: Sequence[str]):
        """Raises UsageError for a tokenizer with more special tokens than there are private-use characters."""
        if len(special) > MOST:
            raise UsageError(
                f"the tokenizer has {len(special)} special tokens; {MOST} at most can be escaped"
            )
        # Longer ones first: a token may begin with another one.
        self._special = sorted(filter(None, special), key=len, reverse=True)
        self._number = {token: number for number, token in enumerate(self._special)}
        self.pattern = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        self._escape = next(c for c in ESCAPES if not any(c in token for token in self._special))
        self._undo = re.compile(
            f"{self._escape}([{self._escape}{chr(FIRST)}-{chr(FIRST + max(0, len(self._special) - 1))}])"
        )

    def used_in(self, text: str) -> bool:
        """Return whether the text contains an escape."""
        return self._escape in text

    def escape(self, text: str) -> str:
        """Return the text without special tokens."""
        text = text.replace(self._escape, self._escape * 2)
        return self.pattern.sub(lambda found: self._escape + chr(FIRST + self._number[found[0]]), text)

    def unescape(self, text: str) -> str:
        """Return the text with all escapes resolved."""
        if not self.used_in(text):
            return text
        return self._undo.sub(
            lambda found: found[1] if found[1] == self._escape else self._special[ord(found[1]) - FIRST], text
        )

    def escape_all(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a message in which every string is escaped, at any depth."""
        return {str(name): self._deep(value) for name, value in message.items()}

    def _deep(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            return {self._deep(name): self._deep(part) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._deep(part) for part in value]
        return value
