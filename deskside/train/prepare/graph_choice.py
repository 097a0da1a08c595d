"""Decision whether a run with `compute.cuda_graph` auto replays its passes from graphs.

It does if the host launches kernels for most of the time of a dry step, and if dry steps that reserve the memory of a
captured pass succeed. A resumed run does what the run did before.
"""

import contextlib
from collections.abc import Sequence

import torch

from deskside.budget.host import HOST_BOUND
from deskside.train.prepare.batch_size_finder import (
    TIMED_DRY_STEPS,
    BatchSizeFinder,
    StageWork,
    free_failed_attempt,
)
from deskside.train.prepare.graph_support import can_capture


def choose_graphs(finder: BatchSizeFinder, stages: Sequence[StageWork], recorded: bool | None = None) -> None:
    """Prepare the stepper of `finder` to capture passes, if the run may choose so and should.

    stages: with their micro-batches. recorded: whether the run that is resumed replays passes; None for a new run.
    """
    config, stepper, world = finder.config, finder.stepper, finder.world
    if config.compute.cuda_graph != "auto" or recorded is False:
        return
    if not can_capture(config, world.device, stepper.precision.fused, stepper.context.attention):
        return
    passes = [finder.stage_rows(stage) // stage.micro_rows for stage in stages]
    if world.size > 1 and max(passes) == 1:  # its gradients are sent while it runs, so it is never replayed
        return
    starts = [0.0, *(stage.until for stage in stages)]
    longest = max(range(len(stages)), key=lambda number: stages[number].until - starts[number])
    share = host_share(finder, stages[longest])
    chosen = recorded or world.all_reduce_min(int(share >= HOST_BOUND))
    if chosen and _fits(finder, stages):
        why = f"the host takes {share:.0%} of the time of a step"
        finder.log(f"compute.cuda_graph auto: passes become CUDA graphs, as {why}")
    elif chosen:
        stepper.leave_graphs()
        free_failed_attempt(world.device)
        finder.log(
            "compute.cuda_graph auto: passes are not captured, as there is too little memory to keep one"
        )
    stepper.precision.scales.reset()  # the dry steps' data is not that of the run


def host_share(finder: BatchSizeFinder, stage: StageWork) -> float:
    """Return the share of a dry step's time that the host takes to launch it: of the faster of two steps.

    A host that is faster than the device ends early only in a step of few passes: its queue of 1,024 launches is then
    never full.
    """
    finder.stepper.set_window(stage.window)
    rows = finder.stage_dry_rows(stage)
    times = [finder.timed_dry_step(stage.micro_rows, stage.dataset, rows) for _ in range(TIMED_DRY_STEPS)]
    launched, seconds = min(times, key=lambda pair: pair[1])
    return launched / seconds


def _fits(finder: BatchSizeFinder, stages: Sequence[StageWork]) -> bool:
    """Prepare to capture passes. Return True if a captured pass has room beside the steps of all stages."""
    stepper, prepared = finder.stepper, False
    with contextlib.suppress(torch.OutOfMemoryError):  # all ranks must agree before any of them runs a step
        stepper.use_graphs(stepper.event)
        prepared = True
    if not finder.world.all_reduce_min(int(prepared)):
        return False
    try:
        for stage in stages:
            stepper.set_window(stage.window)
            with finder.reserve_memory(), finder.reserve_captured():
                finder.dry_step(stage.micro_rows, stage.dataset, finder.stage_dry_rows(stage))
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None  # it keeps the tensors of the failed step alive
        return False
    return True
