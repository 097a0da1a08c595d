"""Text and messages -> the tokens that a model goes on from."""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from deskside.data.renderer import Renderer, encode, own_template
from deskside.export.load import Loaded


class Prompts:
    """Prompts of one model. `chats` tells whether it has a chat template. Belongs to one thread at a time."""

    def __init__(self, loaded: Loaded):
        self._start = loaded.start_token
        # A copy of its own: the way it treats special tokens is changed.
        self._coder = Tokenizer.from_str(loaded.tokenizer.to_str())
        self._renderer: Renderer | None = None
        if own_template(loaded.tokenizer_dir) is not None:
            self._renderer = Renderer(loaded.tokenizer_dir, self._coder)

    @property
    def chats(self) -> bool:
        """Whether messages can be rendered."""
        return self._renderer is not None

    def text(self, text: str) -> list[int]:
        """The start token, and a text to continue: what it spells makes no special token."""
        return [self._start, *encode(self._coder, text, plain=True)]

    def messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens after which the assistant speaks. Raises NotRendered when the template refuses the messages."""
        assert self._renderer is not None  # chats
        return self._renderer.prompt(messages)
