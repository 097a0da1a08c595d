"""Messages -> the text that a chat template makes of them, and its tokens.

Templates run in transformers' sandbox for Jinja: they come with a model, and so from anybody.

What a message says never makes a special token: `<|im_end|>` in it is encoded as the plain text that it is, so nobody
can end a turn, or speak as the system, from inside of a message. A template writes special tokens and messages into one
text; to tell them apart, the ones that messages spell are broken up before rendering and mended after it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskside.errors import UsageError

TEMPLATE = "chat_template.jinja"
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)  # that a template may write by their names
_BREAK = "\ue000"  # of the private use area: breaks up a special token that a message spells

Message = Mapping[str, Any]


class NotRendered(UsageError):
    """A conversation that cannot be used; says why."""


class Refused(NotRendered):
    """A template refuses the messages, or cannot be run at all, for this `reason`."""

    def __init__(self, reason: str):
        super().__init__(f"the model's chat template refuses these messages: {reason}")
        self.reason = reason


class Renderer:
    """The chat template of a folder. `special`: a pattern that finds the tokenizer's special tokens.

    tokenizer: a copy of its own, because the way that it treats special tokens is changed. Raises UsageError for a
    folder without a template. Belongs to one thread at a time.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        template = own_template(folder)
        if template is None:
            raise UsageError(f"{folder}: has no chat template; make a chat model: deskside sft")
        self.template = template
        self._coder = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        special = [str(token.content) for token in added if token.special]
        # Longer ones first: a token may begin with another one.
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._named = _named_tokens(folder)

    def text(self, messages: Sequence[Message], reply: bool) -> str:
        """The text of messages; with `reply` up to where the assistant speaks next. Raises Refused."""
        texts, _ = self._rendered(messages, add_generation_prompt=reply)
        return str(texts[0])

    def marked(self, messages: Sequence[Message]) -> tuple[list[tuple[int, int]], str]:
        """Where the stretches stand that the template marks with `{% generation %}`, and the text. Raises Refused."""
        texts, spans = self._rendered(messages, return_assistant_tokens_mask=True)
        return [(a, b) for a, b in spans[0] if b > a], str(texts[0])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens after which the assistant speaks. Raises Refused."""
        return self.ids(self.text(self.guarded(messages), reply=True))

    def guarded(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages whose special tokens are broken up after their first character; `ids` mends them."""
        guarded = []
        for message in messages:
            content = str(message["content"]).replace(_BREAK, "")
            content = self.special.sub(lambda found: found[0][0] + _BREAK + found[0][1:], content)
            guarded.append({**message, "content": content})
        return guarded

    def ids(self, text: str) -> list[int]:
        """Tokens of a text; the template's special tokens are found in it, broken-up ones are plain text."""
        if _BREAK not in text:
            return encode(self._coder, text, plain=False)
        ids: list[int] = []
        at = 0
        for found in [*self.special.finditer(text), None]:
            part = text[at : found.start() if found else len(text)].replace(_BREAK, "")
            ids += encode(self._coder, part, plain=True)
            if found:
                number = self._coder.token_to_id(found[0])
                assert number is not None  # it is one of the tokenizer's own
                ids.append(number)
                at = found.end()
        return ids

    def _rendered(self, messages: Sequence[Message], **options: bool) -> tuple[list[str], list[Any]]:
        from jinja2 import TemplateError  # both are slow to import, and only chats need them
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)], chat_template=self.template, **options, **self._named
            )
        except (TemplateError, TypeError) as error:
            raise Refused((str(error).splitlines() or [type(error).__name__])[0][:160]) from None
        return texts, spans


def encode(tokenizer: Tokenizer, text: str, plain: bool) -> list[int]:
    """Tokens of a text, special ones that it spells included unless `plain`. Changes how the tokenizer treats them."""
    tokenizer.encode_special_tokens = plain
    # As a batch, because only that lets other threads run meanwhile.
    return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)


def checked_messages(value: object) -> list[dict[str, Any]]:
    """The messages of a record: text parts are joined. Raises NotRendered for what is no conversation."""
    if not isinstance(value, list) or not value:
        raise NotRendered("it is not a list of messages")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise NotRendered(f"message {number} has no role")
        content = message.get("content")
        if isinstance(content, list) and all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
        ):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise NotRendered(f"message {number} ({message['role']}) has no text")
        try:
            content.encode("utf-8")
        except UnicodeEncodeError:
            raise NotRendered(f"message {number} holds half of a surrogate pair") from None
        messages.append({"role": message["role"], "content": content})
    return messages


def own_template(folder: Path) -> str | None:
    """The chat template beside a tokenizer, or inside of its tokenizer_config.json; None where there is none."""
    file, config = folder / TEMPLATE, folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text("utf-8")
    if not config.is_file():
        return None
    found = json.loads(config.read_text("utf-8")).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def _named_tokens(folder: Path) -> dict[str, str]:
    """Those of NAMED_TOKENS that tokenizer_config.json has."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    found = {name: settings.get(name) for name in NAMED_TOKENS}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}
