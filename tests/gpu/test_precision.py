"""Recipes on this GPU: products, sublayers, the weight cache, the head, and steps, native and emulated."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.config.recipes import RECIPES, Operand
from deskside.config.sections import PrecisionConfig
from deskside.kernels import fused
from deskside.kernels.attention import AttentionContext, document_positions
from deskside.model.transformer import Transformer
from deskside.precision import check
from deskside.precision.convert import QuantizedModel, convert, restore
from deskside.precision.products import Kind, product
from deskside.precision.quantized_linear import Quantizer, Shared
from deskside.precision.quantized_operand import (
    Draws,
    QuantizedOperand,
    cast_rowwise,
    quantize_operand,
)
from deskside.precision.scales import CURRENT_SCALING_STEPS, DelayedScales
from deskside.precision.selfcheck import check_head
from tests.gpu import card
from tests.precision.small import B, T, backward, error_and_slope, everywhere, fresh, make, worst
from tests.train import tiny_run

pytestmark = card.NEEDS_CARD
QUANTIZED = [name for name, recipe in RECIPES.items() if recipe.quantized]
FP8 = [name for name in QUANTIZED if any(f in ("e4m3", "e5m2") for f in RECIPES[name].formats)]
SDPA = AttentionContext(backend="sdpa")


def native_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no products in FP8")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


# Products


@pytest.mark.parametrize("name", RECIPES)
def test_the_self_check_passes(name: str) -> None:
    best, emulated = check(name, card.DEVICE), check(name, card.DEVICE, native=False)
    assert best.ok and emulated.ok, (best.reason, emulated.reason)
    if name in FP8:
        native_fp8()
        assert best.native and not emulated.native and best.reason == ""
    for kind, error in best.errors.items():
        assert error == pytest.approx(emulated.errors[kind], rel=0.03)
    on_cpu = check(name, "cpu", native=False)
    for kind, error in on_cpu.errors.items():
        assert error == pytest.approx(emulated.errors[kind], rel=0.05, abs=1e-5)


SIZES = {"output": (512, 256, 384), "input_gradient": (512, 384, 256), "weight_gradient": (256, 384, 2048)}


def dequantized(x: QuantizedOperand) -> Tensor:
    """Return the values in the tensor's own orientation if it is stored so, otherwise transposed."""
    values = x.values.double()
    if x.scale is None:
        return values
    return values * (x.scale.double() if x.scale.ndim == 0 else x.scale.double()[:, None])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fp8_products(scaling: str, kind: Kind, native: bool) -> None:
    """Compared with float64 products of the same operands, so only the order of
    sums and the result's rounding differ.

    Hopper's tensor cores sum FP8 products with 14 bits if `use_fast_accum` allows it, which only the output does.
    """
    if native:
        native_fp8()
    rows, columns, summed = SIZES[kind]
    gradient = "e4m3" if scaling == "row" or kind == "output" else "e5m2"
    left, right = Operand(gradient, scaling), Operand("e4m3", scaling)  # type: ignore[arg-type]
    draws = Draws(0)
    a = torch.randn(rows, summed, device=card.DEVICE).bfloat16()
    b = torch.randn(columns, summed, device=card.DEVICE).bfloat16()
    if kind == "output":
        x, y = quantize_operand(a, left, "columns", draws, 0), quantize_operand(b, right, "columns", draws, 0)
    elif kind == "input_gradient":
        x, y = (
            quantize_operand(a, left, "columns", draws, 0),
            quantize_operand(b.T.contiguous(), right, "rows", draws, 0),
        )
    else:
        x = quantize_operand(a.T.contiguous(), left, "rows", draws, 0)
        y = quantize_operand(b.T.contiguous(), right, "rows", draws, 0)
    truth = dequantized(x) @ dequantized(y).T
    assert truth.shape == (rows, columns)
    low = product(kind, x, y, torch.bfloat16, native)
    assert low.dtype == torch.bfloat16 and relative(low, truth) < 4e-3
    if scaling == "tensor" or not native:  # row scales require a bfloat16 result
        full = product(kind, x, y, torch.float32, native)
        assert full.dtype == torch.float32
        # Tensor cores truncate sums: 2e-6 over 2048 values, where rounding would give 1e-7.
        assert relative(full, truth) < (1e-3 if native and kind == "output" else 2e-4 if native else 1e-5)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("scaling", ["1x16", "16x16"])
def test_nvfp4_products(scaling: str, kind: Kind) -> None:
    """Emulated on the GPU: operands are bitwise those of a CPU, and products equal float64 up to the order of sums."""
    rows, columns, summed = SIZES[kind]
    left, right = Operand("nvfp4", "1x16"), Operand("nvfp4", scaling)  # type: ignore[arg-type]
    draws = Draws(0)
    shape_a = (summed, rows) if kind == "weight_gradient" else (rows, summed)
    shape_b = (columns, summed) if kind == "output" else (summed, columns)
    a, b = (torch.randn(*s, device=card.DEVICE).bfloat16() for s in (shape_a, shape_b))
    along_a, along_b = ("rows" if s[0] == summed else "columns" for s in (shape_a, shape_b))
    x, y = quantize_operand(a, left, along_a, draws, 0), quantize_operand(b, right, along_b, draws, 0)  # type: ignore[arg-type]
    for made, given, operand, along in ((x, a, left, along_a), (y, b, right, along_b)):
        exact = quantize_operand(given.cpu(), operand, along, draws, 0)  # type: ignore[arg-type]
        assert torch.equal(made.values.cpu(), exact.values)
        assert made.scale is not None and exact.scale is not None
        assert torch.equal(made.scale.cpu(), exact.scale)
    wide_a, wide_b = dequantized(x), dequantized(y)
    truth = (wide_a.T if along_a == "rows" else wide_a) @ (wide_b if along_b == "rows" else wide_b.T)
    assert relative(product(kind, x, y, torch.float32, native=True), truth) < 1e-5
    assert relative(product(kind, x, y, torch.bfloat16, native=False), truth) < 3e-3


def test_rows_and_columns_of_row_scaling() -> None:
    x = torch.randn(256, 384, device=card.DEVICE).bfloat16()
    both, of_rows, of_columns = cast_rowwise(x, torch.float8_e4m3fn)
    assert relative(both.rows.double() * of_rows.double()[:, None], x) < 0.03
    assert relative((both.columns.double() * of_columns.double()[:, None]).T, x) < 0.03


def test_a_card_without_the_conversion_takes_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a 30-series GPU: no kernel casts, and the numbers are the same."""
    x = torch.randn(256, 384, device=card.DEVICE).bfloat16()

    def rows() -> tuple[bool, Tensor]:
        shared = Shared(Draws(0), DelayedScales(16), False, True)
        operand = Operand("e4m3", "delayed")
        quantizer = Quantizer(operand, operand, shared, (0, 0))
        shared.scales.allocate(x.device)
        for _ in range(CURRENT_SCALING_STEPS):
            quantizer.quantize_rows(x)
            shared.scales.end_step()
        return quantizer.cast is not None, quantizer.quantize_rows(x)[0].values

    native_fp8()
    with_kernel, truth = rows()
    fused.writes_fp8.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *a: (8, 6))
        without, found = rows()
    fused.writes_fp8.cache_clear()
    assert (with_kernel, without) == (True, False)
    assert float((found.view(torch.uint8) == truth.view(torch.uint8)).float().mean()) > 0.99


# Sublayers


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no QK-norm": {"qk_norm": False},
    "ReLU^2, no gate": {"hidden_act": "relu2", "gated_mlp": False},
    "GELU": {"hidden_act": "gelu"},
    "windows": {"sliding_window": 9, "window_pattern": "SL"},
    "learned positions": {"position_embedding": "learned"},
    "tied embeddings": {"tie_word_embeddings": True},
}


def on_card(model: Transformer) -> Transformer:
    return model.to(card.DEVICE)


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_bf16_halves_against_float64(changes: dict[str, Any]) -> None:
    """The error is no larger than that of BF16 computed by autograd on the plain model."""
    context = AttentionContext(backend="reference")
    loss, truth = backward(on_card(make(torch.float64, **changes)), context)
    errors = {}
    for fused_halves in (False, True):
        model = on_card(make(**changes))
        applied = convert(model, "bf16", fused=fused_halves)
        low, found = backward(model, context)
        errors[fused_halves] = error_and_slope(found, truth)
        assert low == pytest.approx(loss, rel=0.01)
        assert (applied.shared.misses > 0) is fused_halves
    assert errors[True][0] < 1.2 * errors[False][0] < 0.08
    assert errors[True][1] == pytest.approx(1, abs=0.01)


def test_documents_of_packed_rows() -> None:
    ends = [0, 11, T, T + 1, 2 * T, 3 * T, 3 * T + 40, 4 * T, 4 * T]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=card.DEVICE)
    context = AttentionContext(cu_seqlens=cu_seqlens, max_seqlen=T, backend="reference")
    options = {"positions_BT": document_positions(cu_seqlens, B, T)}
    truth = backward(on_card(make(torch.float64)), context, **options)[1]
    model = on_card(make())
    convert(model, "bf16", fused=True)
    error, slope = error_and_slope(backward(model, context, **options)[1], truth)
    assert error < 0.05 and slope == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", QUANTIZED)
def test_recipes_on_the_card_are_those_of_a_cpu(name: str) -> None:
    """Compares the loss and the size of the gradients' errors, with native
    products where available, and emulated ones.
    """
    loss, truth = backward(fresh())
    model = fresh()
    expected = steps(model, convert(model, everywhere(name), fused=True, native=False), truth)
    for native in (True, False):
        if native and (name not in FP8 or not check(name, card.DEVICE, native=True).ok):
            continue
        model = on_card(fresh())
        applied = convert(model, everywhere(name), fused=True, native=native)
        for (low, error, slope), (_, wanted, _) in zip(steps(model, applied, truth), expected, strict=True):
            assert low == pytest.approx(loss, rel=1e-3)
            assert error == pytest.approx(wanted, rel=0.1)
            assert slope == pytest.approx(1, abs=0.01)


def steps(
    model: Transformer, applied: QuantizedModel, truth: dict[str, Tensor]
) -> list[tuple[float, float, float]]:
    made = []
    for step in range(1, CURRENT_SCALING_STEPS + 2):
        applied.begin_step(step)
        low, found = backward(model, SDPA)
        made.append((low, *error_and_slope(found, truth)))
        assert float(applied.scales.zero_or_nan()) == 0
        applied.end_step()
    return made


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "fp8-rowwise", "nvfp4", "nvfp4-eden"])
def test_what_is_recomputed_is_the_same(name: str) -> None:
    """Scales, signs and stochastic rounding are those of the first time. Only an embedding's sums may be reordered."""
    model = on_card(make())
    applied = convert(model, everywhere(name), fused=True)
    made = []
    for rung in ("none", "block"):
        applied.set_checkpointing(rung)
        applied.scales.reset()
        for step in range(1, CURRENT_SCALING_STEPS + 2):
            applied.begin_step(step)
            made.append(backward(model, AttentionContext(backend="reference"))[1])
            applied.end_step()
    for found, truth in zip(
        made[CURRENT_SCALING_STEPS + 1 :], made[: CURRENT_SCALING_STEPS + 1], strict=True
    ):
        assert worst(found, {n: t.double() for n, t in truth.items()}) < 1e-3


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "fp8-rowwise", "nvfp4"])
def test_converted_weights_are_kept_for_a_step_and_no_longer(name: str) -> None:
    """torch's fused AdamW changes weights without increasing their version, and the next step must see the change."""
    losses = {}
    for cache in (True, False):
        model = on_card(make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        applied = convert(model, everywhere(name), PrecisionConfig(weight_cache=cache), fused=True)
        losses[cache] = []
        for step in (1, 2, 3):
            applied.begin_step(step)
            loss, _ = backward(model, SDPA, passes=2)
            optimizer.step()
            applied.end_step()
            losses[cache].append(loss)
        weights = 4 * len(model.layers)
        uses = 3 * 2 * 2 * weights  # steps, passes, forward and backward
        assert applied.shared.hits + applied.shared.misses == uses
        assert applied.shared.misses == (3 * weights if cache else uses)
    assert losses[True] == pytest.approx(losses[False], rel=2e-3)
    assert losses[True][2] < losses[True][0]


def test_weight_gradients_are_added_inside_of_their_product() -> None:
    model = on_card(fresh())
    truth = None
    for inside in (False, True):
        convert(model, "bf16", PrecisionConfig(accumulate="fused" if inside else "native"), fused=True)
        found = backward(model, SDPA, passes=4)[1]
        truth = truth or {n: t.double() for n, t in found.items()}
        assert worst(found, truth) < 5e-3
        restore(model)


@pytest.mark.parametrize("native", [True, False])
def test_the_heads_selfcheck(native: bool) -> None:
    if native:
        native_fp8()
    result = check_head(card.DEVICE, native)
    assert result.ok and result.native is native, result.reason


@pytest.mark.parametrize("native", [True, False])
def test_the_head_in_fp8(native: bool) -> None:
    if native:
        native_fp8()
    model = on_card(fresh(vocab_size=4096))
    loss, truth = backward(model, SDPA)
    convert(model, "fp8-delayed", PrecisionConfig(head="fp8"), fused=True, native=native).begin_step(1)
    low, found = backward(model, SDPA)
    error, slope = error_and_slope(found, truth)
    assert low == pytest.approx(loss, rel=1e-3)
    assert 0.01 < error < 0.09 and slope == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_trouble(value: float) -> None:
    model = on_card(make())
    applied = convert(model, everywhere("fp8-delayed"), fused=True)
    for step in range(1, CURRENT_SCALING_STEPS + 1):
        applied.begin_step(step)
        backward(model, SDPA)
        assert float(applied.scales.zero_or_nan()) == 0
        applied.end_step()
    with torch.no_grad():
        next(iter(model.layers[1].mlp.parameters()))[:4] = value  # type: ignore[union-attr]
    applied.begin_step(3)
    backward(model, SDPA)
    assert not bool(applied.scales.zero_or_nan() == 0)


@pytest.mark.parametrize(
    "name", ["bf16", "fp8-delayed", "fp8-tensorwise", "fp8-rowwise", "nvfp4", "nvfp4-eden"]
)
def test_a_run_learns(name: str, data: Any, tmp_path: Any) -> None:
    """Covers all of `train`: self-check, fitting, steps, evaluation in BF16, checkpoint and export."""
    precision = {"name": name} if name == "bf16" else {"name": name, "keep_first": 0.0, "keep_last": 0.0}
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64}
    config = card.config(data, precision=precision, model=sizes, schedule={"length": "60 steps"})
    outcome = tiny_run.train(tmp_path, config)
    losses = card.losses(outcome.run.path)
    assert losses[-1] < losses[0] - 0.5 and outcome.summary["val_bpb"] < 4
