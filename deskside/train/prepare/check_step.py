"""Check the fused sublayers on this GPU against the ordinary forward of a block.

The recipe's self-check runs one linear layer. This check also runs the kernels around it: a copy of the first block
with random weights, a few tokens, both outputs and every gradient. It compiles the same kernels that the run uses.
"""

import copy

import torch
from torch import Tensor, nn

from deskside.kernels.attention import AttentionContext
from deskside.kernels.functional import gradients
from deskside.model.block import Block
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert, restore
from deskside.utils.errors import UsageError

TOKENS = 128
STD = 0.05
# BF16 rounding gives errors of 1 to 3 % in the gradients of QK-norm's weights; a wrong mask, stride or scale, 30 %.
TOLERANCE = 0.1


def check_block(model: Transformer) -> None:
    """Raise UsageError, naming the alternative, if the fused block differs from the ordinary one."""
    first = model.layers[0]
    assert isinstance(first, Block)
    block = copy.deepcopy(first)
    generator = torch.Generator(model.embed.weight.device).manual_seed(0)
    for parameter in block.parameters():
        with torch.no_grad():
            parameter.normal_(0.0, STD, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    restore(block)
    written = _run(block, model, generator.manual_seed(1))
    convert(block, "bf16", fused=True)
    error, name = max(
        (_error(a, b), name)
        for (name, a), b in zip(
            written.items(), _run(block, model, generator.manual_seed(1)).values(), strict=True
        )
    )
    if not error <= TOLERANCE:
        raise UsageError(
            f"compute.compile: the fused kernels are wrong on this GPU ({name} is off by {error:.1e}); use "
            f"--compute.compile block with bf16, and tell what deskside doctor says"
        )


def _run(block: nn.Module, model: Transformer, generator: torch.Generator) -> dict[str, Tensor]:
    """Return both outputs, and the gradients of both inputs and of every weight."""
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
    names = ["residual", "delta", *(name for name, _ in block.named_parameters())]
    found = gradients(outputs, [*inputs, *block.parameters()], upstream)
    results = {"residual's result": outputs[0], "delta's result": outputs[1]}
    return results | {f"gradient of {name}": g for name, g in zip(names, found, strict=True)}


def _error(truth: Tensor, got: Tensor) -> float:
    got, truth = got.detach().float(), truth.detach().float()
    error = float((got - truth).norm() / truth.norm())
    return error if error == error else float("inf")
