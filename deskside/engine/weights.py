"""A second set of weights to generate with, beside a model that is being trained.

Training keeps float32 weights and casts each where it is used. A step of decoding would cast all of them for one token
of each row, which costs several times what the step does. So the engine gets a copy in the dtype of the activations,
whose tensors stay where they are: CUDA graphs hold their addresses. `refresh` brings it up to date.
"""

import torch

from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError


@torch.no_grad()
def inference_copy(model: Transformer) -> Transformer:
    """The model to generate with: weights of two and more dimensions in the dtype of the activations, none trained."""
    copy = allocate(model.config, model.embed.weight.device, model.activation_dtype)
    refresh(copy, model)
    return for_inference(copy, model.activation_dtype)


def for_inference(copy: Transformer, dtype: torch.dtype) -> Transformer:
    """Prepare a model for inference, with activations in `dtype`."""
    copy.embed.output_dtype = dtype
    if copy.position is not None:
        copy.position.output_dtype = dtype
    return copy.requires_grad_(False).eval()


@torch.no_grad()
def refresh(copy: Transformer, model: Transformer) -> None:
    """Overwrite the copy's weights with the model's. An engine over it then has to forget: `Engine.weights_changed`.

    Raises UsageError when the two do not have the same parameters.
    """
    mine, theirs = dict(copy.named_parameters()), dict(model.named_parameters())
    if mine.keys() != theirs.keys():
        other = sorted(mine.keys() ^ theirs.keys())[0]
        raise UsageError(
            f"{other}: only one of the two models has this parameter; merge adapters before generating"
        )
    for name, parameter in mine.items():
        parameter.copy_(theirs[name])
