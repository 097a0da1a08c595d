"""Decide whether a run with `compute.cuda_graph` auto replays its passes from CUDA graphs.

It does if launching kernels takes the host most of the time of a dry step, and if dry steps that reserve the memory of
a captured pass succeed. A resumed run does what the run did before, if the memory still suffices.
"""

import contextlib
from collections.abc import Sequence

import torch

from deskside.budget.host import HOST_BOUND
from deskside.train.loop.graph_support import can_capture
from deskside.train.loop.stage_work import StageWork, same_shape
from deskside.train.prepare.batch_size_finder import (
    TIMED_DRY_STEPS,
    BatchSizeFinder,
    free_failed_attempt,
)


def choose_graphs(finder: BatchSizeFinder, stages: Sequence[StageWork], recorded: bool | None = None) -> None:
    """Prepare the stepper of `finder` to capture passes, if `compute.cuda_graph` is auto and graphs pay off and fit.

    stages: with their micro-batches. recorded: whether the run that is resumed replays passes; None for a new run.
    """
    config, stepper, world = finder.config, finder.stepper, finder.world
    if config.compute.cuda_graph != "auto" or recorded is False:
        return
    if not can_capture(config, world.device, stepper.precision.fused, stepper.context.attention):
        return
    window, wanted, why = stepper.window, bool(recorded), "they were before"
    if not recorded:
        starts = [0.0, *(stage.until for stage in stages)]
        longest = max(range(len(stages)), key=lambda number: stages[number].until - starts[number])
        share = host_share(finder, stages[longest])
        wanted = bool(world.all_reduce_min(int(share >= HOST_BOUND)))
        why = f"the host takes {share:.0%} of the time of a step of one pass"
    if wanted and _fits(finder, stages):
        finder.log(f"compute.cuda_graph auto: passes become CUDA graphs, as {why}")
    elif wanted:
        stepper.leave_graphs()
        free_failed_attempt(world.device)
        finder.log(
            "compute.cuda_graph auto: passes are not captured, as there is too little memory to keep one"
        )
    stepper.set_window(window)
    stepper.precision.scales.reset()  # the dry steps' data is not that of the run


def host_share(finder: BatchSizeFinder, stage: StageWork) -> float:
    """Return the share of the time of a dry step of one pass that the host takes to launch it.

    The faster of two dry steps counts. They have one pass, because in a step of several passes a host that is faster
    than the device fills its queue of 1,024 launches and waits.
    """
    finder.stepper.set_window(stage.window)
    micro_rows = stage.micro_rows
    times = [finder.timed_dry_step(micro_rows, stage.dataset, micro_rows) for _ in range(TIMED_DRY_STEPS)]
    launched, seconds = min(times, key=lambda pair: pair[1])
    return launched / seconds


def _fits(finder: BatchSizeFinder, stages: Sequence[StageWork]) -> bool:
    """Prepare to capture passes. Return True if a captured pass fits in memory next to the steps of all stages."""
    stepper, prepared = finder.stepper, False
    with contextlib.suppress(torch.OutOfMemoryError):  # all ranks must agree before any of them runs a step
        stepper.use_graphs(stepper.event)
        prepared = True
    if not finder.world.all_reduce_min(int(prepared)):
        return False
    try:
        for number, stage in enumerate(stages):
            if number and same_shape(stages[number - 1], stage):
                continue
            stepper.set_window(stage.window)
            step = stage.micro_rows, stage.dataset, finder.stage_dry_rows(stage)
            with finder.reserve_memory(), finder.reserve_captured():
                if finder.uses_bf16_steps:  # they save more than steps in the recipe's formats
                    with stepper.precision.high_precision():
                        finder.dry_step(*step)
                finder.dry_step(*step)
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None  # it keeps the tensors of the failed step alive
        return False
    return True
