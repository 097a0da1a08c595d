"""Text from a stream of tokens, in whole characters, up to a stop string.

A token of byte-level BPE may end in the middle of a UTF-8 character. Such a token is held back until the tokens after
it complete the character, so a terminal or an HTTP client never receives half of one. In the same way text is held back
while it may be the beginning of a stop string.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from deskside.utils.errors import UsageError

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)


class TextStream:
    """Give it tokens, get text. All pieces together, `finish` included, are the text of all tokens.

    stops: strings that end the text. It ends before the one that is complete first; then `stopped` is true, and tokens
    that still come give nothing. Raises UsageError for an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        if "" in stops:
            raise UsageError("stop: an empty string would end every answer at once; leave it out")
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._before: list[int] = []  # tokens of the last piece: some decoders treat the first token apart
        self._held: list[int] = []
        self._unsaid = ""  # text that may begin a stop string

    def push(self, token: int) -> str:
        """The text that is complete with this token; empty while a character or a stop string is unfinished."""
        self._held.append(token)
        piece = self._piece()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._before, self._held = self._held, []
        return self._until_stop(piece)

    def finish(self) -> str:
        """Return the text that was held back. Incomplete UTF-8 sequences become U+FFFD."""
        piece = self._until_stop(self._piece()) if self._held else ""
        rest = "" if self.stopped else self._unsaid
        self._before, self._held, self._unsaid = [], [], ""
        return piece + rest

    def _until_stop(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._unsaid + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._unsaid = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._unsaid = text[len(text) - held :]
        return text[: len(text) - held]

    def _piece(self) -> str:
        before = self._decode(self._before) if self._before else ""
        return self._decode([*self._before, *self._held])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
