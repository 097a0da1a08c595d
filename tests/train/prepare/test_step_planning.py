"""The memory that a run predicts for its step: what `budget/memory.py` gives
for the passes that a process really makes.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from deskside.budget.format_costs import LowFormat
from deskside.budget.host_memory import host_memory
from deskside.budget.memory import training_memory
from deskside.budget.step_spec import StepSpec
from deskside.config import merge, presets
from deskside.plan.estimate import peak_memory
from deskside.plan.setting import setting_from_config
from deskside.train.parallel import World
from deskside.train.prepare import step_planning
from deskside.train.prepare.step_planning import check_host_memory, modelled_memory_gib, step_spec
from deskside.utils.errors import UsageError

ROWS = 1024


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_passes_are_counted_per_process(processes: int, sharded: bool, passes: int) -> None:
    """One pass on each of several processes keeps no gradients of an earlier one, with replicas and with shards."""
    tokens = processes * passes * ROWS
    config = merge.build([{"batch": {"tokens": tokens, "sequence_length": ROWS}}])
    work = StepSpec(ROWS, tokens, ROWS, gpus=processes, sharded=sharded, optimizer=config.optim.name)
    wanted = training_memory(config.model, work).allocated / 2**30
    assert modelled_memory_gib(config, ROWS, "bf16", "block", (), processes, sharded) == wanted


def test_gradients_of_a_graph_exist_from_the_start_of_its_pass() -> None:
    """A step of one pass then needs what one of several passes does, and both need more than without a graph."""

    def modelled(passes: int, cuda_graph: str) -> float:
        tokens = 64 * ROWS  # of a pass, so that the peak is not in the update
        batch = {"tokens": passes * tokens, "sequence_length": ROWS}
        config = merge.build([{"batch": batch, "compute": {"cuda_graph": cuda_graph}}])
        return modelled_memory_gib(config, tokens, "bf16", "fused", ())

    assert modelled(1, "off") < modelled(4, "off") < modelled(1, "on") == modelled(4, "on")


def test_one_process() -> None:
    config = merge.build([{"batch": {"tokens": 4 * ROWS, "sequence_length": ROWS}}])
    work = StepSpec(ROWS, 4 * ROWS, ROWS, optimizer=config.optim.name, precision="fp32", compiled=False)
    wanted = training_memory(config.model, work).allocated / 2**30
    assert modelled_memory_gib(config, ROWS, "fp32", "off", ()) == wanted


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
NVFP4 = {"name": "nvfp4", "keep_first": 0.1, "keep_last": 0.3}
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": {"name": "bf16"}},
    "no weight cache": {"precision": {"name": "bf16", "weight_cache": False}},
    "fp8": {"precision": {"name": "fp8-delayed", "head": "fp8"}},
    "fp8 experts": {"precision": {"name": "fp8"}, "model": EXPERTS},
    "nvfp4 experts": {"precision": {"name": "nvfp4-eden"}, "model": EXPERTS},
    "emulated fp8": {"precision": {"name": "fp8-rowwise", "native": "never"}},
    "nvfp4": {"precision": NVFP4, "model": {"num_hidden_layers": 10}},
    "offloaded 8-bit states": {"optim": {"name": "adamw", "states": "8bit", "offload": True}},
    "checkpointing": {"compute": {"activation_checkpointing": "mlp", "loss_chunk_tokens": 512}},
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_training_models_the_step_that_the_planner_models(changes: dict[str, Any]) -> None:
    """Compares two paths from a configuration to bytes:
    `plan.estimate.setting_from_config`, and the run's own description.
    """
    config = merge.build([{"batch": {"tokens": 4 * ROWS, "sequence_length": ROWS}}, changes])
    name = config.precision.name if config.precision.name != "auto" else "bf16"
    native: frozenset[LowFormat] = frozenset({"fp8"})
    setting = replace(setting_from_config(config, 1, name, native=native), micro_tokens=ROWS)
    assert modelled_memory_gib(config, ROWS, name, "fused", native) == pytest.approx(
        peak_memory(setting).allocated / 2**30, rel=1e-12
    )


def test_what_makes_the_memory_of_a_step_differ() -> None:
    def gib(recipe: str = "bf16", mode: str = "fused", **precision: Any) -> float:
        parts = {
            "batch": {"tokens": 4 * ROWS, "sequence_length": ROWS},
            "precision": {"name": recipe, **precision},
        }
        return modelled_memory_gib(merge.build([parts]), ROWS, recipe, mode, {"fp8"})

    found = [
        gib(),
        gib(mode="off"),
        gib(weight_cache=False),
        gib("nvfp4-eden"),
        gib("fp8-delayed", head="fp8"),
    ]
    assert len({round(value, 6) for value in found}) == len(found)
    assert gib(weight_cache=False) < gib() < gib("nvfp4-eden")


def test_too_little_host_memory_is_refused_with_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    optim = {"name": "muon", "offload": True, "gradients": "host"}
    config = merge.build([*presets.layers("710m"), {"optim": optim}])
    monkeypatch.setattr(step_planning, "usable_bytes", lambda: 2**30)
    with pytest.raises(UsageError, match=r"optimizer states .*iB, gradients .*iB.*1\.0 GiB left"):
        check_host_memory(config, "bf16", "fused", World(torch.device("cpu")))
    for enough in (2**33, None):
        monkeypatch.setattr(step_planning, "usable_bytes", lambda size=enough: size)
        check_host_memory(config, "bf16", "fused", World(torch.device("cpu")))


@pytest.mark.parametrize("sharded", [False, True])
def test_host_memory_is_that_of_all_processes(sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two replicas has its own states there. With a sharded model, each process has half of them."""
    config = merge.build([*presets.layers("710m"), {"optim": {"name": "adamw", "offload": True}}])
    length = config.batch.sequence_length
    of_one = sum(host_memory(config.model, step_spec(config, length, "bf16", "fused", ())).values())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(step_planning, "usable_bytes", lambda: int(1.5 * of_one))
    world = World(torch.device("cpu"), 0, 2, sharded)
    if sharded:
        check_host_memory(config, "bf16", "fused", world)
    else:
        with pytest.raises(UsageError, match="optimizer states"):
            check_host_memory(config, "bf16", "fused", world)
