"""Rendering of messages with a chat template, and tokenization of the result.

Templates come with a model and are untrusted, so they run in transformers' Jinja sandbox. Any exception in a template
becomes `RefusedByTemplate`.

The content of a message never becomes a special token: `<|im_end|>` in it is encoded as plain text, so a message
cannot end a turn or impersonate the system. A template mixes special tokens and messages in one text. To
distinguish them, every string of a message is escaped before rendering (escaping.py), and `ids` unescapes it after
the template's own special tokens have been found. As a second defense, `encode_plain` refuses text if the tokenizer
encodes any of it as a special token.

A message has a role, a text and perhaps a name. The template must know the role and must write the name. Messages with
other fields (tool calls, reasoning) are refused by `checked_messages`; no field is silently left out.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskside.data.chat.escaping import Escaping
from deskside.data.encoder import Encoder, ReferenceEncoder
from deskside.utils.errors import RunError, UsageError, describe_error
from deskside.utils.parsing import read_json_object

TEMPLATE = "chat_template.jinja"
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # that a template can use by these names
ROLES = ("system", "user", "assistant", "tool", "developer")  # that are tried with every template
FIELDS = frozenset({"role", "content", "name"})  # supported fields of a message
# Unsupported fields of a record, beside its messages.
ROW_FIELDS = ("tools", "functions", "chat_template_kwargs")
_TRIAL = "trialtext"  # appears in the rendered text if the template writes a part of a message

Message = Mapping[str, Any]


class NotRendered(UsageError):
    """Raised for a conversation or record that cannot be used. The message gives the reason."""


class RefusedByTemplate(NotRendered):
    """Raised if the template refuses the messages or fails, for this `reason`."""

    def __init__(self, reason: str):
        super().__init__(f"the model's chat template refuses these messages: {reason}")
        self.reason = reason


class Renderer:
    """The chat template and tokenizer of a folder. special: a pattern that matches the tokenizer's special tokens.

    tokenizer: not to be used elsewhere, because its treatment of special tokens is changed. encoder: encodes instead of
    it, if given. Raises UsageError for a folder without a template. Not thread-safe.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, encoder: Encoder | None = None):
        template = read_chat_template(folder)
        if template is None:
            raise UsageError(f"{folder}: has no chat template; make a chat model with: deskside sft")
        self.template = template
        self._tokenizer = tokenizer
        self._encoder = encoder or ReferenceEncoder(tokenizer)
        special = special_tokens(tokenizer)
        self._special_names = {number: name for name, number in special.items()}
        self._escaping = Escaping(list(special))
        self.special = self._escaping.pattern
        settings = tokenizer_settings(folder)
        self._named_tokens: dict[str, str] = {}
        for name in NAMED_TOKENS:
            token = settings.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text:
                self._named_tokens[name] = text
        self._writes_name: dict[str, bool] = {}  # by role

    def text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Render messages as escaped text. `unescape` makes it readable, and `ids` tokenizes it. Raises NotRendered."""
        texts, _ = self._rendered(messages, add_generation_prompt=add_generation_prompt)
        return str(texts[0])

    def assistant_spans_and_text(self, messages: Sequence[Message]) -> tuple[list[tuple[int, int]], str]:
        """Return the non-empty spans that the template marks with `{% generation %}`, and the escaped text.

        Raises NotRendered.
        """
        texts, spans = self._rendered(messages, return_assistant_tokens_mask=True)
        return [(a, b) for a, b in spans[0] if b > a], str(texts[0])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens up to the assistant's turn. Raises NotRendered."""
        return self.ids(self.text(messages, add_generation_prompt=True))

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

    def _rendered(self, messages: Sequence[Message], **options: bool) -> tuple[list[str], list[Any]]:
        for number, message in enumerate(messages, start=1):
            self._check(number, message)
        return self._run([self._escaping.escape_all(message) for message in messages], **options)

    def _run(self, messages: Sequence[Message], **options: bool) -> tuple[list[str], list[Any]]:
        """Run the template. Raises RefusedByTemplate for any exception in it."""
        from jinja2 import TemplateError  # both are slow to import, and only chats need them
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)], chat_template=self.template, **options, **self._named_tokens
            )
        except TemplateError as error:  # includes raise_exception in the template
            raise RefusedByTemplate((str(error).splitlines() or [type(error).__name__])[0][:160]) from None
        except Exception as error:  # noqa: BLE001 - an expression may raise anything, from 1/0 to MemoryError
            raise RefusedByTemplate(describe_error(error)) from None
        return texts, spans

    # Roles and names that the template supports

    def _check(self, number: int, message: Message) -> None:
        """Raise NotRendered if the template does not support the message's role, or would not write its name."""
        role = message["role"]
        if role not in self.roles:
            raise NotRendered(
                f"message {number}: the chat template does not know the role {str(role)[:40]!r}; it knows "
                f"{', '.join(sorted(self.roles))}"
            )
        if message.get("name") is None:
            return
        if role not in self._writes_name:
            named_message = {"role": role, "content": "text", "name": _TRIAL}
            self._writes_name[role] = self._writes_trial(named_message) is True
        if not self._writes_name[role]:
            raise NotRendered(
                f"message {number}: the chat template does not write the name of a message of the role {role!r}; "
                "leave it out"
            )

    @cached_property
    def roles(self) -> frozenset[str]:
        """Roles that the template knows: it writes their text in a trial, or refuses every trial.

        The candidates are ROLES and the strings that the template compares a role with.
        """
        candidates = {*ROLES, *_compared_roles(self.template)}
        return frozenset(
            role for role in candidates if self._writes_trial({"role": role, "content": _TRIAL}) is not False
        )

    def _writes_trial(self, message: Message) -> bool | None:
        """Render a message that contains _TRIAL in several short conversations.

        Returns True if any rendered text contains _TRIAL, False if none does, and None if all are refused.
        """
        user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        rendered = False
        for conversation in ([message], [message, user], [user, message], [user, assistant, message]):
            try:
                texts, _ = self._run(conversation, add_generation_prompt=False)
            except RefusedByTemplate:
                continue
            rendered = True
            if _TRIAL in texts[0]:
                return True
        return False if rendered else None


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


def checked_messages(value: object) -> list[dict[str, Any]]:
    """Validate the messages of a record, and return them with text parts joined and without empty optional fields.

    Raises NotRendered for an invalid conversation or an unsupported field.
    """
    if not isinstance(value, list) or not value:
        raise NotRendered("it is not a list of messages")
    return [_checked_message(number, message) for number, message in enumerate(value, start=1)]


def _checked_message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise NotRendered(f"message {number} has no role")
    where = f"message {number} ({message['role'][:40]})"
    fields = {name: field for name, field in message.items() if not _is_empty(field)}
    if unknown := sorted(str(name) for name in fields.keys() - FIELDS):
        raise NotRendered(
            f"{where} has {', '.join(unknown)[:120]}, which is not supported; take it out of the data"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(where, part) for part in content)
    checked = {"role": message["role"], "content": content}
    if "name" in fields:
        checked["name"] = fields["name"]
    for name, text in checked.items():
        if not isinstance(text, str):
            raise NotRendered(
                f"{where} has no text" if name == "content" else f"{where} has a {name} that is not text"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise NotRendered(f"message {number} holds half of a surrogate pair in its {name}") from None
    return checked


def _part_text(where: str, part: object) -> str:
    """Return the text of a part of a message's content. where: names the message in an error."""
    if isinstance(part, Mapping):
        fields = {name: field for name, field in part.items() if not _is_empty(field)}
        text = part.get("text")
        only_text = fields.keys() <= {"type", "text"} and fields.get("type", "text") == "text"
        if only_text and isinstance(text, str):
            return text
    raise NotRendered(f"{where} has no text: a part of its content is something else")


def _is_empty(value: object) -> bool:
    """Return True if a field is empty. Parquet files have null for fields that only other rows have."""
    return value is None or (isinstance(value, (str, list, Mapping)) and not value)


def refuse_row_fields(fields: Mapping[str, Any]) -> None:
    """Raise NotRendered for a record with fields, such as tools, that would have to be part of the prompt."""
    if unsupported := [name for name in ROW_FIELDS if not _is_empty(fields.get(name))]:
        raise NotRendered(f"the record has {', '.join(unsupported)}, which is not supported; take it out")


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of a tokenizer's folder, from its own file or tokenizer_config.json, or None.

    Raises RunError for a damaged file.
    """
    file = folder / TEMPLATE
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError:
            raise RunError(f"{file}: is not UTF-8; save it as UTF-8") from None
    template = tokenizer_settings(folder).get("chat_template")
    if isinstance(template, list):  # several templates with names
        by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = by_name.get("default") or next(iter(by_name.values()), None)
    return template if isinstance(template, str) else None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, or {} without one. Raises RunError if it is not a JSON object."""
    file = folder / "tokenizer_config.json"
    return read_json_object(file) if file.is_file() else {}


def _compared_roles(template: str) -> set[str]:
    """Return the strings that a template compares a role with, or no strings if it cannot be parsed."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))
    except (TemplateSyntaxError, RecursionError):  # reported when the template is run
        return set()
    roles: set[str] = set()
    for comparison in tree.find_all(nodes.Compare):
        operands = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        if not any(_is_role(operand) for operand in operands):
            continue
        for operand in operands:
            constants = operand.items if isinstance(operand, nodes.List | nodes.Tuple) else [operand]
            roles |= {c.value for c in constants if isinstance(c, nodes.Const) and isinstance(c.value, str)}
    return roles


def _is_role(node: Any) -> bool:
    """Return True for an attribute or item `role`, and for a variable with "role" in its name."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return isinstance(node, nodes.Name) and "role" in node.name
