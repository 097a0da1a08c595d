"""Tokenization of conversations, with a mask of the tokens that the model is trained to predict.

A chat template renders a conversation as one text, in which `turns` finds the assistant's turns. A turn ends with the
token that ends generation, if the template writes one.

The text is split where an assistant turn begins or ends, and the parts are tokenized separately. So a turn begins with
a new token, as after the prompt in a chat, even if a merge would have crossed the split.

Text of a message that spells a special token is tokenized as plain text (see `renderer`), so data cannot forge a turn.
As for all prepared data, the tokenizer must be byte-level BPE; other tokenizers encode the first word of a text
differently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deskside.data import tokenizer as bpe
from deskside.data.chat.messages import Conversation, NotRendered
from deskside.data.chat.renderer import (
    TEMPLATE,
    RefusedByTemplate,
    Renderer,
    read_chat_template,
)
from deskside.data.chat.turns import MarkedText, text_with_turns
from deskside.data.encoder import EncoderInfo, make_encoder
from deskside.utils.errors import UsageError

CHAT_FILES = ("tokenizer_config.json", TEMPLATE, "generation_config.json")
DEFAULT_TEMPLATE = (  # ChatML
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_TRIAL_CONVERSATION = Conversation(
    [{"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": "It is."}]
)

Turns = Literal["all", "last"]  # the assistant turns to learn


@dataclass(frozen=True)
class TokenizedConversation:
    """A tokenized conversation: ids, and a mask with 1 for tokens that count in the loss, both of shape [tokens].

    unlearnt_turns: number of the assistant's messages that do not count in the loss. rewritten: True if the template
    would write earlier turns differently; here every turn is as the model generates it.
    """

    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    unlearnt_turns: int
    rewritten: bool


class ChatTemplate:
    """The chat template and tokenizer of a folder.

    turn_end: id of the special token that ends a turn, or None.
    """

    def __init__(self, folder: Path, encoder: EncoderInfo | None = None):
        """Raises UsageError for an unsupported tokenizer or template. encoder: from `choose_encoder`."""
        self._tokenizer = bpe.load(folder)
        fast = None if encoder is None else make_encoder(self._tokenizer.to_str(), encoder)
        self._renderer = Renderer(folder, self._tokenizer, fast)
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

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the token ids of a conversation with the generation prompt. Raises NotRendered."""
        return self._renderer.prompt(conversation)

    def conversation(self, conversation: Conversation, turns: Turns = "all") -> TokenizedConversation:
        """Tokenize a whole conversation. turns: which assistant turns are learned.

        Raises NotRendered, also if the template leaves out a text.
        """
        marked = text_with_turns(self._renderer, conversation, last=turns == "last")
        self._check_complete(conversation, marked)
        text, position = marked.text, 0
        ids: list[int] = []
        mask: list[int] = []
        for begin, end in marked.spans:
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
            np.array(ids + rest, np.uint32),
            np.array(mask + [0] * len(rest), np.uint8),
            len(marked.unlearnt),
            marked.rewritten,
        )

    def _check_complete(self, conversation: Conversation, marked: MarkedText) -> None:
        """Raise NotRendered if the text lacks a message's content or reasoning. White space may differ.

        Of turns that are not learned, a template may leave out the reasoning, as it does in a chat.
        """

        def is_written(part: str) -> bool:
            # Some templates write the result of a tool as JSON.
            forms = (part, json.dumps(part, ensure_ascii=False)[1:-1])
            written = "".join(marked.text.split())
            return any("".join(form.split()) in written for form in forms)

        for number, message in enumerate(conversation.messages, start=1):
            if number - 1 in marked.unlearnt:
                continue
            for name in ("content", "reasoning_content"):
                part = self._renderer.escape(message.get(name, ""))
                if part not in marked.text and not is_written(part):
                    raise NotRendered(f"message {number}: the chat template leaves out some of its {name}")


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
    settings = bpe.read_config(source)
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
