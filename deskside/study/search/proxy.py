"""The model and the length of a search's trials: those of the run that is searched for, or a smaller proxy.

A trial that takes a share s of the target's time trains a model with about sqrt(s) of its weights, so that both see as
many tokens per weight. Width and depth shrink together, as in a depth series. The settings carry over by three rules:

- width, batch and length: `optim.scale` (budget/scaling.py) scales learning rates and weight decay.
- depth: CompleteP (Dey et al., arXiv 2505.01618) keeps learning rates if the output of every sublayer is multiplied by
  1 / layers. The target has the factor that it is configured with, so that it exports as it is; the proxy's factor is
  larger by (layers of the target) / (layers of the proxy).
- batch: the best batch grows as tokens^0.383 (budget/scaling.py); the proxy's is smaller by that, in powers of two.
"""

import math
from dataclasses import dataclass
from typing import Any

from deskside.budget.scaling import BATCH_EXPONENT
from deskside.budget.shape import num_params
from deskside.config.dimensions import UNIT
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.utils.format import count, duration

MIN_LAYERS = 2
MLP_UNIT = 128  # keeps the products of common models on whole tiles
SHRINK_BELOW = 2 / 3  # share of the target's time below which the model shrinks too


@dataclass(frozen=True)
class Proxy:
    """The model and length of the trials, as changes of the target.

    Attributes:
        layer: Configuration on top of the target's; empty if the trials train the target's model.
        why: What the trials train and why, in one sentence.
    """

    layer: dict[str, Any]
    why: str


def choose_proxy(
    target: RunConfig, target_seconds: float, trial_seconds: float, shrink: bool = True
) -> Proxy:
    """Return the proxy for trials of `trial_seconds`. shrink: False for trials with the target's model."""
    share = trial_seconds / target_seconds
    model = target.model
    if share >= 1:
        return Proxy(
            {}, f"trials are whole runs: {count(num_params(model))} parameters, {duration(target_seconds)}"
        )
    length = f"{duration(trial_seconds)} instead of {duration(target_seconds)}, so that enough trials fit"
    if share > SHRINK_BELOW or not shrink or model.num_hidden_layers <= MIN_LAYERS:
        return Proxy({}, f"trials train the same model, {count(num_params(model))} parameters, for {length}")
    layers = best_layers(model, math.sqrt(share))
    batch = target.batch
    doublings = round(BATCH_EXPONENT * math.log2(math.sqrt(share)))
    tokens = max(batch.sequence_length, int(batch.tokens * 2.0**doublings))
    tokens -= tokens % batch.sequence_length
    factor = model.residual_multiplier * model.num_hidden_layers / layers
    small = model.model_copy(update=resized(model, layers))
    layer = {"model": {**resized(model, layers), "residual_multiplier": factor}, "batch": {"tokens": tokens}}
    return Proxy(
        layer,
        f"trials train {layers} of {model.num_hidden_layers} layers, {count(num_params(small))} of "
        f"{count(num_params(model))} parameters, for {length}; as many tokens per weight as the target, learning "
        f"rates by optim.scale, depth by CompleteP (residual multiplier {factor:.3g})",
    )


def best_layers(model: ModelConfig, share: float) -> int:
    """Return the number of layers whose resized model has nearest to `share` of the model's weights."""
    wanted = share * num_params(model)
    sizes = {
        layers: num_params(model.model_copy(update=resized(model, layers)))
        for layers in range(min(MIN_LAYERS, model.num_hidden_layers), model.num_hidden_layers + 1)
    }
    return min(sizes, key=lambda layers: abs(math.log(sizes[layers] / wanted)))


def resized(model: ModelConfig, layers: int) -> dict[str, Any]:
    """Return the model's keys with another number of layers and a width in proportion.

    Heads keep their size and, as nearly as whole numbers allow, their grouping; the MLP keeps its ratio to the width.
    """
    if layers == model.num_hidden_layers:
        return {"num_hidden_layers": layers}
    factor = layers / model.num_hidden_layers
    heads = max(1, round(model.num_attention_heads * factor))
    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    kv_heads = min(groups, key=lambda n: abs(math.log(n / (model.num_key_value_heads * factor))))
    hidden = max(UNIT, UNIT * round(heads * model.hidden_size / model.num_attention_heads / UNIT))
    mlp = "moe_intermediate_size" if model.num_experts else "intermediate_size"
    mlp_unit = MLP_UNIT if getattr(model, mlp) % MLP_UNIT == 0 else UNIT
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": model.head_dim,
        mlp: max(mlp_unit, mlp_unit * round(getattr(model, mlp) * hidden / model.hidden_size / mlp_unit)),
    }
