"""The Modelfile with which `ollama create` imports an exported GGUF file.

Ollama renders conversations with a Go template (text/template), not with the model's Jinja template. Chat templates
that write each message as fixed text, content, fixed text are converted: the fixed texts are read off rendered
conversations, and the result is accepted only if it renders other conversations to the same text. For any other
template, none is written, and Ollama looks for one of its own that resembles the template in the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deskside.data.chat.messages import Conversation, Message, NotRendered
from deskside.data.chat.renderer import Renderer, read_chat_template
from deskside.data.tokenizer import load as load_tokenizer

MODELFILE = "Modelfile"
_CONTENTS = ("first trial text", "second text of it", "a third one", "the fourth, नमस्ते", "fifth")


@dataclass(frozen=True)
class ChatParts:
    """The fixed texts of a chat template.

    start: of a conversation without system message; system, user, assistant: before and after the content of a message;
    prompt: precedes the answer. The start of a conversation with a system message is part of `system`.
    """

    start: str
    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text that `template` gives for these messages, the first of which may be a system message."""
        wrap = {"system": self.system, "user": self.user, "assistant": self.assistant}
        text = "" if messages[0]["role"] == "system" else self.start
        for message in messages:
            before, after = wrap[message["role"]]
            text += before + message["content"] + after
        return text + self.prompt

    def template(self) -> str:
        """Return the Go template. `.System` holds the system message, which `.Messages` contains as well."""
        return (
            "{{ if .System }}" + "{{ .System }}".join(self.system) + "{{ else }}" + self.start + "{{ end }}"
            "{{ range .Messages }}"
            '{{ if eq .Role "user" }}' + "{{ .Content }}".join(self.user) + "{{ end }}"
            '{{ if eq .Role "assistant" }}' + "{{ .Content }}".join(self.assistant) + "{{ end }}"
            "{{ end }}" + self.prompt
        )


def modelfile(gguf_file: str, folder: Path, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the content of the Modelfile, and whether it has the model's chat template.

    gguf_file: name of the file in the same folder. folder: with the tokenizer and chat template. stops: tokens that
    end an answer.
    """
    # Without a chat template, the model continues the text that it is given.
    template: str | None = "{{ .Prompt }}"
    if read_chat_template(folder) is not None:
        parts = chat_parts(Renderer(folder, load_tokenizer(folder)))
        template = None if parts is None else parts.template()
    lines = [f"FROM ./{gguf_file}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    return "\n".join(lines) + "\n", template is not None


def chat_parts(renderer: Renderer) -> ChatParts | None:
    """Return the fixed texts of a chat template, or None if it contains anything else."""
    try:
        parts = _read_parts(renderer)
        if parts is None or any(_text(renderer, each) != parts.render(each) for each in _conversations()):
            return None
    except NotRendered:
        return None
    texts = (parts.start, *parts.system, *parts.user, *parts.assistant, parts.prompt)
    # A Go template or a Modelfile would read these, and a date would stay that of today.
    special = any(sign in text for text in texts for sign in ("{{", "}}", '"""'))
    return None if special or "strftime_now" in renderer.template else parts


def _read_parts(renderer: Renderer) -> ChatParts | None:
    """Read the fixed texts off three conversations. The first message of a role ends where the second begins."""
    a, b, c = _CONTENTS[:3]
    lone = _text(renderer, _talk(a)).split(a)
    turns = _split(_text(renderer, _talk(a, b, c)), (a, b, c))
    system = _split(_text(renderer, [{"role": "system", "content": a}, *_talk(b)]), (a, b))
    if len(lone) != 2 or turns is None or system is None or lone[0] != turns[0] or lone[1] != turns[3]:
        return None
    before_user = _common_end(_common_end(turns[0], turns[2]), system[1])
    after_user = _common_end(turns[1][::-1], turns[3][::-1])[::-1]  # their common beginning
    return ChatParts(
        start=turns[0].removesuffix(before_user),
        system=(system[0], system[1].removesuffix(before_user)),
        user=(before_user, after_user),
        assistant=(turns[1].removeprefix(after_user), turns[2].removesuffix(before_user)),
        prompt=turns[3].removeprefix(after_user),
    )


def _conversations() -> list[list[Message]]:
    """Return the conversations on which a converted template must agree."""
    first: Message = {"role": "system", "content": _CONTENTS[3]}
    talks = [_talk(*_CONTENTS[:count]) for count in (1, 3, 5)]
    return [*talks, *([first, *talk] for talk in talks)]


def _talk(*contents: str) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def _text(renderer: Renderer, messages: Sequence[Message]) -> str:
    return renderer.unescape(renderer.text(Conversation(messages), add_generation_prompt=True))


def _common_end(a: str, b: str) -> str:
    pairs = enumerate(zip(reversed(a), reversed(b), strict=False))
    length = next((number for number, (x, y) in pairs if x != y), min(len(a), len(b)))
    return a[len(a) - length :]


def _split(text: str, contents: Sequence[str]) -> list[str] | None:
    """Return the texts around the contents, or None if one of them does not occur once and in order."""
    found = re.fullmatch("(.*)".join(["", *map(re.escape, contents), ""]), text, re.DOTALL)
    return list(found.groups()) if found and all(text.count(content) == 1 for content in contents) else None
