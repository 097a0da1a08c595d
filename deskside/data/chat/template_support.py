"""Tests which roles, fields and variables a chat template supports.

A template silently drops fields that it does not know. To find out whether it writes a field, short conversations are
rendered in which this field holds a word that occurs nowhere else. The word must be in the text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from deskside.data.chat.messages import Conversation, Message, NotRendered

ROLES = ("system", "user", "assistant", "tool", "developer")  # tried with every template
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # usable in templates by these names
# Variables of a template that chat_template_kwargs cannot set.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", *NAMED_TOKENS})
TRIAL_WORD = "trialtext"
_CALL_ID = "call00001"  # nine letters and digits, the only ids that Mistral's templates accept
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
_TRIAL_CALL = {
    **_CALL,
    "function": {"name": f"{TRIAL_WORD}name", "arguments": {f"{TRIAL_WORD}key": f"{TRIAL_WORD}value"}},
}
_TRIAL_TOOL = {
    "type": "function",
    "function": {
        "name": f"{TRIAL_WORD}name",
        "description": f"{TRIAL_WORD}description",
        "parameters": {"type": "object", "properties": {f"{TRIAL_WORD}key": {"type": "string"}}},
    },
}
_TRIAL_WORDS = {  # words that must be written for a field with the trial value
    "tool_calls": [f"{TRIAL_WORD}{part}" for part in ("name", "key", "value")],
    "tools": [f"{TRIAL_WORD}{part}" for part in ("name", "description", "key")],
}
# A function in conversations with tools that are no trial of tools.
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_USER, _ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class TemplateSupport:
    """Finds out what a template supports.

    template: its source. render: renders a conversation without generation prompt; raises `NotRendered` if the template
    refuses it.
    """

    def __init__(self, template: str, render: Callable[[Conversation], str]):
        self._template, self._render = template, render
        self._written: dict[tuple[str, frozenset[str], str, bool], bool] = {}  # by the arguments of `_writes`

    def check(self, conversation: Conversation) -> None:
        """Raise NotRendered for a part of a conversation that the template would leave out."""
        if conversation.tools and not self.writes_tools:
            raise NotRendered(
                "the chat template does not write tools; leave them out, or use another template"
            )
        if unknown := sorted(conversation.chat_template_kwargs.keys() - self.variables):
            raise NotRendered(
                f"chat_template_kwargs: the chat template has no variable {unknown[0][:60]!r}; leave it out"
            )
        after_calls = False
        for number, message in enumerate(conversation.messages, start=1):
            self._check_message(number, message, after_calls)
            after_calls = "tool_calls" in message or (after_calls and message["role"] == "tool")

    def _check_message(self, number: int, message: Message, after_calls: bool) -> None:
        role = message["role"]
        if role not in self.roles:
            raise NotRendered(
                f"message {number}: the chat template does not know the role {str(role)[:40]!r}; it knows "
                f"{', '.join(sorted(self.roles))}"
            )
        given = {name for name, value in message.items() if value}
        if given <= {"role", "content"}:
            return
        # The place of a result shows which call it answers, and so its id and name (`checked_messages`).
        implied = {"role", "tool_call_id", *(["name"] if role == "tool" and after_calls else [])}
        several = len(message.get("tool_calls", ())) > 1  # some templates write only the first call
        for name in sorted(given - implied):
            if not self._writes(role, frozenset(given), name, several):
                others = sorted(given - {"role", "content", name})
                beside = f" beside {', '.join(others)}" if others else ""
                beside += ", if there are several" if several and name == "tool_calls" else ""
                raise NotRendered(
                    f"message {number}: the chat template does not write the {name} of a message of the role {role!r}"
                    f"{beside}; leave it out, or use another template"
                )

    @cached_property
    def roles(self) -> frozenset[str]:
        """Roles that the template knows: it writes their text in a trial, or refuses every trial.

        The candidates are ROLES and the strings that the template compares a role with.
        """
        candidates = {*ROLES, *_compared_roles(self._template)}
        trials = {role: _trials({"role": role, "content": TRIAL_WORD}) for role in candidates}
        return frozenset(
            role for role, trial in trials.items() if self._shows(trial, [TRIAL_WORD]) is not False
        )

    @cached_property
    def writes_tools(self) -> bool:
        """True if the template writes the functions that the model may call."""
        trials = [
            Conversation(messages, [_TRIAL_TOOL])
            for messages in ([_USER], [{**_USER, "role": "system"}, _USER])
        ]
        return self._shows(trials, _TRIAL_WORDS["tools"]) is True

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that chat_template_kwargs may set."""
        from jinja2 import meta

        tree = _parsed(self._template)
        return frozenset() if tree is None else frozenset(meta.find_undeclared_variables(tree)) - RESERVED

    def _writes(self, role: str, fields: frozenset[str], name: str, several: bool) -> bool:
        """Return True if the template writes field `name` of a message with these fields, and perhaps several calls."""
        key = (role, fields, name, several)
        if key not in self._written:
            values = {"role": role, "tool_call_id": _CALL_ID, "tool_calls": [_CALL]}
            message: dict[str, Any] = {"content": ""} | {field: values.get(field, "text") for field in fields}
            message[name] = (
                TRIAL_WORD if name != "tool_calls" else [*([_CALL] if several else []), _TRIAL_CALL]
            )
            self._written[key] = self._shows(_trials(message), _TRIAL_WORDS.get(name, [TRIAL_WORD])) is True
        return self._written[key]

    def _shows(self, trials: Sequence[Conversation], words: Sequence[str]) -> bool | None:
        """Return True if a rendered trial has all `words`, False if none has, and None if all trials are refused."""
        rendered = False
        for trial in trials:
            try:
                text = self._render(trial)
            except NotRendered:
                continue
            rendered = True
            if all(word in text for word in words):
                return True
        return False if rendered else None


def _trials(message: Mapping[str, Any]) -> list[Conversation]:
    """Return short conversations with a message."""
    before: list[list[Message]] = [[], [_USER], [_USER, _ASSISTANT], [_USER, _CALLING]]
    return [Conversation([*messages, message]) for messages in before] + [Conversation([message, _USER])]


def _parsed(template: str) -> Any:
    """Return the syntax tree of a template, or None if it has none, which is reported when it is run."""
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))
    except (TemplateSyntaxError, RecursionError):
        return None


def _compared_roles(template: str) -> set[str]:
    """Return the strings that a template compares a role with."""
    from jinja2 import nodes

    tree = _parsed(template)
    roles: set[str] = set()
    for comparison in () if tree is None else tree.find_all(nodes.Compare):
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
