"""Check training steps of a small model: eager, with hand-written kernels and with torch.compile.

The loss and the gradient of every parameter are compared with the same model in float64. A few eager steps on one batch
must lower its loss. Hand-written kernels and torch.compile are timed against eager.
"""

import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from deskside.budget.scaling import Scaling
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.reading.loader import Batch
from deskside.doctor.check_tools import Result, add_error, compare, median_seconds, speed
from deskside.kernels.attention import AttentionContext
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.optim.build import build
from deskside.precision.convert import convert
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop.step import Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.parallel import World
from deskside.train.prepare.setup import prepare_execution

# Relative to float64. Typical errors of loss and worst gradient: 1e-6 and 1e-5 in fp32, 3e-4 and 2e-2 in bf16.
TOLERANCE = {"fp32": 1e-3, "bf16": 8e-2}
ExecutionMode = Literal["fused", "block"]
STEPS = 8
MAX_LOSS_RATIO = 0.99  # the last step's loss must be below this share of the first's


@dataclass(frozen=True)
class ProblemSize:
    """Size of a training problem: hidden size, layers, rows and tokens per row."""

    hidden: int
    layers: int
    rows: int
    tokens: int


SMALL_SIZE = ProblemSize(128, 2, 4, 64)
COMPILED_SIZES = {"cpu": SMALL_SIZE, "cuda": ProblemSize(512, 4, 16, 512)}


def step(precision: str, device: str) -> Result:
    """Check an eager training step in a precision, and that a few steps lower the loss."""
    stepper, batch = _stepper(SMALL_SIZE, precision, torch.device(device))
    result = compare_step(stepper, batch, precision, torch.device("cpu"))
    losses = [stepper.run([batch], number + 1).read() for number in range(STEPS)]
    result["details"] = {"losses": [round(loss, 4) for loss, _, _ in losses]}
    first, last = losses[0][0], losses[-1][0]
    if any(skipped for _, _, skipped in losses):
        result = add_error(result, "a step was skipped because its loss or gradient was not finite")
    elif not last < MAX_LOSS_RATIO * first:
        result = add_error(
            result, f"{STEPS} steps on one batch brought its loss from {first:.3f} to {last:.3f}"
        )
    return result


def compiled_step(mode: ExecutionMode, precision: str, device: str) -> Result:
    """Check forward and backward with `compute.compile` = mode against float64, and time them against eager."""
    where = torch.device(device)
    size = COMPILED_SIZES[where.type]
    stepper, batch = _stepper(size, precision, where)
    eager = median_seconds(lambda: _forward_backward(stepper, batch), where, runs=5)
    config = RunConfig(model=stepper.model.config, compute=ComputeConfig(compile=mode))
    prepare_execution(config, stepper.model, stepper.world, precision)
    began = time.perf_counter()
    _forward_backward(stepper, batch)
    compile_seconds = time.perf_counter() - began
    result = compare_step(stepper, batch, precision, where)
    seconds = median_seconds(lambda: _forward_backward(stepper, batch), where, runs=5)
    result["details"] = {
        "compile_seconds": round(compile_seconds, 1),
        "times_eager": round(eager / seconds, 3),
    }
    return result | {"speed": speed(size.rows * size.tokens / seconds, "tokens/s")}


def compare_step(stepper: Stepper, batch: Batch, precision: str, reference_device: torch.device) -> Result:
    """Compare a step with float64. The errors in the result are those of the loss and of the worst gradient."""
    loss = _forward_backward(stepper, batch)
    got = {"loss": loss} | _gradients(stepper.model)
    truth = _float64_step(stepper.model, batch, reference_device)
    result = compare(got, truth, TOLERANCE[precision])
    errors: dict[str, float | None] = dict(result["errors"])
    loss_error = errors.pop("loss")
    finite = [error for error in errors.values() if error is not None]
    worst = max(finite) if len(finite) == len(errors) else None
    problems = result["reason"].split("; ")
    if len(problems) > 2:
        problems = [*problems[:2], f"and {len(problems) - 2} more"]
    return {**result, "reason": "; ".join(problems), "errors": {"loss": loss_error, "gradients": worst}}


def _stepper(size: ProblemSize, precision: str, device: torch.device) -> tuple[Stepper, Batch]:
    config = RunConfig(model=_model_config(size))
    model = Transformer(config.model)
    # No matrix may be zero here: the layers before a zero matrix get no gradient to check.
    initialize(model, 0, InitOptions(output="fan_in", head_std=0.02))
    model = model.to(device)
    converted = convert(model, precision)
    optimizer = build(model, config.optim, Scaling(1.0, 1.0, 1.0))
    optimizer.set_progress(1.0, 0.0, 0)
    context = TrainContext(
        config=config,
        world=World(device),
        model=model,
        attention=AttentionBackends("sdpa"),
        precision=converted,
    )
    stepper = Stepper(context, optimizer)
    return stepper, _batch(size, config.model.vocab_size, device)


def _model_config(size: ProblemSize) -> ModelConfig:
    return ModelConfig(
        vocab_size=512,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=2 * size.hidden,
        max_position_embeddings=2048,
    )


def _batch(size: ProblemSize, vocab: int, device: torch.device) -> Batch:
    tokens = torch.randint(
        vocab, (size.rows, size.tokens + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    valid = size.rows * size.tokens
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, None, valid, valid)


def _forward_backward(stepper: Stepper, batch: Batch) -> Tensor:
    stepper.optimizer.zero_grad()
    return stepper.forward_backward([batch])


def _gradients(model: Transformer) -> dict[str, Tensor]:
    """Return the gradients by name; zeros for a missing one, so that it counts as an error."""
    return {
        f"gradient of {name}": torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def _float64_step(model: Transformer, batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return loss and gradients of the step in float64, eager, with the reference attention."""
    exact = Transformer(model.config)
    exact.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    exact = exact.double().to(device)
    moved = replace(batch, tokens_BT=batch.tokens_BT.to(device), targets_BT=batch.targets_BT.to(device))
    loss = exact.loss(moved.tokens_BT, moved.targets_BT, AttentionContext()) / batch.num_valid_step
    loss.backward()
    return {"loss": loss.detach()} | _gradients(exact)
