"""Messages -> the text that a chat template makes of them, and its tokens.

Templates run in transformers' sandbox for Jinja: they come with a model, and so from anybody. Whatever one raises
becomes `Refused`, here and nowhere else.

Nothing that a message holds ever makes a special token: `<|im_end|>` in it is encoded as the plain text that it is, so
nobody can end a turn, or speak as the system, from inside of a message. A template writes special tokens and messages
into one text; to tell them apart, every string of a message is escaped before rendering (escaping.py), and `ids` undoes
it after the template's own special tokens have been found. `encode_plain` is the second line of defence: it refuses a
text whose tokens hold a special one, whatever the tokenizer did to it.

A message holds a role, a text and perhaps a name. A role has to be one that the template knows, and a name one that it
writes. Other fields (tool calls, reasoning) are refused by `checked_messages`, never dropped.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskside.data.chat.escaping import Escaping
from deskside.utils.errors import RunError, UsageError, described
from deskside.utils.parsing import json_object

TEMPLATE = "chat_template.jinja"
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)  # that a template may write by their names
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
        special = special_tokens(tokenizer)
        self._special_ids = frozenset(special.values())
        self._escaping = Escaping(list(special))
        self.special = self._escaping.pattern
        self._named = _named_tokens(folder)
        self._names_shown: dict[str, bool] = {}

    def text(self, messages: Sequence[Message], reply: bool) -> str:
        """Return the text of messages, escaped; with `reply` up to where the assistant speaks next.

        `plain` shows it to a person, and `ids` makes tokens of it. Raises NotRendered.
        """
        texts, _ = self._rendered(messages, add_generation_prompt=reply)
        return str(texts[0])

    def marked(self, messages: Sequence[Message]) -> tuple[list[tuple[int, int]], str]:
        """Where the stretches stand that the template marks with `{% generation %}`, and the text, escaped.

        Raises NotRendered.
        """
        texts, spans = self._rendered(messages, return_assistant_tokens_mask=True)
        return [(a, b) for a, b in spans[0] if b > a], str(texts[0])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens after which the assistant speaks. Raises NotRendered."""
        return self.ids(self.text(messages, reply=True))

    def escaped(self, text: str) -> str:
        """Return a text from outside so that it can stand in a rendered text without making a special token."""
        return self._escaping.escape(text)

    def plain(self, text: str) -> str:
        """Return a rendered text without its escapes."""
        return self._escaping.unescape(text)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a rendered text: the template's special tokens, and everything else as plain text.

        Raises NotRendered where the tokenizer makes a special token of plain text.
        """
        found = list(self.special.finditer(text))
        if not self._escaping.used_in(text):
            ids = encode(self._coder, text, plain=False)
            if sum(token in self._special_ids for token in ids) == len(found):
                return ids
            # A normaliser has made a special token of something that is none. One by one, that cannot happen.
        ids = []
        at = 0
        for special in [*found, None]:
            part = self.plain(text[at : special.start() if special else len(text)])
            ids += encode_plain(self._coder, part, self._special_ids)
            if special:
                number = self._coder.token_to_id(special[0])
                assert number is not None  # it is one of the tokenizer's own
                ids.append(number)
                at = special.end()
        return ids

    def _rendered(self, messages: Sequence[Message], **options: bool) -> tuple[list[str], list[Any]]:
        for number, message in enumerate(messages, start=1):
            self._check(number, message)
        return self._run([self._escaping.escape_all(message) for message in messages], **options)

    def _run(self, messages: Sequence[Message], **options: bool) -> tuple[list[str], list[Any]]:
        """Run the template. Raises Refused for whatever it raises."""
        from jinja2 import TemplateError  # both are slow to import, and only chats need them
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)], chat_template=self.template, **options, **self._named
            )
        except TemplateError as error:  # what a template says on purpose
            raise Refused((str(error).splitlines() or [type(error).__name__])[0][:160]) from None
        except Exception as error:  # noqa: BLE001 - an expression may raise anything, from 1/0 to MemoryError
            raise Refused(described(error)) from None
        return texts, spans

    # What the template knows

    def _check(self, number: int, message: Message) -> None:
        """Raises NotRendered for a role or a name that the template would not write."""
        role = message["role"]
        if role not in self.roles:
            raise NotRendered(
                f"message {number}: the chat template does not know the role {str(role)[:40]!r}; it knows "
                f"{', '.join(sorted(self.roles))}"
            )
        if message.get("name") is not None and not self._shows_name(role):
            raise NotRendered(
                f"message {number}: the chat template does not write the name of a message of the role {role!r}; "
                "leave it out"
            )

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles that the template knows: those whose text it writes, or about which it raises an error of its own.

        Asked are the usual ones, and those that the template compares a role with.
        """
        candidates = {*ROLES, *_compared_roles(self.template)}
        return frozenset(
            role for role in candidates if self._shows({"role": role, "content": _TRIAL}) is not False
        )

    def _shows_name(self, role: str) -> bool:
        if role not in self._names_shown:
            shown = self._shows({"role": role, "content": "text", "name": _TRIAL})
            self._names_shown[role] = shown is True
        return self._names_shown[role]

    def _shows(self, message: Message) -> bool | None:
        """Whether _TRIAL in a message appears in some short conversation; None where all of them are refused."""
        user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        rendered = False
        for talk in ([message], [message, user], [user, message], [user, assistant, message]):
            try:
                texts, _ = self._run(talk, add_generation_prompt=False)
            except Refused:
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
    """Tokens of a text, special ones that it spells included unless `plain`. Changes how the tokenizer treats them."""
    tokenizer.encode_special_tokens = plain
    # As a batch, because only that lets other threads run meanwhile.
    return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)


def encode_plain(tokenizer: Tokenizer, text: str, special: frozenset[int]) -> list[int]:
    """Tokens of a text from outside. Raises NotRendered where one of them is special after all."""
    ids = encode(tokenizer, text, plain=True)
    if not special.isdisjoint(ids):
        found = next(token for token in ids if token in special)
        raise NotRendered(
            f"the tokenizer writes the control token {tokenizer.id_to_token(found)} for plain text; take that text out"
        )
    return ids


def checked_messages(value: object) -> list[dict[str, Any]]:
    """The messages of a record: text parts are joined, and fields without a value left out.

    Raises NotRendered for what is no conversation, and for fields that no rendering here would show.
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
    """The text of a part of a message's content."""
    given = {name: f for name, f in part.items() if not _empty(f)} if isinstance(part, Mapping) else {}
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or given.keys() - {"type", "text"} or given.get("type", "text") != "text":
        raise NotRendered(f"{where} has no text: a part of its content is something else")
    return text


def _empty(value: object) -> bool:
    """Whether a field says nothing. Tables fill in null where other rows have a value."""
    return value is None or (isinstance(value, (str, list, Mapping)) and not value)


def refuse_row_fields(fields: Mapping[str, Any]) -> None:
    """Raises NotRendered for a record with tools and the like, which a chat would have to show."""
    if found := [name for name in ROW_FIELDS if not _empty(fields.get(name))]:
        raise NotRendered(f"the record has {', '.join(found)}, which cannot be represented here; take it out")


def own_template(folder: Path) -> str | None:
    """The chat template beside a tokenizer, or inside of its tokenizer_config.json; None where there is none.

    Raises RunError for a file that is damaged.
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
    """Return tokenizer_config.json, empty where there is none. Raises RunError where it is no JSON object."""
    file = folder / "tokenizer_config.json"
    return json_object(file) if file.is_file() else {}


def _named_tokens(folder: Path) -> dict[str, str]:
    """Those of NAMED_TOKENS that tokenizer_config.json has."""
    settings = tokenizer_settings(folder)
    found = {name: settings.get(name) for name in NAMED_TOKENS}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _compared_roles(template: str) -> set[str]:
    """Return the texts that a template compares a role with; none where it does not parse."""
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
    """Whether an expression is `message.role`, `message["role"]` or a variable that is named for it."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return isinstance(node, nodes.Name) and "role" in node.name
