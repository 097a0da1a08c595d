"""The space of a search: which configuration keys it varies, and in which range.

A range follows from the type of the field and the value in the default configuration: one of a few rules for numbers
(`RULES`), every choice of a Literal, both values of a bool. `--over KEY=LOW:HIGH` replaces it. Settings are stored so
that they mean the same at another size of the model and another length (`proxy.py`): learning rates and decays at the
reference point of `optim.scale`, tokens per step in doublings of the default, the size as a number of layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from deskside.config.base import plain_message
from deskside.config.duration import Duration
from deskside.config.merge import KeyPath, config_fields
from deskside.config.no_effect import has_effect
from deskside.config.run import RunConfig
from deskside.study.search.proxy import resized
from deskside.study.spec.spec import suggestion
from deskside.utils.errors import UsageError

DEPTH = "model.depth"  # not a key: the number of layers, to which the width is proportional
Kind = Literal["log", "linear", "one minus", "doublings", "layers", "integer", "choice"]

# Key -> (kind, low, high). The ends are factors of the default for log, layers and integer, doublings of it for
# doublings, and values for linear and one minus, which is logarithmic in 1 - value.
RULES: dict[str, tuple[Kind, float, float]] = {
    "optim.lr": ("log", 1 / 8, 8),
    "optim.embedding_lr": ("log", 1 / 8, 8),
    "optim.head_lr": ("log", 1 / 8, 8),
    "optim.scalar_lr": ("log", 1 / 8, 8),
    "optim.weight_decay": ("log", 1 / 8, 8),
    "optim.momentum": ("one minus", 0.8, 0.99),
    "schedule.warmup": ("linear", 0.0, 0.1),
    "schedule.decay": ("linear", 0.1, 0.9),
    "schedule.final_lr_fraction": ("linear", 0.0, 0.3),
    "batch.tokens": ("doublings", -3, 3),
    DEPTH: ("layers", 0.5, 2),
    "model.num_hidden_layers": ("integer", 0.5, 2),
}
DEFAULT_KEYS = (
    "optim.lr",
    "optim.embedding_lr",
    "optim.weight_decay",
    "batch.tokens",
    DEPTH,
    "schedule.decay",
)
# Every number, choice and switch of these parts can be searched, except for what follows.
PARTS = ("optim", "schedule", "model", "batch")
# Keys that change how a step is computed or what a run is, not what a token teaches; and sizes that must fit others.
EXCLUDED = {
    *(
        f"optim.{key}"
        for key in ("name", "scale", "weights", "states", "offload", "gradients", "master_weights")
    ),
    *(f"schedule.{key}" for key in ("name", "clock", "length")),
    *("model.model_type", "model.vocab_size", "model.max_position_embeddings", "model.position_embedding"),
    *("model.fused_qkv", "model.fused_gate_up", "batch.sequence_length", "batch.micro_tokens"),
}


@dataclass(frozen=True)
class Dimension:
    """One varied key.

    Attributes:
        default: The value in the default configuration of the trials.
        low, high: Ends of the range, included: values; doublings of the default for kind "doublings".
        choices: Values of kind "choice".
    """

    key: str
    kind: Kind
    default: Any
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The name of the parameter in Optuna's study."""
        if self.kind == "doublings":
            return f"log2({self.key} / {self.default})"
        return f"1 - {self.key}" if self.kind == "one minus" else self.key

    @property
    def default_parameter(self) -> Any:
        """The parameter of the default configuration."""
        if self.kind == "doublings":
            return 0
        return 1 - self.default if self.kind == "one minus" else self.default

    def suggest(self, trial: Any) -> Any:
        """Return the parameter that Optuna suggests for a trial. trial: an `optuna.trial.Trial`."""
        if self.kind == "choice":
            return trial.suggest_categorical(self.name, self.choices)
        if self.kind in ("doublings", "layers", "integer"):
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.kind == "layers")
        return trial.suggest_float(self.name, *self._parameter_ends, log=self.kind != "linear")

    def position(self, parameter: Any) -> float:
        """Return where a parameter is in the range on its scale: 0 at the low end of the parameter, 1 at the high end.

        Choices are spread evenly, in their order.
        """
        if self.kind == "choice":
            return self.choices.index(parameter) / max(1, len(self.choices) - 1)
        low, high = self._parameter_ends
        if self.kind in ("log", "one minus", "layers"):
            low, high, parameter = math.log(low), math.log(high), math.log(parameter)
        return float((parameter - low) / (high - low))

    @property
    def _parameter_ends(self) -> tuple[float, float]:
        return (1 - self.high, 1 - self.low) if self.kind == "one minus" else (self.low, self.high)

    def layer(self, parameter: Any, base: RunConfig) -> dict[str, Any]:
        """Return the configuration layer of a parameter. base: the default of the trials, or of the target."""
        if self.kind == "layers":
            layers = round(parameter * base.model.num_hidden_layers / self.default)
            return {"model": resized(base.model, layers)}
        value = parameter
        if self.kind == "doublings":
            value = int(value_of(base, self.key) * 2.0**parameter)
        elif self.kind == "one minus":
            value = 1 - parameter
        if isinstance(value, float):
            # Reports and presets have the values that are run. The first trial has exactly the default.
            value = self.default if parameter == self.default_parameter else float(f"{value:.4g}")
        *parts, leaf = self.key.split(".")
        layer: dict[str, Any] = {leaf: value}
        for part in reversed(parts):
            layer = {part: layer}
        return layer

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the range as `--over` takes them."""
        if self.kind == "doublings":
            return self.default * 2.0**self.low, self.default * 2.0**self.high
        return self.low, self.high

    @property
    def range_text(self) -> str:
        """The range as text."""
        if self.kind == "choice":
            return ", ".join(str(choice).lower() for choice in self.choices)
        low, high = self.ends
        how = {"log": ", logarithmic", "one minus": ", logarithmic in 1 - value", "doublings": ", doublings"}
        how["layers"] = " layers, width in proportion"
        return f"{low:g} to {high:g}{how.get(self.kind, '')}"


def dimensions(over: str | None, config: RunConfig) -> list[Dimension]:
    """Return the dimensions of `--over` (None: `DEFAULT_KEYS`, as far as they have an effect).

    over: "KEY" or "KEY=LOW:HIGH", separated by commas. Raises UsageError for a key that cannot be searched.
    """
    if over is None:
        keys = [key for key in DEFAULT_KEYS if key == DEPTH or value_of(config, key)]
        return [dimension(key, None, config) for key in keys if has_effect(key, config)]
    result: list[Dimension] = []
    for text in over.split(","):
        key, sign, ends = text.strip().partition("=")
        key = key.strip().replace("-", "_")
        if any(key == other.key for other in result):
            raise UsageError(f"--over {key}: is given twice; give it once")
        result.append(dimension(key, _ends(key, ends) if sign else None, config))
    sizes = {DEPTH, "model.num_hidden_layers"} & {one.key for one in result}
    if len(sizes) == 2:
        raise UsageError(
            f"--over {DEPTH},model.num_hidden_layers: both set the number of layers; give one of them"
        )
    return result


def dimension(key: str, ends: tuple[float, float] | None, config: RunConfig) -> Dimension:
    """Return the dimension of a key. ends: its range, None for the default one. Raises UsageError."""
    fields = searchable(config)
    if key not in fields:
        known = list(fields)
        raise UsageError(
            f"--over {key}: cannot be searched here; {suggestion(key, known)}; all: {', '.join(known)}"
        )
    annotation = fields[key]
    default = config.model.num_hidden_layers if key == DEPTH else value_of(config, key)
    if annotation is bool or get_origin(annotation) is Literal:
        if ends is not None:
            raise UsageError(
                f"--over {key}={ends[0]:g}:{ends[1]:g}: is a choice without a range; write --over {key}"
            )
        return Dimension(
            key, "choice", default, choices=(False, True) if annotation is bool else get_args(annotation)
        )
    kind, low, high = RULES.get(key, (None, 0.0, 0.0))
    if ends is None:
        if kind is None or (kind == "log" and not default):
            raise UsageError(f"--over {key}: has no range of its own here; give one: --over {key}=LOW:HIGH")
        if kind in ("log", "layers", "integer"):
            low, high = low * default, high * default
        if kind in ("layers", "integer"):
            low, high = max(1, math.floor(low)), math.ceil(high)
        elif kind == "doublings":
            low = max(low, -math.floor(math.log2(default / config.batch.sequence_length)))
        else:
            low, high = min(low, default), max(high, default)
        return Dimension(key, kind, default, low, high)
    if problem := _problem_of_ends(
        key, kind or ("integer" if isinstance(default, int) else None), ends, config
    ):
        raise UsageError(f"--over {key}={ends[0]:g}:{ends[1]:g}: {problem}")
    low, high = ends
    if kind == "doublings":
        low, high = math.log2(low / default), math.log2(high / default)
        if not low.is_integer() or not high.is_integer():
            raise UsageError(f"--over {key}: the ends must be {default} times or divided by 2, 4, 8, ...")
    elif isinstance(default, int) or default is None:
        kind = kind or "integer"
    elif kind != "one minus":
        kind = "log" if low > 0 and high / low >= 5 else "linear"
    start = 0 if kind == "doublings" else default
    if start is None or not low <= start <= high:
        raise UsageError(f"--over {key}={ends[0]:g}:{ends[1]:g}: does not contain the default, {default}; widen it, "
                         f"or set another default with --{key}")  # fmt: skip
    return Dimension(key, kind, default, low, high)


def _problem_of_ends(key: str, kind: Kind | None, ends: tuple[float, float], config: RunConfig) -> str:
    """Return why a given range is impossible, or "". kind: None for a number that need not be whole."""
    if kind == "doublings" and ends[0] < config.batch.sequence_length:
        return f"a step has at least one row of {config.batch.sequence_length} tokens"
    if kind == "layers" and ends[0] < 1:
        return "a model has at least one layer"
    if kind == "one minus" and ends[1] >= 1:
        return "it must be below 1"
    if kind in ("doublings", "layers", "integer"):
        if not all(end.is_integer() for end in ends):
            return "the ends must be whole numbers"
        ends = int(ends[0]), int(ends[1])
    if key != DEPTH:
        field = dict(config_fields())[tuple(key.split("."))]
        annotated: Any = Annotated[(field.annotation, *field.metadata)]
        adapter = TypeAdapter(annotated)
        for end in ends:
            try:
                adapter.validate_python(end)
            except ValidationError as error:
                return plain_message(error.errors(include_url=False)[0])
    return ""


def searchable(config: RunConfig) -> dict[str, Any]:
    """Return key -> type of everything that can be searched from this configuration."""
    found: dict[str, Any] = {DEPTH: int}
    for path, field in config_fields():
        key, annotation = ".".join(path), field.annotation
        if path[0] not in PARTS or key in EXCLUDED or not _has(config, path):
            continue
        if annotation in (bool, int, float) or get_origin(annotation) is Literal or key in RULES:
            number = annotation not in (bool,) and get_origin(annotation) is not Literal
            if not number or isinstance(value_of(config, key), (int, float)):
                found[key] = annotation
    return found


def value_of(config: RunConfig, key: str) -> Any:
    """Return the value of a key, or None if this configuration does not have it."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return None if isinstance(value, Duration) else value


def settings_layer(
    space: list[Dimension], parameters: Mapping[str, Any], base: RunConfig
) -> list[dict[str, Any]]:
    """Return the configuration layers of one trial's parameters. The size comes first, because others relate to it."""
    ordered = sorted(space, key=lambda one: one.kind != "layers")
    return [one.layer(parameters[one.name], base) for one in ordered]


def _has(config: RunConfig, path: KeyPath) -> bool:
    part: Any = config
    for name in path[:-1]:
        part = getattr(part, name, None)
    return part is not None and hasattr(part, path[-1])


def _ends(key: str, text: str) -> tuple[float, float]:
    low, sign, high = text.partition(":")
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = math.nan, math.nan
    if not sign or not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and 0 <= ends[0] < ends[1]):
        raise UsageError(f"--over {key}={text}: is not a range; write LOW:HIGH, such as {key}=0.01:0.1")
    return ends
