"""Frozen weights in NF4, INT8 or FP8: the base of adapters in training (NF4, INT8), and generation.

NF4 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): each weight is one of 16 quantiles of a Gaussian times the largest
magnitude of its block of 64 weights. The magnitudes are stored in 8 bits, with a float32 scale for each 256 of them,
which makes 4.13 bits per weight. INT8: each output row has a float32 scale (LLM.int8(), arXiv 2208.07339, without its
outlier columns). FP8: the same with E4M3 codes. NF4 uses the storage and kernels of bitsandbytes; INT8 and FP8 need no
library (`kernels/stored_weights.py`).

All are dequantized to the dtype of the activations for each product. Only a step of generation with few rows, which
takes as long as its weights take to read, multiplies codes of INT8 and FP8 directly. In training, the row scales of
INT8 could be applied to the product instead, which avoids rounding the weight to 16 bits. But it rounds the product
twice, is not closer to float64, and needs 4 more bytes per output of a layer, in the forward and again in the backward.

A frozen 4-bit weight cannot train, because an update is far smaller than the step between two of 16 values and would
be rounded away. Only adapters train, so only they have gradients and optimizer states. These formats are therefore of
no use for pretraining.

`freeze` replaces the Linears of a model by `FrozenLinear`s and its experts by `FrozenExperts`, to which
precision/lora.py adds adapters. `dense()` returns the weight for merging. Weights that are frozen in "bf16" keep their
modules and are cast to bfloat16. So are routers in every format: they are small, and rounding them further would change
which experts a token chooses.
"""

import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.kernels import moe
from deskside.kernels.stored_weights import dequantize_rows, linear_from_codes
from deskside.ops.linear import Linear
from deskside.ops.moe import ROUTING_PROJECTIONS, Experts
from deskside.precision.formats import LARGEST
from deskside.precision.lora import Adapter, adapters_of
from deskside.precision.row_adapters import RowAdapters
from deskside.utils.errors import UsageError

Format = Literal["nf4", "int8", "fp8"]
BLOCK = 64  # NF4 weights that share a largest magnitude
SCALE_BLOCK = 256  # magnitudes that share a scale
BUFFERS: dict[Format, tuple[str, ...]] = {
    "int8": ("codes", "row_scale"),
    "fp8": ("codes", "row_scale"),
    "nf4": ("codes", "magnitude", "magnitude_scale", "magnitude_map", "magnitude_mean"),
}
DOES_NOT_TRAIN = (
    "a frozen {0} weight does not train: updates are smaller than the steps between its values and would be rounded "
    "away; train adapters beside it, or keep the weights in full precision"
)


class FrozenLinear(Linear):
    """y = x W^T + b with W stored in `format`. W gets no gradient: there is no parameter `weight`.

    x: (..., in) in any float dtype, in which the product is computed. `requires_grad_(True)` raises UsageError.
    """

    adapter: Adapter | RowAdapters | None
    codes: Tensor  # nf4: two to a byte; int8, fp8: (rows, in)
    row_scale: Tensor  # int8, fp8: (rows,) float32
    magnitude: Tensor  # nf4: uint8, one for each block
    magnitude_scale: Tensor  # nf4: float32, one for 256 magnitudes
    magnitude_map: Tensor  # nf4: (256,), the value of each uint8 code
    magnitude_mean: Tensor  # nf4: the magnitudes' mean, subtracted before their quantization

    def __init__(self, source: Linear, format: Format, stored: Mapping[str, Tensor] | None = None):
        """stored: saved buffers of such a layer, used instead of `source.weight`, which may then be on "meta"."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.role, self.slices, self.format = source.role, source.slices, format
        self.forward_override = None
        self.adapter = adapters_of(source).get("weight")
        self.bias = source.bias
        self.register_parameter("weight", None)
        buffers = _quantize(source.weight.detach(), format) if stored is None else stored
        for name in BUFFERS[format]:
            self.register_buffer(name, buffers[name])

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            y = _opaque_product(x, self.stored, self.out_features, self.in_features, False)
        else:
            y = _FrozenProduct.apply(x, self)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y if self.adapter is None else self.adapter.output(x, y, self._plain_product, self.bias)

    def _plain_product(self, x: Tensor) -> Tensor:
        return _opaque_product(x, self.stored, self.out_features, self.in_features, False)

    def dense(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """Return the dequantized weight (rows, in), computed on `device` (None: the device of the codes)."""
        stored = [tensor.to(device) for tensor in self.stored]
        return _dense(stored, self.out_features, self.in_features, dtype)

    @property
    def stored(self) -> list[Tensor]:
        """The buffers that store the weight, in the order of BUFFERS."""
        return [getattr(self, name) for name in BUFFERS[self.format]]

    def requires_grad_(self, requires_grad: bool = True) -> "FrozenLinear":
        if requires_grad:
            raise UsageError(DOES_NOT_TRAIN.format(self.format))
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frozen {self.format}"


class FrozenExperts(Experts):
    """Experts with both weights stored in `format`, the rows of all experts in one matrix. They get no gradients.

    The buffers are those of `FrozenLinear`, with the name of the weight in front: gate_up_weight_codes, ...
    """

    def __init__(self, source: Experts, format: Format, stored: Mapping[str, Tensor] | None = None):
        """stored: saved buffers of such experts, used instead of the weights, which may then be on "meta"."""
        nn.Module.__init__(self)
        self.activation, self.slices, self.shapes = source.activation, source.slices, source.shapes
        self.gate_up_bias, self.down_bias = source.gate_up_bias, source.down_bias
        self.format = format
        self.adapters = nn.ModuleDict(adapters_of(source))
        for weight in self.shapes:
            self.register_parameter(weight, None)
            if stored is None:
                buffers = _quantize(getattr(source, weight).detach().flatten(0, 1), format)
            else:
                buffers = {name: stored[f"{weight}_{name}"] for name in BUFFERS[format]}
            for name, tensor in buffers.items():
                self.register_buffer(f"{weight}_{name}", tensor)

    def product(self, name: str, x: Tensor, ends_E: Tensor) -> Tensor:
        _, rows, columns = self.shapes[name]
        y = _experts_product(x.contiguous(), self.stored(name), ends_E, rows, columns, False)
        return self.adapters[name](x, y, ends_E) if name in self.adapters else y

    def dense(self, name: str, device: torch.device | None = None) -> Tensor:
        """Return a dequantized weight (E, rows, in) in float32, computed on `device` (None: that of the codes)."""
        stored = [tensor.to(device) for tensor in self.stored(name)]
        experts, rows, columns = self.shapes[name]
        return _dense(stored, experts * rows, columns, torch.float32).view(experts, rows, columns)

    def stored(self, name: str) -> list[Tensor]:
        """Return the buffers that store a weight, in the order of BUFFERS."""
        return [getattr(self, f"{name}_{buffer}") for buffer in BUFFERS[self.format]]

    def requires_grad_(self, requires_grad: bool = True) -> "FrozenExperts":
        if requires_grad:
            raise UsageError(DOES_NOT_TRAIN.format(self.format))
        return self

    def extra_repr(self) -> str:
        return f"frozen {self.format}"


def _quantize(weight: Tensor, format: Format) -> dict[str, Tensor]:
    """Return the buffers that store a weight (rows, in), by name."""
    if format != "nf4":
        largest = weight.float().abs().amax(dim=1)
        scale = torch.where(largest > 0, largest, 1.0) / (127 if format == "int8" else LARGEST["e4m3"])
        scaled = weight.float() / scale[:, None]
        codes = scaled.round().to(torch.int8) if format == "int8" else scaled.to(torch.float8_e4m3fn)
        return {"codes": codes, "row_scale": scale}
    functional = _bitsandbytes()
    codes, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True
    )
    return {
        "codes": codes,
        "magnitude": state.absmax,
        "magnitude_scale": state.state2.absmax,
        "magnitude_map": state.state2.code,
        "magnitude_mean": state.offset,
    }


class _FrozenProduct(torch.autograd.Function):
    """x W^T. The backward dequantizes the weight again, because saving it would need the memory that freezing saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        return _product(x, layer.stored, layer.out_features, layer.in_features, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: FrozenLinear = ctx.layer
        return _product(grads[0], layer.stored, layer.out_features, layer.in_features, True), None


def _product(x: Tensor, stored: Sequence[Tensor], rows: int, columns: int, transposed: bool) -> Tensor:
    """Return x W^T, or x W if `transposed`. W: (rows, columns)."""
    if not transposed and len(stored) == len(BUFFERS["int8"]):
        return linear_from_codes(x, stored[0], stored[1])
    dense = _dense(stored, rows, columns, x.dtype)
    return x @ dense if transposed else F.linear(x, dense)


def _dense(stored: Sequence[Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight (rows, columns) from its stored buffers: two for int8 and fp8, five for nf4."""
    if len(stored) == len(BUFFERS["int8"]):
        codes, row_scale = stored
        return dequantize_rows(codes, row_scale, dtype)
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
def _opaque_product(x: Tensor, stored: Sequence[Tensor], rows: int, columns: int, transposed: bool) -> Tensor:
    """Compute `_product` as one operator for torch.compile.

    Otherwise the compiler would dequantize each weight once for both passes and keep it between them, which needs
    memory for the whole model in 16 bits.
    """
    return _product(x, stored, rows, columns, transposed)


@_opaque_product.register_fake
def _(x: Tensor, stored: Sequence[Tensor], rows: int, columns: int, transposed: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], columns if transposed else rows)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, stored, *ctx.options = inputs
    ctx.save_for_backward(*stored)


def _opaque_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, columns, transposed = ctx.options
    stored = list(ctx.saved_tensors)
    no_grads: list[Tensor | None] = [None] * len(stored)
    return _opaque_product(grad, stored, rows, columns, not transposed), no_grads, None, None, None


_opaque_product.register_autograd(_opaque_backward, setup_context=_setup_context)


@torch.library.custom_op("deskside::frozen_experts_product", mutates_args=())
def _experts_product(
    x: Tensor, stored: Sequence[Tensor], ends_E: Tensor, rows: int, columns: int, transposed: bool
) -> Tensor:
    """Return x_e W_e^T for the rows x_e of each expert, or x_e W_e if `transposed`. W_e: (rows, columns).

    It is one operator for the reason given at `_opaque_product`.
    """
    experts = len(ends_E)
    weight = _dense(stored, experts * rows, columns, x.dtype).view(experts, rows, columns)
    return moe.grouped_matmul(x, weight, ends_E, not transposed)


@_experts_product.register_fake
def _(
    x: Tensor, stored: Sequence[Tensor], ends_E: Tensor, rows: int, columns: int, transposed: bool
) -> Tensor:
    return x.new_empty(len(x), columns if transposed else rows)


def _setup_experts(ctx: Any, inputs: Any, output: Any) -> None:
    _, stored, ends_E, *ctx.options = inputs
    ctx.save_for_backward(ends_E, *stored)


def _experts_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, columns, transposed = ctx.options
    ends_E, *stored = ctx.saved_tensors
    no_grads: list[Tensor | None] = [None] * len(stored)
    grad_x = _experts_product(grad.contiguous(), stored, ends_E, rows, columns, not transposed)
    return grad_x, no_grads, None, None, None, None


_experts_product.register_autograd(_experts_backward, setup_context=_setup_experts)


def is_quantized_by_freeze(module: nn.Module) -> TypeGuard[Linear | Experts]:
    """Return True if `freeze` stores this layer in codes: experts, and all matrices but ROUTING_PROJECTIONS."""
    if isinstance(module, Linear):
        return module.role == "matrix" and all(s.name not in ROUTING_PROJECTIONS for s in module.slices)
    return isinstance(module, Experts)


def frozen_layer(
    source: Linear | Experts, format: Format, stored: Mapping[str, Tensor] | None = None
) -> FrozenLinear | FrozenExperts:
    """Return a layer in `format`. stored: see the classes."""
    if isinstance(source, Experts):
        return FrozenExperts(source, format, stored)
    return FrozenLinear(source, format, stored)


def freeze(model: nn.Module, format: Format | Literal["bf16"]) -> nn.Module:
    """Freeze a Linear (returned as a new module, except in "bf16") or a whole model (in place).

    In a model, every weight matrix of the transformer blocks but the routers is stored in `format`. Routers, head and
    embeddings become bfloat16, because weights that do not train need no float32 master copy. Vectors keep their dtype.
    Raises UsageError if the format is unknown, or bitsandbytes is missing (NF4).
    """
    if format == "bf16":
        _freeze_in_bf16(model)
        return model
    if format not in ("nf4", "int8"):
        raise UsageError(f"'{format}' is not a format of frozen weights; use bf16, int8 or nf4")
    if format == "nf4":
        _bitsandbytes()
    if isinstance(model, Linear):
        if model.bias is not None:
            model.bias.requires_grad_(False)
        return model if isinstance(model, FrozenLinear) else FrozenLinear(model, format)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_quantized_by_freeze(child) and not isinstance(child, FrozenLinear | FrozenExperts):
                setattr(parent, name, frozen_layer(child, format))
    _freeze_in_bf16(model)
    return model


@torch.no_grad()
def quantize_for_generation(model: nn.Module, format: Format, device: torch.device) -> None:
    """Move a model to the device with the weight matrices of its blocks in `format`, in place.

    One matrix at a time is on the device in full precision. Embeddings, head and vectors keep their dtype. Raises
    UsageError for a mixture of experts, whose weights would all be dequantized in every step; for NF4 without
    bitsandbytes; and for FP8 on a GPU without E4M3, below compute capability 8.9.
    """
    if any(isinstance(module, Experts) for module in model.modules()):
        raise UsageError(
            f"{format} weights are not supported for experts in generation; leave the option out, or use a dense model"
        )
    if format == "nf4":
        _bitsandbytes()
    if format == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UsageError("fp8 weights need a GPU of compute capability 8.9 or higher; use int8")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_quantized_by_freeze(child):
                setattr(parent, name, frozen_layer(child.to(device), format))
    model.to(device)


def _freeze_in_bf16(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(torch.bfloat16)


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers. Tied weights count once."""
    tensors = {t.untyped_storage().data_ptr(): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.nbytes for t in tensors.values())


def _bitsandbytes() -> ModuleType:
    # On a CPU, bitsandbytes warns that kernels of the hub are missing, and computes without them.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise UsageError(
            f"frozen nf4 weights need bitsandbytes ({error}); install it with: pip install 'deskside[bitsandbytes]'"
        ) from None
    module: ModuleType = functional
    return module
