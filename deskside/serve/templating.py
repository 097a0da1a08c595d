"""Encode text and chat messages as prompt tokens."""

from collections.abc import Callable, Sequence
from functools import cached_property

from tokenizers import Tokenizer

from deskside.data.chat.answer_parser import Thinking
from deskside.data.chat.messages import Conversation, NotRendered
from deskside.data.chat.renderer import Renderer, encode_plain, read_chat_template, special_tokens
from deskside.data.chat.tool_formats import END_THINK, THINK, ToolFormat, find_tool_format
from deskside.data.encoder import EncoderInfo, ReferenceEncoder, make_encoder
from deskside.data.tokenizer import max_bytes_per_token
from deskside.utils.errors import UsageError
from deskside.weights.load import Loaded

# Characters per allowed token that are encoded first of a long text, to see whether it is far too long.
PREFIX_CHARACTERS = 16
PROMPT_END = 16  # tokens at the end of a prompt, in which it may begin or end the reasoning


class PromptTooLong(UsageError):
    """The prompt has too many tokens. `tokens` is a lower bound, because the encoding may stop early."""

    def __init__(self, tokens: int, longest: int):
        super().__init__(f"has {tokens} tokens or more, but the maximum is {longest}; shorten it")


class PromptEncoder:
    """Encodes prompts for a model. Not thread-safe.

    longest: Maximum tokens of a prompt; None for no limit. A text that is far longer is usually refused before all of
    it is encoded, which saves time. encoder: from `choose_encoder`; None encodes by tokenizers.
    """

    def __init__(self, loaded: Loaded, longest: int | None = None, encoder: EncoderInfo | None = None):
        self._start, self._longest = loaded.start_token, longest
        self._tokenizer = Tokenizer.from_str(loaded.tokenizer.to_str())  # a copy, because it is changed
        self._encoder = (
            ReferenceEncoder(self._tokenizer)
            if encoder is None
            else make_encoder(self._tokenizer.to_str(), encoder)
        )
        self._special = {number: name for name, number in special_tokens(self._tokenizer).items()}
        self._token_bytes = max_bytes_per_token(self._tokenizer)
        self._renderer: Renderer | None = None
        if read_chat_template(loaded.tokenizer_dir) is not None:
            self._renderer = Renderer(loaded.tokenizer_dir, self._tokenizer, self._encoder)

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return self._renderer is not None

    @property
    def roles(self) -> frozenset[str]:
        """The roles that the chat template accepts; empty without a chat template."""
        return frozenset() if self._renderer is None else self._renderer.roles

    @property
    def variables(self) -> frozenset[str]:
        """Variables of the chat template that a request may set; empty without a chat template."""
        return frozenset() if self._renderer is None else self._renderer.variables

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The form in which the model writes tool calls; None if the chat template does not show it."""
        renderer = self._renderer
        if renderer is None:
            return None
        return find_tool_format(
            lambda conversation, prompt: renderer.unescape(renderer.text(conversation, prompt))
        )

    @cached_property
    def _forgets_reasoning(self) -> bool:
        """True if the template marks reasoning but, as its model expects, does not write that of earlier answers."""
        renderer = self._renderer
        if renderer is None or END_THINK not in renderer.template:
            return False
        question = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "b", "reasoning_content": "c"}
        try:
            renderer.text(Conversation([question, answer]), add_generation_prompt=False)
        except NotRendered:
            return True
        return False

    def is_special(self, text: str) -> bool:
        """Return True if a text is the name of a special token."""
        return text in self._special.values()

    def thinking(self, prompt: Sequence[int]) -> Thinking:
        """Return whether the answer to a prompt has reasoning, which the template shows by writing <think>."""
        if self._renderer is None or THINK not in self._renderer.template:
            return "no"
        end = self._tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False).rstrip()
        if end.endswith(END_THINK):
            return "no"
        return "must" if end.endswith(THINK) else "may"

    def text(self, text: str) -> list[int]:
        """Return the start token and the tokens of a text. Special tokens are encoded as text.

        Raises PromptTooLong, and NotRendered if the tokenizer gives a special token anyway.
        """
        tokens = self._encode(text, text, lambda part: encode_plain(self._encoder, part, self._special))
        return self._checked([self._start, *tokens])

    def conversation(self, conversation: Conversation, add_generation_prompt: bool = True) -> list[int]:
        """Return the prompt tokens of a conversation, with the beginning of the assistant's turn unless told not to.

        Raises PromptTooLong, and NotRendered if the template refuses the messages or leaves out a part of them.
        """
        assert self._renderer is not None  # the caller has checked `has_chat_template`
        if self._forgets_reasoning:
            messages = [
                {name: value for name, value in message.items() if name != "reasoning_content"}
                for message in conversation.messages
            ]
            conversation = conversation.with_messages(messages)
        text = self._renderer.text(conversation, add_generation_prompt)
        return self._checked(self._encode(text, self._renderer.unescape(text), self._renderer.ids))

    def _encode(self, text: str, plain: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encode a text. Raises PromptTooLong if a bound or the beginning shows that it is too long.

        plain: The text without escapes.
        """
        longest = self._longest
        if longest is None:
            return encode(text)
        if self._token_bytes is not None:  # a token has a maximum number of bytes
            min_tokens = len(plain.encode()) // self._token_bytes
            if min_tokens > longest:
                raise PromptTooLong(min_tokens, longest)
        size = PREFIX_CHARACTERS * longest
        if len(text) > 2 * size:
            tokens = len(encode(text[:size]))
            if tokens > 2 * longest:  # twice, because the last word of a prefix may take more tokens
                raise PromptTooLong(tokens, longest)
        return encode(text)

    def _checked(self, tokens: list[int]) -> list[int]:
        if self._longest is not None and len(tokens) > self._longest:
            raise PromptTooLong(len(tokens), self._longest)
        return tokens
