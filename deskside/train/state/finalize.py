"""The end of a run: its whole model, and the export of it."""

import torch
from torch import Tensor

from deskside.model.transformer import Transformer
from deskside.precision.lora import is_adapted
from deskside.run.directory import RunDirectory
from deskside.train.parallel import World
from deskside.utils.errors import UsageError
from deskside.weights.checkpoint import load_weights
from deskside.weights.hf import save_hf
from deskside.weights.merge_adapters import merged


def export(run: RunDirectory, model: Transformer) -> str:
    """Write the model to the run directory in Hugging Face format. Return a message about the result."""
    try:
        save_hf(model, model.config, run.tokenizer, run.model)
    except UsageError as error:  # transformers has no such architecture
        return f"no Hugging Face model was written: {error}"
    return f"the Hugging Face model is in {run.model}"


def whole_model(model: Transformer, world: World) -> Transformer:
    """Return the model with all its weights in this process, with adapters merged.

    Every rank must call this, because sharded weights are gathered.
    """
    if is_adapted(model):
        return merged(model)
    if not world.sharded:
        return model
    tensors: dict[str, Tensor] = {
        name: parameter.full_tensor().cpu() if hasattr(parameter, "full_tensor") else parameter.detach().cpu()
        for name, parameter in model.named_parameters()
    }
    copy = Transformer(model.config)
    load_weights(copy, tensors)
    return copy.to(torch.device("cpu"))
