"""Experts in FP8 and NVFP4 on this GPU: casts, torch's grouped product of FP8 operands, and a whole step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deskside.config.recipes import RECIPES, expert_recipe
from deskside.kernels import moe
from deskside.kernels.moe import fp8_rows
from deskside.ops.moe import Experts
from deskside.precision.convert import QuantizedModel, convert
from deskside.precision.expert_linear import ExpertLinear
from deskside.precision.hardware_caps import HardwareCaps, hardware_caps
from deskside.precision.quantized_linear import Shared
from deskside.precision.quantized_operand import Draws
from deskside.precision.scales import DelayedScales
from deskside.precision.selfcheck import check_experts
from deskside.precision.sorted_operand import SortedRows
from tests.gpu import card
from tests.gpu.test_moe import error, gradients, random
from tests.precision.small import make

pytestmark = card.NEEDS_CARD
QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantized]
SHAPES = ((4096, 8, 2, 512, 704), (1000, 64, 8, 256, 128), (333, 5, 1, 64, 48), (64, 128, 8, 128, 64))


def has_grouped_fp8() -> bool:
    return torch.cuda.is_available() and hardware_caps(torch.device(card.DEVICE), mxfp8=False).grouped_fp8


def routing_of(N: int, E: int, k: int, align: int = 16) -> moe.Routing:
    logits = torch.randn(N, E, device=card.DEVICE)
    logits[:, E // 2] -= 100.0  # an expert without tokens, unless every token chooses all
    return moe.route(logits, k, True, align)


@pytest.mark.parametrize(("N", "E", "k", "D", "F"), SHAPES)
def test_casts_equal_their_reference_to_the_bit(N: int, E: int, k: int, D: int, F: int) -> None:
    torch.manual_seed(0)
    routing = routing_of(N, E, k)
    x = random(N, D) * torch.logspace(-6, 6, N, device=card.DEVICE)[:, None].bfloat16()
    x[0] = 0.0
    choices = routing.slots_Nk, routing.tokens_S
    rows, (cast, inverse) = moe.dispatch(x, routing.tokens_S), fp8_rows.dispatch_fp8(x, *choices)
    weight = torch.randn(E, F // 16 * 16, D, device=card.DEVICE)
    cases = (
        tuple(module.dispatch_fp8(x, *choices) for module in (moe, fp8_rows)),
        (moe.cast_rows(rows), fp8_rows.cast_rows(rows)),
        (moe.cast_weight_columns(weight), fp8_rows.cast_weight_columns(weight)),
        tuple(module.transpose_rows(cast, inverse, routing.ends_E) for module in (moe, fp8_rows)),
        tuple(
            module.dispatch_columns(x, routing.tokens_S, inverse, routing.ends_E)
            for module in (moe, fp8_rows)
        ),
    )
    for results in cases:
        for ours, truth in zip(*results, strict=True):
            assert torch.equal(ours.float(), truth.float())
    assert all(torch.equal(*pair) for pair in zip(moe.cast_weight_columns(weight), cases[2][0], strict=True))


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False)])
@pytest.mark.parametrize(("N", "E", "k", "D", "F"), SHAPES)
def test_gates_to_fp8_equal_their_reference(
    N: int, E: int, k: int, D: int, F: int, activation: str, gated: bool
) -> None:
    """The sigmoid is approximate, so a value or a scale may be rounded in the other direction."""
    torch.manual_seed(0)
    routing = routing_of(N, E, k)
    S, weights = len(routing.tokens_S), routing.weights_S
    x, grad = random(S, 2 * F if gated else F), random(S, F)
    for function, arguments in (
        ("weighted_gated_fp8", (x, weights, activation, gated)),
        ("weighted_gated_backward_fp8", (grad, x, weights, activation, gated)),
    ):
        results = [getattr(module, function)(*arguments) for module in (moe, fp8_rows)]
        for ours, truth in zip(*results, strict=True):
            assert ours.dtype == truth.dtype and ours.shape == truth.shape
            assert error(ours.float(), truth.float()) < 2e-2
        repeated = getattr(moe, function)(*arguments)
        for ours, again in zip(results[0], repeated, strict=True):
            assert torch.equal(ours.float(), again.float())


@pytest.mark.skipif(not has_grouped_fp8(), reason="needs compute capability 9.0 or 10.x")
@pytest.mark.parametrize(("N", "E", "k", "D", "F"), SHAPES)
def test_native_products_equal_emulated_ones(N: int, E: int, k: int, D: int, F: int) -> None:
    """The scales are powers of two, so only the order of sums and the fast accumulation of the output differ."""
    torch.manual_seed(0)
    routing = routing_of(N, E, k)
    experts = Experts(E, D, F // 16 * 16, "silu", gated=True).to(card.DEVICE)
    torch.nn.init.normal_(experts.gate_up_weight)
    x, g = random(N, D), random(len(routing.tokens_S), experts.gate_up_weight.shape[1])
    g = g.masked_fill((routing.tokens_S < 0)[:, None], 0.0)
    found: dict[bool, list[Tensor]] = {}
    for native in (True, False):
        shared = Shared(Draws(0), DelayedScales(1), native, cache=True, caps=HardwareCaps(grouped_fp8=native))
        plan = ExpertLinear(experts, "gate_up_weight", expert_recipe(RECIPES["fp8-delayed"]), shared, 0)
        forms = plan.weight(torch.bfloat16)
        inputs, grads = (
            SortedRows(x, routing),
            SortedRows(g, routing, in_order=True),
        )
        found[native] = [
            plan.output(inputs, forms, torch.bfloat16),
            plan.input_gradient(grads, forms, torch.bfloat16),
            plan.weight_gradient(grads, inputs),
        ]
    for ours, truth in zip(found[True], found[False], strict=True):
        assert bool(ours.isfinite().all()) and error(ours, truth) < 1e-2
    padding = routing.tokens_S < 0
    assert bool(padding.any()) and not found[True][0][padding].any() and not found[True][1][padding].any()


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_selfcheck_passes(recipe: str) -> None:
    result = check_experts(recipe, card.DEVICE)
    assert result.ok, result.reason
    fp8 = any(product.left.format == "e4m3" for product in expert_recipe(RECIPES[recipe]).products)
    assert result.native == (fp8 and has_grouped_fp8()), result.reason


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_step_is_near_float64_and_repeats_without_synchronising(recipe: str) -> None:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    truth = gradients(make(torch.float64, **sizes).to(card.DEVICE))
    everywhere = replace(RECIPES[recipe], keep_first=0.0, keep_last=0.0)

    def step(checkpointing: str = "none") -> tuple[QuantizedModel, dict[str, Tensor]]:
        model = make(**sizes).to(card.DEVICE)
        applied = convert(model, everywhere, fused=True)
        applied.set_checkpointing(checkpointing)
        applied.begin_step(1)
        return applied, gradients(model)

    applied, found = step()
    pairs = [(found[n].double().flatten(), truth[n].flatten()) for n in truth]
    a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
    assert 0.01 < float((a - b).norm() / b.norm()) < 5 * RECIPES[recipe].tolerance
    again = step()[1]
    assert all(torch.equal(found[n], again[n]) for n in truth)
    if recipe.startswith("fp8-") and recipe != "fp8-nvfp4":  # no random numbers
        recomputed = step("block")[1]
        assert all(torch.equal(found[n], recomputed[n]) for n in truth)
    applied.begin_step(2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients_of_step_without_copies(applied)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients_of_step_without_copies(applied: QuantizedModel) -> None:
    """Run forward and backward of the first layer's experts, which must not wait
    for the device, and return the gradients.
    """
    mlp = applied.model.layers[0].mlp  # type: ignore[union-attr,index]
    residual = torch.zeros(2, 64, 128, dtype=torch.bfloat16, device=card.DEVICE)
    delta = torch.ones_like(residual).requires_grad_()
    out = mlp.forward_override(residual, delta)  # type: ignore[union-attr]
    (out[0].sum() + out[1].sum()).backward()
