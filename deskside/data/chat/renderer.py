"""Rendering of messages with a chat template, and tokenization of the result.

Templates run in transformers' Jinja sandbox, because they come with a model and are untrusted. Everything that one
raises becomes `RefusedByTemplate`.

The content of a message never becomes a special token: `<|im_end|>` in it is encoded as plain text, so a message
cannot end a turn or impersonate the system. A template mixes special tokens and messages in one text. To
distinguish them, every string of a message is escaped before rendering (escaping.py), and `ids` unescapes it after
the template's own special tokens have been found. As a second defense, `encode_plain` refuses text whose tokens
include a special one, whatever the tokenizer did to it.

A message has a role, a text and perhaps a name. The template must know the role and write the name. Other fields
(tool calls, reasoning) are refused by `checked_messages`, never dropped.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskside.data.chat.escaping import Escaping
from deskside.utils.errors import RunError, UsageError, describe_error
from deskside.utils.parsing import read_json_object

TEMPLATE = "chat_template.jinja"
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)  # a template may write them by these names
ROLES = ("system", "user", "assistant", "tool", "developer")  # known wherever a template writes them
FIELDS = frozenset({"role", "content", "name"})  # of a message
ROW_FIELDS = (
    "tools",
    "functions",
    "chat_template_kwargs",
)  # of a record, beside its messages: not represented
_TRIAL = "trialtext"

Message = Mapping[str, Any]


class NotRendered(UsageError):
    """A conversation that cannot be used; the message gives the reason."""


class RefusedByTemplate(NotRendered):
    """The template refuses the messages, or cannot be run, for this `reason`."""

    def __init__(self, reason: str):
        super().__init__(f"the model's chat template refuses these messages: {reason}")
        self.reason = reason


class Renderer:
    """The chat template of a folder. special: a pattern that finds the tokenizer's special tokens.

    tokenizer: a private copy, because its treatment of special tokens is changed. Raises UsageError for a folder
    without a template. Not thread-safe.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        template = read_chat_template(folder)
        if template is None:
            raise UsageError(f"{folder}: has no chat template; make a chat model: deskside sft")
        self.template = template
        self._tokenizer = tokenizer
        special = special_tokens(tokenizer)
        self._special_ids = frozenset(special.values())
        self._escaping = Escaping(list(special))
        self.special = self._escaping.pattern
        settings = {name: tokenizer_settings(folder).get(name) for name in NAMED_TOKENS}
        texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in settings.items()}
        self._named = {name: text for name, text in texts.items() if isinstance(text, str) and text}
        self._names_shown: dict[str, bool] = {}

    def text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Render messages as escaped text. `unescape` makes it readable, and `ids` tokenizes it. Raises NotRendered."""
        texts, _ = self._rendered(messages, add_generation_prompt=add_generation_prompt)
        return str(texts[0])

    def text_with_assistant_spans(self, messages: Sequence[Message]) -> tuple[list[tuple[int, int]], str]:
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
        """Tokenize a rendered text: the template's special tokens, and everything else as plain text.

        Raises NotRendered if the tokenizer would encode plain text as a special token.
        """
        found = list(self.special.finditer(text))
        if not self._escaping.used_in(text):
            ids = encode(self._tokenizer, text, plain=False)
            if sum(token in self._special_ids for token in ids) == len(found):
                return ids
            # A normaliser has made a special token of something that is none. One by one, that cannot happen.
        ids = []
        at = 0
        for special in [*found, None]:
            part = self.unescape(text[at : special.start() if special else len(text)])
            ids += encode_plain(self._tokenizer, part, self._special_ids)
            if special:
                number = self._tokenizer.token_to_id(special[0])
                assert number is not None  # it is one of the tokenizer's own
                ids.append(number)
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
                conversations=[list(messages)], chat_template=self.template, **options, **self._named
            )
        except TemplateError as error:  # what a template says on purpose
            raise RefusedByTemplate((str(error).splitlines() or [type(error).__name__])[0][:160]) from None
        except Exception as error:  # noqa: BLE001 - an expression may raise anything, from 1/0 to MemoryError
            raise RefusedByTemplate(describe_error(error)) from None
        return texts, spans

    # What the template knows

    def _check(self, number: int, message: Message) -> None:
        """Raise NotRendered for a role or a name that the template would not write."""
        role = message["role"]
        if role not in self.roles:
            raise NotRendered(
                f"message {number}: the chat template does not know the role {str(role)[:40]!r}; it knows "
                f"{', '.join(sorted(self.roles))}"
            )
        if message.get("name") is None:
            return
        if role not in self._names_shown:
            named = {"role": role, "content": "text", "name": _TRIAL}
            self._names_shown[role] = self._shows(named) is True
        if not self._names_shown[role]:
            raise NotRendered(
                f"message {number}: the chat template does not write the name of a message of the role {role!r}; "
                "leave it out"
            )

    @cached_property
    def roles(self) -> frozenset[str]:
        """Return the roles that the template knows: it writes their text, or raises its own error about them.

        Tested are the usual roles, and those that the template compares a role with.
        """
        candidates = {*ROLES, *_compared_roles(self.template)}
        return frozenset(
            role for role in candidates if self._shows({"role": role, "content": _TRIAL}) is not False
        )

    def _shows(self, message: Message) -> bool | None:
        """Return whether _TRIAL in a message appears in some short conversation; None if all of them are refused."""
        user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        rendered = False
        for talk in ([message], [message, user], [user, message], [user, assistant, message]):
            try:
                texts, _ = self._run(talk, add_generation_prompt=False)
            except RefusedByTemplate:
                continue
            rendered = True
            if _TRIAL in texts[0]:
                return True
        return False if rendered else None


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the control tokens of a tokenizer with their ids."""
    added = tokenizer.get_added_tokens_decoder()
    return {
        str(token.content): int(number) for number, token in added.items() if token.special and token.content
    }


def encode(tokenizer: Tokenizer, text: str, plain: bool) -> list[int]:
    """Tokenize a text, including the special tokens that it spells unless `plain`. Changes the tokenizer's setting."""
    tokenizer.encode_special_tokens = plain
    # As a batch, because only that lets other threads run meanwhile.
    return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)


def encode_plain(tokenizer: Tokenizer, text: str, special: frozenset[int]) -> list[int]:
    """Tokenize untrusted text. Raises NotRendered if a token is special nevertheless."""
    ids = encode(tokenizer, text, plain=True)
    if not special.isdisjoint(ids):
        found = next(token for token in ids if token in special)
        raise NotRendered(
            f"the tokenizer writes the control token {tokenizer.id_to_token(found)} for plain text; take that text out"
        )
    return ids


def checked_messages(value: object) -> list[dict[str, Any]]:
    """Return the messages of a record, with text parts joined and empty fields removed.

    Raises NotRendered for invalid conversations, and for fields that cannot be rendered here.
    """
    if not isinstance(value, list) or not value:
        raise NotRendered("it is not a list of messages")
    return [_checked(number, message) for number, message in enumerate(value, start=1)]


def _checked(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise NotRendered(f"message {number} has no role")
    where = f"message {number} ({message['role'][:40]})"
    given = {name: field for name, field in message.items() if not _empty(field)}
    if unknown := sorted(str(name) for name in given.keys() - FIELDS):
        raise NotRendered(
            f"{where} has {', '.join(unknown)[:120]}, which cannot be represented here; take it out of the data"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(where, part) for part in content)
    checked = {"role": message["role"], "content": content}
    if "name" in given:
        checked["name"] = given["name"]
    for name, text in checked.items():
        if not isinstance(text, str):
            raise NotRendered(
                f"{where} has no text" if name == "content" else f"{where} has a {name} that is no text"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise NotRendered(f"message {number} holds half of a surrogate pair in its {name}") from None
    return checked


def _part(where: str, part: object) -> str:
    """Return the text of a part of a message's content."""
    given = {name: f for name, f in part.items() if not _empty(f)} if isinstance(part, Mapping) else {}
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or given.keys() - {"type", "text"} or given.get("type", "text") != "text":
        raise NotRendered(f"{where} has no text: a part of its content is something else")
    return text


def _empty(value: object) -> bool:
    """Return whether a field is empty. Tables have null where other rows have a value."""
    return value is None or (isinstance(value, (str, list, Mapping)) and not value)


def refuse_row_fields(fields: Mapping[str, Any]) -> None:
    """Raise NotRendered for a record with tools and the like, which a chat would have to show."""
    if found := [name for name in ROW_FIELDS if not _empty(fields.get(name))]:
        raise NotRendered(f"the record has {', '.join(found)}, which cannot be represented here; take it out")


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template beside a tokenizer, or inside its tokenizer_config.json, or None.

    Raises RunError for a damaged file.
    """
    file = folder / TEMPLATE
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError:
            raise RunError(f"{file}: is not UTF-8; save it as UTF-8") from None
    found = tokenizer_settings(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, or {} if it is missing. Raises RunError if it is not a JSON object."""
    file = folder / "tokenizer_config.json"
    return read_json_object(file) if file.is_file() else {}


def _compared_roles(template: str) -> set[str]:
    """Return the strings that a template compares a role with; none if it does not parse."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))
    except (TemplateSyntaxError, RecursionError):  # running it says what is wrong
        return set()
    found: set[str] = set()
    for compared in tree.find_all(nodes.Compare):
        parts = [compared.expr, *(operand.expr for operand in compared.ops)]
        if any(_is_role(part) for part in parts):
            for part in parts:
                constants = part.items if isinstance(part, nodes.List | nodes.Tuple) else [part]
                found |= {
                    c.value for c in constants if isinstance(c, nodes.Const) and isinstance(c.value, str)
                }
    return found


def _is_role(node: Any) -> bool:
    """Return whether an expression is `message.role`, `message["role"]` or a variable of that name."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return isinstance(node, nodes.Name) and "role" in node.name
