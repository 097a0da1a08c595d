"""Check the fused sublayers on this GPU against the unfused ones.

The recipe's self-check covers one linear layer. This check covers the kernels around it, in BF16. It runs a copy of the
first block with random weights on a few tokens, and compares both outputs and every gradient.
"""

import copy
import math

import torch
from torch import Tensor, nn

from deskside.kernels.attention import AttentionContext
from deskside.kernels.compile_ahead import compile_ahead
from deskside.kernels.functional import gradients
from deskside.model.block import Block
from deskside.model.transformer import Transformer
from deskside.ops.moe import ROUTER_BIAS
from deskside.precision.convert import convert, restore
from deskside.precision.selfcheck import CheckResult
from deskside.utils.errors import UsageError

TOKENS = 128  # per row, at most
STD = 0.05  # of the random weights
# Relative error. BF16 rounding causes 1 to 3 % in the gradients of QK-norm's weights; a wrong mask, stride or scale
# causes 30 % or more.
TOLERANCE = 0.1


def check_block(model: Transformer) -> CheckResult:
    """Compare the outputs and gradients of the fused block with those of the unfused one. Raises UsageError."""
    first = model.layers[0]
    assert isinstance(first, Block)
    block = copy.deepcopy(first)
    generator = torch.Generator(model.embed.weight.device).manual_seed(0)
    for parameter in block.parameters():
        with torch.no_grad():
            parameter.normal_(0.0, STD, generator=generator)
            if parameter.ndim == 1:  # weights of norms
                parameter.add_(1.0)
    restore(block)
    unfused = _run(block, model, generator.manual_seed(1))
    precision = convert(block, "bf16", fused=True)
    if not model.config.num_experts:  # whose kernels exchange indices
        with compile_ahead(model.embed.weight.device):
            _run(block, model, generator.manual_seed(1))
        precision.forget_weights()
    fused = _run(block, model, generator.manual_seed(1))
    error, name = max((_error(unfused[name], fused[name]), name) for name in unfused)
    if not error <= TOLERANCE:
        raise UsageError(
            f"compute.compile: the fused kernels are wrong on this GPU ({name} is off by {error:.1e}); use "
            f"--compute.compile block with bf16, and report the output of deskside doctor"
        )
    return CheckResult(True, {name: error}, "")


def _run(block: nn.Module, model: Transformer, generator: torch.Generator) -> dict[str, Tensor]:
    """Return both outputs of the block, and the gradients of both inputs and of every weight, by name."""
    config, device = model.config, model.embed.weight.device
    tokens = min(TOKENS, config.max_position_embeddings)
    shape = (2, tokens, config.hidden_size)
    dtype = model.activation_dtype
    inputs = [
        torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_() for _ in range(2)
    ]
    upstream = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)]
    assert isinstance(block, Block)
    context = model._contexts(AttentionContext(), 2, tokens, inputs[0])[block.attn.window]
    outputs = block(*inputs, model._rotation(tokens, None), context)[:2]
    weights = {name: p for name, p in block.named_parameters() if not name.endswith(ROUTER_BIAS)}
    names = ["residual", "delta", *weights]
    grads = gradients(outputs, [*inputs, *weights.values()], upstream)
    results = {"residual's result": outputs[0], "delta's result": outputs[1]}
    return results | {f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}


def _error(expected: Tensor, actual: Tensor) -> float:
    """Return the relative error in the 2-norm; infinite if it is NaN."""
    actual, expected = actual.detach().float(), expected.detach().float()
    error = float((actual - expected).norm() / expected.norm())
    return float("inf") if math.isnan(error) else error
