"""Initial weights. One function sets everything, and says why for each group.

Each logical tensor has its own generator on the CPU, seeded by (seed, name). So the same seed gives the same model
whether projections are fused or not, on any device, and whatever is added to the architecture elsewhere.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch

from deskside.config.model import ModelConfig
from deskside.model.transformer import Transformer
from deskside.ops.logical import LogicalTensor, logical_tensors
from deskside.utils.child_process import cpu_cores
from deskside.utils.splitmix import derive_seed

MOST_THREADS = 8  # that draw at once, each with memory for a tensor
OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class InitOptions:
    """Options of the initialization. The defaults are recommended.

    embedding_std: None is the configuration's initializer_range. head_std: standard deviation of an untied head.
    output: initialization of projections that write to the residual stream; "fan_in" as of those that read it.
    """

    embedding_std: float | None = None
    head_std: float = 0.001
    output: Literal["zero", "fan_in"] = "zero"


@torch.no_grad()
def allocate(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Transformer:
    """A model on `device` whose weights are not set. dtype: of weights with two or more dimensions; the others are
    float32. Takes the memory of the weights and no more."""
    with torch.device("meta"):
        model = Transformer(config)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(dtype)
    # Not `to_empty`: it asks for a tensor like one on the meta device, which torch does in Python and sympy.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    return model


@torch.no_grad()
def initialize(model: Transformer, seed: int, options: InitOptions | None = None) -> None:
    """Set every parameter of `model`, in place.

    - Norm weights one, biases zero: the norms begin as plain normalisation.
    - Token and position embeddings: normal, initializer_range. A norm follows before anything reads them, so the scale
      decides only how large the first updates of the stream are beside it. It also has to suit the head where the two
      are tied: logits then begin near initializer_range * sqrt(hidden_size).
    - Matrices that read the stream (q, k, v, gate, up): uniform with standard deviation 1 / sqrt(fan-in), which keeps
      unit-scale inputs at unit scale whatever the width (LeCun et al. 1998; the width rule of muP, Yang et al. 2022,
      arXiv 2203.03466). Uniform, because no entry begins as an outlier.
    - Matrices that write to the stream (o, down): zero. Each sublayer then begins as the identity, and the depth of the
      model does not change the size of the first steps (Zhang et al. 2019, arXiv 1901.09321).
    - The router: normal, initializer_range, so that all experts begin nearly equally likely.
    - An untied head: normal, head_std, so that the first prediction is nearly uniform and the first loss is
      log(vocab_size). Not zero, or nothing below the head would get a gradient in the first step.
    """
    options = options or InitOptions()
    model.reset_buffers()
    mine = threading.local()

    def fill(tensor: LogicalTensor) -> None:
        shape = tensor.view.shape
        # Drawn into the same memory again and again: half of the time would go into new pages.
        if not hasattr(mine, "scratch") or len(mine.scratch) < shape.numel():
            mine.scratch = torch.empty(shape.numel())
        _fill(tensor, mine.scratch[: shape.numel()].view(shape), model, seed, options)

    # Each tensor has its own generator, which runs on one core and without the GIL.
    with ThreadPoolExecutor(min(MOST_THREADS, cpu_cores())) as pool:
        list(pool.map(fill, logical_tensors(model)))


def _fill(
    tensor: LogicalTensor, scratch: torch.Tensor, model: Transformer, seed: int, options: InitOptions
) -> None:
    """Set one tensor. scratch: float32 of its shape on the CPU, for what is drawn."""
    view = tensor.view
    generator = torch.Generator().manual_seed(derive_seed(seed, tensor.name))
    embedding_std = model.config.initializer_range if options.embedding_std is None else options.embedding_std

    def normal(std: float) -> None:
        view.copy_(scratch.normal_(0.0, std, generator=generator))

    if tensor.kind == "norm":
        view.fill_(1.0)
    elif tensor.kind == "bias":
        view.zero_()
    elif tensor.kind in ("embedding", "position"):
        normal(embedding_std)
    elif tensor.kind == "head":
        normal(options.head_std)
    elif tensor.name.endswith("router.weight"):
        normal(model.config.initializer_range)
    elif tensor.name.endswith(OUTPUT_PROJECTIONS) and options.output == "zero":
        view.zero_()
    else:
        bound = 3**0.5 * tensor.view.shape[-1] ** -0.5
        view.copy_(scratch.uniform_(-bound, bound, generator=generator))
