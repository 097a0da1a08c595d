"""Choose the kernels of a run's BF16 products, and use them (`compute.matmul`)."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from deskside.config.run import RunConfig
from deskside.kernels.choose_matmul import MatmulChoice, choose_matmul
from deskside.kernels.quack_matmul import SUPPORTED_GPUS, load, tiles_of
from deskside.precision.convert import QuantizedModel
from deskside.train.parallel import World
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.trials import TrialCache

NEEDED = f"the package quack-kernels (pip install 'deskside[quack]') and a GPU of {SUPPORTED_GPUS}"
MAX_TRIAL_TOKENS = 65_536


def check_matmul(config: RunConfig, precision: QuantizedModel, world: World) -> None:
    """Raise UsageError if compute.matmul is quack but quack-kernels can compute no product of the run."""
    if config.compute.matmul != "quack":
        return
    if world.sharded or precision.matmul_shape(1) is None:
        raise UsageError(
            "compute.matmul: quack computes BF16 products of fused dense blocks with float32 weights that are not "
            "sharded, and this run has none; leave it out"
        )
    if reason := _why_unusable(world.device):
        raise UsageError(f"compute.matmul: {reason}; leave it out")


def choose_and_use_matmul(
    config: RunConfig,
    precision: QuantizedModel,
    world: World,
    tokens: float,
    cache: TrialCache,
    recorded: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Use the kernels that rank 0 chooses, and return the entries of plan.json; {} if all products are torch's.

    The micro-batch is chosen afterwards, with these kernels. So the trial uses `batch.micro_tokens` tokens or, if that
    is "auto", the tokens of one GPU in a step.

    tokens: the most that the run can train on. recorded: plan.json of a resumed run; it keeps its choice, because
    rounding depends on it. Raises UsageError if this machine lacks what the choice needs.
    """
    facts: dict[str, Any] | None = None
    if recorded:
        facts = recorded.get("matmul")
        if facts is not None:
            _check_choice(MatmulChoice.of(facts), world.device)
    elif config.compute.matmul != "torch" and not world.sharded:
        facts = _choose(config, precision, world, tokens, cache)
    if facts is None:
        return {}
    precision.use_matmul(MatmulChoice.of(facts))
    return facts


def _choose(
    config: RunConfig, precision: QuantizedModel, world: World, tokens: float, cache: TrialCache
) -> dict[str, Any] | None:
    """Return the results of a trial on rank 0, if all ranks can use them; otherwise None."""
    batch = config.batch
    of_readers = batch.tokens if batch.micro_tokens == "auto" else batch.micro_tokens * world.readers
    pass_tokens = max(1, min(of_readers // world.size, MAX_TRIAL_TOKENS))
    shape = precision.matmul_shape(pass_tokens)
    if shape is None:
        return None
    forced = config.compute.matmul == "quack"
    passes = config.model.num_hidden_layers * tokens / world.size / pass_tokens

    def choose() -> dict[str, Any] | None:
        try:
            return choose_matmul(shape, world.device, math.inf if forced else passes, cache)
        except RuntimeError as error:  # another version of the package
            say(f"compute.matmul: {error}; torch computes the products")
            return None

    facts: dict[str, Any] | None = world.broadcast_result(choose)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if facts is None and forced:
        say("compute.matmul: no kernel of quack-kernels could be tried; torch computes the products")
    if facts is not None and not world.all_reduce_min(int(_why_unusable(world.device) is None)):
        say("compute.matmul: quack-kernels cannot be used by all processes; torch computes the products")
        return None
    return facts


def _why_unusable(device: torch.device) -> str | None:
    """Return why quack-kernels cannot be used on this device; None if it can."""
    if not tiles_of(device):
        return f"quack needs {NEEDED}"
    try:
        load()
    except RuntimeError as error:
        return str(error)
    return None


def _check_choice(choice: MatmulChoice, device: torch.device) -> None:
    used = {*choice.plain.values(), *(choice.gated or ())}
    if not used <= set(tiles_of(device)):
        raise UsageError(
            f"this run was trained with quack-kernels; to go on as it was, it needs {NEEDED}, as before"
        )
    if used and (reason := _why_unusable(device)):
        raise UsageError(f"this run was trained with quack-kernels: {reason}")
