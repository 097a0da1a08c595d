"""Frozen NF4 and INT8 weights compared with bitsandbytes' own modules and
float64, and their guarantees for training.
"""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig
from deskside.kernels.attention import AttentionContext
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.ops.linear import Linear
from deskside.ops.moe import Experts
from deskside.optim.build import build
from deskside.precision.frozen import FrozenExperts, FrozenLinear, freeze, stored_bytes
from deskside.utils.errors import UsageError
from tests.optim.models import NO_SCALING, make

FORMATS = ["nf4", "int8"]
IN, ROWS = 192, 96


def linear(bias: bool = False) -> Linear:
    layer = Linear(IN, [("q", 64), ("k", 32)], bias=bias)
    torch.manual_seed(0)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def frozen(given: Linear, format: str) -> FrozenLinear:
    layer = freeze(given, format)  # type: ignore[arg-type]
    assert isinstance(layer, FrozenLinear)
    return layer


def transformer(experts: int = 0) -> Transformer:
    config = ModelConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, max_position_embeddings=64,
        **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if experts else {}),
    )  # fmt: skip
    model = Transformer(config)
    initialize(model, 0)
    return model


def test_nf4_is_bitsandbytes_linear4bit() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    source = linear()
    theirs = bitsandbytes.nn.Linear4bit(
        IN, ROWS, bias=False, compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4"
    )
    theirs.weight = bitsandbytes.nn.Params4bit(
        source.weight.detach().clone(),
        requires_grad=False,
        compress_statistics=True,
        quant_type="nf4",
        blocksize=64,
    )
    theirs = theirs.to("cpu")
    ours = frozen(source, "nf4")
    assert torch.equal(ours.codes.flatten(), theirs.weight.data.flatten())
    x = torch.randn(5, IN).bfloat16().requires_grad_()
    y, other = ours(x), theirs(x)
    torch.testing.assert_close(y, other, rtol=0.02, atol=2e-3)
    (grad,) = torch.autograd.grad(y.float().sum(), x)
    (expected,) = torch.autograd.grad(other.float().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=0.02, atol=2e-3)


def test_int8_codes_are_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    source = linear()
    with torch.no_grad():
        source.weight.copy_(source.weight.half())  # theirs takes float16
    codes, largest, _ = functional.int8_vectorwise_quant(source.weight.detach().half())
    ours = frozen(source, "int8")
    away = (codes.int() - ours.codes.int()).abs()
    assert int(away.max()) <= 1 and float(away.float().mean()) < 1e-3  # theirs divides in float16
    torch.testing.assert_close(ours.row_scale * 127, largest.float())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("format", "error"), [("nf4", 0.12), ("int8", 0.01)])
def test_output_and_gradient_are_those_of_the_stored_weight(format: str, error: float, bias: bool) -> None:
    source = linear(bias)
    if source.bias is not None:
        nn.init.normal_(source.bias)
    weight = source.weight.detach().double()
    layer = frozen(source, format)
    dense = layer.dense().double()
    assert 1e-4 < float((dense - weight).norm() / weight.norm()) < error
    x, grad = torch.randn(2, 3, IN).bfloat16().requires_grad_(), torch.randn(2, 3, ROWS).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    expected = x.detach().double() @ dense.T + (0 if source.bias is None else source.bias.detach().double())
    assert float((y.detach().double() - expected).norm() / expected.norm()) < 0.006
    (dx,) = torch.autograd.grad(y, x, grad)
    truth = grad.double() @ dense
    assert float((dx.double() - truth).norm() / truth.norm()) < 0.006


@pytest.mark.parametrize(("format", "bits"), [("nf4", 4 + 8 / 64 + 32 / (64 * 256)), ("int8", 8 + 32 / 1024)])
def test_bytes_per_weight(format: str, bits: float) -> None:
    layer = frozen(Linear(1024, [("w", 512)]), format)
    constant = 4 * 257 if format == "nf4" else 0  # NF4's map of 256 values and the mean
    assert stored_bytes(layer) == pytest.approx(1024 * 512 * bits / 8 + constant, abs=1)


@pytest.mark.parametrize("format", FORMATS)
def test_the_dense_weight_is_not_kept_for_the_backward(format: str) -> None:
    kept: list[torch.Tensor] = []
    layer = frozen(linear(), format)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(4, IN, requires_grad=True))
    assert kept == []


class Touched(TorchDispatchMode):
    """Records operators that read or write a tensor with `numbers` elements, in
    order, except views and allocations.
    """

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers, self.names = numbers, list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        # A view's schema has an alias that is not written. An in-place operator writes what it aliases.
        schema = function._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        empty = schema.name.startswith("aten::empty")
        if not view and not empty and any(t.numel() in self.numbers for t in tensors):
            self.names.append(schema.name)
        return out


@pytest.mark.parametrize("format", FORMATS)
def test_activations_meet_nothing_but_the_product(format: str) -> None:
    """Scales are applied to the weight, because a pass over the activations would cost more."""
    layer = frozen(linear(), format)
    x, grad = torch.randn(7, IN).bfloat16().requires_grad_(), torch.randn(7, ROWS).bfloat16()
    with Touched(7 * IN, 7 * ROWS) as touched:
        torch.autograd.grad(layer(x), x, grad)
    assert touched.names == ["aten::mm", "aten::mm"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_is_frozen_whole_and_computes_nearly_the_same(format: str) -> None:
    model = transformer()
    tokens, context = torch.arange(32)[None], AttentionContext(backend="sdpa")
    before, size = model.hidden(tokens, context).detach(), stored_bytes(model)
    freeze(model, format)  # type: ignore[arg-type]
    after = model.hidden(tokens, context).detach()
    assert 1e-4 < float((after.float() - before).norm() / before.norm()) < (0.25 if format == "nf4" else 0.03)
    assert not any(p.requires_grad for p in model.parameters())
    assert sum(isinstance(m, FrozenLinear) for m in model.modules()) == 2 * 4
    assert not isinstance(model.head, FrozenLinear)
    assert stored_bytes(model) < 0.5 * size
    again = stored_bytes(model)
    assert stored_bytes(freeze(model, format)) == again  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_frozen_as_one_weight_and_compute_with_it(format: str, bias: bool) -> None:
    """The codes are those of bitsandbytes or of a `FrozenLinear`; output and
    gradient equal those of the dense weights.
    """
    torch.manual_seed(0)
    source, counts = Experts(3, 64, 96, "silu", gated=True, bias=bias), torch.tensor([4, 0, 5])
    for weight in source.parameters():
        nn.init.normal_(weight, std=0.05)
    model = nn.Sequential(nn.Sequential(source))
    freeze(model, format)  # type: ignore[arg-type]
    layer = model[0][0]
    assert isinstance(layer, FrozenExperts) and not any(p.requires_grad for p in layer.parameters())
    weights, rows = 3 * 3 * 64 * 96, 3 * (2 * 96 + 64)
    expected_bytes = weights + 4 * rows if format == "int8" else weights * (1 / 2 + 1 / 64) + 2 * 4 * 257
    expected_bytes += 4 * rows if bias else 0
    assert stored_bytes(layer) == pytest.approx(expected_bytes, abs=32)  # and NF4's scales of 256 magnitudes
    dense = Experts(3, 64, 96, "silu", gated=True, bias=bias)
    dense.load_state_dict(
        {name: tensor for name, tensor in layer.state_dict().items() if "bias" in name}, strict=False
    )
    for name in source.shapes:
        weight = getattr(source, name).detach().flatten(0, 1)
        if format == "nf4":
            bitsandbytes = pytest.importorskip("bitsandbytes")
            codes, state = bitsandbytes.functional.quantize_4bit(
                weight, quant_type="nf4", compress_statistics=True
            )
            assert torch.equal(layer.stored(name)[0], codes)
            weight = bitsandbytes.functional.dequantize_4bit(codes, state)
        else:
            linear = Linear(weight.shape[1], [("w", weight.shape[0])])
            linear.weight.data = weight
            weight = frozen(linear, format).dense()
        assert torch.equal(layer.dense(name).flatten(0, 1), weight)
        getattr(dense, name).data = weight.view(source.shapes[name])
    x, grad = torch.randn(9, 64, requires_grad=True), torch.randn(9, 64)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x, counts)
    assert max(t.numel() for t in kept if t.is_floating_point()) <= 9 * 2 * 96  # no dense weight
    expected = dense(x, counts)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    (ours,), (theirs,) = torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, x, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match="does not train"):
        layer.requires_grad_()


@pytest.mark.parametrize("format", FORMATS)
def test_routers_stay_in_bfloat16(format: str) -> None:
    model = transformer(experts=4)
    freeze(model, format)  # type: ignore[arg-type]
    for block in model.layers:
        assert block.mlp.mixture.router.weight.dtype == torch.bfloat16
        assert isinstance(block.mlp.mixture.experts, FrozenExperts)


@pytest.mark.parametrize("format", FORMATS)
def test_saved_and_loaded_it_computes_the_same(format: str) -> None:
    layer, x = frozen(linear(), format), torch.randn(3, IN)
    other = frozen(Linear(IN, [("q", 64), ("k", 32)]), format)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("format", FORMATS)
def test_training_it_is_refused_with_the_reason(format: str) -> None:
    model = make()
    freeze(model, format)  # type: ignore[arg-type]
    reason = f"a frozen {format} weight does not train.*train adapters"
    with pytest.raises(UsageError, match=reason):
        model.down.requires_grad_()
    model.adapter = nn.Parameter(torch.zeros(3))
    assert [info.name for info in build(model, AdamWConfig(), NO_SCALING).parameters] == ["adapter"]


@pytest.mark.parametrize("format", FORMATS)
def test_an_adapter_beside_it_learns(format: str) -> None:
    """y = x W^T + (x A) B: the adapter gets the same gradients as with the dense weight."""
    layer = frozen(linear(), format)
    x = torch.randn(8, IN)
    a, b = (0.1 * torch.randn(IN, 4)).requires_grad_(), torch.zeros(4, ROWS, requires_grad=True)
    target = torch.randn(8, ROWS)
    ours = torch.autograd.grad((layer(x) + x @ a @ b - target).square().sum(), (a, b))
    dense = torch.autograd.grad((x @ layer.dense().T + x @ a @ b - target).square().sum(), (a, b))
    for got, expected in zip(ours, dense, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert float(ours[1].norm()) > 0


def test_what_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'fp4' is not a format of frozen weights; use bf16, int8 or nf4"):
        freeze(linear(), "fp4")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match=r"frozen nf4 weights need bitsandbytes.*deskside\[bitsandbytes\]"):
        freeze(linear(), "nf4")
    assert isinstance(freeze(linear(), "int8"), FrozenLinear)
