"""Modelled bytes of optimizer state, compared with the tensors of a real
optimizer, and their effect on time and peak.
"""

from typing import Any

import pytest

from deskside.budget.host_memory import checkpoint_bytes
from deskside.budget.memory import training_memory
from deskside.budget.scaling import Scaling
from deskside.budget.shape import block_matrix_params, num_params, root_params
from deskside.budget.sizes import Sizes
from deskside.budget.speed import Rates, step_seconds
from deskside.budget.states import BUFFERS, PIECE, gpu_state_bytes, state_bytes
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.model.transformer import Transformer
from deskside.optim import offload
from deskside.optim.build import build

SHAPE = ModelConfig(
    vocab_size=512, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=256, max_position_embeddings=128,
)  # fmt: skip
STATES = ["float32", "bfloat16", "8bit", "4bit"]
OPTIMIZERS = ["adamw", "muon"]


def spec(optimizer: Any = "adamw", states: Any = "float32", **options: Any) -> StepSpec:
    return StepSpec(128, 512, 512, optimizer=optimizer, states=states, **options)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bytes_are_those_of_a_real_optimizer(optimizer: str, states: str) -> None:
    kind = AdamWConfig if optimizer == "adamw" else MuonConfig
    config = kind.model_validate(
        {"name": optimizer, "states": states, "normalize": "none"}
        if optimizer == "muon"
        else {"states": states}
    )
    real = build(Transformer(SHAPE), config, Scaling(1.0, 1.0, 1.0))
    real.create_state()
    tensors = {key: t.nbytes for key, t in real.state_dict_flat()[0].items() if not key.startswith("step/")}
    assert state_bytes(Sizes(SHAPE, spec(optimizer, states))).total == pytest.approx(
        sum(tensors.values()), rel=1e-4
    )
    assert (
        gpu_state_bytes(Sizes(SHAPE, spec(optimizer, states)))
        == state_bytes(Sizes(SHAPE, spec(optimizer, states))).total
    )


def test_the_buffers_are_those_of_the_optimizer() -> None:
    assert (BUFFERS, PIECE) == (offload.BUFFERS, offload.PIECE)
    large = ModelConfig()
    for states, per_weight in (("float32", 8), ("bfloat16", 4), ("8bit", 2 + 8 / 256), ("4bit", 1 + 8 / 128)):
        found = state_bytes(Sizes(large, spec("adamw", states)))
        assert found.buffers == 3 * 2**22 * per_weight
        assert (
            gpu_state_bytes(Sizes(large, spec("adamw", states, offload_optimizer=True)))
            == found.buffers + found.vectors
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_peak_and_the_time_follow(optimizer: str) -> None:
    shape, rates = ModelConfig(), Rates(matmul_flops=700e12, bandwidth=4e12)
    plain = spec(optimizer)
    matrices, tables = block_matrix_params(shape), root_params(shape)
    peak = training_memory(shape, plain).items["optimizer"]
    assert peak == pytest.approx(
        (8 if optimizer == "adamw" else 4) * matrices + 8 * (num_params(shape) - matrices)
    )
    for states in STATES[1:]:
        small = spec(optimizer, states)
        assert training_memory(shape, small).items["optimizer"] < 0.53 * peak
        if states == "bfloat16":  # codes move fewer bytes, but take time to compute
            times = [step_seconds(shape, s, rates)["optimizer"] for s in (small, plain)]
            assert times[0] < times[1]
        assert step_seconds(shape, small, rates)["offload"] == 0
        streamed = spec(optimizer, states, offload_optimizer=True)
        each = {
            "adamw": {"bfloat16": 4, "8bit": 2.03125, "4bit": 1.0625},
            "muon": {"bfloat16": 2, "8bit": 1 + 4 / 256, "4bit": 1 + 4 / 256},
        }[optimizer][states]
        table = {"bfloat16": 4, "8bit": 2.03125, "4bit": 1.0625}[states]
        expected = (each * matrices + table * tables) / 20e9
        assert step_seconds(shape, streamed, rates)["offload"] == pytest.approx(expected)


def test_master_weights_are_counted_on_the_host_only() -> None:
    config = AdamWConfig(weights="bfloat16", offload=True, states="8bit", master_weights=True)
    model = Transformer(SHAPE)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    real = build(model, config, Scaling(1.0, 1.0, 1.0))
    real.create_state()
    held = sum(t.nbytes for key, t in real.state_dict_flat()[0].items() if not key.startswith("step/"))
    options = {"weights": "bfloat16", "offload_optimizer": True, "master_weights": True}
    modelled = state_bytes(Sizes(SHAPE, spec("adamw", "8bit", **options)))
    assert modelled.total == pytest.approx(held, rel=1e-3)
    without = state_bytes(Sizes(SHAPE, spec("adamw", "8bit", weights="bfloat16")))
    large = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert modelled.total - without.total == 4 * large


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_24_bits_are_a_byte_more_on_the_gpu(optimizer: Any, states: str) -> None:
    kind = AdamWConfig if optimizer == "adamw" else MuonConfig
    model = Transformer(SHAPE)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    rows = {} if optimizer == "adamw" else {"normalize": "none"}
    config = kind.model_validate({"name": optimizer, "weights": "24bit", "states": states, **rows})
    real = build(model, config, Scaling(1.0, 1.0, 1.0))
    real.create_state()
    held = sum(t.nbytes for key, t in real.state_dict_flat()[0].items() if not key.startswith("step/"))
    found = state_bytes(Sizes(SHAPE, spec(optimizer, states, weights="24bit")))
    without = state_bytes(Sizes(SHAPE, spec(optimizer, states, weights="bfloat16")))
    large = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert found.total == pytest.approx(held, rel=1e-3) and found.total - without.total == large
    on_host = [
        gpu_state_bytes(Sizes(SHAPE, spec(optimizer, states, weights=weights, offload_optimizer=True)))
        for weights in ("bfloat16", "24bit")
    ]
    assert on_host[1] - on_host[0] == large
    assert found.streamed == without.streamed
    saved = [
        checkpoint_bytes(SHAPE, spec(optimizer, states, weights=weights)) for weights in ("bfloat16", "24bit")
    ]
    assert saved[1] - saved[0] == large
    peaks = [
        training_memory(SHAPE, spec(optimizer, states, weights=weights)).items["optimizer"]
        for weights in ("bfloat16", "24bit")
    ]
    assert peaks[1] - peaks[0] == pytest.approx(large, abs=2)
    times = [
        step_seconds(
            SHAPE, spec(optimizer, states, weights=weights), Rates(matmul_flops=700e12, bandwidth=4e12)
        )
        for weights in ("float32", "24bit", "bfloat16")
    ]
    assert times[0]["optimizer"] > times[1]["optimizer"] > times[2]["optimizer"]
    if optimizer == "muon":  # the checkpoint of a replica also has what others own
        shared = StepSpec(128, 2048, 512, optimizer="muon", states=states, weights="24bit", gpus=4)
        assert checkpoint_bytes(SHAPE, shared) == pytest.approx(saved[1], abs=8)
