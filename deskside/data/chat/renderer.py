"""Rendering of conversations with a chat template, and tokenization of the result.

Templates come with a model and are untrusted, so they run in transformers' Jinja sandbox. Any exception in a template
becomes `RefusedByTemplate`.

The content of a message never becomes a special token: `<|im_end|>` in it is encoded as plain text, so a message
cannot end a turn or impersonate the system. A template mixes special tokens and messages in one text. To
distinguish them, every string of a conversation is escaped before rendering (escaping.py), and `ids` unescapes it after
the template's own special tokens have been found. As a second defense, `encode_plain` refuses text if the tokenizer
encodes any of it as a special token.

A conversation with parts that the template would leave out, such as tool calls or reasoning, is refused
(template_support.py).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskside.data.chat.escaping import Escaping
from deskside.data.chat.messages import Conversation, NotRendered
from deskside.data.chat.template_support import NAMED_TOKENS, TOOL, TRIAL_WORD, TemplateSupport
from deskside.data.encoder import Encoder, ReferenceEncoder
from deskside.data.tokenizer import named_token, read_config
from deskside.utils.errors import RunError, UsageError, describe_error, first_line

TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # where transformers saves the one named tool_use
# One template of two. The empty texts keep the white space of both, which a block beside it would take.
_WITH_AND_WITHOUT_TOOLS = (
    "{{% if tools %}}{{{{ '' }}}}{}{{{{ '' }}}}{{% else %}}{{{{ '' }}}}{}{{{{ '' }}}}{{% endif %}}"
)


class RefusedByTemplate(NotRendered):
    """Raised if the template refuses the messages or fails, for this `reason`."""

    def __init__(self, reason: str):
        super().__init__(f"the model's chat template refuses these messages: {reason}")
        self.reason = reason


class Renderer:
    """Renders conversations with the chat template of a folder, and tokenizes them.

    special: a pattern that matches the tokenizer's special tokens. marks_turns: True if the template marks the
    assistant's turns with `{% generation %}`.

    tokenizer: not to be used elsewhere, because its treatment of special tokens is changed. encoder: encodes instead of
    it, if given. Raises UsageError for a folder without a template. Not thread-safe.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, encoder: Encoder | None = None):
        template = read_chat_template(folder)
        if template is None:
            raise UsageError(f"{folder}: has no chat template; make a chat model with: deskside sft")
        self.template = template
        self.marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        self._tokenizer = tokenizer
        self._encoder = encoder or ReferenceEncoder(tokenizer)
        special = special_tokens(tokenizer)
        self._special_names = {number: name for name, number in special.items()}
        self._escaping = Escaping(list(special))
        self.special = self._escaping.pattern
        settings = read_config(folder)
        self._named_tokens: dict[str, str] = {}
        for name in NAMED_TOKENS:
            if text := named_token(settings, name):
                self._named_tokens[name] = text

        def render(trial: Conversation) -> str:
            return self._run(trial, add_generation_prompt=False)[0]

        self._support = TemplateSupport(template, render)
        self._support_with_tools = TemplateSupport(
            template, lambda trial: render(replace(trial, tools=trial.tools or [TOOL]))
        )

    @property
    def end_of_text(self) -> str:
        """The token that the template gets as `eos_token`, or ""."""
        return self._named_tokens.get("eos_token", "")

    @property
    def roles(self) -> frozenset[str]:
        """The roles that the template knows."""
        return self._support.roles

    @property
    def variables(self) -> frozenset[str]:
        """Names that chat_template_kwargs may set."""
        return self._support.variables

    def text(self, conversation: Conversation, add_generation_prompt: bool) -> str:
        """Render a conversation as escaped text. `unescape` makes it readable, and `ids` tokenizes it.

        Raises NotRendered, also for what the template would leave out.
        """
        return self._rendered(conversation, add_generation_prompt=add_generation_prompt)[0]

    def assistant_spans_and_text(self, conversation: Conversation) -> tuple[list[tuple[int, int]], str]:
        """Return the non-empty spans that the template marks with `{% generation %}`, and the escaped text.

        Raises NotRendered.
        """
        text, spans = self._rendered(conversation, return_assistant_tokens_mask=True)
        return [(a, b) for a, b in spans if b > a], text

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the tokens up to the assistant's turn. Raises NotRendered."""
        return self.ids(self.text(conversation, add_generation_prompt=True))

    def escape(self, text: str) -> str:
        """Escape untrusted text, so that it cannot become a special token in a rendered text."""
        return self._escaping.escape(text)

    def unescape(self, text: str) -> str:
        """Return a rendered text without its escapes."""
        return self._escaping.unescape(text)

    def ids(self, text: str) -> list[int]:
        """Tokenize a rendered text, with special tokens only where the template wrote them.

        Raises NotRendered if the tokenizer would encode plain text as a special token.
        """
        matches = list(self.special.finditer(text))
        if not self._escaping.used_in(text):
            ids: list[int] = self._encoder.ids(text, plain=False).tolist()
            if sum(token in self._special_names for token in ids) == len(matches):
                return ids
            # The tokenizer found other special tokens than the template wrote, so tokenize the parts separately.
        ids = []
        at = 0
        for special in [*matches, None]:
            part = self.unescape(text[at : special.start() if special else len(text)])
            ids += encode_plain(self._encoder, part, self._special_names)
            if special:
                token_id = self._tokenizer.token_to_id(special[0])
                assert token_id is not None  # it is one of the tokenizer's special tokens
                ids.append(token_id)
                at = special.end()
        return ids

    def _rendered(self, conversation: Conversation, **options: bool) -> tuple[str, list[tuple[int, int]]]:
        (self._support_with_tools if conversation.tools else self._support).check(conversation)
        escape_all = self._escaping.escape_all
        return self._run(
            Conversation(
                [escape_all(message) for message in conversation.messages],
                [self._escaping.escape_value(tool) for tool in conversation.tools],
                escape_all(conversation.chat_template_kwargs),
            ),
            **options,
        )

    def _run(self, conversation: Conversation, **options: bool) -> tuple[str, list[tuple[int, int]]]:
        """Run the template; return the text and the marked spans. Raises RefusedByTemplate for any exception in it."""
        from jinja2 import TemplateError  # both are slow to import, and only chats need them
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = list(conversation.messages)
        if self._wants_parts:
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=list(conversation.tools) or None,
                chat_template=self.template,
                **options,
                **self._named_tokens,
                **conversation.chat_template_kwargs,
            )
        except TemplateError as error:  # includes raise_exception in the template
            raise RefusedByTemplate(first_line(error)[:160]) from None
        except Exception as error:  # noqa: BLE001 - an expression may raise anything, from 1/0 to MemoryError
            raise RefusedByTemplate(describe_error(error)) from None
        return str(texts[0]), list(spans[0]) if spans else []

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template writes contents only as lists of parts, as that of some multimodal models."""

        def is_written(content: Any) -> bool:
            try:
                return TRIAL_WORD in self._run(Conversation([{"role": "user", "content": content}]))[0]
            except RefusedByTemplate:
                return False

        self._wants_parts = False  # so that `_run` leaves the contents of these trials as they are
        return not is_written(TRIAL_WORD) and is_written(_parts(TRIAL_WORD))


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens of a tokenizer with their ids."""
    added = tokenizer.get_added_tokens_decoder()
    return {
        str(token.content): int(number) for number, token in added.items() if token.special and token.content
    }


def encode_plain(encoder: Encoder, text: str, special: Mapping[int, str]) -> list[int]:
    """Tokenize untrusted text as plain text. Raises NotRendered if the tokenizer gives a special token anyway.

    special: names of the special tokens by id.
    """
    ids: list[int] = encoder.ids(text).tolist()
    if not special.keys().isdisjoint(ids):
        name = next(special[token] for token in ids if token in special)
        raise NotRendered(f"the tokenizer writes the control token {name} for plain text; take this text out")
    return ids


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of a tokenizer's folder, from its own files or tokenizer_config.json, or None.

    Of named templates, `tool_use` writes conversations with tools, and `default` others, as in transformers.
    Raises RunError for a damaged file.
    """
    template: object = _read_template(folder / TEMPLATE)
    with_tools: object = _read_template(folder / TOOL_TEMPLATE)
    if template is None:
        template = read_config(folder).get("chat_template")
    if isinstance(template, list):  # several templates with names
        by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = by_name.get("default") or next(iter(by_name.values()), None)
        with_tools = by_name.get("tool_use")
    if not isinstance(template, str):
        return None
    if not isinstance(with_tools, str):
        return template
    return _WITH_AND_WITHOUT_TOOLS.format(*(text.removesuffix("\n") for text in (with_tools, template)))


def _read_template(file: Path) -> str | None:
    try:
        return file.read_text("utf-8") if file.is_file() else None
    except UnicodeDecodeError:
        raise RunError(f"{file}: is not UTF-8; save it as UTF-8") from None
