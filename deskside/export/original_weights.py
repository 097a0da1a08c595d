"""Merging a run's adapters into the original weights instead of the rounded base that the run keeps.

A run with adapters keeps its base in BF16, INT8 or NF4. If the original is still available, an export in float32
avoids that rounding. Freezing the original again must reproduce the run's base bit for bit, which proves that it is
the original.
"""

from collections.abc import Callable

from deskside.config.run import RunConfig
from deskside.run.directory import reached
from deskside.train.state.init_weights import grown
from deskside.utils.errors import RunError, UsageError
from deskside.weights import frozen_base
from deskside.weights.checkpoint_files import Damaged, find
from deskside.weights.load import Loaded, load_model
from deskside.weights.merge_adapters import merge_into, read_adapted


class Unavailable(Exception):
    """The original weights cannot be used; the message gives the reason."""


def merge_into_original(loaded: Loaded, warn: Callable[[str], None]) -> str:
    """Overwrite a loaded run's weights with its adapters merged into the original weights; return their path.

    Needs memory for the original in float32 and for its frozen form. Raises Unavailable.
    """
    run_dir = loaded.run_dir
    assert run_dir is not None
    config = RunConfig.model_validate(loaded.run["config"])
    assert config.adapter is not None
    checkpoint = next((c for c in find(run_dir / "checkpoints") if c.step == loaded.step), None)
    if checkpoint is None:
        raise Unavailable("the run has no checkpoint, so its adapters are not at hand apart")
    source = loaded.run.get("init")
    if not isinstance(source, str):
        raise Unavailable("the run does not say which model it was started from")
    path = reached(source, loaded.run.get("directory"))
    try:
        original = load_model(path, warn=warn)
        weights = {name: parameter.detach() for name, parameter in original.model.named_parameters()}
        if config.align is not None:
            fresh = loaded.run.get("fresh")
            if not isinstance(fresh, list) or not all(type(token) is int for token in fresh):
                raise Unavailable("the run does not say which tokens it added to the original")
            weights = grown(weights, config.model.vocab_size, fresh)
        same = frozen_base.is_made_from(run_dir, config.model, config.adapter, config.seed, weights)
        model = read_adapted(run_dir, checkpoint, config, "cpu")
    except (UsageError, RunError, Damaged) as error:
        raise Unavailable(f"the original cannot be used: {error}") from None
    if not same:
        raise Unavailable(
            f"{path} is not the original to the last bit: rounded to {config.adapter.base} here, it differs from what "
            "the run kept"
        )
    merge_into(loaded.model, model, weights)
    return path
