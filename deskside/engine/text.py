"""Text from a stream of tokens, in whole characters.

A token of byte-level BPE may end in the middle of a UTF-8 character. Such a token is held back until the tokens after
it complete the character, so a terminal or an HTTP client never receives half of one.
"""

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)


class TextStream:
    """Give it tokens, get text. All pieces together, `finish` included, are the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before: list[int] = []  # tokens of the last piece: some decoders treat the first token apart
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that is complete with this token; empty while a character is unfinished."""
        self._held.append(token)
        piece = self._piece()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._before, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """What was held back: bytes that never became a character show as U+FFFD."""
        piece = self._piece() if self._held else ""
        self._before, self._held = [], []
        return piece

    def _piece(self) -> str:
        before = self._decode(self._before) if self._before else ""
        return self._decode([*self._before, *self._held])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
