"""Incremental detokenization: text in whole characters, up to a stop string.

A token of byte-level BPE may end in the middle of a UTF-8 character. Such a token is held back until later tokens
complete the character, so a terminal or an HTTP client never receives half of one. Likewise, text that may be the
beginning of a stop string is held back.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from deskside.utils.errors import UsageError

REPLACEMENT = "\ufffd"  # decoders write it for incomplete or invalid UTF-8
CONTEXT_TOKENS = 8  # of the text before an answer; more than a character has


class TextStream:
    """Turns tokens into text as they arrive. The results of all `push` calls and of `finish` are the whole text.

    stops: strings that end the text and are not part of it. Once one is found, `stopped` is true and further tokens
    yield no text. min_tokens: tokens in whose text no stop string is looked for. skip_special_tokens: whether special
    tokens have no text. context: tokens of the text that this one continues; SentencePiece's decoders drop the space
    before the first word of a text. Raises UsageError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ):
        if "" in stops:
            raise UsageError("stop: an empty string would end every answer at once; leave it out")
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._skip_special_tokens = skip_special_tokens
        self._tokens_before_stops = min_tokens
        # Tokens of the last piece, decoded again with new ones: some decoders treat the first token differently.
        self._last_tokens = list(context[-CONTEXT_TOKENS:])
        if self._last_tokens and self._decode(self._last_tokens).endswith(REPLACEMENT):
            self._last_tokens = []  # the text begins in the middle of a character
        self._held_tokens: list[int] = []
        self._held_text = ""  # may be the beginning of a stop string

    def push(self, token: int) -> str:
        """Return the text that this token completes; it may be empty."""
        self._held_tokens.append(token)
        self._tokens_before_stops -= 1
        piece = self._piece()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._last_tokens, self._held_tokens = self._held_tokens, []
        return self._until_stop(piece)

    def finish(self) -> str:
        """Return the text that was held back. Incomplete UTF-8 sequences become U+FFFD."""
        piece = self._until_stop(self._piece()) if self._held_tokens else ""
        rest = "" if self.stopped else self._held_text
        self._last_tokens, self._held_tokens, self._held_text = [], [], ""
        return piece + rest

    def _until_stop(self, piece: str) -> str:
        """Return the held text and the piece, up to a stop string or to what may become one."""
        if self.stopped:
            return ""
        if self._tokens_before_stops > 0:
            return piece
        text = self._held_text + piece
        stops_at = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if stops_at:
            self.stopped, self._held_text = True, ""
            return text[: min(stops_at)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held_text = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _piece(self) -> str:
        """Return the text of the held tokens."""
        last = self._decode(self._last_tokens) if self._last_tokens else ""
        return self._decode([*self._last_tokens, *self._held_tokens])[len(last) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
