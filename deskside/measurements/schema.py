"""Schema of the rows of the probe store. Imports no torch.

People copy, merge and edit the store's text files, and the planner would compute with any number in them, such as a
step time of zero. So every field that deskside reads has a type, and every number bounds, which are far wider than the
values of any machine. Other fields of a result may have any value.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deskside.budget.step_spec import Checkpointing, OptimizerName, Precision
from deskside.config.base import plain_message
from deskside.config.model import ModelConfig

_MAX_SHOWN = 40  # characters of an invalid value in an error message
Seconds = Annotated[float, Field(ge=1e-9, le=1e7)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
Tokens = Annotated[int, Field(ge=1, le=2**50)]
Device = Annotated[str, Field(pattern="^(cuda|cpu)$")]


class _Record(BaseModel):
    """A model without type conversion: the text "1" and true are not accepted as numbers."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())


class MachineKey(_Record):
    """The part of `Machine.key()` that is read back; the rest is only compared."""

    card: str
    memory_gib: Annotated[int, Field(ge=0, le=2**20)]


class PointSpec(_Record):
    """The setting of a training measurement."""

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
    """Result of the device benchmark."""

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
    """The fields of every row, including rows of failed measurements."""

    error: str
    seconds: Annotated[float, Field(ge=0, le=1e9)]
    when: str


def row_error(row: Mapping[str, Any]) -> str:
    """Return the first error of a row that has all its top-level fields, in one line; '' if the row is valid."""
    key, spec = row["key"], row["key"]["spec"]
    error = (
        _structure_error("key.machine", key["machine"])
        or _model_error(RowOutcome, row, "")
        or _model_error(MachineKey, key["machine"], "key.machine")
    )
    if error or row["status"] != "ok":
        return error
    if row["kind"] == "card":
        if spec:
            return f"field key.spec: must be empty in a row of kind card, not {short_json(spec)}"
        return _model_error(CardMeasurement, row["result"], "result")
    return (
        _model_error(PointSpec, spec, "key.spec")
        or _model_error(PointMeasurement, row["result"], "result")
        or _consistency_error(spec, row["result"])
        or _structure_error("key.spec.model", spec["model"])
        or _model_error(ModelConfig, spec["model"], "key.spec.model")
    )


def short_json(value: Any) -> str:
    """Return a value as JSON, truncated for an error message."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _model_error(model: type[BaseModel], value: Any, name: str) -> str:
    """Return the first validation error of a value in one line; '' if it is valid. name: its place in the row."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join([part for part in (name, *map(str, first["loc"])) if part])
        if first["type"] == "missing":
            return f"field {field} is missing"
        return f"field {field}: {plain_message(first)}, not {short_json(first['input'])}"
    return ""


def _structure_error(name: str, value: Any) -> str:
    """Return an error unless the value is a dict of numbers, strings, booleans and null; else ''."""
    if not isinstance(value, dict):
        return f"field {name}: must be an object, not {short_json(value)}"
    for part, item in value.items():
        if isinstance(item, dict | list):
            return f"field {name}.{part}: must be one value, not {short_json(item)}"
    return ""


def _consistency_error(spec: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return an error if fields that are valid alone contradict each other; else ''."""
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
