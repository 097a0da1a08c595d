"""Convert text and messages to prompt tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from deskside.data.chat.renderer import Renderer, encode_plain, read_chat_template, special_tokens
from deskside.data.tokenizer import max_bytes_per_token
from deskside.utils.errors import UsageError
from deskside.weights.load import Loaded

PREFIX_CHARACTERS = 16  # per token of the maximum: the prefix that is encoded to see if a text is too long


class TooLong(UsageError):
    """A prompt with too many tokens, at least `tokens`."""

    def __init__(self, tokens: int, longest: int):
        super().__init__(f"has {tokens} tokens or more, and {longest} at most are taken; shorten it")


class Prompts:
    """Makes the prompts of a model, which has a chat template if `chats`. Not thread-safe.

    longest: tokens of a prompt at most; None for any number. A text that is far longer is refused before all of it is
    encoded, so that the time spent on it is bounded too.
    """

    def __init__(self, loaded: Loaded, longest: int | None = None):
        self._start, self._longest = loaded.start_token, longest
        # A copy, because its treatment of special tokens is changed.
        self._coder = Tokenizer.from_str(loaded.tokenizer.to_str())
        self._coder.no_truncation()
        self._coder.no_padding()
        self._special = frozenset(special_tokens(self._coder).values())
        self._token_bytes = max_bytes_per_token(self._coder)
        self._renderer: Renderer | None = None
        if read_chat_template(loaded.tokenizer_dir) is not None:
            self._renderer = Renderer(loaded.tokenizer_dir, self._coder)

    @property
    def chats(self) -> bool:
        """True if the model has a chat template."""
        return self._renderer is not None

    @property
    def roles(self) -> frozenset[str]:
        """The allowed roles of messages; none without a chat template."""
        return frozenset() if self._renderer is None else self._renderer.roles

    def text(self, text: str) -> list[int]:
        """Return the start token and the tokens of a text, in which no special token is parsed. Raises TooLong."""
        tokens = self._encode(text, text, lambda part: encode_plain(self._coder, part, self._special))
        return self._checked([self._start, *tokens])

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt tokens of a conversation, up to the assistant's turn.

        Raises NotRendered when the template refuses the messages, and TooLong.
        """
        assert self._renderer is not None  # chats
        text = self._renderer.text(messages, add_generation_prompt=True)
        return self._checked(self._encode(text, self._renderer.unescape(text), self._renderer.ids))

    def _encode(self, text: str, plain: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encode a text. Raises TooLong for one that is far too long, before all of it is encoded.

        plain: the text without special tokens.
        """
        longest = self._longest
        if longest is None:
            return encode(text)
        if self._token_bytes is not None:  # a token has a maximum number of bytes
            least = len(plain.encode()) // self._token_bytes
            if least > longest:
                raise TooLong(least, longest)
        size = PREFIX_CHARACTERS * longest
        if len(text) > 2 * size:
            tokens = len(encode(text[:size]))
            if tokens > 2 * longest:  # twice, because the last word of a prefix may take more tokens
                raise TooLong(tokens, longest)
        return encode(text)

    def _checked(self, tokens: list[int]) -> list[int]:
        if self._longest is not None and len(tokens) > self._longest:
            raise TooLong(len(tokens), self._longest)
        return tokens
