"""Modelled host memory and offloaded gradients, compared with what the optimizer and the streams hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from deskside.budget.host_memory import checkpoint_bytes, host_memory
from deskside.budget.memory import instants, training_memory
from deskside.budget.scaling import Scaling
from deskside.budget.separate_gradients import (
    WAITING,
    gradients_in_backward,
    largest_tensor,
    sublayer_weights,
)
from deskside.budget.shape import num_params
from deskside.budget.sizes import Sizes
from deskside.budget.speed import Rates, step_seconds
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.model.transformer import Transformer
from deskside.optim import side_stream
from deskside.optim.build import build

DENSE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 640,
}
MOE: dict[str, Any] = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
}
FUSED: dict[str, Any] = {"copies": "step", "activation_checkpointing": "block"}


def spec(passes: int = 1, rows: int = 1, **options: Any) -> StepSpec:
    given = {"optimizer": "adamw", **FUSED, **options}
    return StepSpec(sequence_length=2048, tokens=passes * rows * 2048, micro_tokens=rows * 2048, **given)


def test_waiting_gradients_are_those_of_the_side_stream() -> None:
    assert WAITING == side_stream.WAITING


@pytest.mark.parametrize("sizes", [DENSE, MOE], ids=["dense", "experts"])
def test_sizes_are_those_of_the_model(sizes: dict[str, Any]) -> None:
    shape = ModelConfig(**sizes)
    with torch.device("meta"):
        block = Transformer(shape).layers[0]
    s = Sizes(shape, spec(weights="bfloat16"))
    assert largest_tensor(s) == max(p.numel() for p in block.parameters())
    largest = max(
        sum(p.numel() for n, p in part.named_parameters() if p.ndim > 1 and "router" not in n)
        for part in (block.attn, block.mlp)
    )
    assert sublayer_weights(s) == largest
    place = {"gradients": "released"}
    released = gradients_in_backward(Sizes(shape, spec(weights="bfloat16", **place)))
    offloaded = gradients_in_backward(Sizes(shape, spec(weights="bfloat16", offload_optimizer=True, **place)))
    assert released == 2 * largest and offloaded == 2 * largest + WAITING * 2 * largest_tensor(s)


def test_host_memory_item_by_item() -> None:
    shape = ModelConfig(**MOE)
    with torch.device("meta"):
        model = Transformer(shape)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert host_memory(shape, spec(2)) == {}
    options = {"weights": "bfloat16", "states": "8bit", "offload_optimizer": True, "gradients": "host"}
    found = host_memory(shape, spec(2, 4, activation_offloading=True, **options))
    assert found == {
        "optimizer states": int(matrices * (2 + 8 / 256)),
        "gradients": 2 * matrices,
        "activations": 2 * 2 * (4 * 2048) * 256 * 2,  # residual and delta of two of three blocks
    }
    assert "gradients" not in host_memory(shape, spec(1, gradients="released", weights="bfloat16"))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_is_the_weights_and_the_states_of_a_real_optimizer(name: str) -> None:
    shape = ModelConfig(**MOE)
    model = Transformer(shape)
    config = {"adamw": AdamWConfig(), "muon": MuonConfig(normalize="none")}[name]
    optimizer = build(model, config, Scaling(1.0, 1.0, 1.0))
    optimizer.create_state()
    states = optimizer.state_dict_flat()[0].values()
    found = sum(t.nbytes for t in [*model.parameters(), *states])
    assert checkpoint_bytes(shape, spec(optimizer=name)) == pytest.approx(found, rel=1e-4)
    shards = spec(4, optimizer=name, gpus=4, sharded=True, copies="use")
    assert checkpoint_bytes(shape, shards) == pytest.approx(found / 4, rel=1e-4)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_gradients_off_the_card_save_nearly_all_of_them(name: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1408}
    shape = ModelConfig(**WIDE, num_hidden_layers=32, **(experts if name == "experts" else {}))
    options: dict[str, Any] = {"weights": "bfloat16", "states": "8bit"}
    gradients = 2 * num_params(shape)
    for passes, place in ((4, "host"), (1, "released")):
        on_card = training_memory(shape, spec(passes, **options)).allocated
        found = training_memory(shape, spec(passes, gradients=place, **options))
        assert found.items["gradients"] < 0.3 * gradients
        if passes > 1:
            assert on_card - found.allocated > 0.6 * gradients
        for memory in instants(shape, spec(passes, gradients=place, **options)).values():
            assert memory.items["gradients"] < 0.3 * gradients


def test_transfers_cost_time_only_where_the_computation_is_shorter() -> None:
    shape = ModelConfig(**WIDE, num_hidden_layers=16)
    rates = Rates(matmul_flops=100e12, bandwidth=1e12)
    seconds = {}
    for link in (20e9, 1e8):
        slow = replace(rates, host_bandwidth=link)
        for passes, place in ((8, "device"), (8, "host"), (1, "released")):
            options = {"states": "8bit", "offload_optimizer": place == "released", "gradients": place}
            work = spec(passes, 16, weights="bfloat16", **options)
            seconds[link, place] = step_seconds(shape, work, slow)["offload"]
    gradients = 2 * num_params(shape)
    assert seconds[20e9, "device"] == seconds[20e9, "released"] == 0
    assert seconds[20e9, "host"] == pytest.approx(gradients / 20e9, rel=0.01)  # up for the update
    assert seconds[1e8, "host"] > 2 * gradients / 1e8 and seconds[1e8, "released"] > 0


def test_mlps_in_chunks_need_the_memory_of_a_chunk() -> None:
    """They need more than their share of whole MLPs only by the gradient of the residual and the sums in float32."""
    shape = ModelConfig(**WIDE, num_hidden_layers=4)
    plain, chunked = (spec(1, 16, mlp_chunk_tokens=chunk) for chunk in (None, 2048))
    work = [instants(shape, s)["backward"].items["workspace"] for s in (plain, chunked)]
    assert 0.3 * work[0] < work[1] < 0.8 * work[0]  # attention needs the rest
    rates = Rates(matmul_flops=100e12, bandwidth=1e12)
    slower = [step_seconds(shape, s, rates)["recompute"] for s in (plain, chunked)]
    mlp = 3 * 1024 * 2816 * 4
    expected = 8 * mlp * 15 / (1e12 * rates.fused.weights)
    assert slower[1] - slower[0] == pytest.approx(expected)
    whole = spec(1, 16, mlp_chunk_tokens=16 * 2048)
    assert instants(shape, whole) == instants(shape, plain)
