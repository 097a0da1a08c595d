"""The explicit lists of fields of OpenAI's API that have no effect here, and of those that are refused.

Fields that are in no list and in no request are refused as unknown. docs/serve.md has a table of all fields, which a
test compares with these lists and with OpenAI's client.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from deskside.serve.strict_model import StrictModel

MAX_NAME_CHARACTERS = 256  # also of other short texts
ShortText = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
EmptyList = Annotated[list[Any], Field(max_length=0)] | None
Metadata = Annotated[dict[ShortText, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class StreamOptions(StrictModel):
    """Options of a stream.

    `include_obfuscation` has no effect: it would pad the chunks, so that their encrypted lengths say less.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class IneffectiveFields(StrictModel):
    """Fields that are accepted and have no effect. Each description says why."""

    user: ShortText | None = Field(None, description="identifies a user of the client; no records are kept")
    safety_identifier: ShortText | None = Field(
        None, description="identifies a user of the client; no records are kept"
    )
    metadata: Metadata | None = Field(None, description="labels of stored answers; nothing is stored")
    store: bool | None = Field(None, description="nothing is stored")
    service_tier: ShortText | None = Field(None, description="there is one tier")
    prompt_cache_key: ShortText | None = Field(None, description="every prompt uses the prefix cache")
    prompt_cache_retention: ShortText | None = Field(
        None, description="prefixes are kept until their memory is needed"
    )
    prompt_cache_options: dict[ShortText, Any] | None = Field(
        None, description="every prompt uses the prefix cache"
    )


class ChatIneffectiveFields(IneffectiveFields):
    """More such fields, of chat completions."""

    prediction: dict[ShortText, Any] | None = Field(
        None, description="a guess of the answer, which may only make it faster"
    )
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = Field(
        None, description="answers are text; audio is refused"
    )
    verbosity: Literal["medium"] | None = Field(None, description="medium is the default; others are refused")


class ChatRefusedFields(StrictModel):
    """Fields that are accepted only with a value that asks for nothing."""

    audio: None = None
    functions: EmptyList = None
    function_call: Literal["none", "auto"] | None = None
    moderation: None = None
    web_search_options: None = None


# Continuations of error messages for refused fields and values.
REMEDIES = {
    "access_programs": "are not available here; leave them out",
    "audio": "is not available here: answers are text",
    "background": "is not available here; stream the response",
    "context_management": "is not available here; shorten the input",
    "conversation": "is not available here: nothing is stored; send all messages as input",
    "functions": "are not available here; use tools",
    "function_call": "is not available here; use tool_choice",
    "image": "is not available here: answers are text",
    "max_tool_calls": "is not available here: the client runs the tools",
    "moderation": "is not available here; leave it out",
    "modalities": "must be text, the only kind of answer",
    "previous_response_id": "is not available here: nothing is stored; send earlier messages as input",
    "suffix": "is not available here: the model cannot fill in a gap",
    "truncation": "must be disabled; shorten the input",
    "verbosity": "must be medium; models have no such setting here, so ask for it in a message",
    "web_search_options": "are not available here; give tools",
}
