"""Apply a precision recipe to a model, and take it off again.

The model computes in the dtype of its stream of activations, and casts each weight where it is used. So BF16 training
with float32 master weights is one setting: the dtype that the embeddings hand out. Norms, softmax, rotary angles and
the loss compute in float32 in every recipe, by themselves.
"""

from dataclasses import dataclass

import torch
from torch import nn

from deskside.errors import UsageError
from deskside.ops.linear import Embedding


@dataclass(frozen=True)
class Recipe:
    """activations: the dtype of the stream and so of every GEMM's operands; None is the weights' own.

    tolerance: relative Frobenius error against float64 that the self-check allows to one GEMM of this recipe.
    """

    name: str
    activations: torch.dtype | None
    tolerance: float


RECIPES = {
    # 256-long sums of float32 products: about 1e-6; TF32, where someone switched it on, gives 3e-4 and is not fp32.
    "fp32": Recipe("fp32", None, 2e-5),
    # Rounding both operands and the result to 8 bits: about 3e-3.
    "bf16": Recipe("bf16", torch.bfloat16, 1e-2),
}


def recipe_named(name: str) -> Recipe:
    """Raises UsageError for a recipe that does not exist."""
    if name not in RECIPES:
        raise UsageError(f"precision '{name}' does not exist; use one of {', '.join(RECIPES)}")
    return RECIPES[name]


def apply(model: nn.Module, name: str) -> None:
    """Switch a model to a recipe, in place; parameters and optimizer state stay what they are."""
    recipe = recipe_named(name)
    for module in model.modules():
        if isinstance(module, Embedding):
            module.output_dtype = recipe.activations


def restore(model: nn.Module) -> None:
    """Undo `apply`: the model computes in the dtype of its weights, as it was built."""
    for module in model.modules():
        if isinstance(module, Embedding):
            module.output_dtype = None
