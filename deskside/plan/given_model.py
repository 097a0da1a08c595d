"""The models of a plan: one that the user asks about, or one that could be trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deskside.config import merge, presets
from deskside.config.depth_series import MAX_DEPTH, nearest_depth, of_depth, sizes
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.sections import BatchConfig
from deskside.plan.question import PlanQuestion, count
from deskside.utils import format
from deskside.utils.errors import UsageError

STAGES_SET_LENGTH = (
    "--sequence: schedule.stages sets the sequence lengths; change them there, or leave one out"
)


@dataclass(frozen=True)
class CandidateModel:
    """A model that could be trained. preset: the argument of `deskside train`; layers: its configuration layers, of
    which later ones take precedence."""

    preset: str
    layers: tuple[dict[str, Any], ...]
    config: RunConfig

    @property
    def model(self) -> ModelConfig:
        return self.config.model


@dataclass(frozen=True)
class GivenModel(CandidateModel):
    """The model that the user asks about. label: its name for messages; explicit: the dotted keys set by a layer.

    file_layers: those of `layers` that come from files of the user. is_trained: `preset` is a run, directory or hub
    model, which `deskside train` takes as --init.
    """

    label: str
    explicit: frozenset[str]
    file_layers: tuple[dict[str, Any], ...] = ()
    is_trained: bool = False


def given_model(
    q: PlanQuestion, overrides: Mapping[str, Any], shape: ModelConfig | None
) -> GivenModel | None:
    """Return the model set by --preset, --init, --depth or --params; None in an open search."""
    files: list[dict[str, Any]] = []
    if q.preset is not None:
        preset = label = q.preset
        layers, files = presets.layers(preset), presets.file_layers(preset)
    elif q.init is not None:
        assert shape is not None
        preset = label = q.init
        layers = merge.resolved_layers("model", shape.model_dump(mode="json"))
        if shape.max_position_embeddings < BatchConfig().sequence_length:
            layers.append({"batch": {"sequence_length": shape.max_position_embeddings}})
    elif q.depth is not None or q.params is not None:
        depth = q.depth if q.depth is not None else _nearest_depth(count("--params", q.params), str(q.params))
        if depth > MAX_DEPTH:
            raise UsageError(
                f"--depth: {depth} is beyond what can be planned; give an even depth from 2 to {MAX_DEPTH}"
            )
        preset = label = f"d{depth}"
        if q.depth is None:
            label = f"{preset}, the depth with the nearest size to {q.params} parameters"
        layers = [of_depth(depth)]
    else:
        return None
    layers = [*layers, dict(overrides)] if overrides else layers
    explicit = frozenset(".".join(path) for path in merge.merge(layers)[1])
    config = merge.build(layers)
    if q.sequence is not None:
        if config.schedule.stages:
            raise UsageError(STAGES_SET_LENGTH)
        layers = [*layers, sequence_length_layer(q.sequence, config, explicit)]
        config = merge.build(layers)
    return GivenModel(preset, tuple(layers), config, label, explicit, tuple(files), q.init is not None)


def sequence_length_layer(
    sequence: int, config: RunConfig, explicit: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the configuration layer that sets the sequence length.

    It also raises max_position_embeddings if needed, and rounds batch.tokens to a multiple of the sequence length
    unless `explicit` contains that key.
    """
    batch: dict[str, Any] = {"sequence_length": sequence}
    layer: dict[str, Any] = {"batch": batch}
    if sequence > config.model.max_position_embeddings:
        layer["model"] = {"max_position_embeddings": sequence}
    if config.batch.tokens % sequence and "batch.tokens" not in explicit:
        batch["tokens"] = max(1, round(config.batch.tokens / sequence)) * sequence
    return layer


def _nearest_depth(params: float, text: str) -> int:
    """Return the depth with the nearest number of parameters. text: the number as the user wrote it."""
    nearest = nearest_depth(params)
    if nearest is None:
        raise UsageError(
            f"--params: no depth has about {text} parameters; give a size from {format.count(sizes()[2])} (d2) "
            f"to {format.count(sizes()[MAX_DEPTH])} (d{MAX_DEPTH})"
        )
    return nearest
