"""Card reports: what `deskside probe --share` writes about a card, for other owners of the same card. Imports no torch.

A report names no person, host, user, path, serial number or UUID. It has no free text: a string is either one of a few
words or a name or version in characters that cannot make a path or a sentence, and unknown fields are refused. The file
is JSON; docs/card-report.schema.json is its JSON Schema.
"""

import datetime
import hashlib
import json
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deskside.budget.step_spec import Checkpointing, OptimizerName, Precision
from deskside.config.base import first_problem
from deskside.config.model import ModelConfig
from deskside.measurements.schema import short_json
from deskside.utils.errors import UsageError
from deskside.utils.machine import Machine
from deskside.utils.parsing import Unreadable, json_value

KIND = "deskside card report"
SCHEMA = 1
MAX_FILE_BYTES = 2**18
MAX_POINTS, MAX_CHECKS = 64, 128
# Fields of a point that describe the run, without its result.
SETTING = (
    "model", "sequence_length", "tokens", "micro_tokens", "optimizer", "activation_checkpointing", "precision",
    "compile",
)  # fmt: skip

Seconds = Annotated[float, Field(ge=1e-6, le=1e5, description="seconds")]
Flops = Annotated[float, Field(ge=1, le=1e18, description="FLOP/s")]
Bytes = Annotated[int, Field(ge=1, le=2**50, description="bytes")]
Watts = Annotated[float, Field(ge=1, le=5000, description="watts")]
Tokens = Annotated[int, Field(ge=1, le=2**40)]
Version = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+]{0,59}$")]
ModelField = Annotated[str, Field(pattern=r"^[a-z_]{1,60}$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,60}$")]  # a choice, such as "layernorm" or "SSSL"
CheckName = Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,60}$")]
Verdict = Literal[
    "works", "wrong numbers", "unsupported", "not installed", "out of memory", "timeout", "crashed"
]  # fmt: skip


class _Record(BaseModel):
    """An immutable record without type conversion and without unknown fields."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class StepTime(_Record):
    """Step times: the median, and the 10th and 90th percentile."""

    median: Seconds
    p10: Seconds
    p90: Seconds

    @model_validator(mode="after")
    def _check_order(self) -> "StepTime":
        if not self.p10 <= self.median <= self.p90:
            raise ValueError("the median must lie between p10 and p90")
        return self


class ReportedPoint(_Record):
    """A short training run. model: fields of ModelConfig; matmul_flops: of a large BF16 product, just before the run;
    precision: the recipe that ran; launch_seconds: the host's time to launch a step of fused kernels; replays: its
    passes were CUDA graphs."""

    model: Annotated[dict[ModelField, bool | int | float | Word], Field(max_length=80)]
    sequence_length: Annotated[int, Field(ge=2, le=2**24)]
    tokens: Tokens
    micro_tokens: Tokens
    optimizer: OptimizerName
    activation_checkpointing: Checkpointing
    precision: Precision
    compile: Literal["fused", "off", "block", "model"]
    step_seconds: StepTime
    matmul_flops: Flops
    launch_seconds: Seconds | None = None
    replays: bool = False
    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    device_used_bytes: Bytes
    watts: Watts | None = None

    @field_validator("model")
    @classmethod
    def _check_model(cls, fields: dict[str, Any]) -> dict[str, Any]:
        try:
            ModelConfig(**fields)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None
        return fields

    @model_validator(mode="after")
    def _check_batch(self) -> "ReportedPoint":
        if self.micro_tokens % self.sequence_length or self.tokens % self.micro_tokens:
            raise ValueError(
                f"micro_tokens: {self.micro_tokens} must be whole rows of {self.sequence_length} tokens that divide "
                f"the step's {self.tokens}"
            )
        if not self.peak_allocated_bytes <= self.peak_reserved_bytes:
            raise ValueError("peak_allocated_bytes: more than peak_reserved_bytes")
        return self

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(**self.model)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds.median

    def setting(self) -> dict[str, Any]:
        """Return the fields that describe the run, without its result."""
        return {name: getattr(self, name) for name in SETTING}

    def probe_row(self) -> dict[str, Any]:
        """Return this point in the form of a row of the probe store, as far as the planner reads one."""
        fields = self.model_dump()
        spec = ("model", "sequence_length", "tokens", "optimizer", "activation_checkpointing")
        result = {name: value for name, value in fields.items() if name not in spec}
        result |= {"matmul_peak_tflops": self.matmul_flops / 1e12, "device": "cuda"}
        return {
            "kind": "point",
            "status": "ok",
            "key": {"spec": {name: fields[name] for name in spec}},
            "result": result,
        }


class Benchmark(_Record):
    """Speeds of the card itself: a large BF16 product, and a copy within its memory (bytes read plus written)."""

    matmul_flops: Flops
    copy_bytes_per_second: Annotated[float, Field(ge=1, le=1e15, description="bytes/s")]


class CardReport(_Record):
    """Report of one card. card: the driver's name of it; memory_bytes: usable; deskside: version and digest of the
    code of a training step; doctor: the verdict of each check of `deskside doctor --quick`."""

    kind: Literal["deskside card report"]
    version: Literal[1] = Field(alias="schema")
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    card: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()+-]{0,79}$")]
    memory_bytes: Bytes
    power_limit_watts: Watts | None
    driver: Version
    torch: Version
    cuda: Version
    triton: Version | None
    deskside: Version
    benchmark: Benchmark | None
    points: Annotated[tuple[ReportedPoint, ...], Field(min_length=1, max_length=MAX_POINTS, strict=False)]
    doctor: Annotated[dict[CheckName, Verdict], Field(max_length=MAX_CHECKS)]

    @model_validator(mode="after")
    def _check(self) -> "CardReport":
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise ValueError(f"date: {self.date} is not a date") from None
        settings = [json.dumps(point.setting(), sort_keys=True) for point in self.points]
        if len(set(settings)) < len(settings):
            raise ValueError("points: two of them have the same setting")
        return self

    def to_json(self) -> dict[str, Any]:
        content = self.model_dump(mode="json", by_alias=True)
        for point in content["points"]:
            if not point["replays"]:
                del point["replays"]  # reports had no such field until 2026-12, and must keep their digests
        return content

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the report's canonical JSON."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **CardReport.model_json_schema(by_alias=True),
    }


def read_report(path: Path) -> CardReport:
    """Return the report in a file. Raises UsageError, with one line, for anything else that may be there."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path}: is not a file; give one written by deskside probe --share")
        if found.st_size > MAX_FILE_BYTES:
            raise UsageError(
                f"{path}: has {found.st_size:,} bytes; a card report has at most {MAX_FILE_BYTES:,}"
            )
        with path.open("rb") as file:
            content = json_value(file.read(MAX_FILE_BYTES), finite=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Unreadable as error:
        raise UsageError(f"{path}: is not JSON: {error}") from None
    try:
        return parse_report(content)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def parse_report(content: Any) -> CardReport:
    """Return the report in a JSON value. Raises ValueError with one line."""
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError("is not a card report; deskside probe --share writes one")
    schema = content.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        newer = ": a newer deskside wrote it; update yours" if type(schema) is int and schema > SCHEMA else ""
        raise ValueError(f"schema {short_json(schema)} is not one that this deskside reads ({SCHEMA}){newer}")
    try:
        return CardReport.model_validate(content)
    except ValidationError as error:
        raise ValueError(_printable(first_problem(error))) from None


def make_report(
    machine: Machine, rows: Sequence[Mapping[str, Any]], doctor: Mapping[str, str], date: datetime.date
) -> CardReport:
    """Return the report of a machine with a GPU.

    rows: its rows of the probe store, the oldest first. The newest result of a setting counts, since the rows of
    "auto" and of the recipe or micro-batch that it chose have the same one, and the newest MAX_POINTS of these. doctor:
    verdict by check.
    Raises ValueError if there is no result, or if a value is not one that a report can have.
    """
    ok = [row for row in rows if row["status"] == "ok"]
    points: dict[str, dict[str, Any]] = {}
    for row in ok:
        if row["kind"] == "point" and row["result"].get("device", "cuda") == "cuda":
            point = _point(row)
            setting = json.dumps([point[name] for name in SETTING], sort_keys=True)
            points.pop(setting, None)  # the newest goes to the end
            points[setting] = point
    if not points:
        raise ValueError("no training run was measured on this card, so there is nothing to share")
    card = next((row["result"] for row in reversed(ok) if row["kind"] == "card"), None)
    content = {
        "kind": KIND,
        "schema": SCHEMA,
        "date": date.isoformat(),
        **{
            name: getattr(machine, name)
            for name in ("card", "memory_bytes", "driver", "torch", "cuda", "triton")
        },
        "power_limit_watts": machine.power_limit_watts and float(machine.power_limit_watts),
        "deskside": machine.code,
        "benchmark": card
        and {"matmul_flops": card["matmul_peak"], "copy_bytes_per_second": card["copy_bandwidth"]},
        "points": list(points.values())[-MAX_POINTS:],
        "doctor": dict(doctor),
    }
    return parse_report(content)


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the probe store as a point of a report."""
    spec, result = row["key"]["spec"], row["result"]
    of_spec = ("model", "sequence_length", "tokens", "optimizer", "activation_checkpointing")
    of_result = (
        "micro_tokens", "precision", "compile", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes",
    )  # fmt: skip
    return {
        **{name: spec[name] for name in of_spec},
        **{name: result[name] for name in of_result},
        "step_seconds": {name: result["step_seconds"][name] for name in ("median", "p10", "p90")},
        "matmul_flops": result["matmul_peak_tflops"] * 1e12,
        "launch_seconds": result.get("launch_seconds"),
        "replays": result.get("replays", False),
        "watts": result.get("watts"),
    }


def _printable(text: str) -> str:
    """Return a text in ASCII without control characters, at most 300 characters long."""
    shown = text.encode("ascii", "backslashreplace").decode()
    return re.sub(r"[\x00-\x1f\x7f]", "?", shown)[:300]
