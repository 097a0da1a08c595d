"""What a client may ask for, in the form of OpenAI's API, and how a refusal looks.

Fields and meanings are those of OpenAI's reference (platform.openai.com/docs/api-reference). `top_k`, `min_p` and
`repetition_penalty` are additions that vLLM and others use under the same names. A field that would change the answer
and that this server cannot obey is refused, never ignored; so is a field that nobody knows. Types are strict: "1" is no
number.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deskside.data.renderer import NotRendered, checked_messages
from deskside.engine.sampling import Sampling
from deskside.errors import UsageError

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256


class Refusal(Exception):
    """A request that gets no answer: the HTTP status, and what OpenAI's clients read of an error."""

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
        """The JSON of the answer."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class _Format(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"] = "text"


class _Common(BaseModel):
    """Fields of both kinds of request."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    user: str | None = None  # says who asks; changes nothing
    metadata: dict[str, str] | None = None
    # Taken at the value that changes nothing:
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

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
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """How tokens are drawn. OpenAI's defaults: temperature 1, every token."""
        top_p = 1.0 if self.top_p is None else self.top_p
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=1 if top_p == 0 else (self.top_k if self.top_k and self.top_k > 0 else None),
            top_p=top_p if 0 < top_p < 1 else None,
            min_p=self.min_p or None,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )

    def check(self) -> None:
        """What types alone cannot say. Raises Refusal."""
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                raise Refusal(400, f"{name} is not available here; use repetition_penalty", param=name)
        if self.logit_bias:
            raise Refusal(400, "logit_bias is not available here; leave it out", param="logit_bias")
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options needs stream: true", param="stream_options")
        if len(self.stops) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_CHARACTERS for s in self.stops):
            raise Refusal(
                400,
                f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
                param="stop",
            )
        try:
            self.sampling()
        except UsageError as error:
            raise Refusal(400, str(error), param=str(error).partition(":")[0]) from None


class ChatRequest(_Common):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: _Format | None = None
    store: bool | None = None  # nothing is stored, whatever it says
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def limit(self) -> int | None:
        """Tokens of an answer, where the client says."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.tools:
            raise Refusal(400, "tools are not available here; leave them out", param="tools")
        if self.top_logprobs:
            raise Refusal(400, "top_logprobs: only the chosen token's logprob is given", param="top_logprobs")

    def turns(self) -> list[dict[str, str]]:
        """Messages as a template wants them. Raises Refusal for what is no conversation."""
        try:
            return checked_messages(self.messages)
        except NotRendered as error:
            raise Refusal(400, f"messages: {error}", param="messages") from None


class CompletionRequest(_Common):
    """POST /v1/completions. A prompt is text or tokens; a list of either asks for several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def limit(self) -> int | None:
        """Tokens of an answer: OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        super().check()
        if self.logprobs:
            raise Refusal(
                400, "logprobs: only 0 is available, which gives the chosen token's own", param="logprobs"
            )
        if self.best_of is not None and self.best_of != self.count:
            raise Refusal(400, "best_of is not available here; use n", param="best_of")
        if self.echo:
            raise Refusal(400, "echo is not available here; leave it out", param="echo")
        if self.suffix:
            raise Refusal(400, "suffix is not available here; leave it out", param="suffix")

    def prompts(self) -> Sequence[str | list[int]]:
        """Every prompt. Raises Refusal where there is none."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise Refusal(400, "prompt: is an empty list", param="prompt")
        if isinstance(given[0], int):
            return [[int(token) for token in given]]
        return given


Read = TypeVar("Read", bound=_Common)


def read(kind: type[Read], body: bytes) -> Read:
    """A request out of its JSON. Raises Refusal.

    pydantic's parser wants valid UTF-8 and bounds how deep JSON may be nested.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refused(error) from None
    request.check()
    return request


def _refused(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"[:300])
    param = str(first["loc"][0]) if first["loc"] else None
    shown = None if param is None else param[:60]
    if first["type"] == "extra_forbidden":
        name = ".".join(str(part) for part in first["loc"])[:80]
        return Refusal(400, f"{name}: there is no such field here; leave it out", param=shown)
    where = "the body" if shown is None else shown
    what = first["msg"].removeprefix("Input ")[:200]
    return Refusal(400, f"{where}: {what[:1].lower()}{what[1:]}", param=shown)
