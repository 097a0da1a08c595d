"""Base weights in NF4 or INT8 for adapters: stored small, dequantised where they are used, never trained.

NF4 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): blocks of 64 weights share a largest magnitude, and each weight is
one of 16 quantiles of a Gaussian; the magnitudes themselves are stored in 8 bits, 256 to a float32 scale: 4.13 bits per
weight. INT8: each output row has a float32 scale (LLM.int8(), arXiv 2208.07339, without its outlier columns). NF4's
storage and kernels are bitsandbytes'; INT8 is a division and needs no library (`kernels/stored_weights.py`).

Either weight is made in the dtype of the activations and used once. A scale for each row could be applied to INT8's
product instead, which would spare the weight its rounding to 16 bits. That rounds the product twice and is not nearer
to float64, and costs 4 bytes for each output of a layer forward and again backward, where this costs none.

A frozen 4-bit weight does not train: an update is far smaller than the step between two of 16 values, so it would be
rounded away. What trains is an adapter beside it, through which the gradient of the input flows on. So memory for
gradients and optimiser states is the adapter's, and a model's own pretraining is no use for these formats.

`freeze` replaces modules; an adapter (`precision/lora.py`) is added to the `FrozenLinear`, and `dense()` gives
the weight to merge with. Frozen in "bf16" a weight stays what it is, in 16 bits.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.kernels.stored_weights import dequantize_int8
from deskside.ops.linear import Linear
from deskside.precision.lora import Adapter, adapter_of
from deskside.utils.errors import UsageError

Format = Literal["nf4", "int8"]
BLOCK = 64  # NF4 weights that share a magnitude
SCALE_BLOCK = 256  # magnitudes that share a scale
BUFFERS: dict[Format, tuple[str, ...]] = {
    "int8": ("codes", "row_scale"),
    "nf4": ("codes", "magnitude", "magnitude_scale", "magnitude_map", "magnitude_mean"),
}
DOES_NOT_TRAIN = (
    "a frozen {0} weight does not train: updates are smaller than the steps between its values and would be rounded "
    "away; train adapters beside it, or keep the weights in full precision"
)


class FrozenLinear(Linear):
    """y = x W^T + b with W in `format`. Only the input gets a gradient; there is no parameter `weight`.

    x: (..., in) in any float dtype, which is the product's too. Raises UsageError when it is asked to train.
    """

    adapter: Adapter | None
    codes: Tensor  # nf4: two to a byte; int8: (rows, in)
    row_scale: Tensor  # int8: (rows,) float32
    magnitude: Tensor  # nf4: uint8, one for each block
    magnitude_scale: Tensor  # float32, one for 256 magnitudes
    magnitude_map: Tensor  # the 256 values of a uint8
    magnitude_mean: Tensor  # what was subtracted from the magnitudes

    def __init__(self, source: Linear, format: Format, stored: Mapping[str, Tensor] | None = None):
        """stored: buffers that an equal layer had, in place of `source.weight`, which may then be on "meta"."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.role, self.slices, self.format = source.role, source.slices, format
        self.forward_override = None
        self.adapter = adapter_of(source)
        self.bias = source.bias
        self.register_parameter("weight", None)
        if stored is not None:
            for name in BUFFERS[format]:
                self.register_buffer(name, stored[name])
            return
        weight = source.weight.detach()
        if format == "int8":
            largest = weight.float().abs().amax(dim=1)
            scale = torch.where(largest > 0, largest, 1.0) / 127
            self.register_buffer("codes", (weight.float() / scale[:, None]).round().to(torch.int8))
            self.register_buffer("row_scale", scale)
            return
        functional = _bitsandbytes()
        codes, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True
        )
        self.register_buffer("codes", codes)
        self.register_buffer("magnitude", state.absmax)
        self.register_buffer("magnitude_scale", state.state2.absmax)
        self.register_buffer("magnitude_map", state.state2.code)
        self.register_buffer("magnitude_mean", state.offset)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            y = _opaque_product(x, self.stored, self.out_features, self.in_features, False)
        else:
            y = _FrozenProduct.apply(x, self)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y if self.adapter is None else self.adapter(x, y)

    def dense(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """The dequantized weight (rows, in), computed on `device` (None: that of the codes)."""
        stored = [tensor.to(device) for tensor in self.stored]
        return _dense(stored, self.out_features, self.in_features, dtype)

    @property
    def stored(self) -> list[Tensor]:
        """The buffers that store the weight."""
        return [getattr(self, name) for name in BUFFERS[self.format]]

    def requires_grad_(self, requires_grad: bool = True) -> "FrozenLinear":
        if requires_grad:
            raise UsageError(DOES_NOT_TRAIN.format(self.format))
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frozen {self.format}"


class _FrozenProduct(torch.autograd.Function):
    """x W^T. The backward dequantises again: keeping the dense weight would undo what freezing saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        return _product(x, layer.stored, layer.out_features, layer.in_features, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: FrozenLinear = ctx.layer
        return _product(grads[0], layer.stored, layer.out_features, layer.in_features, True), None


def _product(x: Tensor, stored: Sequence[Tensor], rows: int, columns: int, turned: bool) -> Tensor:
    """x W^T, or x W when `turned`."""
    dense = _dense(stored, rows, columns, x.dtype)
    return x @ dense if turned else F.linear(x, dense)


def _dense(stored: Sequence[Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """(rows, columns) from the buffers of BUFFERS, int8's two or nf4's five."""
    if len(stored) == len(BUFFERS["int8"]):
        codes, row_scale = stored
        return dequantize_int8(codes, row_scale, dtype)
    functional = _bitsandbytes()
    codes, magnitude, scale, table, mean = stored
    absmax = functional.dequantize_blockwise(magnitude, absmax=scale, code=table, blocksize=SCALE_BLOCK)
    state = functional.QuantState(
        absmax=absmax + mean,
        shape=torch.Size((rows, columns)),
        dtype=dtype,
        blocksize=BLOCK,
        quant_type="nf4",
    )
    weight: Tensor = functional.dequantize_4bit(codes, state)
    return weight


@torch.library.custom_op("deskside::frozen_product", mutates_args=())
def _opaque_product(x: Tensor, stored: Sequence[Tensor], rows: int, columns: int, turned: bool) -> Tensor:
    """`_product`, which torch.compile does not look into. It would find that forward and backward make the same dense
    weight, make it once, and keep it in between: all of the model in 16 bits."""
    return _product(x, stored, rows, columns, turned)


@_opaque_product.register_fake
def _(x: Tensor, stored: Sequence[Tensor], rows: int, columns: int, turned: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], columns if turned else rows)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    _, stored, *ctx.shape = inputs
    ctx.save_for_backward(*stored)


def _opaque_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, columns, turned = ctx.shape
    stored = list(ctx.saved_tensors)
    none: list[Tensor | None] = [None] * len(stored)
    return _opaque_product(grad, stored, rows, columns, not turned), none, None, None, None


_opaque_product.register_autograd(_opaque_backward, setup_context=_remember)


def freeze(model: nn.Module, format: Format | Literal["bf16"]) -> nn.Module:
    """Freezes a Linear (returned as a new module) or a whole model (in place): nothing in it trains any more.

    Of a model every block matrix is stored in `format`; head and embeddings become bfloat16, because a weight that
    does not train needs no float32 master; vectors stay as they are. Raises UsageError without bitsandbytes, for an
    unknown format, and for experts, which are not made of Linears.
    """
    if format == "bf16":
        _in_16_bits(model)
        return model
    if format not in ("nf4", "int8"):
        raise UsageError(f"'{format}' is no format of frozen weights; use bf16, int8 or nf4")
    if format == "nf4":
        _bitsandbytes()
    if isinstance(model, Linear):
        if model.bias is not None:
            model.bias.requires_grad_(False)
        return model if isinstance(model, FrozenLinear) else FrozenLinear(model, format)
    for name, module in model.named_modules():
        if isinstance(getattr(module, "slices", None), dict):
            raise UsageError(
                f"'{name}' holds experts, whose weights cannot be frozen in {format}; use full precision"
            )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear) and not isinstance(child, FrozenLinear) and child.role == "matrix":
                setattr(parent, name, FrozenLinear(child, format))
    _in_16_bits(model)
    return model


def _in_16_bits(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(torch.bfloat16)


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights as they are stored, frozen ones included, tied ones once."""
    tensors = {t.untyped_storage().data_ptr(): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.nbytes for t in tensors.values())


def _bitsandbytes() -> ModuleType:
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise UsageError(
            f"frozen nf4 weights need bitsandbytes ({error}); install it with: pip install 'deskside[bitsandbytes]'"
        ) from None
    module: ModuleType = functional
    return module
