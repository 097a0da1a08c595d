"""Requests of the OpenAI API and their error responses.

The fields are those of OpenAI's reference (platform.openai.com/docs/api-reference), and extensions with the names that
vLLM and others use. A field that would change the completion but is not supported is rejected with an error, never
ignored; field_lists.py lists the fields that need no effect. Unknown fields are rejected too. Types are strict: the
string "1" is not accepted as a number.

Nothing unbounded reaches the engine: the types bound numbers, short strings and most lists, so these bounds are part of
the OpenAPI document (openapi.py). The length of a prompt is bounded by the largest body (request_guard.py).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from deskside.data.chat.messages import Conversation, NotRendered, checked_conversation
from deskside.engine.sampling import TOP_LOGPROBS
from deskside.serve.field_lists import (
    REMEDIES,
    ChatIneffectiveFields,
    ChatRefusedFields,
    EmptyList,
    IneffectiveFields,
    ShortText,
    StreamOptions,
)
from deskside.serve.sampling_fields import MAX_CHOICES, SamplingFields, TokenCount, TokenId
from deskside.serve.strict_model import StrictModel
from deskside.serve.structured import JsonSchema, JsonSchemaFormat, StructuredFields, StructuredOutputs
from deskside.serve.tool_fields import (
    MAX_CALLS,
    CalledFunction,
    FunctionDefinition,
    MessageToolCall,
    NamedToolChoice,
    Tool,
    ToolFields,
)
from deskside.utils.errors import UsageError

MAX_MESSAGES, MAX_PARTS = 8192, 4096
MAX_PROMPTS = 4096
MAX_TEMPLATE_VARIABLES = 32


class ApiError(Exception):
    """An error response: the HTTP status, and the fields of OpenAI's error objects. retry_after: in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        types = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = types.get(self.status, default)
        return {
            "error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        }


def field_error(error: UsageError) -> ApiError:
    """Return the error response for an error that begins with the name of a field and a colon."""
    return ApiError(400, str(error), param=str(error).partition(":")[0])


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"] = "text"
    text: str


class RequestMessage(StrictModel):
    """One message of a conversation.

    Fields that accept only null or an empty list occur in messages that clients send back unchanged.
    What the model's chat template would not write, such as a name, is rejected. Content may be null if there are calls.
    """

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: ShortText | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_call_id: ShortText | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_CALLS)] | None = None
    annotations: EmptyList = None
    provider_specific_fields: dict[str, Any] | None = None  # LiteLLM's copy of other fields; ignored

    @property
    def characters(self) -> int:
        """Number of characters of its texts."""
        content = self.content or ""
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        texts += [call.function.arguments for call in self.tool_calls or []]
        return sum(map(len, [*texts, self.reasoning_content or ""]))


class _CommonRequest(SamplingFields, StructuredFields, IneffectiveFields):
    """Fields of chat and text completion requests."""

    model: ShortText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def usage_in_stream(self) -> bool:
        """True if a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream: true", param="stream_options")
        try:
            self.text_grammar()
        except UsageError as error:
            raise field_error(error) from None


class ChatRequest(_CommonRequest, ToolFields, ChatIneffectiveFields, ChatRefusedFields):
    """POST /v1/chat/completions. `chat_template_kwargs` are variables of the chat template, as in vLLM."""

    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: Annotated[dict[ShortText, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = (
        None
    )

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_top_logprobs(self) -> int:
        """Most probable tokens at each position of an answer."""
        return self.top_logprobs or 0

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs: true", param="top_logprobs")
        try:
            self.check_tools()
        except UsageError as error:
            raise field_error(error) from None

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of an answer; None if the client gives no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def characters(self) -> int:
        """Approximate number of characters to tokenize: the texts, and 16 per message for the chat template."""
        others = [*self.template_tools, self.chat_template_kwargs or ""]
        return len(json.dumps(others)) + sum(16 + message.characters for message in self.messages)

    def template_variables(self, known: Collection[str]) -> dict[str, Any]:
        """Return the variables of the chat template, for a template that has the variables `known`.

        `reasoning_effort` becomes the variable of this name, or else decides `enable_thinking`. A template with
        neither has one way to answer, so it needs no effect.
        """
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            if "reasoning_effort" in known:
                variables["reasoning_effort"] = self.reasoning_effort
            elif "enable_thinking" in known:
                variables["enable_thinking"] = self.reasoning_effort != "none"
        return variables | (self.chat_template_kwargs or {})

    def conversation(self, known: Collection[str]) -> Conversation:
        """Return the input of a chat template with the variables `known`. Raises ApiError for an invalid one."""
        try:
            ignored: Any = {"provider_specific_fields": True, "tool_calls": {"__all__": {"index"}}}
            messages = [message.model_dump(exclude=ignored) for message in self.messages]
            return checked_conversation(messages, self.template_tools, self.template_variables(known))
        except NotRendered as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None


TokenPrompt = Annotated[list[TokenId], Field(min_length=1)]


Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | TokenPrompt
    | Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def prompt_list(prompts: Prompts) -> Sequence[str | list[int]]:
    """Return prompts as a list, even if there is only one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts[0], int):
        return [[int(token) for token in prompts]]
    return prompts


class CompletionRequest(_CommonRequest):
    """POST /v1/completions. `prompt` is text, token ids, or a list of prompts of one kind."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        """Most probable tokens at each position of prompt and answer."""
        return self.logprobs or 0

    @property
    def samples_per_prompt(self) -> int:
        return self.best_of or self.choices_per_prompt

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of an answer; 16 by default, as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        super().check()
        if self.samples_per_prompt < self.choices_per_prompt:
            raise ApiError(400, f"best_of: must be at least n, {self.choices_per_prompt}", param="best_of")
        if self.stream and self.samples_per_prompt > self.choices_per_prompt:
            raise ApiError(
                400, "best_of: the best is known only at the end; leave out stream", param="best_of"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise ApiError(400, "echo: with logprobs, it is not available in a stream", param="echo")

    @property
    def characters(self) -> int:
        """Number of characters to tokenize, or of token ids to check."""
        return sum(map(len, self.prompts()))

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts as a list, even if there is only one."""
        return prompt_list(self.prompt)


RequestModel = TypeVar("RequestModel", bound=StrictModel)


def parse_request(kind: type[RequestModel], body: bytes) -> RequestModel:
    """Parse and check the JSON body of a request. Raises ApiError.

    pydantic's parser rejects invalid UTF-8 and deeply nested JSON.
    """
    return _checked(kind.model_validate_json, body)


def convert_request(kind: type[RequestModel], body: dict[str, Any]) -> RequestModel:
    """Check a request that is made from another one. Raises ApiError."""
    return _checked(kind.model_validate, body)


def _checked(validate: Callable[[Any], RequestModel], body: Any) -> RequestModel:
    try:
        request = validate(body)
    except ValidationError as error:
        raise _api_error(error) from None
    request.check()
    return request


def _api_error(error: ValidationError) -> ApiError:
    """Return the error response for the first problem that pydantic found."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"[:300])
    path, is_extra = first["loc"], first["type"] == "extra_forbidden"
    param = str(path[0]) if path else None
    shown = None if param is None else param[:60]
    # For a union, pydantic's path also contains the type that was tried. Keep only fields and indices of the request.
    known = {*FIELDS, param, path[-1] if is_extra else None}
    where = ".".join(str(part) for part in path if isinstance(part, int) or part in known)[:80] or "the body"
    if is_extra:
        return ApiError(400, f"{where}: there is no such field; leave it out", param=shown)
    if param in REMEDIES:
        return ApiError(400, f"{param} {REMEDIES[param]}", param=shown)
    reason = first["msg"].removeprefix("Input ")[:200]
    return ApiError(400, f"{where}: {reason[:1].lower()}{reason[1:]}", param=shown)


def _fields() -> frozenset[str]:
    """Return the names of all fields of requests and messages."""
    models: list[Mapping[str, Any]] = [
        kind.model_fields
        for kind in (
            ChatRequest,
            CompletionRequest,
            RequestMessage,
            TextPart,
            StreamOptions,
            Tool,
            FunctionDefinition,
            NamedToolChoice,
            MessageToolCall,
            CalledFunction,
            JsonSchemaFormat,
            JsonSchema,
            StructuredOutputs,
        )
    ]
    return frozenset(field.alias or name for fields in models for name, field in fields.items())


FIELDS = _fields()
