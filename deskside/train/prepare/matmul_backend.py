"""Choose the kernels of a run's BF16 products, and use them (`compute.matmul`)."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from deskside.config.run import RunConfig
from deskside.kernels.choose_matmul import MatmulChoice, choose_matmul
from deskside.kernels.quack_matmul import tiles_of
from deskside.precision.convert import QuantizedModel
from deskside.train.parallel import World
from deskside.utils.errors import UsageError
from deskside.utils.trials import TrialCache

NEEDED = "the package quack-kernels (pip install quack-kernels) and a GPU of compute capability 9, 10 or 12"


def check_matmul(config: RunConfig, precision: QuantizedModel, world: World) -> None:
    """Raise UsageError if compute.matmul is quack, and no product of the run can be computed by it."""
    if config.compute.matmul != "quack":
        return
    if world.sharded or precision.matmul_shape(1) is None:
        raise UsageError(
            "compute.matmul: quack computes BF16 products of fused dense blocks with float32 weights that are not "
            "sharded, and this run has none; leave it out"
        )
    if not tiles_of(world.device):
        raise UsageError(f"compute.matmul: quack needs {NEEDED}; leave it out")


def choose_and_use_matmul(
    config: RunConfig,
    precision: QuantizedModel,
    world: World,
    pass_tokens: int,
    tokens: float,
    cache: TrialCache,
    recorded: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Use the kernels that rank 0 chooses, and return the entries of plan.json; {} if all products are torch's.

    pass_tokens: of a micro-batch. tokens: the most that the run can train on. recorded: plan.json of a resumed run; it
    keeps its choice, because rounding depends on it. Raises UsageError if this machine lacks what the choice needs.
    """
    facts: dict[str, Any] | None = None
    if recorded:
        facts = recorded.get("matmul")
        if facts is not None and not tiles_of(world.device):
            raise UsageError(f"this run was trained with quack-kernels, so going on needs {NEEDED}")
    elif config.compute.matmul != "torch" and world.device.type == "cuda" and not world.sharded:
        shape = precision.matmul_shape(pass_tokens)
        if shape is not None:
            passes = config.model.num_hidden_layers * tokens / world.readers / pass_tokens
            passes = math.inf if config.compute.matmul == "quack" else passes
            facts = world.broadcast_result(lambda: choose_matmul(shape, world.device, passes, cache))
    if facts is None:
        return {}
    precision.use_matmul(MatmulChoice.of(facts))
    torch.cuda.empty_cache()
    return facts
