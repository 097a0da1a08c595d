"""Check the fused sublayers on this GPU against the unfused ones.

The recipe's self-check covers one linear layer. This check covers the kernels around it, in BF16. It runs a copy of the
first block with random weights on a few tokens, and compares both outputs and every gradient.
"""

import copy
import math

import torch
from torch import Tensor

from deskside.kernels.attention import AttentionContext
from deskside.kernels.compile_ahead import compile_ahead
from deskside.kernels.functional import gradients
from deskside.model.block import Block, MoE
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
# Share of tokens that may get other experts: where two experts are nearly as probable, rounding decides, for about 2 %
# of the tokens. A token with another expert has another output, so these are left out of the comparison.
OTHER_EXPERTS = 0.1


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
    fused_block = copy.deepcopy(block)
    precision = convert(fused_block, "bf16", fused=True)
    compared: Tensor | None = None
    if isinstance(block.mlp, MoE):
        with torch.no_grad():
            choices = [_choices(b, model, generator.manual_seed(1)) for b in (block, fused_block)]
        compared = (choices[0] == choices[1]).all(dim=1)
        if (different := 1.0 - float(compared.float().mean())) > OTHER_EXPERTS:
            raise _wrong(f"{different:.0%} of the tokens get other experts")
    else:  # kernels of experts exchange indices, so they cannot run before they are compiled
        with compile_ahead(model.embed.weight.device):
            _run(fused_block, model, generator.manual_seed(1))
        precision.forget_weights()
    unfused, fused = (_run(b, model, generator.manual_seed(1), compared) for b in (block, fused_block))
    error, name = max((_error(unfused[name], fused[name]), name) for name in unfused)
    if not error <= TOLERANCE:
        raise _wrong(f"{name} is off by {error:.1e}")
    return CheckResult(True, {name: error}, "")


def _wrong(what: str) -> UsageError:
    return UsageError(
        f"compute.compile: the fused kernels are wrong on this GPU ({what}); use --compute.compile block with bf16, "
        f"and report the output of deskside doctor"
    )


def _choices(block: Block, model: Transformer, generator: torch.Generator) -> Tensor:
    """Return the experts of each token (N, k), sorted by number."""
    assert isinstance(block.mlp, MoE)
    chosen: list[Tensor] = []
    block.mlp.mixture.choices_observer = chosen.append
    _forward(block, model, _random(model, generator))
    block.mlp.mixture.choices_observer = None
    return chosen[0].long().sort(dim=1).values


def _run(
    block: Block, model: Transformer, generator: torch.Generator, compared_N: Tensor | None = None
) -> dict[str, Tensor]:
    """Return both outputs of the block, and the gradients of both inputs and of every weight, by name.

    compared_N: tokens whose outputs and gradients count; None for all. The others' are zeros.
    """
    inputs = [tensor.requires_grad_() for tensor in _random(model, generator)]
    upstream = _random(model, generator)
    outputs = _forward(block, model, inputs)
    if compared_N is not None:
        outputs = [torch.where(compared_N.view(*out.shape[:2], 1), out, 0.0) for out in outputs]
    weights = {name: p for name, p in block.named_parameters() if not name.endswith(ROUTER_BIAS)}
    names = ["residual", "delta", *weights]
    grads = gradients(outputs, [*inputs, *weights.values()], upstream)
    results = {"residual's result": outputs[0], "delta's result": outputs[1]}
    return results | {f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}


def _random(model: Transformer, generator: torch.Generator) -> list[Tensor]:
    """Return two tensors of the shape of a block's inputs and outputs."""
    shape = (2, min(TOKENS, model.config.max_position_embeddings), model.config.hidden_size)
    device, dtype = model.embed.weight.device, model.activation_dtype
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)]


def _forward(block: Block, model: Transformer, inputs: list[Tensor]) -> list[Tensor]:
    rows, tokens, _ = inputs[0].shape
    context = model._contexts(AttentionContext(), rows, tokens, inputs[0])[block.attn.window]
    rotation = model._rotations(tokens, None)[block.attn.rope]
    return list(block(*inputs, rotation, context)[:2])


def _error(expected: Tensor, actual: Tensor) -> float:
    """Return the relative error in the 2-norm; infinite if it is NaN."""
    actual, expected = actual.detach().float(), expected.detach().float()
    error = float((actual - expected).norm() / expected.norm())
    return float("inf") if math.isnan(error) else error
