"""Rendering of a conversation with the places of the assistant's turns, which the model learns.

A template that is made for training marks the turns with `{% generation %}`. In others they are found by rendering
beginnings of the conversation: what is written up to a turn, with the generation prompt, is its prompt, and what is
written with the turn must begin with this prompt; the rest is the turn, as the model has to generate it.

Usually every such rendering is a beginning of the whole text. But some templates write a turn differently once a later
message follows: Qwen3's removes the reasoning of earlier answers. Then the text is put together from the turns as the
model generates them, each as the last one of the conversation, and what the template writes between them. That is also
the text of TRL's training templates, which keep every turn as it was generated. If even the end of a turn depends on
what follows, as in the template of gpt-oss, a turn is learned only if the whole text has it exactly as the model
generates it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from deskside.data.chat.messages import Conversation, Message, NotRendered
from deskside.data.chat.renderer import Renderer

MARKS = [chr(0xF8FF - number) for number in range(64)]  # of the Private Use Area
_QUESTION = [{"role": "user", "content": "Is it raining?"}]


class NotContinued(NotRendered):
    """Raised if the text up to a turn is not a beginning of the text with the turn."""

    def __init__(self) -> None:
        super().__init__("its text before a reply is not a prefix of its text with the reply")


@dataclass(frozen=True)
class MarkedText:
    """A rendered conversation.

    text: escaped. spans: (begin, end) of the assistant's turns that can be learnt. unlearnt: numbers of the assistant's
    other messages. rewritten: True if the template would write an earlier turn differently in the whole conversation.
    """

    text: str
    spans: list[tuple[int, int]]
    unlearnt: Sequence[int] = ()
    rewritten: bool = False


def text_with_turns(renderer: Renderer, conversation: Conversation, last: bool) -> MarkedText:
    """Render a conversation and find the assistant's turns, in order. last: only the last one. Raises NotRendered."""
    numbers = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not numbers:
        raise NotRendered("it has no assistant message")
    if renderer.marks_turns:
        spans, text = renderer.assistant_spans_and_text(conversation)
        if not spans:
            raise NotRendered("the chat template marks none of its turns")
        spans = spans[-1:] if last else spans
        return MarkedText(text, spans, numbers[: max(0, len(numbers) - len(spans))])
    text = renderer.text(conversation, add_generation_prompt=False)
    wanted = numbers[-1:] if last else numbers
    spans = []
    for n in wanted:
        span = _span(renderer, conversation, text, n)
        if span is None:
            break
        spans.append(span)
    else:
        return MarkedText(text, spans, numbers[: -len(wanted)])
    try:
        appended = _appended(renderer, conversation, numbers)
    except NotContinued:
        found = {n: span for n in wanted if (span := _span(renderer, conversation, text, n))}
        if numbers[-1] not in found:
            raise
        return MarkedText(text, list(found.values()), [n for n in numbers if n not in found])
    return MarkedText(appended.text, appended.spans[-1:], numbers[:-1], True) if last else appended


def _span(renderer: Renderer, conversation: Conversation, text: str, n: int) -> tuple[int, int] | None:
    """Return (begin, end) of message n in the text of the conversation; None if the template wrote it differently there
    than as the last message, which is how the model generates it.
    """
    prompt = _text_before(renderer, conversation, n)
    if not text.startswith(prompt):
        return None
    is_last = n + 1 == len(conversation.messages)
    answered = text if is_last else renderer.text(conversation.first(n + 1), add_generation_prompt=False)
    is_there = text.startswith(answered) and len(prompt) < len(answered)
    return (len(prompt), len(answered)) if is_there else None


def _appended(renderer: Renderer, conversation: Conversation, numbers: list[int]) -> MarkedText:
    """Return a text in which every turn is as the model generates it. numbers: of the assistant's messages.

    To find what follows a turn, a mark is put at the end of the turn's last text: it is what the template writes after
    this mark.
    """
    messages = conversation.messages
    given = json.dumps(messages, ensure_ascii=False)
    mark = next((mark for mark in MARKS if mark not in given), None)
    if mark is None:
        raise NotRendered("it uses too many characters of the Private Use Area")
    final = _final(renderer, conversation)

    def written(beginning: Sequence[Message], add_generation_prompt: bool = False) -> str:
        text = renderer.text(conversation.with_messages(beginning), add_generation_prompt)
        return text if add_generation_prompt else text.removesuffix(final)

    def after_mark(marked: Sequence[Message], add_generation_prompt: bool = False) -> str:
        parts = written(marked, add_generation_prompt).split(mark)
        if len(parts) != 2:
            raise NotRendered("the chat template writes the text of a turn more than once, or leaves it out")
        return parts[1]

    def with_mark(n: int) -> list[Message]:
        return [*messages[:n], _marked(messages[n], mark)]

    text = _text_before(renderer, conversation, numbers[0])
    turn = _rest(written(messages[: numbers[0] + 1]), text)
    spans = [(len(text), len(text) + len(turn))]
    text += turn
    for n, following in pairwise(numbers):
        before = [*with_mark(n), *messages[n + 1 : following]]
        prompt = after_mark(before, add_generation_prompt=True)
        turn = _rest(after_mark([*before, messages[following]]), prompt)
        text += _rest(prompt, after_mark(with_mark(n)))
        spans.append((len(text), len(text) + len(turn)))
        text += turn
    ended = with_mark(numbers[-1])
    text += _rest(after_mark([*ended, *messages[numbers[-1] + 1 :]]), after_mark(ended)) + final
    if numbers[-1] + 1 == len(messages):
        spans[-1] = (spans[-1][0], len(text))
    return MarkedText(text, spans, rewritten=True)


def _marked(message: Message, mark: str) -> Message:
    """Return a message with a mark at the end of the last text that a template writes of it.

    This is its content, or else the name of its last call, whose arguments templates write in many ways.
    """
    if "tool_calls" not in message:
        return {**message, "content": message["content"] + mark}
    *calls, last = message["tool_calls"]
    function = {**last["function"], "name": last["function"]["name"] + mark}
    return {**message, "tool_calls": [*calls, {**last, "function": function}]}


def _rest(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise NotContinued
    return text.removeprefix(beginning)


def _final(renderer: Renderer, conversation: Conversation) -> str:
    """Return the end of text that the template writes wherever no generation prompt follows, as Phi-3's does, or ""."""
    question, end = conversation.with_messages(_QUESTION), renderer.end_of_text
    text = renderer.text(question, add_generation_prompt=False)
    is_final = text.endswith(end) and not renderer.text(question, add_generation_prompt=True).startswith(text)
    return end if is_final else ""


def _text_before(renderer: Renderer, conversation: Conversation, n: int) -> str:
    """Return the text before message n, with the generation prompt.

    If the assistant speaks first, this is the rendering of an empty conversation, which many templates refuse or write
    without the beginning of the text. So the generation prompt is found by rendering a question with and without it,
    and the text is what the template writes up to the end of this prompt. Only if the template has no generation prompt
    is the empty conversation rendered.
    """
    if n:
        return renderer.text(conversation.first(n), add_generation_prompt=True)
    question = conversation.with_messages(_QUESTION)
    without_prompt = renderer.text(question, False).removesuffix(_final(renderer, conversation))
    prompt = _rest(renderer.text(question, add_generation_prompt=True), without_prompt)
    if not prompt:
        return renderer.text(conversation.first(0), add_generation_prompt=True)
    first = renderer.text(conversation.first(1), add_generation_prompt=False)
    at = first.find(prompt)
    if at < 0:
        raise NotRendered(
            "it begins with the assistant, and the template does not show where that turn begins"
        )
    return first[: at + len(prompt)]
