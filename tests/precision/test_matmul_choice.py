"""Fused sublayers whose products are those of quack-kernels, here computed by torch."""

from typing import Any

import pytest
import torch

from deskside.config.sections import PrecisionConfig
from deskside.kernels.choose_matmul import MatmulChoice
from deskside.model.transformer import Transformer
from deskside.precision.convert import QuantizedModel, convert
from tests.kernels.quack_reference import TILE, use_reference
from tests.precision.small import backward, make, worst

LAYERS = 3
PLAIN = {(kind, *size): TILE for kind in ("output", "input_gradient") for size in ((256, 128), (128, 128))}


def converted(model: Transformer, choice: MatmulChoice | None, recipe: str = "fp32") -> QuantizedModel:
    applied = convert(model, recipe, fused=True)
    if choice is not None:
        applied.use_matmul(choice)
    return applied


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return use_reference(monkeypatch)


@pytest.mark.parametrize("checkpointing", ["none", "mlp", "block"])
def test_gradients_are_those_of_the_model(launched: list[str], checkpointing: str) -> None:
    model = make()
    loss, truth = backward(model)
    applied = converted(model, MatmulChoice(PLAIN, (TILE, TILE)))
    applied.set_checkpointing(checkpointing)
    again, found = backward(model)
    assert again == pytest.approx(loss, rel=1e-6)
    assert worst(found, truth) < 1e-5
    recomputed = 1 if checkpointing == "none" else 2
    assert launched.count("gate") == recomputed * LAYERS and launched.count("gate_gradient") == LAYERS
    assert launched.count("plain") > 4 * LAYERS  # qkv and o in both directions, and the other two of the MLP


def test_a_converted_weight_follows_the_optimizer(launched: list[str]) -> None:
    model = make()
    applied = converted(model, MatmulChoice({}, (TILE, TILE)))
    backward(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    applied.end_step()
    applied.begin_step(1)
    found = backward(model)
    plain = make()
    plain.load_state_dict(model.state_dict())
    assert found[0] == pytest.approx(backward(plain)[0], rel=1e-6)


@pytest.mark.parametrize("gated", [True, False])
def test_without_tiles_nothing_is_launched(launched: list[str], gated: bool) -> None:
    model = make(gated_mlp=gated)
    converted(model, MatmulChoice({}, None))
    backward(model)
    assert launched == []


def test_the_products_that_can_have_tiles() -> None:
    applied = converted(make(), None, "bf16")
    shape = applied.matmul_shape(64)
    assert shape is not None and shape.gated == (128, 128)
    assert shape.weights == ((128, 128), (256, 128))
    applied.set_checkpointing("block")
    applied.set_mlp_chunk(64)
    shape = applied.matmul_shape(64)
    assert shape is not None and shape.gated is None


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"gated_mlp": False, "hidden_act": "relu2"}])
def test_only_silu_has_an_epilogue(changes: dict[str, Any]) -> None:
    shape = converted(make(**changes), None, "bf16").matmul_shape(64)
    assert shape is not None and shape.gated is None


def test_other_recipes_and_16_bit_weights_have_none() -> None:
    for recipe in ("fp32", "fp8-delayed"):
        assert converted(make(), None, recipe).matmul_shape(64) is None
    half = make()
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    assert converted(half, None, "bf16").matmul_shape(64) is None


def test_chunks_are_set_before_tiles(launched: list[str]) -> None:
    applied = converted(make(), MatmulChoice({}, (TILE, TILE)))
    applied.set_checkpointing("block")
    with pytest.raises(AssertionError, match="chunks"):
        applied.set_mlp_chunk(64)


def test_gradients_that_are_added_inside_products_leave_the_gate_alone() -> None:
    applied = convert(make(), "bf16", PrecisionConfig(accumulate="fused"), fused=True)
    shape = applied.matmul_shape(64)
    assert shape is not None and shape.gated is None


@pytest.mark.parametrize("cache", [True, False])
def test_two_passes_add_up(launched: list[str], cache: bool) -> None:
    model = make()
    _, truth = backward(model)
    applied = convert(model, "fp32", PrecisionConfig(weight_cache=cache), fused=True)
    applied.use_matmul(MatmulChoice({}, (TILE, TILE)))
    assert worst(backward(model, passes=2)[1], truth) < 1e-5
