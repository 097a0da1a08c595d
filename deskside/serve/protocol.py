"""Requests of the OpenAI API and their error responses.

The fields are those of OpenAI's reference (platform.openai.com/docs/api-reference). `top_k`, `min_p` and
`repetition_penalty` are extensions with the names that vLLM and others use. A field that would change the completion
but is not supported is rejected with an error, never ignored. Unknown fields are rejected too. Types are strict: the
string "1" is not accepted as a number.

Nothing unbounded reaches the engine: the types bound numbers, short strings and most lists, so these bounds are part of
the OpenAPI document (openapi.py). The length of a prompt is bounded by the largest body (request_guard.py).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from deskside.data.chat.messages import Conversation, NotRendered, checked_conversation
from deskside.engine.sampling import (
    MAX_PENALTY,
    MAX_TOP_K,
    MIN_PENALTY,
    MIN_TEMPERATURE,
    Sampling,
)
from deskside.serve.strict_model import StrictModel
from deskside.serve.structured import JsonSchema, JsonSchemaFormat, StructuredFields, StructuredOutputs
from deskside.utils.errors import UsageError

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
MAX_CHOICES = 4096
MAX_INT32 = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_MESSAGES, MAX_PARTS = 8192, 4096
MAX_PROMPTS = 4096
MAX_NAME_CHARACTERS = 256  # also of other short texts
# Continuations of error messages, for fields that are accepted only with a value that has no effect.
REMEDIES = {
    "frequency_penalty": "is not available here; use repetition_penalty",
    "presence_penalty": "is not available here; use repetition_penalty",
    "logit_bias": "is not available here; leave it out",
    "tools": "are not available here; leave them out",
    "tool_choice": "must be none or auto, because tools are not available here",
    "top_logprobs": "must be 0: only the logprob of the sampled token is available",
    "echo": "is not available here; leave it out",
    "suffix": "is not available here; leave it out",
    "best_of": "is not available here; use n",
}


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


TokenCount = Annotated[int, Field(ge=0, le=MAX_INT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
ShortText = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
EmptyList = Annotated[list[Any], Field(max_length=0)] | None
Zero = Annotated[float, Field(ge=0, le=0)]


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"] = "text"
    text: str


class RequestMessage(StrictModel):
    """One message of a conversation.

    Fields that accept only null or an empty list occur in messages that clients send back unchanged.
    A name is rejected if the model's chat template does not write it.
    """

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
    name: ShortText | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_call_id: None = None
    reasoning_content: None = None
    tool_calls: EmptyList = None
    annotations: EmptyList = None


class _CommonRequest(StructuredFields):
    """Fields of chat and text completion requests."""

    model: ShortText | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY)] | None = None
    max_tokens: TokenCount | None = None
    user: ShortText | None = None  # identifies the client's user; ignored
    metadata: (
        Annotated[dict[ShortText, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None
    ) = None  # ignored
    # Accepted only with the value that has no effect:
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def choices_per_prompt(self) -> int:
        """Number of completions of each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_in_stream(self) -> bool:
        """True if a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """Return the sampling parameters. OpenAI's default is temperature 1 over all tokens."""
        top_p = 1.0 if self.top_p is None else self.top_p
        temperature = 1.0 if self.temperature is None else self.temperature
        top_k = self.top_k if self.top_k and self.top_k > 0 else None  # 0 and -1 disable it
        if top_p == 0:
            top_k = 1  # only the most probable token
        return Sampling(
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,  # greedy
            top_k=top_k,
            top_p=top_p if 0 < top_p < 1 else None,
            min_p=self.min_p or None,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )

    def check(self) -> None:
        """Check the fields that depend on each other. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream: true", param="stream_options")
        try:
            self.text_grammar()
        except UsageError as error:
            raise field_error(error) from None


class ChatRequest(_CommonRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    store: bool | None = None  # ignored: nothing is stored
    tools: EmptyList = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of an answer; None if the client gives no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def characters(self) -> int:
        """Approximate number of characters to tokenize: the text, and 16 per message for the chat template."""
        total = 16 * len(self.messages)
        for message in self.messages:
            if isinstance(message.content, str):
                total += len(message.content)
            else:
                total += sum(len(part.text) for part in message.content)
        return total

    def conversation(self) -> Conversation:
        """Return the input of a chat template. Raises ApiError for an invalid conversation."""
        try:
            return checked_conversation([message.model_dump() for message in self.messages])
        except NotRendered as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None


TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenPrompt = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(_CommonRequest):
    """POST /v1/completions. `prompt` is text, token ids, or a list of prompts of one kind."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenPrompt
        | Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: Literal[False] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of an answer; 16 by default, as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise ApiError(400, f"best_of {REMEDIES['best_of']}", param="best_of")

    @property
    def characters(self) -> int:
        """Number of characters to tokenize, or of token ids to check."""
        return sum(map(len, self.prompts()))

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts as a list, even if there is only one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[int(token) for token in prompt]]
        return prompt


RequestModel = TypeVar("RequestModel", bound=_CommonRequest)


def parse_request(kind: type[RequestModel], body: bytes) -> RequestModel:
    """Parse and check the JSON body of a request. Raises ApiError.

    pydantic's parser rejects invalid UTF-8 and deeply nested JSON.
    """
    try:
        request = kind.model_validate_json(body)
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
            JsonSchemaFormat,
            JsonSchema,
            StructuredOutputs,
        )
    ]
    return frozenset(field.alias or name for fields in models for name, field in fields.items())


FIELDS = _fields()
