"""Reversible escapes for special tokens that occur in untrusted text.

A text is escaped before a chat template mixes it with the template's own special tokens, and unescaped after the
template's tokens have been found. An escaped text contains no special token of the tokenizer:

    special token number n  ->  ESCAPE + the character U+F0000 + n (private use)
    ESCAPE                  ->  ESCAPE ESCAPE

`unescape(escape(text)) == text` holds for every text. A special token is replaced as a whole, so this also works for
tokens of one character and tokens that are parts of other tokens.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deskside.utils.errors import UsageError

FIRST_CODE, MAX_SPECIAL = 0xF0000, 0xFFFE  # start and size of Supplementary Private Use Area-A
ESCAPES = [chr(0xE000 + number) for number in range(64)]  # candidates for ESCAPE, of the Private Use Area


class Escaping:
    """Escapes and unescapes one set of special tokens. pattern: matches any of these tokens."""

    def __init__(self, special: Sequence[str]):
        """Raises UsageError for a tokenizer with more special tokens than there are private-use characters."""
        if len(special) > MAX_SPECIAL:
            raise UsageError(
                f"the tokenizer has {len(special)} special tokens, but at most {MAX_SPECIAL} are supported; use another"
            )
        # Longer tokens first, because a token may begin with another one.
        self._special = sorted(filter(None, special), key=len, reverse=True)
        self._number = {token: number for number, token in enumerate(self._special)}
        self.pattern = re.compile("|".join(map(re.escape, self._special)) or "(?!)")  # "(?!)" never matches
        self._escape = next(c for c in ESCAPES if not any(c in token for token in self._special))
        last = chr(FIRST_CODE + max(0, len(self._special) - 1))
        self._escaped = re.compile(f"{self._escape}([{self._escape}{chr(FIRST_CODE)}-{last}])")

    def used_in(self, text: str) -> bool:
        """Return True if the text contains an escape."""
        return self._escape in text

    def escape(self, text: str) -> str:
        """Return the text with its special tokens escaped."""
        text = text.replace(self._escape, self._escape * 2)
        return self.pattern.sub(lambda match: self._escape + chr(FIRST_CODE + self._number[match[0]]), text)

    def unescape(self, text: str) -> str:
        """Return the text with its escapes replaced by the characters that they represent."""
        if not self.used_in(text):
            return text

        def original(match: re.Match[str]) -> str:
            code = match[1]
            return self._escape if code == self._escape else self._special[ord(code) - FIRST_CODE]

        return self._escaped.sub(original, text)

    def escape_all(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a message in which every string but the names of its fields is escaped, at any depth."""
        return {str(name): self.escape_value(value) for name, value in message.items()}

    def escape_value(self, value: Any) -> Any:
        """Return a copy of a JSON value in which every string is escaped, at any depth, also names of fields."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            return {self.escape_value(name): self.escape_value(part) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape_value(part) for part in value]
        return value
