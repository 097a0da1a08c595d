"""Schema of the rows of the probe store. Imports no torch.

The store is text that people copy, merge and edit, and a time of zero in it would reach the planner as a number like
any other. So every field that is read anywhere has a type and bounds, which are far outside those of any machine. Other
fields may hold anything.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deskside.budget.step_spec import Checkpointing, OptimizerName, Precision
from deskside.config.model import ModelConfig

_MAX_SHOWN = 40  # characters of a wrong value
Seconds = Annotated[float, Field(ge=1e-9, le=1e7)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
Tokens = Annotated[int, Field(ge=1, le=2**50)]
Device = Annotated[str, Field(pattern="^(cuda|cpu)$")]


class _Record(BaseModel):
    """A model that converts nothing: text is not a number, nor is true."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())


class MachineKey(_Record):
    card: str
    memory_gib: Annotated[int, Field(ge=0, le=2**20)]


class PointSpec(_Record):
    sequence_length: Annotated[int, Field(ge=1, le=2**27)]
    tokens: Tokens
    optimizer: OptimizerName = "muon"
    activation_checkpointing: Checkpointing = "none"
    model: Any


class StepSeconds(_Record):
    median: Seconds
    p10: Seconds
    p90: Seconds


class CardMeasurement(_Record):
    """Result of the GPU benchmark."""

    matmul_peak: Annotated[float, Field(ge=1e3, le=1e20)]
    copy_bandwidth: Annotated[float, Field(ge=1e3, le=1e18)]
    device: Device = "cuda"


class PointMeasurement(_Record):
    """Result of a training measurement."""

    tokens_per_second: Annotated[float, Field(ge=1e-6, le=1e12)]
    step_seconds: StepSeconds
    mfu: Annotated[float, Field(ge=0, le=1e3)]
    matmul_peak_tflops: Annotated[float, Field(ge=1e-6, le=1e8)]
    peak_allocated_bytes: Annotated[int, Field(ge=1, le=2**60)]
    peak_reserved_bytes: Bytes | None
    device_used_bytes: Bytes | None
    micro_tokens: Tokens
    accumulation: Tokens
    watts: Annotated[float, Field(ge=0, le=1e5)] | None
    finite: bool = True
    setup_seconds: Annotated[float, Field(ge=0, le=1e7)] = 0.0
    precision: Precision
    compile: str = ""
    device: Device = "cuda"


class RowOutcome(_Record):
    """The fields of every row, also of one whose measurement failed."""

    error: str
    seconds: Annotated[float, Field(ge=0, le=1e9)]
    when: str


def damage(row: Mapping[str, Any]) -> str:
    """Return what is wrong with a row that has all its top-level fields, in one line; '' if nothing is."""
    key, spec = row["key"], row["key"]["spec"]
    wrong = (
        _not_plain("key.machine", key["machine"])
        or _invalid(RowOutcome, row, "")
        or _invalid(MachineKey, key["machine"], "key.machine")
    )
    if wrong or row["status"] != "ok":
        return wrong
    if row["kind"] == "card":
        if spec:
            return f"field key.spec: a card's is empty, not {shown(spec)}"
        return _invalid(CardMeasurement, row["result"], "result")
    return (
        _invalid(PointSpec, spec, "key.spec")
        or _invalid(PointMeasurement, row["result"], "result")
        or _contradiction(spec, row["result"])
        or _not_plain("key.spec.model", spec["model"])
        or _invalid(ModelConfig, spec["model"], "key.spec.model")
    )


def shown(value: Any) -> str:
    """Return a value as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _invalid(model: type[BaseModel], value: Any, name: str) -> str:
    """Return the first error of a value in one line; '' if it is valid."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join([part for part in (name, *map(str, first["loc"])) if part])
        if first["type"] == "missing":
            return f"field {field} is missing"
        message = first["msg"].removeprefix("Value error, ")
        return f"field {field}: {message[0].lower()}{message[1:]}, not {shown(first['input'])}"
    return ""


def _not_plain(name: str, value: Any) -> str:
    """Return an error unless the value is a dict of numbers, strings, booleans and null."""
    if not isinstance(value, dict):
        return f"field {name}: must hold fields, not {shown(value)}"
    for part, item in value.items():
        if isinstance(item, dict | list):
            return f"field {name}.{part}: must be one value, not {shown(item)}"
    return ""


def _contradiction(spec: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return an error for fields that are valid alone but not together."""
    length, tokens, micro = spec["sequence_length"], spec["tokens"], result["micro_tokens"]
    if micro % length or tokens % micro:
        return (
            f"field result.micro_tokens: must be a multiple of the sequence length {length} that divides the step's "
            f"{tokens} tokens, not {micro}"
        )
    steps = result["step_seconds"]
    if steps["p10"] > steps["p90"]:
        return f"field result.step_seconds.p10: {steps['p10']:g} is above p90, {steps['p90']:g}"
    return ""
