"""Text and messages -> the tokens that a model goes on from.

What a person writes never makes a special token: `<|im_end|>` in a message is encoded as the plain text that it is, so
nobody can end a turn, or speak as the system, from inside of a message. A template writes special tokens and messages
into one text; to tell them apart, the ones that messages spell are broken up before rendering and mended after it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskside.data.chat_template import NotRendered, own_template
from deskside.export.load import Loaded

_BREAK = "\ue000"  # of the private use area
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Prompts:
    """Prompts of one model. `chats` tells whether it has a chat template. Belongs to one thread at a time."""

    def __init__(self, loaded: Loaded):
        folder = loaded.tokenizer_dir
        self._start = loaded.start_token
        # A copy of its own: the way it treats special tokens is changed below.
        self._coder = Tokenizer.from_str(loaded.tokenizer.to_str())
        added = self._coder.get_added_tokens_decoder().values()
        special = [str(token.content) for token in added if token.special]
        # Longer ones first: a token may begin with another one.
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._template = own_template(folder)
        self._renderer = None if self._template is None else _renderer(folder)

    @property
    def chats(self) -> bool:
        """Whether messages can be rendered."""
        return self._template is not None

    def text(self, text: str) -> list[int]:
        """The start token, and a text to continue."""
        return [self._start, *self._plain(text)]

    def messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens after which the assistant speaks. Raises NotRendered when the template refuses the messages."""
        from jinja2 import TemplateError

        assert self._renderer is not None  # chats
        guarded = [{**m, "content": self._guarded(m["content"])} for m in messages]
        try:
            text = str(
                self._renderer.apply_chat_template(
                    guarded, chat_template=self._template, tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise NotRendered(f"the model's chat template refuses these messages: {reason}") from None
        return self._mended(text)

    def _plain(self, text: str) -> list[int]:
        return self._encode(text, plain=True)

    def _encode(self, text: str, plain: bool) -> list[int]:
        self._coder.encode_special_tokens = plain
        # As a batch, because only that lets other threads run meanwhile.
        return list(self._coder.encode_batch([text], add_special_tokens=False)[0].ids)

    def _guarded(self, content: str) -> str:
        content = content.replace(_BREAK, "")
        return self._special.sub(lambda found: found[0][0] + _BREAK + found[0][1:], content)

    def _mended(self, text: str) -> list[int]:
        if _BREAK not in text:
            return self._encode(text, plain=False)
        ids: list[int] = []
        at = 0
        for found in self._special.finditer(text):
            ids += self._plain(text[at : found.start()].replace(_BREAK, ""))
            number = self._coder.token_to_id(found[0])
            assert number is not None  # it is one of the tokenizer's own
            ids.append(number)
            at = found.end()
        return ids + self._plain(text[at:].replace(_BREAK, ""))


def _renderer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast  # slow to import, and only chat models need it

    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    named = {name: settings.get(name) for name in _NAMES}
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in named.items()}
    known = {n: t for n, t in texts.items() if isinstance(t, str)}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **known)
