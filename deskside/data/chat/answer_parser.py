"""The parts of an answer: reasoning, text, and tool calls, found while the answer is still generated.

A call is recognized when its name and the beginning of its arguments are there. From then on, its arguments are passed
on as they come. What looks like a call but is none, such as a call of a function that the request does not offer, is
text of the answer: nothing is lost, except white space around calls and reasoning.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from deskside.data.chat.tool_formats import END_THINK, THINK, ToolFormat, new_call_id
from deskside.utils.parsing import Unreadable, json_value

# Whether an answer has reasoning: never; if it begins with <think>; or always, because the prompt ends with <think>.
Thinking = Literal["no", "may", "must"]
MAX_HEAD = 1000  # characters of a call before its arguments, if these are to be passed on as they come
_JSON_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_SEPARATORS = " \t\r\n[],;"


@dataclass
class ToolCall:
    """A call, or a part of one: only its first part has an id and a name. arguments: JSON text."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class AnswerPart:
    """A part of an answer, or all of it.

    calls: by their place among the answer's calls. text_places: begin and end, in the answer, of the pieces of `text`.
    """

    text: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    text_places: list[tuple[int, int]] = field(default_factory=list)

    def add(self, rest: "AnswerPart") -> None:
        """Add the last part of an answer, in which no call begins or continues."""
        self.text += rest.text
        self.text_places += rest.text_places
        self.reasoning += rest.reasoning


class AnswerParser:
    """Divides one answer. tool_format, functions: how calls are written, and the names of the functions on offer."""

    def __init__(self, thinking: Thinking, tool_format: ToolFormat | None, functions: Collection[str] = ()):
        self.num_calls = 0
        self._format = tool_format if functions else None
        self._functions = frozenset(functions)
        self._part = AnswerPart()  # what the current `push` has found
        self._length = 0  # characters of the answer
        self._buffer = ""  # the end of the answer, which is not assigned to a part yet
        self._opening = ""  # text before the buffer that belongs to the next call, if there is one
        self._anything = False  # whether a part other than reasoning was found
        self._skips_space = thinking == "must"
        self._scanner = _ObjectEnd()
        states = {"no": self._text, "may": self._beginning, "must": self._reasoning}
        self._state: Callable[[], bool] = states[thinking]

    def push(self, text: str) -> AnswerPart:
        """Return the parts that are certain after this text."""
        self._length += len(text)
        self._buffer += text
        while self._buffer and self._state():
            pass
        part, self._part = self._part, AnswerPart()
        return part

    def finish(self) -> AnswerPart:
        """Return the text that was held back. Call it once, after the last `push`."""
        rest = self._opening + self._buffer
        if self._state == self._reasoning:
            return AnswerPart(reasoning=rest)
        end = "" if self._format is None else self._format.end
        after_call = self._state == self._calls and not self._opening
        if self._state == self._after_arguments or (after_call and end.startswith(rest.strip(_SEPARATORS))):
            return AnswerPart()  # the rest of a call
        return AnswerPart(rest, text_places=[(self._length - len(rest), self._length)] if rest else [])

    def parse(self, text: str) -> AnswerPart:
        """Return the parts of a whole answer."""
        part = self.push(text)
        part.add(self.finish())
        return part

    # States. Each assigns some of the buffer, which is not empty, and returns False if it needs more text to continue.

    def _beginning(self) -> bool:
        """The answer may begin with <think>."""
        text = self._buffer.lstrip()
        if len(text) < len(THINK) and THINK.startswith(text):
            return False
        if text.startswith(THINK):
            self._buffer, self._state, self._skips_space = text[len(THINK) :], self._reasoning, True
        else:
            self._state = self._text
        return True

    def _reasoning(self) -> bool:
        if not self._skip_space():
            return False
        reasoning, end, rest = self._buffer.partition(END_THINK)
        if end:
            self._part.reasoning += reasoning.rstrip()
            self._buffer, self._state, self._skips_space = rest, self._text, True
            return True
        kept = _kept(self._buffer, END_THINK)
        self._part.reasoning += self._buffer[:kept]
        self._buffer = self._buffer[kept:]
        return False

    def _text(self) -> bool:
        if not self._skip_space():
            return False
        if self._format is None:
            return self._use_text(len(self._buffer))
        if begin := self._format.begin:
            at = self._buffer.find(begin)
            if at < 0:
                return self._use_text(_kept(self._buffer, begin))
            self._use_text(len(self._buffer[:at].rstrip()))
            self._buffer, self._state = self._buffer.lstrip(), self._calls
            return True
        # An answer that does not begin with a call has none.
        text = self._buffer.lstrip()
        if self._anything or not text.startswith("{"):
            return self._use_text(len(self._buffer)) if text or self._anything else False
        self._opening, self._buffer = self._buffer[: -len(text)], text
        self._state = self._calls
        return True

    def _calls(self) -> bool:
        """Between calls."""
        assert self._format is not None
        for marker in (self._format.begin, self._format.end):
            if marker and self._buffer.startswith(marker):
                return self._open(len(marker), begins=marker == self._format.begin)
            if marker.startswith(self._buffer):
                return False
        if self._buffer[0] in (_SEPARATORS if self._format.listed or not self._format.begin else " \t\r\n"):
            return self._open(1)
        if self._format.named:
            return self._named_head(self._format.named)
        if self._buffer[0] != "{":
            return self._no_call(0)
        self._scanner, self._state = _ObjectEnd(), self._object
        return True

    def _object(self) -> bool:
        """In a JSON object that may be a call."""
        end = self._scanner.feed(self._buffer)
        head = _JSON_HEAD.match(self._buffer[:MAX_HEAD])
        if head is not None:
            name = _json_or_none(head[1])
            if name not in self._functions:
                return self._no_call(head.end())
            return self._start(str(name), head.end(), self._after_arguments)
        if end is None:
            return False
        call = _json_or_none(self._buffer[:end])
        fields = call if isinstance(call, dict) else {}
        arguments = fields.get("arguments", fields.get("parameters", {}))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = fields.get("name")
        if not isinstance(name, str) or name not in self._functions or not isinstance(arguments, str):
            return self._no_call(end)
        self._start(name, end, self._calls)
        self._part.calls[self.num_calls - 1].arguments = arguments
        self._state = self._calls
        return True

    def _named_head(self, separator: str) -> bool:
        """Before the arguments of a call whose name is not in JSON."""
        head = re.match(rf"([\w.-]+)(?:\[CALL_ID\]\w+)?{re.escape(separator)}\s*(?=\{{)", self._buffer)
        if head is None:
            possible = re.fullmatch(r"[\w.-]+(\[[A-Z_]*(\]\w*)?)*\s*", self._buffer[:MAX_HEAD]) is not None
            return self._no_call(0) if not possible or len(self._buffer) > MAX_HEAD else False
        if head[1] not in self._functions:
            return self._no_call(head.end())
        return self._start(head[1], head.end(), self._calls)

    def _start(self, name: str, head: int, following: Callable[[], bool]) -> bool:
        """Begin a call, whose arguments begin after `head` characters of the buffer."""
        self._part.calls[self.num_calls] = ToolCall(new_call_id(), name)
        self.num_calls += 1
        self._anything, self._opening = True, ""
        self._buffer, self._scanner = self._buffer[head:], _ObjectEnd()
        self._state, self._following = self._arguments, following
        return True

    def _arguments(self) -> bool:
        end = self._scanner.feed(self._buffer)
        call = self._part.calls.setdefault(self.num_calls - 1, ToolCall())
        call.arguments += self._buffer[:end]
        if end is None:
            self._buffer, self._scanner.position = "", 0
            return False
        self._buffer, self._state = self._buffer[end:], self._following
        self._scanner = _ObjectEnd(depth=1)
        return True

    def _after_arguments(self) -> bool:
        """In the JSON object of a call, after its arguments."""
        end = self._scanner.feed(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        self._scanner.position = 0
        if end is not None:
            self._state = self._calls
        return end is not None

    def _open(self, length: int, begins: bool = False) -> bool:
        """Drop text around calls from the buffer, but keep it while what follows may turn out to be no call."""
        if begins or self._opening:
            self._opening += self._buffer[:length]
        self._buffer = self._buffer[length:]
        return True

    def _no_call(self, length: int) -> bool:
        """Take text that is not a call from the buffer."""
        length += len(self._opening)
        self._opening, self._buffer, self._state = "", self._opening + self._buffer, self._text
        self._use_text(length)
        return True

    def _use_text(self, length: int) -> bool:
        """Move text from the buffer to the part."""
        begin = self._length - len(self._buffer)
        if length:
            self._part.text_places.append((begin, begin + length))
        self._part.text += self._buffer[:length]
        self._anything = self._anything or length > 0
        self._buffer = self._buffer[length:]
        return False

    def _skip_space(self) -> bool:
        """Drop white space from the buffer, if it is to be dropped here. Return False if nothing else is there."""
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        return bool(self._buffer)


class _ObjectEnd:
    """Finds the end of a JSON object. depth: of the objects and lists that are open before the first character."""

    def __init__(self, depth: int = 0):
        self.position = 0  # in the text that `feed` gets
        self._depth, self._in_string, self._escaped = depth, False, False

    def feed(self, text: str) -> int | None:
        """Return the place after the object in a text that has grown since the last call, or None."""
        for place in range(self.position, len(text)):
            character = text[place]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.position = place + 1
                    return place + 1
        self.position = len(text)
        return None


def _kept(text: str, marker: str) -> int:
    """Return the length of a text without a beginning of the marker at its end, and white space before that."""
    held = next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
    return len(text[: len(text) - held].rstrip())


def _json_or_none(text: str) -> object:
    try:
        return json_value(text, big_integers=True)
    except Unreadable:
        return None
