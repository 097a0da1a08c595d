"""Weight initialization: `initialize` sets all parameters and documents the choice for each group.

Each logical tensor has its own generator on the CPU, seeded by (seed, name). So a seed gives the same weights on any
device, with or without fused projections, and independently of other parts of the architecture.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch

from deskside.config.model import INITIALIZER_RANGE, ModelConfig
from deskside.model.transformer import Transformer
from deskside.ops.logical import LogicalTensor, logical_tensors
from deskside.utils.child_process import cpu_cores
from deskside.utils.splitmix import derive_seed

MAX_THREADS = 8  # limits the memory, as each thread has a buffer for a whole tensor
# Not that of embeddings: with 1, a router like them would begin with near certainty.
ROUTER_STD = 0.02
OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class InitOptions:
    """Options of the initialization. The defaults are recommended.

    embedding_std: standard deviation of embeddings; None is the model's `initializer_range`, or else INITIALIZER_RANGE;
    that of a run is `RunConfig.embedding_std`. head_std: standard deviation of an untied head. output: initialization
    of the matrices that write to the residual stream; "fan_in" is that of the other matrices.
    """

    embedding_std: float | None = None
    head_std: float = 0.001
    output: Literal["zero", "fan_in"] = "zero"


@torch.no_grad()
def allocate(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Return a model on `device` with uninitialized weights, without using further memory.

    dtype: that of weights with two or more dimensions; the others are float32.
    """
    with torch.device("meta"):
        model = Transformer(config)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(dtype)
    # Not `to_empty`, which calls empty_like on meta tensors, and so imports sympy.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    return model


@torch.no_grad()
def initialize(model: Transformer, seed: int, options: InitOptions | None = None) -> None:
    """Set every parameter of `model`, in place. With the default options:

    - Norm weights one (those of queries: q_norm_init), biases zero: the norms begin as plain normalization.
    - Token and position embeddings: normal, embedding_std. A norm follows before they are read, so their scale only
      determines the relative size of the first updates to the residual stream. A tied embedding is also the head; its
      logits then begin near embedding_std * sqrt(hidden_size).
    - Matrices that read the stream (q, k, v, gate, up): uniform with standard deviation 1 / sqrt(fan-in), which keeps
      unit-scale inputs at unit scale for any width (LeCun et al. 1998; the width rule of muP, Yang et al. 2022,
      arXiv 2203.03466). Uniform, so that no entry begins as an outlier.
    - Matrices that write to the stream (o, down): zero. Each sublayer then begins as the identity, and the depth of the
      model does not change the size of the first steps (Zhang et al. 2019, arXiv 1901.09321).
    - The router: normal, ROUTER_STD, so that all experts begin with nearly equal probability.
    - An untied head: normal, head_std, so that the first prediction is nearly uniform and the first loss is
      close to log(vocab_size). Not zero, because nothing below the head would then have a gradient in the first step.
    """
    options = options or InitOptions()
    model.reset_buffers()
    per_thread = threading.local()

    def fill(tensor: LogicalTensor) -> None:
        shape = tensor.view.shape
        # One buffer per thread is reused, because allocating a new one for each tensor would take half of the time.
        if not hasattr(per_thread, "scratch") or len(per_thread.scratch) < shape.numel():
            per_thread.scratch = torch.empty(shape.numel())
        _fill(tensor, per_thread.scratch[: shape.numel()].view(shape), model, seed, options)

    # Each tensor has its own generator, which runs on one core and without the GIL.
    with ThreadPoolExecutor(min(MAX_THREADS, cpu_cores())) as executor:
        list(executor.map(fill, logical_tensors(model)))


def _fill(
    tensor: LogicalTensor, scratch: torch.Tensor, model: Transformer, seed: int, options: InitOptions
) -> None:
    """Set one tensor. scratch: float32 buffer of its shape on the CPU for the random numbers."""
    view = tensor.view
    generator = torch.Generator().manual_seed(derive_seed(seed, tensor.name))

    def normal(std: float) -> None:
        view.copy_(scratch.normal_(0.0, std, generator=generator))

    if tensor.kind == "norm":
        view.fill_(model.config.q_norm_init if tensor.name.endswith("q_norm.weight") else 1.0)
    elif tensor.kind == "bias":
        view.zero_()
    elif tensor.kind in ("embedding", "position"):
        normal(options.embedding_std or model.config.initializer_range or INITIALIZER_RANGE)
    elif tensor.kind == "head":
        normal(options.head_std)
    elif tensor.name.endswith("router.weight"):
        normal(ROUTER_STD)
    elif tensor.name.endswith(OUTPUT_PROJECTIONS) and options.output == "zero":
        view.zero_()
    else:
        bound = 3**0.5 * tensor.view.shape[-1] ** -0.5
        view.copy_(scratch.uniform_(-bound, bound, generator=generator))
