"""Requests of the OpenAI API and their error responses.

Fields and meanings are those of OpenAI's reference (platform.openai.com/docs/api-reference). `top_k`, `min_p` and
`repetition_penalty` are extensions with the names that vLLM and others use. A field that would change the completion
but is not supported is rejected with an error, never ignored. Unknown fields are rejected too. Types are strict: the
string "1" is not accepted as a number.

Every number, string and list has an upper bound, so nothing unbounded reaches the engine. The bounds are part of the
types, and thus of the OpenAPI document (openapi.py).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deskside.data.chat.renderer import NotRendered, checked_messages
from deskside.engine.sampling import (
    MAX_PENALTY,
    MAX_TOP_K,
    MIN_PENALTY,
    MIN_TEMPERATURE,
    Sampling,
)

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
MAX_CHOICES = 4096
MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_MESSAGES, MAX_PARTS = 8192, 4096
MAX_PROMPTS = 4096
MAX_NAME = 256  # characters of names, and of other short texts
# Error messages for fields that are accepted only with a value that does not change the completion.
REMEDIES = {
    "frequency_penalty": "is not available here; use repetition_penalty",
    "presence_penalty": "is not available here; use repetition_penalty",
    "logit_bias": "is not available here; leave it out",
    "tools": "are not available here; leave them out",
    "tool_choice": "takes none and auto, because tools are not available here",
    "top_logprobs": "takes only 0: only the chosen token's logprob is given",
    "echo": "is not available here; leave it out",
    "suffix": "is not available here; leave it out",
    "best_of": "is not available here; use n",
}


class ApiError(Exception):
    """An error response: the HTTP status, and the fields that OpenAI's clients read."""

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
        """The JSON of the response."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
ShortText = Annotated[str, Field(max_length=MAX_NAME)]
Nothing = Annotated[list[Any], Field(max_length=0)] | None
Zero = Annotated[float, Field(ge=0, le=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(_Strict):
    """The only supported response format."""

    type: Literal["text"] = "text"


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"] = "text"
    text: str


class RequestMessage(_Strict):
    """One message of a conversation.

    Fields that accept only null or an empty list occur in assistant messages that OpenAI's clients send back unchanged.
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
    tool_calls: Nothing = None
    annotations: Nothing = None


class _Common(_Strict):
    """Fields of chat and text completion requests."""

    model: ShortText | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY)] | None = None
    max_tokens: Tokens | None = None
    user: ShortText | None = None  # identifies the client's user; ignored
    metadata: (
        Annotated[dict[ShortText, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None
    ) = None  # ignored
    # Accepted only with the value that has no effect:
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def count(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_in_stream(self) -> bool:
        """True if a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """Return the sampling parameters. OpenAI's default is temperature 1 over all tokens."""
        top_p = 1.0 if self.top_p is None else self.top_p
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,  # as good as greedy
            top_k=1 if top_p == 0 else (self.top_k if self.top_k and self.top_k > 0 else None),
            top_p=top_p if 0 < top_p < 1 else None,
            min_p=self.min_p or None,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )

    def check(self) -> None:
        """Check what types alone cannot express. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")


class ChatRequest(_Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    response_format: TextFormat | None = None
    store: bool | None = None  # ignored: nothing is stored
    tools: Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer, if the client gives it."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def characters(self) -> int:
        """Characters of text to tokenize."""
        return sum(
            len(message.content)
            if isinstance(message.content, str)
            else sum(len(part.text) for part in message.content)
            for message in self.messages
        ) + 16 * len(self.messages)

    def turns(self) -> list[dict[str, Any]]:
        """Return the messages for a chat template. Raises ApiError for an invalid conversation."""
        try:
            return checked_messages([message.model_dump() for message in self.messages])
        except NotRendered as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None


Token = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
TokenPrompt = Annotated[list[Token], Field(min_length=1)]


class CompletionRequest(_Common):
    """POST /v1/completions. A prompt is text or tokens; a list of either asks for several."""

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
    def limit(self) -> int | None:
        """Maximum tokens of an answer; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.count:
            raise ApiError(400, f"best_of {REMEDIES['best_of']}", param="best_of")

    @property
    def characters(self) -> int:
        """Characters of text to tokenize, and tokens to check."""
        return sum(map(len, self.prompts()))

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, also if there is only one."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [[int(token) for token in given]]
        return given


Read = TypeVar("Read", bound=_Common)


def read(kind: type[Read], body: bytes) -> Read:
    """Parse a request from JSON. Raises ApiError.

    pydantic's parser rejects invalid UTF-8 and deeply nested JSON.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _api_error(error) from None
    request.check()
    return request


def _api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"[:300])
    param = str(first["loc"][0]) if first["loc"] else None
    shown = None if param is None else param[:60]
    # pydantic adds the tried branch of a union to the path. Keep only the fields and indices of the request.
    places = [str(part) for part in first["loc"] if isinstance(part, int) or part in FIELDS or part == param]
    where = ".".join(places)[:80] or "the body"
    if first["type"] == "extra_forbidden":
        name = ".".join([*places, str(first["loc"][-1])] if len(first["loc"]) > 1 else places)[:80]
        return ApiError(400, f"{name}: there is no such field here; leave it out", param=shown)
    if param in REMEDIES:
        return ApiError(400, f"{param} {REMEDIES[param]}", param=shown)
    what = first["msg"].removeprefix("Input ")[:200]
    return ApiError(400, f"{where}: {what[:1].lower()}{what[1:]}", param=shown)


def _fields() -> frozenset[str]:
    """Return the names of all fields of requests and messages."""
    models: list[Mapping[str, Any]] = [
        kind.model_fields
        for kind in (ChatRequest, CompletionRequest, RequestMessage, TextPart, StreamOptions)
    ]
    return frozenset(name for fields in models for name in fields)


FIELDS = _fields()
