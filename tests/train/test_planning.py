"""The memory that a run expects of its step: what `budget/memory.py` says of the passes that a process really does."""

import pytest

from deskside.budget.memory import training_memory
from deskside.budget.work import Work
from deskside.config import merge
from deskside.train.planning import modelled_memory_gib

ROWS = 1024


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_passes_are_counted_per_process(processes: int, sharded: bool, passes: int) -> None:
    """One pass on each of several processes keeps no gradients of an earlier one, replicas or shards."""
    tokens = processes * passes * ROWS
    config = merge.build([{"batch": {"tokens": tokens, "sequence_length": ROWS}}])
    work = Work(ROWS, tokens, ROWS, gpus=processes, sharded=sharded, optimizer=config.optim.name)
    wanted = training_memory(config.model, work).allocated / 2**30
    assert modelled_memory_gib(config, ROWS, True, True, processes, sharded) == wanted


def test_one_process() -> None:
    config = merge.build([{"batch": {"tokens": 4 * ROWS, "sequence_length": ROWS}}])
    work = Work(ROWS, 4 * ROWS, ROWS, optimizer=config.optim.name, precision="fp32", compiled=False)
    wanted = training_memory(config.model, work).allocated / 2**30
    assert modelled_memory_gib(config, ROWS, False, False, 1) == wanted
