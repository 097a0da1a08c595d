"""Fields of requests that constrain the text of an answer: OpenAI's response_format, and vLLM's structured_outputs.

vLLM's earlier names (guided_json and so on) mean the same.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from deskside.engine.grammar import MAX_CHARACTERS, GrammarKind
from deskside.serve.strict_model import StrictModel
from deskside.utils.errors import UsageError

MAX_CHOICE_CHARACTERS = 4096
ANY_OBJECT = '{"type": "object"}'

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARACTERS)]],
    Field(min_length=1, max_length=4096),
]
Schema = dict[str, Any]


class GrammarSource(NamedTuple):
    """A grammar as in `Grammars.compile`, and the field of the request that it comes from."""

    field: str
    kind: GrammarKind
    text: str


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"] = "text"


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """A JSON schema. It is always followed, also if `strict` is false. Name and description have no effect."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(StrictModel):
    """The form of the answer, by one of these. json: a schema, or its text. grammar: EBNF as in llama.cpp, or Lark."""

    json_: Annotated[Schema | GrammarText | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class StructuredFields(StrictModel):
    """The fields of a request that constrain the text of its answer. At most one may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    def text_grammar(self) -> GrammarSource | None:
        """Return the grammar of the answer's text, or None. Raises UsageError if there is more than one."""
        sources = [source for source in self._grammars() if source is not None]
        if len(sources) > 1:
            raise UsageError(
                f"{sources[1].field}: the answer is already constrained by {sources[0].field}; give only one"
            )
        return sources[0] if sources else None

    def _grammars(self) -> Iterator[GrammarSource | None]:
        asked = self.response_format
        if isinstance(asked, JsonObjectFormat):
            yield GrammarSource("response_format", "json", ANY_OBJECT)
        elif isinstance(asked, JsonSchemaFormat):
            yield _source("response_format", "json", asked.json_schema.schema_ or {})
        outputs = self.structured_outputs
        if outputs is not None:
            if outputs.json_object:
                yield GrammarSource("structured_outputs", "json", ANY_OBJECT)
            yield _source("structured_outputs", "json", outputs.json_)
            yield _source("structured_outputs", "regex", outputs.regex)
            yield _source("structured_outputs", "choice", outputs.choice)
            yield _source("structured_outputs", "grammar", outputs.grammar)
        yield _source("guided_json", "json", self.guided_json)
        yield _source("guided_regex", "regex", self.guided_regex)
        yield _source("guided_choice", "choice", self.guided_choice)
        yield _source("guided_grammar", "grammar", self.guided_grammar)


def _source(field: str, kind: GrammarKind, value: Any) -> GrammarSource | None:
    if value is None:
        return None
    return GrammarSource(field, kind, value if isinstance(value, str) else json.dumps(value))
