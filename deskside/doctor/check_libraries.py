"""Check optional libraries: linear layers with their gradients, optimizer updates, attention, products with a gate.

That a library imports and reports support for a format is not enough: its results are compared with float64.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deskside.doctor import check_attention
from deskside.doctor.check_tools import Result, compare, median_seconds, speed
from deskside.kernels import quack_matmul
from deskside.kernels.attention import AttentionBackend, Requirements
from deskside.kernels.quack_matmul import MatmulTile

ROWS, IN_FEATURES, OUT_FEATURES = 256, 512, 384
TIMED = {"cuda": (16384, 4096, 4096), "cpu": (64, 128, 128)}  # rows, in features, out features
UPDATES = 20
BF16_TOLERANCE = 1e-2  # rounding causes about 2e-3
# Two to three times the relative errors that the formats themselves cause.
FP8_TOLERANCE, MX_TOLERANCE, NVFP4_TOLERANCE, NF4_TOLERANCE, UPDATE_TOLERANCE = 0.12, 0.12, 0.4, 0.2, 0.15
TE_RECIPES = {
    "Float8CurrentScaling": FP8_TOLERANCE,
    "MXFP8BlockScaling": MX_TOLERANCE,
    "NVFP4BlockScaling": NVFP4_TOLERANCE,
}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


def torchao(recipe: str, device: str) -> Result:
    """Check float8 training of a linear layer, tensorwise or rowwise."""
    float8: Any = import_module("torchao.float8")
    settings = float8.Float8LinearConfig.from_recipe_name(recipe)

    def make(inputs: int, outputs: int) -> nn.Module:
        plain = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
        converted: nn.Module = float8.convert_to_float8_training(plain, config=settings)
        if type(converted[0]) is nn.Linear:  # type: ignore[index]
            raise RuntimeError("convert_to_float8_training left the layer as it was")
        return converted.to(device, torch.bfloat16)

    return _linear(make, nullcontext, FP8_TOLERANCE, torch.device(device), torch.bfloat16)


def transformer_engine(recipe: str, device: str) -> Result:
    """Check a linear layer of transformer-engine; `recipe` is the class name of one of its recipes."""
    te: Any = import_module("transformer_engine.pytorch")
    settings = getattr(import_module("transformer_engine.common.recipe"), recipe)()

    def context() -> AbstractContextManager[Any]:
        old = not hasattr(te, "autocast")  # fp8_autocast: its name until 2.8
        enter = te.fp8_autocast if old else te.autocast
        entered: AbstractContextManager[Any] = enter(
            enabled=True, **{"fp8_recipe" if old else "recipe": settings}
        )
        return entered

    def make(inputs: int, outputs: int) -> nn.Module:
        layer: nn.Module = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device=device)
        return layer

    return _linear(make, context, TE_RECIPES[recipe], torch.device(device), torch.bfloat16)


def bitsandbytes_adamw(device: str) -> Result:
    """Check the updates of bitsandbytes' 8-bit AdamW against those of torch's AdamW in float64."""
    bnb: Any = import_module("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(128, 256, generator=generator)
    gradients = [torch.randn(128, 256, generator=generator) + 0.3 for _ in range(UPDATES)]
    quantized = nn.Parameter(initial.to(device, copy=True))
    exact = nn.Parameter(initial.double())
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    adamw_8bit, adamw = bnb.optim.AdamW8bit([quantized], **settings), torch.optim.AdamW([exact], **settings)
    for gradient in gradients:
        quantized.grad, exact.grad = gradient.to(device), gradient.double()
        adamw_8bit.step()
        adamw.step()
    states = {state.dtype for state in adamw_8bit.state[quantized].values() if isinstance(state, Tensor)}
    if torch.uint8 not in states:
        raise RuntimeError("AdamW8bit kept no 8-bit state")
    got = {"update": quantized.detach().cpu().double() - initial.double()}
    truth = {"update": exact.detach() - initial.double()}
    return compare(got, truth, UPDATE_TOLERANCE)


def bitsandbytes_nf4(device: str) -> Result:
    """Check a frozen 4-bit (NF4) linear layer, as in QLoRA: output and input gradient."""
    bnb: Any = import_module("bitsandbytes")
    where = torch.device(device)
    dtype = DTYPE[where.type]
    weight, x, grad = _problem(where)
    layer = bnb.nn.Linear4bit(IN_FEATURES, OUT_FEATURES, bias=False, quant_type="nf4", compute_dtype=dtype)
    layer.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
    layer = layer.to(where)
    leaf = x.to(dtype).requires_grad_()
    output = layer(leaf)
    (dx,) = torch.autograd.grad(output, leaf, grad.to(dtype))
    exact = _exact(weight, x, grad)
    return compare({"output": output, "input gradient": dx}, exact, NF4_TOLERANCE)


def flash_attention_4(window: bool, device: str) -> Result:
    """Check FlashAttention-4, forward and backward."""
    cute: Any = import_module("flash_attn.cute")

    def attend(need: Requirements) -> check_attention.Attend:
        sides = (None, None) if need.window is None else (need.window - 1, 0)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = cute.flash_attn_func(q, k, v, causal=True, window_size=sides)
            output = result[0] if isinstance(result, tuple) else result
            assert isinstance(output, Tensor)
            return output

        return function

    # Not a backend of deskside: this entry only declares which problems it supports, and its function is never called.
    library = AttentionBackend(
        "flash-attn-4", lambda q, k, v, _: q, frozenset({"cuda"}), frozenset(), window=True
    )
    return check_attention.measure(attend, library, window, device)


def quack_linear(device: str) -> Result:
    """Check products of quack-kernels with each tile that deskside uses: output and input gradient of a layer."""
    where = torch.device(device)
    weight, x, grad = (value.bfloat16() for value in _problem(where))

    def products(tile: MatmulTile) -> dict[str, Tensor]:
        output, x_grad = quack_matmul.matmul(x, weight.T, tile), quack_matmul.matmul(grad, weight, tile)
        return {"output": output, "input gradient": x_grad}

    got = _with_tiles(where, products)
    rows, inputs, outputs = TIMED[where.type]
    left, right = (torch.randn(count, inputs, device=where).bfloat16() for count in (rows, outputs))
    seconds = [
        median_seconds(partial(quack_matmul.matmul, left, right.T, tile), where, runs=5) for tile in got
    ]
    fastest = speed(2 * rows * inputs * outputs / min(seconds), "FLOP/s")
    return _compare_tiles(got, _exact(weight, x, grad)) | {"speed": fastest}


def quack_gate(device: str) -> Result:
    """Check SwiGLU in the epilogues of quack-kernels' products, and its gradient, with each tile."""
    where = torch.device(device)
    weight, x, _ = _problem(where)
    # Rows of gate and up alternate. Inner values near 1 tell SiLU from other activations.
    first, x = (weight / math.sqrt(IN_FEATURES)).bfloat16(), x.bfloat16()
    second, grad = first.T[:, : OUT_FEATURES // 2].contiguous(), x.flip(0)

    def products(tile: MatmulTile) -> dict[str, Tensor]:
        inner, hidden = quack_matmul.gated_matmul(x, first, tile)
        inner_grad = quack_matmul.gated_matmul_gradient(grad, second, inner, tile)
        return {"inner": inner, "hidden": hidden, "inner gradient": inner_grad}

    inner = (x.double() @ first.double().T).requires_grad_()
    hidden = F.silu(inner[:, 0::2]) * inner[:, 1::2]
    (inner_grad,) = torch.autograd.grad(hidden, inner, grad.double() @ second.double())
    truth = {"inner": inner, "hidden": hidden, "inner gradient": inner_grad}
    return _compare_tiles(_with_tiles(where, products), truth)


def _with_tiles(
    device: torch.device, compute: Callable[[MatmulTile], dict[str, Tensor]]
) -> dict[MatmulTile, dict[str, Tensor]]:
    """Return the results with the tiles that the package supports here. Raises RuntimeError if there is none."""
    failure = RuntimeError(f"quack-kernels needs a GPU of {quack_matmul.SUPPORTED_GPUS}")
    results: dict[MatmulTile, dict[str, Tensor]] = {}
    for tile in quack_matmul.tiles_of(device):
        try:
            results[tile] = compute(tile)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failure = error
    if not results:
        raise failure
    return results


def _compare_tiles(got: Mapping[MatmulTile, Mapping[str, Tensor]], truth: Mapping[str, Tensor]) -> Result:
    """Compare the tensors of each tile with the same reference."""
    labels = {tile: f"{tile.rows} x {tile.columns}{', ping-pong' if tile.pingpong else ''}" for tile in got}
    pairs = [(f"{name} ({labels[tile]})", tile, name) for tile in got for name in truth]
    return compare(
        {label: got[tile][name] for label, tile, name in pairs},
        {label: truth[name] for label, _, name in pairs},
        BF16_TOLERANCE,
    )


def _problem(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight, the input x and the gradient of the output in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((OUT_FEATURES, IN_FEATURES), (ROWS, IN_FEATURES), (ROWS, OUT_FEATURES))
    weight, x, grad = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return weight, x, grad


def _exact(weight: Tensor, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output of a linear layer and the gradient of its input in float64."""
    return {"output": x.double() @ weight.double().T, "input gradient": grad.double() @ weight.double()}


def _linear(
    make: Callable[[int, int], nn.Module],
    context: Callable[[], AbstractContextManager[Any]],
    tolerance: float,
    device: torch.device,
    dtype: torch.dtype,
) -> Result:
    """Check output and gradients of the layer `make(inputs, outputs)`, and time it including quantization."""
    weight, x, grad = _problem(device)
    if device.type == "cpu":  # FP8 products may be very slow there
        weight, x, grad = weight[:64, :128], x[:32, :128], grad[:32, :64]
    layer = make(weight.shape[1], weight.shape[0])
    (parameter,) = layer.parameters()
    with torch.no_grad():
        parameter.copy_(weight)
    leaf = x.to(dtype).contiguous().requires_grad_()
    with context():
        output = layer(leaf)
    output.backward(grad.to(dtype).contiguous())
    assert leaf.grad is not None
    weight_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    got = {"output": output, "input gradient": leaf.grad, "weight gradient": weight_grad}
    truth = _exact(weight, x, grad) | {"weight gradient": grad.double().T @ x.double()}
    result = compare(got, truth, tolerance)
    rows, inputs, outputs = TIMED[device.type]
    large = make(inputs, outputs)
    x = torch.randn(rows, inputs, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(rows, outputs, device=device, dtype=dtype)

    def forward_backward() -> None:
        with context():
            y = large(x)
        y.backward(grad)

    seconds = median_seconds(forward_backward, device, runs=5)
    # 2 FLOPs per multiply-add in each of three matmuls.
    return result | {"speed": speed(6 * rows * inputs * outputs / seconds, "FLOP/s")}
