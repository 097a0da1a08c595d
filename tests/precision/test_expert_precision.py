"""Experts in FP8 and NVFP4: their products compared with float64 on
independently quantized operands, and whole steps.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.config.recipes import RECIPES, Operand, expert_recipe
from deskside.kernels import moe
from deskside.model.transformer import Transformer
from deskside.ops.moe import Experts, MoESublayer
from deskside.precision import expert_linear, nvfp4
from deskside.precision.convert import QuantizedModel, convert
from deskside.precision.expert_linear import ExpertLinear
from deskside.precision.fused_moe import FusedMoE
from deskside.precision.hardware_caps import HardwareCaps
from deskside.precision.quantized_linear import Shared
from deskside.precision.quantized_operand import Draws
from deskside.precision.scales import DelayedScales
from deskside.precision.selfcheck import check_experts
from deskside.precision.sorted_operand import SortedRows
from tests.precision.small import Gradients, make, tokens, worst
from tests.precision.test_fused_moe import EXPERTS, backward

QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantized]
E, M, K = 4, 256, 128
Multiply = Callable[..., Tensor]


def fp8_by_ml_dtypes(x_NK: Tensor, dim: int | None = 1) -> Tensor:
    """Return x in float64, quantized with a scale per row (dim=1) or one scale (dim=None) and dequantized."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    magnitude = x_NK.double().abs()
    largest = magnitude.max() if dim is None else magnitude.amax(dim, keepdim=True)
    scale = torch.where(largest == 0, 1.0, torch.exp2(torch.floor(torch.log2(448.0 / largest))))
    codes = (x_NK.double() * scale).float().numpy().astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.astype("float64")) / scale


def fake_quantized(x_NK: Tensor, operand: Operand, along: str) -> Tensor:
    """Return one expert's operand in float64, quantized and dequantized. Only for operands without random numbers."""
    if operand.scaling == "tensor":  # the rows of the other products, with one scale
        return fp8_by_ml_dtypes(fp8_by_ml_dtypes(x_NK), dim=None)
    if operand.format == "e4m3":
        return fp8_by_ml_dtypes(x_NK) if along == "columns" else fp8_by_ml_dtypes(x_NK.T).T
    if operand.format == "nvfp4":
        assert operand.rounding == "nearest" and not operand.fresh_signs
        return nvfp4.quantize(x_NK.contiguous(), operand, along).dequantized().double()  # type: ignore[arg-type]
    return x_NK.double()


def plan_of(recipe: str, caps: HardwareCaps | None = None) -> ExpertLinear:
    torch.manual_seed(0)
    experts = Experts(E, K, M // 2, "silu", gated=True)
    with torch.no_grad():
        experts.gate_up_weight.copy_(torch.randn(E, M, K) * torch.logspace(-3, 3, E)[:, None, None])
    shared = Shared(Draws(0), DelayedScales(1), native=caps is not None, cache=True)
    shared.caps = caps or HardwareCaps()
    return ExpertLinear(experts, "gate_up_weight", expert_recipe(RECIPES[recipe]), shared, 0)


def products(plan: ExpertLinear, routing: moe.Routing, x_ND: Tensor, g_SM: Tensor) -> dict[str, Tensor]:
    x = SortedRows(x_ND, routing)
    g = SortedRows(g_SM, routing, in_order=True)
    weight = plan.weight(torch.bfloat16)
    return {
        "output": plan.output(x, weight, torch.bfloat16),
        "input gradient": plan.input_gradient(g, weight, torch.bfloat16),
        "weight gradient": plan.weight_gradient(g, x),
    }


def routing_of(chosen: list[int], align: int) -> moe.Routing:
    """Route each token to one expert."""
    logits = torch.nn.functional.one_hot(torch.tensor(chosen), E).float() * 10
    return moe.route(logits, 1, True, align)


def operands(routing: moe.Routing, count: int) -> tuple[Tensor, Tensor]:
    """Return tokens (count, K) and gradients of sorted rows (S, M) in bfloat16. Padding has no gradient."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, K, generator=generator) * torch.logspace(-2, 2, count)[:, None]
    g = torch.randn(len(routing.tokens_S), M, generator=generator) * 1e-4
    g[routing.tokens_S < 0] = 0.0
    return x.bfloat16(), g.bfloat16()


CHOICES = {
    "some": [0] * 5 + [1] * 33 + [3] * 16 + [1],
    "all to one": [2] * 40,
    "one token": [3],
}


@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-rowwise", "fp8-nvfp4", "nvfp4", "nvfp4-4o6"])
def test_products_are_those_of_operands_that_others_quantized(recipe: str, chosen: list[int]) -> None:
    plan = plan_of(recipe)
    routing = routing_of(chosen, plan.align)
    x, g = operands(routing, len(chosen))
    found = products(plan, routing, x, g)
    rows, weight = moe.dispatch(x, routing.tokens_S), plan.parameter.detach()
    if recipe == "bf16":
        weight = weight.bfloat16()
    expected = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in found.items()}
    start, used = 0, plan.recipe
    for expert, end in enumerate(routing.ends_E.tolist()):
        part, w = slice(start, end), weight[expert]

        def operand(value: Tensor, side: Operand, along: str) -> Tensor | None:
            known = side.rounding == "nearest" and not side.fresh_signs
            return fake_quantized(value, side, along) if known else None

        wanted = (
            ("output", used.output, rows[part], "columns", w, "columns", part),
            ("input gradient", used.input_gradient, g[part], "columns", w, "rows", part),
            ("weight gradient", used.weight_gradient, g[part], "rows", rows[part], "rows", expert),
        )
        for name, product, a, along_a, b, along_b, place in wanted:
            left, right = operand(a, product.left, along_a), operand(b, product.right, along_b)
            if left is None or right is None:
                expected.pop(name, None)
            elif name == "weight gradient":
                expected[name][place] = left.T @ right
            else:
                expected[name][place] = left @ (right.T if name == "output" else right)
        start = end
    assert "output" in expected
    for name, truth in expected.items():
        error = float((found[name].double() - truth).norm() / truth.norm())
        assert error < 4e-3, name  # results are rounded to bfloat16, NVFP4's once more
    padding = routing.tokens_S < 0
    assert not found["output"][padding].any() and not found["input gradient"][padding].any()
    empty = [expert for expert in range(E) if expert not in chosen]
    assert not found["weight gradient"][empty].any()


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_every_product_is_within_the_recipes_tolerance(recipe: str) -> None:
    plan = plan_of(recipe)
    chosen = CHOICES["some"] * 8
    routing = routing_of(chosen, plan.align)
    x, g = operands(routing, len(chosen))
    x = x / x.float().square().mean(1, keepdim=True).sqrt().bfloat16()
    truth = products(plan_of("bf16"), routing, x, g)
    for name, value in products(plan, routing, x, g).items():
        error = float((value.double() - truth[name].double()).norm() / truth[name].double().norm())
        in_bf16 = name == "weight gradient" and not plan.recipe.weight_gradient.quantized
        assert (0.0 if in_bf16 else 0.005) <= error < (1e-3 if in_bf16 else plan.recipe.tolerance), name


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Compute what torch's operator is documented to return and to refuse
    (aten/native/cuda/GroupedBlas.cpp), in float64.
    """
    assert a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    assert scale_a.dtype == scale_b.dtype == torch.float32 and offs.dtype == torch.int32
    assert a.stride(-1) == 1 and b.stride(-2) == 1 and a.stride(0) % 16 == 0 and b.stride(-1) % 16 == 0
    assert a.shape[-1] % 16 == 0 and b.shape[-1] % 16 == 0 and b.shape[-2] % 16 == 0
    assert scale_a.is_contiguous() and scale_b.is_contiguous()
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    assert all(start % 16 == 0 for start in starts) and all(e > s for s, e in zip(starts, ends, strict=True))
    assert use_fast_accum == (b.dim() == 3)
    if b.dim() == 2:
        assert scale_a.shape == (len(ends) * len(a),) and scale_b.shape == (len(ends) * b.shape[1],)
        rows, columns = scale_a.view(len(ends), -1, 1).double(), scale_b.view(len(ends), 1, -1).double()
        sums = [a[:, s:e].double() @ b[s:e].double() for s, e in zip(starts, ends, strict=True)]
        return (torch.stack(sums) * rows * columns).bfloat16()
    assert ends[-1] == len(a) and scale_a.shape == a.shape[:1] and scale_b.shape == b.shape[::2]
    pieces = [
        (a[s:e].double() * scale_a[s:e, None]) @ (b[i].double() * scale_b[i])
        for i, (s, e) in enumerate(zip(starts, ends, strict=True))
    ]
    return torch.cat(pieces).bfloat16()


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-rowwise", "fp8-nvfp4"])
@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
def test_native_products_get_the_right_operands(
    recipe: str, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tensor] = []

    def called(*args: Any, **options: Any) -> Tensor:
        taken.append(scaled_grouped_mm(*args, **options))
        return taken[-1]

    monkeypatch.setattr(torch, "_scaled_grouped_mm", called)
    routing = routing_of(chosen, plan_of(recipe).align)
    x, g = operands(routing, len(chosen))
    native = products(plan_of(recipe, HardwareCaps(grouped_fp8=True)), routing, x, g)
    count = 1 if recipe == "fp8-nvfp4" else 3
    assert len(taken) == count
    emulated = products(plan_of(recipe), routing, x, g)
    assert len(taken) == count
    for name, value in native.items():
        torch.testing.assert_close(value, emulated[name], rtol=1e-2, atol=float(value.std()) * 1e-2)


def quantized_model(recipe: str, **options: Any) -> tuple[Transformer, QuantizedModel]:
    model = make(**{**EXPERTS, "moe_intermediate_size": 128})
    everywhere = replace(RECIPES[recipe], keep_first=0.0, keep_last=0.0)
    applied = convert(model, everywhere, fused=True, native=False, **options)
    return model, applied


def step(model: Transformer, applied: QuantizedModel, number: int = 1) -> Gradients:
    applied.begin_step(number)
    found = backward(model)[1]
    applied.end_step()
    return found


def distance(found: Gradients, truth: Gradients) -> float:
    ours, theirs = (torch.cat([g[name].double().flatten() for name in truth]) for g in (found, truth))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name in ("fp8-delayed", "nvfp4-eden") else pytest.mark.full)
        for name in QUANTIZED
    ],
)
def test_a_whole_step_is_near_float64_and_repeats(recipe: str) -> None:
    truth = backward(make(torch.float64, **{**EXPERTS, "moe_intermediate_size": 128}))[1]
    model, applied = quantized_model(recipe)
    assert all(isinstance(block.mlp.forward_override, FusedMoE) for block in model.layers)
    found = step(model, applied)
    assert 0.01 < distance(found, truth) < 5 * RECIPES[recipe].tolerance
    again, applied = quantized_model(recipe)
    repeated = step(again, applied)
    assert all(torch.equal(found[name], repeated[name]) for name in found)


@pytest.mark.parametrize("recipe", ["fp8-delayed", pytest.param("nvfp4-4o6", marks=pytest.mark.full)])
def test_a_recomputation_is_the_same_to_the_bit(recipe: str) -> None:
    model, applied = quantized_model(recipe)
    truth = step(model, applied)
    again, applied = quantized_model(recipe)
    applied.set_checkpointing("block")
    found = step(again, applied)
    experts = [name for name in truth if "experts" in name]
    assert experts
    if recipe == "fp8-delayed":  # no random numbers
        assert worst(found, {n: t.double() for n, t in truth.items()}) == 0
    else:
        assert distance(found, truth) < 0.5


def test_what_stays_in_bf16_does() -> None:
    model = make(**{**EXPERTS, "moe_intermediate_size": 128})
    applied = convert(model, RECIPES["nvfp4"], fused=True, native=False)
    first, last = RECIPES["nvfp4"].kept_blocks(len(model.layers))
    plain = []
    for block in model.layers:
        assert isinstance(block.mlp, MoESublayer)
        override = block.mlp.forward_override
        assert isinstance(override, FusedMoE) and override.gate_up.plain == override.down.plain
        plain.append(override.gate_up.plain)
        assert override.align == (1 if override.gate_up.plain else 128)
    assert plain == [True] * first + [False] * (len(plain) - first - last) + [True] * last
    with applied.high_precision():
        assert all(block.mlp.forward_override.gate_up.plain for block in model.layers)


def test_weights_are_quantized_once_a_step_for_all_passes() -> None:
    model, applied = quantized_model("fp8-delayed")
    applied.begin_step(1)
    backward(model, passes=2)
    layers = len(model.layers)
    assert applied.shared.misses == layers * (2 + 3)  # two of attention; router, gate and up, down
    override = model.layers[0].mlp.forward_override
    assert override.gate_up.converted.cached is not None
    rows, columns = override.gate_up.converted.cached[1:]
    assert rows.values.dtype == columns.values.dtype == torch.float8_e4m3fn
    applied.end_step()
    applied.begin_step(2)
    backward(model)
    assert applied.shared.misses == 2 * layers * (2 + 3)


def test_experts_use_rowwise_fp8_and_say_so() -> None:
    for name, recipe in RECIPES.items():
        used = expert_recipe(recipe)
        assert used.name == ("fp8-rowwise" if name.startswith("fp8-") and name != "fp8-nvfp4" else name)
        for product in used.products:
            scaling = "tensor" if product is used.weight_gradient else "row"
            for operand in (product.left, product.right):
                assert operand.format not in ("e4m3", "e5m2") or operand == Operand("e4m3", scaling)
        if not name.startswith("fp8"):
            assert used == recipe


def test_router_and_statistics_do_not_see_padding() -> None:
    """The logits are computed in bfloat16 from the same inputs, so the first
    layer makes the same choice in every recipe.
    """
    seen: dict[str, Tensor] = {}
    for recipe in ("bf16", "fp8-delayed"):
        model = make(**{**EXPERTS, "moe_intermediate_size": 128, "num_hidden_layers": 1})
        convert(model, recipe, fused=True, native=False)
        residual = model.embed(tokens())
        out = model.layers[0].mlp.forward_override(residual, torch.zeros_like(residual))
        seen[recipe] = out[2]
    assert torch.equal(seen["bf16"], seen["fp8-delayed"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_selfcheck_of_experts_passes_on_cpu(recipe: str) -> None:
    result = check_experts(recipe, "cpu")
    assert result.ok and result.reason == ""
    assert result.native == (not RECIPES[recipe].quantized)
    for (name, error), product in zip(
        result.errors.items(), expert_recipe(RECIPES[recipe]).products, strict=True
    ):
        assert (0.01 if product.quantized else 0.0) <= error < RECIPES[recipe].tolerance, name


@pytest.mark.parametrize("kind", ["output", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize(("factor", "how"), [(0.0, "all zero"), (0.7, "off by"), (math.nan, "not finite")])
def test_the_selfcheck_of_experts_sees_each_product(
    kind: str, factor: float, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expert_linear.grouped_product

    def spoiled(which: Any, *operands: Any) -> Tensor:
        return right(which, *operands) * (factor if which == kind else 1.0)

    monkeypatch.setattr(expert_linear, "grouped_product", spoiled)
    result = check_experts("fp8-delayed", "cpu")
    assert not result.ok and f"{kind.replace('_', ' ')} is {how}" in result.reason


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, ValueError])
def test_the_selfcheck_emulates_where_torch_has_no_product(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Tensor:
        raise error("only on compute capability 9.0")

    caps = HardwareCaps(grouped_fp8=True)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    assert check_experts("fp8-delayed", "cpu", caps=caps).native
    monkeypatch.setattr(torch, "_scaled_grouped_mm", refuses)
    result = check_experts("fp8-delayed", "cpu", caps=caps)
    assert result.ok and not result.native and "9.0" in result.reason
    assert not check_experts("fp8-delayed", "cpu", native=True, caps=caps).ok


def test_a_shared_expert_stays_in_bf16() -> None:
    shared = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "qk_norm": False}
    model = make(**{**EXPERTS, **shared})
    applied = convert(model, "fp8-delayed", fused=True, native=False)
    assert not applied._linears
    step(model, applied)
    for block in model.layers:
        override = block.mlp.forward_override
        assert isinstance(override, FusedMoE) and override.shared_expert is not None
        values = [cache.cached[1].values for cache in override.shared_expert.caches if cache.cached]
        assert values and all(value.dtype == torch.bfloat16 for value in values)
        assert not override.gate_up.plain
