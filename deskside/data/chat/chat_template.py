"""Tokenization of conversations, with a mask of the tokens that the assistant has to learn.

A chat template renders messages as one text. The assistant's characters in it are found in one of two ways:

- the template marks them with `{% generation %}`; or

- by prefixes: the rendering of the messages before a turn, with the generation prompt, must be a prefix of the
rendering with the turn; the rest, up to the end-of-turn token, is the turn. Some templates render earlier turns
differently once there is a later one (they drop the thinking). Then only the last turn of a conversation is
learned, and this is counted.

The text is split where an assistant turn begins, and the parts are tokenized separately. So the tokens before a
turn are exactly those of the prompt in a chat, even if a merge would have crossed the split.

A message that spells a special token does not get it (renderer.py), so data cannot forge a turn: message texts are
escaped, and `Renderer.ids` tokenizes their parts. As for all prepared data, the tokenizer must be byte-level BPE;
others encode a text's first word differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from deskside.data import tokenizer as bpe
from deskside.data.chat.renderer import (
    TEMPLATE,
    Message,
    NotRendered,
    RefusedByTemplate,
    Renderer,
    read_chat_template,
    tokenizer_settings,
)
from deskside.utils.errors import UsageError

if TYPE_CHECKING:
    pass

CHAT_FILES = ("tokenizer_config.json", TEMPLATE, "generation_config.json")
DEFAULT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_TRIAL = [{"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": "It is."}]

Turns = Literal["all", "last"]


@dataclass(frozen=True)
class TokenizedConversation:
    """A tokenized conversation: ids, and a mask with 1 for learned tokens (both of shape [tokens]).

    last_only: earlier assistant turns are not marked, because the template later renders them differently.
    """

    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    last_only: bool


class ChatTemplate:
    """The template and tokenizer of a folder with tokenizer.json and chat_template.jinja."""

    def __init__(self, folder: Path):
        """Raises UsageError for an unsupported tokenizer or template."""
        self._tokenizer = bpe.load(folder)
        self._renderer = Renderer(folder, self._tokenizer)
        self._marks = re.search(r"\{%-?\s*generation\s*-?%\}", self._renderer.template) is not None
        if self._renderer.ids("a") == self._renderer.ids(" a"):
            raise UsageError(
                f"{folder}: this tokenizer adds a space before every text, so turns cannot be tokenized separately."
            )
        try:
            trial = self.conversation(_TRIAL)
        except RefusedByTemplate as error:
            raise UsageError(f"chat template: refused: {error.reason}") from None
        except NotRendered as error:
            raise UsageError(f"chat template: {error}") from None
        last = int(np.flatnonzero(trial.mask)[-1])
        ends = self._tokenizer.get_added_tokens_decoder().get(int(trial.ids[last]))
        self.turn_end: int | None = int(trial.ids[last]) if ends is not None and ends.special else None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens up to the assistant's turn. Raises NotRendered."""
        return self._renderer.prompt(messages)

    def conversation(self, messages: Sequence[Message], turns: Turns = "all") -> TokenizedConversation:
        """Tokenize a whole conversation. Raises NotRendered."""
        spans, text, last_only = self._spans(messages)
        if not spans:
            raise NotRendered("no assistant speaks")
        if turns == "last":
            spans, last_only = spans[-1:], False
        ids: list[int] = []
        mask: list[int] = []
        at = 0
        for begin, end in spans:
            # A turn ends after its last special token; white space after that belongs to the next part.
            marks = self._renderer.special.finditer(text, begin, end)
            after = max((found.end() for found in marks), default=end)
            end = after if not text[after:end].strip() else end
            for part, learnt in ((text[at:begin], 0), (text[begin:end], 1)):
                new = self._renderer.ids(part)
                ids += new
                mask += [learnt] * len(new)
            at = end
        rest = self._renderer.ids(text[at:])
        return TokenizedConversation(
            np.array(ids + rest, np.uint32), np.array(mask + [0] * len(rest), np.uint8), last_only
        )

    def _spans(self, messages: Sequence[Message]) -> tuple[list[tuple[int, int]], str, bool]:
        """Return the spans of the assistant's turns, the text, and whether earlier turns are missing."""
        if self._marks:
            return *self._renderer.text_with_assistant_spans(messages), False
        text = self._renderer.text(messages, add_generation_prompt=False)
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for n in numbers:
            before = self._before(messages, n)
            after = (
                self._renderer.text(messages[: n + 1], add_generation_prompt=False)
                if n + 1 < len(messages)
                else text
            )
            if text.startswith(before) and text.startswith(after) and len(before) < len(after):
                spans.append((len(before), len(after)))
            elif n == numbers[-1]:
                raise NotRendered("its text before a reply is not a prefix of its text with the reply")
        # A turn that is rendered differently later would never appear in a prompt as it was learned.
        return (spans, text, False) if len(spans) == len(numbers) else (spans[-1:], text, True)

    def _before(self, messages: Sequence[Message], n: int) -> str:
        """Return the text before turn n, up to where the assistant begins to speak.

        Many templates refuse an empty conversation. If the assistant speaks first, the text before it is what the
        template writes up to the end of the generation prompt, found by rendering a question with and without that
        prompt.
        """
        if n:
            return self._renderer.text(messages[:n], add_generation_prompt=True)
        try:
            return self._renderer.text([], add_generation_prompt=True)
        except RefusedByTemplate:
            question = _TRIAL[:1]
            asked = self._renderer.text(question, add_generation_prompt=False)
            with_prompt = self._renderer.text(question, add_generation_prompt=True)
            first = self._renderer.text(messages[:1], add_generation_prompt=False)
            prompt = with_prompt.removeprefix(asked)
            at = first.find(prompt) if with_prompt.startswith(asked) and prompt else -1
            if at < 0:
                raise NotRendered(
                    "it begins with the assistant, and the template does not show where that turn begins"
                ) from None
            return first[: at + len(prompt)]


# A tokenizer for conversations


@dataclass(frozen=True)
class ChatTokenizer:
    """The result of `make`: new tokens with their ids. fresh: ids that were never trained, including the new ones."""

    added: dict[str, int]
    fresh: tuple[int, ...]
    vocab_size: int
    turn_end: int | None
    default: bool


def make_chat_tokenizer(source: Path, out: Path, template: str | None) -> ChatTokenizer:
    """Write a chat tokenizer to the folder `out`, made from the one in `source`.

    template: its text; None uses the tokenizer's own, or by default ChatML, whose special tokens are added if the
    vocabulary lacks them. generation_config.json names the end tokens. Raises UsageError for an unsupported
    tokenizer or template.
    """
    tokenizer = bpe.load(source)
    bpe.token_bytes(tokenizer)  # refuses what is not byte-level BPE
    end, end_id = bpe.end_of_text(tokenizer, source)
    text = template if template is not None else read_chat_template(source)
    added: dict[str, int] = {}
    fresh: list[int] = []
    if text is None:
        from tokenizers import AddedToken

        known = tokenizer.get_vocab(with_added_tokens=True)
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in bpe.CHAT_TOKENS])
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        fresh = [vocabulary[token] for token in bpe.CHAT_TOKENS]
        added = {t: n for t, n in zip(bpe.CHAT_TOKENS, fresh, strict=True) if t not in known}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.encode_special_tokens = False
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (out / TEMPLATE).write_text(DEFAULT_TEMPLATE if text is None else text, encoding="utf-8")
    settings = tokenizer_settings(source)
    settings.pop("chat_template", None)
    settings.pop("added_tokens_decoder", None)  # tokenizer.json has them, the new ones included
    bpe.write_config(out, {**bpe.default_config(end), **settings})
    turn_end = ChatTemplate(out).turn_end
    # transformers pads with the first one and compares with it, so it must be the end-of-turn token.
    ends = list(dict.fromkeys([turn_end, end_id] if turn_end is not None else [end_id]))
    generation = {"eos_token_id": ends if len(ends) > 1 else end_id, "pad_token_id": end_id}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return ChatTokenizer(added, tuple(fresh), size, turn_end, text is None)
