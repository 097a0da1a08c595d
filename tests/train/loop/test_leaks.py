"""A training step leaves no garbage for the collector, which would free its GPU memory only at some later time.

A custom autograd function that keeps one of its outputs would be such a case,
because its whole graph is a reference cycle.
"""

import gc
import weakref
from typing import Any

import pytest
import torch

from benchmarks.step_config import configuration
from deskside.probe.point import StepTimer, prepare_step, random_batches
from deskside.train import activation_offload
from deskside.train.environment_record import Sensors

MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 256}
DENSE = {**MODEL, "intermediate_size": 128, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MOE = {**MODEL, **EXPERTS, "max_position_embeddings": 64}
BLOCK = {"activation_checkpointing": "block"}
ARMS: dict[str, dict[str, Any]] = {
    "dense": {"model": DENSE},
    "dense, recomputed": {"model": DENSE, "compute": BLOCK},
    "dense, offloaded": {"model": DENSE, "compute": {**BLOCK, "activation_offloading": True}},
    "experts": {"model": MOE},
    "experts, recomputed": {"model": MOE, "compute": BLOCK},
    "experts, offloaded": {
        "model": MOE,
        "compute": {**BLOCK, "activation_offloading": True},
        "optim": {"name": "adamw", "states": "8bit", "weights": "bfloat16"},
    },
    "fp8": {"model": DENSE, "precision": {"name": "fp8-delayed"}},
    "eager": {"model": MOE, "compute": {"compile": "off"}},
}


def living_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


EVERY_RUN = ("experts, offloaded",)


@pytest.mark.parametrize(
    "arm", [pytest.param(arm, marks=() if arm in EVERY_RUN else pytest.mark.full) for arm in ARMS]
)
def test_a_step_leaves_no_tensor(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1024)
    config = {name: dict(keys) for name, keys in ARMS[arm].items()}
    config["compute"] = {"device": "cpu", "compile": "fused", **config.get("compute", {})}
    config["batch"] = {"sequence_length": 64}
    config.setdefault("precision", {"name": "bf16"})
    spec = {"preset": "demo", "tokens": 512, "micro_tokens": 256, "config": config}
    prepared = prepare_step(configuration(spec), lambda part: None)
    world = prepared.stepper.world
    batches = random_batches(prepared.rows, prepared.fit.micro_rows, prepared.rows_per_step, world)
    timer = StepTimer(prepared.stepper, batches, prepared.fit.accumulation, Sensors(world.device))
    for _ in range(2):
        timer.read(timer.launch())
    for _ in range(10):
        gc.collect()  # a cycle may be freed only after another one
    alive = []
    gc.disable()
    try:
        for _ in range(3):
            timer.read(timer.launch())
            alive.append(living_tensors())
    finally:
        gc.enable()
    assert alive[0] == alive[1] == alive[2]


@pytest.mark.full
@pytest.mark.parametrize(
    "gradients",
    [
        pytest.param("device", marks=pytest.mark.full),
        "host",
        pytest.param("released", marks=pytest.mark.full),
    ],
)
def test_a_model_is_freed_with_its_run(gradients: str) -> None:
    """Hooks on parameters that hold parameters create cycles that Python's collector cannot find."""
    optim = {"name": "adamw", "weights": "bfloat16", "gradients": gradients, "grad_clip": 0.0}
    config = {"model": DENSE, "optim": optim, "compute": {"device": "cpu", "compile": "fused"}}
    config |= {"batch": {"sequence_length": 64}, "precision": {"name": "bf16"}}
    passes = 1 if gradients == "released" else 2
    spec = {"preset": "demo", "tokens": 512, "micro_tokens": 512 // passes, "config": config}
    prepared = prepare_step(configuration(spec), lambda part: None)
    world = prepared.stepper.world
    batches = random_batches(prepared.rows, prepared.fit.micro_rows, prepared.rows_per_step, world)
    timer = StepTimer(prepared.stepper, batches, prepared.fit.accumulation, Sensors(world.device))
    timer.read(timer.launch())
    parameters = [weakref.ref(p) for p in prepared.stepper.model.parameters()]
    del prepared, batches, timer
    for _ in range(10):
        gc.collect()
    assert not sum(parameter() is not None for parameter in parameters)
