"""Fields of requests for tools: the functions on offer, whether the answer must call one, and calls in messages."""

from typing import Annotated, Any, Literal

from pydantic import Field

from deskside.serve.strict_model import StrictModel
from deskside.utils.errors import UsageError

MAX_TOOLS = 1024
MAX_CALLS = 1024  # calls in one message
MAX_CALL_ID = 256  # characters
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(StrictModel):
    """A function. parameters: the JSON schema of its arguments; no parameters without it.

    strict: whether also a call that the model decides to make follows the schema. A required one always does.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A function that the answer may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(StrictModel):
    """The name of a function."""

    name: FunctionName


class NamedToolChoice(StrictModel):
    """The function that the answer must call."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class CalledFunction(StrictModel):
    """The function of a call. arguments: a JSON object as text."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: str


class MessageToolCall(StrictModel):
    """A call in a message of the assistant."""

    id: Annotated[str, Field(max_length=MAX_CALL_ID)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0)] | None = None  # of the call in a stream; ignored


class ToolFields(StrictModel):
    """Tools of a request. tool_choice: auto without it."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_functions(self) -> list[FunctionDefinition]:
        """The functions that the prompt offers."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The offered functions as the chat template gets them: without fields that only concern this server."""
        unset = {"strict"}
        return [
            {"type": "function", "function": function.model_dump(exclude=unset, exclude_none=True)}
            for function in self.offered_functions
        ]

    @property
    def callable_functions(self) -> list[FunctionDefinition]:
        """The functions that the answer may call: all that are offered, or the chosen one."""
        if not isinstance(self.tool_choice, NamedToolChoice):
            return self.offered_functions
        chosen = self.tool_choice.function.name
        return [function for function in self.offered_functions if function.name == chosen]

    @property
    def requires_call(self) -> bool:
        """True if the answer must call a function."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    @property
    def constrains_calls(self) -> bool:
        """True if calls have to follow a grammar."""
        strict = any(function.strict for function in self.callable_functions)
        return self.requires_call or strict or self.parallel_tool_calls is False

    def check_tools(self) -> None:
        """Raise UsageError for tools with the same name, and for a choice that no tool can fulfill."""
        names = [function.name for function in self.offered_functions]
        if len(names) != len(set(names)):
            raise UsageError("tools: two functions have the same name; rename one")
        if isinstance(self.tool_choice, NamedToolChoice) and not self.callable_functions:
            raise UsageError(f"tool_choice: there is no function {self.tool_choice.function.name} in tools")
        if self.requires_call and not names:
            raise UsageError("tool_choice: an answer can only call a function if there are tools; give some")
