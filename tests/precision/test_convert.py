"""A recipe is applied to a model, switched off and on, and removed again."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deskside.budget.scaling import Scaling
from deskside.config import merge
from deskside.config.dimensions import check_dimensions
from deskside.config.model import ModelConfig
from deskside.config.recipes import RECIPES
from deskside.config.run import RunConfig
from deskside.config.sections import BatchConfig, PrecisionConfig
from deskside.config.step_options import kept_weights
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.ops.composite import AddNormLinear, AttentionSublayer, MLPSublayer
from deskside.ops.linear import Linear
from deskside.optim.build import build
from deskside.precision.convert import convert, restore, unsupported_reason
from deskside.precision.selfcheck import check
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop.step import Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.parallel import World
from deskside.utils.errors import UsageError
from tests.precision.small import (
    SIZES,
    backward,
    everywhere,
    fresh,
    make,
    plans_of,
    quantized_layers,
    tokens,
    worst,
)

QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantized]


def executions(model: nn.Module) -> list[object]:
    kinds = (AttentionSublayer, MLPSublayer, Linear, AddNormLinear)
    return [
        m.forward_override for m in model.modules() if isinstance(m, kinds) and m.forward_override is not None
    ]


@pytest.mark.parametrize(
    ("name", "fused"), [*((name, True) for name in RECIPES), ("bf16", False), ("fp8-rowwise", False)]
)
def test_restore_leaves_no_trace(name: str, fused: bool) -> None:
    model = make(num_hidden_layers=2)
    with torch.no_grad():
        before = model(tokens())
    weights = {n: p.clone() for n, p in model.named_parameters()}
    convert(model, everywhere(name), PrecisionConfig(head="fp8"), fused=fused, native=False).begin_step(1)
    backward(model)
    restore(model)
    assert executions(model) == []
    with torch.no_grad():
        assert torch.equal(model(tokens()), before)
    assert all(torch.equal(p, weights[n]) and p.dtype == torch.float32 for n, p in model.named_parameters())


def test_another_recipe_takes_the_place_of_the_first() -> None:
    model = make(num_hidden_layers=2)
    truth = backward(model)[1]
    convert(model, everywhere("nvfp4"), native=False)
    convert(model, "fp32", fused=True)
    assert worst(backward(model)[1], {n: t.double() for n, t in truth.items()}) < 1e-4


@pytest.mark.parametrize(
    ("shares", "layers", "kept"),
    [
        ((0.0, 0.0), 4, (0, 0)),
        ((2 / 62, 8 / 62), 12, (1, 2)),
        ((0.5, 0.0), 4, (2, 0)),
        ((0.0, 0.3), 4, (0, 2)),
    ],
)
def test_kept_blocks_compute_in_bf16(shares: tuple[float, float], layers: int, kept: tuple[int, int]) -> None:
    model = fresh(num_hidden_layers=layers)
    recipe = replace(RECIPES["nvfp4"], keep_first=shares[0], keep_last=shares[1])
    applied = convert(model, recipe, fused=True, native=False)
    assert recipe.kept_blocks(layers) == kept
    assert quantized_layers(applied) == 4 * (layers - sum(kept))
    plain = [block.attn.forward_override.first.plain for block in model.layers]
    assert plain == [True] * kept[0] + [False] * (layers - sum(kept)) + [True] * kept[1]


def test_kept_blocks_are_as_written_where_bf16_is_not_fused() -> None:
    model = fresh()
    convert(model, replace(RECIPES["fp8-rowwise"], keep_first=0.3), fused=False, native=False)
    assert [block.mlp.forward_override is None for block in model.layers] == [True, False, False]


@pytest.mark.parametrize(
    ("keep", "left"), [((), 12), (("o_proj",), 9), (("o_proj", "down_proj"), 6), (("k_proj", "up_proj"), 6)]
)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_projections_that_stay_in_bf16(keep: tuple[str, ...], left: int, norm: str) -> None:
    """A fused weight stays in BF16 if one of its projections does, in fused sublayers and, where those
    do not cover the model, in single layers.
    """
    applied = convert(
        fresh(norm=norm), everywhere("fp8-tensorwise"), PrecisionConfig(keep=keep), fused=True, native=False
    )
    assert quantized_layers(applied) == left


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("keep", [("o_proj",), ("k_proj", "up_proj"), ("down_proj", "gate_proj", "q_proj")])
def test_what_the_planner_counts_as_kept_is_kept(keep: tuple[str, ...], fused: bool) -> None:
    model = fresh(fused_qkv=fused, fused_gate_up=fused)
    inside = [m for block in model.layers for m in block.modules() if isinstance(m, Linear)]
    applied = convert(
        model, everywhere("fp8-tensorwise"), PrecisionConfig(keep=keep), fused=fused, native=False
    )
    low = sum(p.linear.weight.numel() for p in plans_of(applied) if not p.plain)
    whole = sum(m.weight.numel() for m in inside)
    config = RunConfig(
        model=model.config,
        batch=BatchConfig(sequence_length=64, tokens=256),
        precision=PrecisionConfig(name="fp8-tensorwise", keep=keep),
    )
    assert kept_weights(config, "fp8-tensorwise") == pytest.approx(1 - low / whole)
    assert kept_weights(config, "bf16") == 0


def test_the_router_and_the_head_stay() -> None:
    model = fresh(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    convert(model, everywhere("fp8-tensorwise"), native=False)
    names = {
        s.name for m in model.modules() if isinstance(m, Linear) and m.forward_override for s in m.slices
    }
    assert "router" not in names and "lm_head" not in names


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"intermediate_size": 72}, "fp8-delayed", ("down_proj", "72 input", "16")),
        ({"intermediate_size": 144}, "nvfp4-eden", ("288 output", "128", "use bf16")),
        ({"hidden_size": 136}, "nvfp4", ("136", "16")),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    changes: dict[str, Any], name: str, words: tuple[str, ...]
) -> None:
    model = fresh(**changes)
    with pytest.raises(UsageError) as error:
        convert(model, everywhere(name), native=False)
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words), line


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(QUANTIZED),
    hidden=st.integers(1, 24),
    inside=st.integers(1, 24),
    heads=st.integers(1, 4),
    grouped=st.booleans(),
    channels=st.sampled_from([8, 16, 32, 64, 128]),
    gated=st.booleans(),
    apart=st.booleans(),
)
def test_the_configuration_refuses_what_the_layers_cannot_do(
    name: str, hidden: int, inside: int, heads: int, grouped: bool, channels: int, gated: bool, apart: bool
) -> None:
    """And nothing else: every accepted option can be applied."""
    sizes: dict[str, Any] = {
        "hidden_size": 16 * hidden,
        "intermediate_size": 16 * inside,
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads if grouped else 2 * heads,
        "head_dim": channels,
        "gated_mlp": gated,
        "fused_qkv": not apart,
    }
    with torch.device("meta"):
        model = Transformer(ModelConfig(**{**SIZES, **sizes}))
    try:
        check_dimensions(everywhere(name), model.config)
    except ValueError:
        with pytest.raises(UsageError):
            convert(model, everywhere(name), native=False)
    else:
        convert(model, everywhere(name), native=False)


def test_amds_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert unsupported_reason(RECIPES["fp8-delayed"], cuda) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name in QUANTIZED:
        assert "AMD" in (unsupported_reason(RECIPES[name], cuda) or "")
        result = check(name, cuda)
        assert not result.ok and "use bf16" in result.reason
    assert (
        unsupported_reason(RECIPES["bf16"], cuda) is None
        and unsupported_reason(RECIPES["nvfp4"], cpu) is None
    )


# Switched off and on


@pytest.mark.parametrize(
    "name",
    [
        "bf16",
        *(
            pytest.param(name, marks=() if name in ("fp8-delayed", "nvfp4") else pytest.mark.full)
            for name in QUANTIZED
        ),
    ],
)
def test_evaluation_is_in_bf16_and_changes_nothing(name: str) -> None:
    """Evaluated between two steps: the loss is BF16's, and the second step equals that of a run without evaluation."""
    model, other = fresh(num_hidden_layers=2), fresh(num_hidden_layers=2)
    with torch.no_grad():
        convert(other, "bf16", fused=True)
        wanted = other.loss(tokens(), tokens(1))
    runs = []
    for evaluate in (False, True):
        applied = convert(model, everywhere(name), fused=True, native=False)
        for step in (1, 2, 3):
            applied.begin_step(step)
            gradients = backward(model)[1]
            applied.end_step()
            if evaluate:
                with applied.high_precision(), torch.no_grad():
                    assert torch.equal(model.loss(tokens(), tokens(1)), wanted)
                assert applied.active
        runs.append((gradients, {n: t.clone() for n, t in applied.scales.state_dict().items()}))
    assert worst(runs[1][0], {n: t.double() for n, t in runs[0][0].items()}) == 0
    assert runs[0][1].keys() == runs[1][1].keys()
    assert all(torch.equal(t, runs[1][1][n]) for n, t in runs[0][1].items())
    assert bool(runs[0][1]) == (name == "fp8-delayed")


def test_plain_ends_where_an_error_ends_it() -> None:
    applied = convert(fresh(), everywhere("fp8-tensorwise"), native=False)
    with pytest.raises(ZeroDivisionError), applied.high_precision():
        assert not applied.active
        raise ZeroDivisionError
    assert applied.active
    applied.set_active(False)
    with applied.high_precision():
        pass
    assert not applied.active  # as it was


def stepper(model: Transformer, **precision: Any) -> Stepper:
    config = merge.build(
        [{"precision": {"name": "fp8-delayed", **precision}, "model": {"intermediate_size": 128}}]
    )
    applied = convert(model, everywhere("fp8-delayed"), fused=True, native=False)
    optimizer = build(model, config.optim, Scaling(1.0, 1.0, 1.0), fused=False)
    attention, world = AttentionBackends("reference"), World(torch.device("cpu"))
    context = TrainContext(config=config, world=world, model=model, attention=attention, precision=applied)
    return Stepper(context, optimizer)


@pytest.mark.parametrize(
    ("precision", "quantised"),
    [
        ({}, "1111111111"),
        ({"warmup_steps": 3}, "0001111111"),
        ({"bf16_from": 0.7}, "1111111000"),
        ({"warmup_steps": 2, "bf16_from": 0.5}, "0011100000"),
    ],
)
def test_steps_in_which_the_recipe_holds(precision: dict[str, Any], quantised: str) -> None:
    model = fresh()
    with_recipe = stepper(model, **precision)
    found = []
    for done in range(10):
        with_recipe.set_progress(1.0, done / 10, done)
        found.append(with_recipe.precision.active)
        assert model.layers[0].mlp.forward_override.first.plain is not found[-1]
    assert "".join(str(int(active)) for active in found) == quantised


def test_steps_in_bf16_leave_no_mark_in_the_scales() -> None:
    model = fresh()
    applied = convert(model, everywhere("fp8-delayed"), fused=True, native=False)
    applied.set_active(False)
    applied.begin_step(1)
    backward(model, AttentionContext(backend="sdpa"))
    applied.end_step()
    assert applied.scales.steps == 0
    applied.set_active(True)
    applied.begin_step(2)
    backward(model)
    applied.end_step()
    assert applied.scales.steps == 1 and bool(applied.scales.history[0].any())


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, float("inf")) for name in QUANTIZED), ("fp8-delayed", float("nan")), ("nvfp4", float("nan"))],
)
def test_a_weight_that_is_not_finite_reaches_loss_gradients_or_trouble(name: str, value: float) -> None:
    """Saturation must not hide it from a step's check for finite values."""
    model = make(num_hidden_layers=2)
    applied = convert(model, everywhere(name), fused=True, native=False)
    for step in range(1, 4 if name == "fp8-delayed" else 2):
        applied.begin_step(step)
        backward(model)
        assert float(applied.scales.zero_or_nan()) == 0
        applied.end_step()
    with torch.no_grad():
        model.layers[1].mlp.input.projections[0].weight[3, 4] = value
    applied.begin_step(4)
    loss, gradients = backward(model)
    seen = [torch.tensor(loss), applied.scales.zero_or_nan(), *gradients.values()]
    assert not all(bool(Tensor.isfinite(t).all()) for t in seen)
