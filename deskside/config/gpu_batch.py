"""The default tokens per optimizer step on several GPUs, and checks that a run suits their number."""

from collections.abc import Mapping, Sequence
from typing import Any

from deskside.budget.scaling import batch_on_gpus, default_batch_tokens
from deskside.config import merge
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError


def build_on_gpus(layers: Sequence[Mapping[str, Any]], gpus: int) -> RunConfig:
    """Return `merge.build(layers)` for a run on `gpus` GPUs.

    Unless a layer sets batch.tokens, it is the default of one GPU, grown by `scaling.default_batch_tokens`. Raises
    UsageError, also if the run does not suit this number of GPUs.
    """
    config = merge.build(layers)
    if gpus == 1 or gpus % config.parallel.context:  # `parallel.init_distributed` refuses the latter
        return config
    if ("batch", "tokens") not in merge.merge(layers)[1]:
        config = merge.build([{"batch": {"tokens": default_tokens(config, gpus)}}, *layers])
    check_processes(config, gpus)
    return config


def default_tokens(config: RunConfig, gpus: int) -> int:
    """Return the tokens per step on `gpus` GPUs for a configuration that has those of one GPU."""
    longest = max(stage.sequence_length for stage in config.stages())
    unit = longest if config.batch.micro_tokens == "auto" else config.batch.micro_tokens
    readers = gpus // config.parallel.context
    return batch_on_gpus(default_batch_tokens(config.batch.tokens, readers), readers, unit)


def check_processes(config: RunConfig, processes: int) -> None:
    """Raise UsageError if a run of several processes, one for each GPU, cannot share its steps or sum its gradients.

    processes: a multiple of `parallel.context`.
    """
    check_gradients(config, processes)
    for stage in config.stages():
        rows_each(config.stage_tokens(stage), stage.sequence_length, processes // config.parallel.context)


def check_gradients(config: RunConfig, processes: int) -> None:
    """Raise UsageError if gradients that leave the GPU would have to be summed over several of them."""
    if processes > 1 and config.optim.gradients != "device":
        raise UsageError(
            f"optim.gradients: {config.optim.gradients} is for one GPU, not {processes}; use device, or one GPU"
        )


def rows_each(tokens: int, sequence_length: int, readers: int) -> int:
    """Return the rows of a step that each of `readers` processes reads. Raises UsageError unless all read as many."""
    rows = tokens // sequence_length
    if rows % readers:
        raise UsageError(
            f"batch.tokens: {tokens} is {rows} rows, which {readers} processes cannot share evenly; use a multiple of "
            f"{readers * sequence_length}, or another number of processes"
        )
    return rows // readers


def describe_batch(config: RunConfig, gpus: int) -> str:
    """Return the tokens per step of a run on several GPUs as text."""
    tokens, context = config.batch.tokens, config.parallel.context
    if context > 1:
        return (
            f"{tokens:,} tokens per step, {tokens * context // gpus:,} on every {context} of {gpus} processes"
        )
    return f"{tokens:,} tokens per step, {tokens // gpus:,} on each of {gpus} processes"
