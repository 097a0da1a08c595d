"""Requests of POST /v1/responses, and the chat completion that each is translated to.

The server keeps no state: what came before is part of `input`, as with OpenAI's `store: false`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from deskside.engine.sampling import TOP_LOGPROBS
from deskside.serve.field_lists import EmptyList, IneffectiveFields, Metadata, ShortText
from deskside.serve.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    ApiError,
    ChatRequest,
    ReasoningEffort,
    convert_request,
)
from deskside.serve.sampling_fields import TokenCount
from deskside.serve.strict_model import OnlyFalse, StrictModel

LOGPROBS = "message.output_text.logprobs"
# Names of fields in errors about the chat completion.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(StrictModel):
    """A part of a message's text. Annotations and log-probabilities of earlier answers have no effect."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str
    annotations: EmptyList = None
    logprobs: list[Any] | None = None


Texts = str | Annotated[list[InputText], Field(max_length=MAX_PARTS)]


class InputMessage(StrictModel):
    """A message. Fields of earlier answers that clients send back, such as id, have no effect."""

    type: Literal["message"] = "message"
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Texts
    id: ShortText | None = None
    status: Status | None = None
    phase: ShortText | None = None


class FunctionCallItem(StrictModel):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: ShortText
    name: ShortText
    arguments: str
    id: ShortText | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None


class FunctionOutputItem(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: ShortText
    output: Texts
    id: ShortText | None = None
    status: Status | None = None


class ReasoningItem(StrictModel):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[InputText], Field(max_length=MAX_PARTS)] | None = None
    summary: EmptyList = None
    encrypted_content: None = None
    id: ShortText | None = None
    status: Status | None = None


InputItem = FunctionCallItem | FunctionOutputItem | ReasoningItem | InputMessage


class ReasoningOptions(StrictModel):
    """The effort of reasoning. A summary is not available."""

    effort: ReasoningEffort | None = None
    summary: None = None
    generate_summary: None = None


class TextOptions(StrictModel):
    """The form of the text. format: as `response_format` of a chat completion, with a JSON schema's fields inside."""

    format: dict[ShortText, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRefusedFields(StrictModel):
    """Fields that are accepted only with a value that asks for nothing."""

    access_programs: None = None
    background: OnlyFalse | None = None
    context_management: EmptyList = None
    conversation: None = None
    image: None = None
    max_tool_calls: None = None
    moderation: None = None
    previous_response_id: None = None
    prompt: None = None
    truncation: Literal["disabled"] | None = None


class ResponsesRequest(IneffectiveFields, ResponsesRefusedFields):
    """POST /v1/responses."""

    model: ShortText | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    max_output_tokens: TokenCount | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_obfuscation"], bool] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[ShortText, Any] | None = None
    tools: list[dict[ShortText, Any]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def response_metadata(self) -> Metadata:
        """The client's labels, which the response repeats."""
        return self.metadata or {}

    def chat(self) -> ChatRequest:
        """Return the chat completion that the request asks for. Raises ApiError."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += _messages(self.input)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
            "top_logprobs": self.top_logprobs,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": _tool_choice(self.tool_choice),
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": None if self.text is None else _response_format(self.text.format),
        }
        return convert_request(
            ChatRequest, {name: value for name, value in body.items() if value is not None}
        )


def renamed(error: ApiError) -> ApiError:
    """Return an error about the chat completion as one about the request."""
    if error.param in FIELD_NAMES:
        return ApiError(error.status, error.message, param=FIELD_NAMES[error.param], code=error.code)
    return error


def _messages(items: list[InputItem]) -> Iterator[dict[str, Any]]:
    """Yield messages. Reasoning, text and calls of one turn of the assistant are one message."""
    turn: dict[str, Any] = {}
    for item in items:
        if isinstance(item, FunctionOutputItem) or (
            isinstance(item, InputMessage) and (item.role != "assistant" or "content" in turn)
        ):
            if turn:
                yield turn
            turn = {}
        if isinstance(item, FunctionOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        elif isinstance(item, FunctionCallItem):
            call = {"name": item.name, "arguments": item.arguments}
            calls = [*turn.get("tool_calls", ()), {"id": item.call_id, "type": "function", "function": call}]
            turn |= {"role": "assistant", "tool_calls": calls}
        elif isinstance(item, ReasoningItem):
            if item.content:
                thoughts = [*filter(None, [turn.get("reasoning_content")]), _text(item.content)]
                turn |= {"role": "assistant", "reasoning_content": "\n".join(thoughts)}
        elif item.role == "assistant":
            turn |= {"role": "assistant", "content": _text(item.content)}
        else:
            role = "system" if item.role == "developer" else item.role  # its new name in OpenAI's API
            yield {"role": role, "content": _text(item.content)}
    if turn:
        yield turn


def _text(content: Texts) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of a chat completion, whose function is an object of its own."""
    if tool.get("type") != "function":
        return tool  # ChatRequest refuses it
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return form
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in form.items() if name != "type"},
    }
