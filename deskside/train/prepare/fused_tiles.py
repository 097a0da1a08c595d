"""Choose the tiles of the fused kernels for a run on a GPU, and use them."""

from typing import Any

import torch

from deskside.config.recipes import recipe_named
from deskside.kernels import fused
from deskside.kernels.fused.choose_tiles import MlpShape, choose_tiles, trial_tokens, use_tiles
from deskside.model.transformer import Transformer
from deskside.train.parallel import World
from deskside.utils.trials import TrialCache


def choose_and_use_tiles(
    model: Transformer, world: World, recipe: str, tokens: float, cache: TrialCache
) -> dict[str, Any]:
    """Use the tiles that rank 0 chooses, and return the entries of plan.json; {} if nothing is chosen.

    Tiles are chosen for the fused kernels of a dense model on a GPU. A resumed run chooses again, because results do
    not depend on them. tokens: the most that the run can train on.
    """
    config, operand = model.config, recipe_named(recipe).output.left
    if world.device.type != "cuda" or config.num_experts:
        return {}
    fp8 = operand.format in ("e4m3", "e5m2") and fused.writes_fp8(world.device)
    shape = MlpShape(
        trial_tokens(config.intermediate_size),
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        config.gated_mlp,
        model.activation_dtype,
        operand.scaling if fp8 else "none",
    )
    passes = config.num_hidden_layers * tokens / world.readers / shape.tokens
    choices: dict[str, Any] = world.broadcast_result(lambda: choose_tiles(shape, world.device, passes, cache))
    use_tiles(choices)
    torch.cuda.empty_cache()
    return choices
