"""Tokenization of conversations, with a mask of the tokens that the model is trained to predict.

A chat template renders messages as one text. The assistant's turns are found in this text in one of two ways:

- The template marks them with `{% generation %}`.

- Otherwise by prefixes: the rendering of the messages before a turn, with the generation prompt, must be a prefix of
the rendering with the turn. The rest, up to the end-of-turn token, is the turn. Some templates render earlier turns
differently once there is a later one (they remove the thinking). Then only the last turn of a conversation is learned,
and such conversations are counted.

The text is split where an assistant turn begins or ends, and the parts are tokenized separately. So a turn begins with
a new token, as after the prompt in a chat, even if a merge would have crossed the split.

Text of a message that spells a special token is tokenized as plain text (see `renderer`), so data cannot forge a turn.
As for all prepared data, the tokenizer must be byte-level BPE; other tokenizers encode the first word of a text
differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
from deskside.data.encoder import EncoderInfo, make_encoder
from deskside.utils.errors import UsageError

CHAT_FILES = ("tokenizer_config.json", TEMPLATE, "generation_config.json")
DEFAULT_TEMPLATE = (  # ChatML
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_TRIAL_CONVERSATION = [
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "It is."},
]

Turns = Literal["all", "last"]  # the assistant turns to learn


@dataclass(frozen=True)
class TokenizedConversation:
    """A tokenized conversation: ids, and a mask with 1 for tokens that count in the loss, both of shape [tokens].

    last_only: True if only the last assistant turn counts, because the template renders a turn differently once later
    messages follow.
    """

    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    last_only: bool


class ChatTemplate:
    """The chat template and tokenizer of a folder.

    turn_end: id of the special token that ends a turn, or None.
    """

    def __init__(self, folder: Path, encoder: EncoderInfo | None = None):
        """Raises UsageError for an unsupported tokenizer or template. encoder: from `choose_encoder`."""
        self._tokenizer = bpe.load(folder)
        fast = None if encoder is None else make_encoder(self._tokenizer.to_str(), encoder)
        self._renderer = Renderer(folder, self._tokenizer, fast)
        self._has_generation_marks = (
            re.search(r"\{%-?\s*generation\s*-?%\}", self._renderer.template) is not None
        )
        if self._renderer.ids("a") == self._renderer.ids(" a"):
            raise UsageError(
                f"{folder}: this tokenizer adds a space before every text, so turns cannot be tokenized separately."
            )
        try:
            trial = self.conversation(_TRIAL_CONVERSATION)
        except RefusedByTemplate as error:
            raise UsageError(f"chat template: refused: {error.reason}") from None
        except NotRendered as error:
            raise UsageError(f"chat template: {error}") from None
        last_learnt = int(trial.ids[np.flatnonzero(trial.mask)[-1]])
        added_token = self._tokenizer.get_added_tokens_decoder().get(last_learnt)
        is_special = added_token is not None and added_token.special
        self.turn_end: int | None = last_learnt if is_special else None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the messages with the generation prompt. Raises NotRendered."""
        return self._renderer.prompt(messages)

    def conversation(self, messages: Sequence[Message], turns: Turns = "all") -> TokenizedConversation:
        """Tokenize a whole conversation. turns: which assistant turns are learned. Raises NotRendered."""
        spans, text, last_only = self._assistant_spans(messages)
        if not spans:
            raise NotRendered("it has no assistant message")
        if turns == "last":
            spans, last_only = spans[-1:], False
        ids: list[int] = []
        mask: list[int] = []
        position = 0
        for begin, end in spans:
            # A turn ends after its last special token; white space after it belongs to the next part.
            special_tokens = self._renderer.special.finditer(text, begin, end)
            after_special = max((match.end() for match in special_tokens), default=end)
            if not text[after_special:end].strip():
                end = after_special
            for part, learnt in ((text[position:begin], 0), (text[begin:end], 1)):
                part_ids = self._renderer.ids(part)
                ids += part_ids
                mask += [learnt] * len(part_ids)
            position = end
        rest = self._renderer.ids(text[position:])
        return TokenizedConversation(
            np.array(ids + rest, np.uint32), np.array(mask + [0] * len(rest), np.uint8), last_only
        )

    def _assistant_spans(self, messages: Sequence[Message]) -> tuple[list[tuple[int, int]], str, bool]:
        """Return the spans of the assistant's turns, the text, and True if earlier turns are missing."""
        if self._has_generation_marks:
            return *self._renderer.assistant_spans_and_text(messages), False
        text = self._renderer.text(messages, add_generation_prompt=False)
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for n in numbers:
            prompt = self._text_before(messages, n)
            answered = text
            if n + 1 < len(messages):
                answered = self._renderer.text(messages[: n + 1], add_generation_prompt=False)
            if text.startswith(prompt) and text.startswith(answered) and len(prompt) < len(answered):
                spans.append((len(prompt), len(answered)))
            elif n == numbers[-1]:
                raise NotRendered("its text before a reply is not a prefix of its text with the reply")
        # The template rewrites earlier turns; for example, it removes their thinking. Their text here is not what the
        # model has to generate, so it is trained on the last turn only.
        return (spans, text, False) if len(spans) == len(numbers) else (spans[-1:], text, True)

    def _text_before(self, messages: Sequence[Message], n: int) -> str:
        """Return the text before message n, with the generation prompt.

        If the assistant speaks first, this is the rendering of an empty conversation, which many templates refuse. Then
        the generation prompt is found by rendering a question with and without it, and the text is what the template
        writes up to the end of this prompt.
        """
        if n:
            return self._renderer.text(messages[:n], add_generation_prompt=True)
        try:
            return self._renderer.text([], add_generation_prompt=True)
        except RefusedByTemplate:
            question = _TRIAL_CONVERSATION[:1]
            without_prompt = self._renderer.text(question, add_generation_prompt=False)
            with_prompt = self._renderer.text(question, add_generation_prompt=True)
            first = self._renderer.text(messages[:1], add_generation_prompt=False)
            prompt = with_prompt.removeprefix(without_prompt)
            at = first.find(prompt) if with_prompt.startswith(without_prompt) and prompt else -1
            if at < 0:
                raise NotRendered(
                    "it begins with the assistant, and the template does not show where that turn begins"
                ) from None
            return first[: at + len(prompt)]


# Making a tokenizer for conversations


@dataclass(frozen=True)
class ChatTokenizer:
    """The result of `make_chat_tokenizer`.

    added: new tokens with their ids. reinitialized: ids of the tokens whose embeddings are initialized again: those of
    DEFAULT_TEMPLATE, whether added or already in the vocabulary; empty for another template. turn_end: id of the
    special token that ends a turn, or None. default: True if DEFAULT_TEMPLATE was used because there was no other.
    """

    added: dict[str, int]
    reinitialized: tuple[int, ...]
    vocab_size: int
    turn_end: int | None
    default: bool


def make_chat_tokenizer(source: Path, out: Path, template: str | None) -> ChatTokenizer:
    """Write a tokenizer with a chat template to the folder `out`, made from the tokenizer in `source`.

    template: text of the chat template; None uses the template in `source`, or else DEFAULT_TEMPLATE, whose special
    tokens are added if the vocabulary lacks them. Also writes generation_config.json with the end tokens. Raises
    UsageError for an unsupported tokenizer or template.
    """
    tokenizer = bpe.load(source)
    bpe.token_bytes(tokenizer)  # raises if it is not byte-level BPE
    eos, eos_id = bpe.end_of_text(tokenizer, source)
    text = template if template is not None else read_chat_template(source)
    added: dict[str, int] = {}
    reinitialized: list[int] = []
    if text is None:
        from tokenizers import AddedToken

        known = tokenizer.get_vocab(with_added_tokens=True)
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in bpe.CHAT_TOKENS])
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        reinitialized = [vocabulary[token] for token in bpe.CHAT_TOKENS]
        added = {t: n for t, n in zip(bpe.CHAT_TOKENS, reinitialized, strict=True) if t not in known}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.encode_special_tokens = False
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (out / TEMPLATE).write_text(DEFAULT_TEMPLATE if text is None else text, encoding="utf-8")
    settings = tokenizer_settings(source)
    settings.pop("chat_template", None)
    settings.pop("added_tokens_decoder", None)  # tokenizer.json has them, including the new ones
    bpe.write_config(out, {**bpe.default_config(eos), **settings})
    turn_end = ChatTemplate(out).turn_end
    # The end-of-turn token comes first, for programs that use only the first end token, such as our GGUF export.
    end_ids = [eos_id] if turn_end in (None, eos_id) else [turn_end, eos_id]
    generation = {"eos_token_id": end_ids if len(end_ids) > 1 else eos_id, "pad_token_id": eos_id}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return ChatTokenizer(added, tuple(reinitialized), size, turn_end, text is None)
