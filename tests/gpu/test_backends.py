"""Other libraries behind our recipe names on a GPU: compiled FP8 products of
torchao, and transformer-engine's layers.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deskside.config.sections import PrecisionConfig
from deskside.kernels.attention import AttentionContext
from deskside.ops.linear import Embedding, Linear
from deskside.precision import check, convert
from deskside.precision.backends import torchao, transformer_engine
from deskside.train.parallel import World
from deskside.train.prepare import setup
from deskside.utils.errors import UsageError
from tests.gpu.card import DEVICE, NEEDS_CARD, QUICK, config, losses
from tests.train import tiny_run

pytestmark = NEEDS_CARD


def why_not(module: str) -> str:
    """Return the reason why a library cannot be imported, or an empty string if it can."""
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return str(error).split(". ")[0]
    return ""


@pytest.fixture(scope="module")
def their_torchao() -> None:
    if reason := why_not("torchao.float8"):
        pytest.skip(f"torchao does not import: {reason}")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 products need compute capability 8.9")


@pytest.fixture(scope="module")
def te() -> None:
    if reason := why_not("transformer_engine.pytorch"):
        pytest.skip(f"transformer-engine does not import: {reason}")


def or_skip(recipe: str, backend: str) -> Any:
    """Return the result of the self-check. Skips with the library's own reason if it refuses the GPU."""
    try:
        return check(recipe, DEVICE, backend=backend)
    except UsageError as refusal:
        if "on this card" not in str(refusal):
            raise
        pytest.skip(str(refusal))


def products(recipe: str, passes: int = 1, backend: Any = "deskside") -> tuple[Tensor, ...]:
    """Return the output, the input gradient and the weight gradient; gradients are summed over micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(Embedding(512, 256), Linear(256, [("a", 128), ("b", 256)]))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model = model.to(DEVICE)
    applied = convert(model, recipe, PrecisionConfig(backend=backend))
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(512, 384, generator=generator).to(DEVICE).bfloat16() for _ in range(passes)]
    output = torch.empty(0)
    for step in (1, 2, 3):  # a delayed scale uses the history of earlier steps
        model.zero_grad()
        applied.begin_step(step)
        for grad in grads:
            with applied.forward_context():
                output = model(torch.arange(512, device=DEVICE))
            output.backward(grad)
        applied.end_step()
    return output.detach(), model[0].weight.grad, model[1].weight.grad


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def first_gradients(given: Any) -> dict[str, Tensor]:
    world = World(torch.device(DEVICE))
    model = setup.build_model(given, world, given.precision.name)
    with torch.no_grad():
        generator = torch.Generator(DEVICE).manual_seed(0)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, device=DEVICE, generator=generator))
    setup.prepare_execution(given, model, world, given.precision.name)
    tokens = torch.randint(300, (32, 128), generator=torch.Generator().manual_seed(0))
    tokens_BT = tokens.to(DEVICE)
    loss, _ = model.loss_and_router(tokens_BT, tokens_BT.roll(-1, 1), AttentionContext(backend="sdpa"))
    (loss / tokens_BT.numel()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# torchao


@pytest.mark.parametrize("recipe", torchao.RECIPES)
def test_torchao_passes_the_self_check(recipe: str, their_torchao: None) -> None:
    result = check(recipe, DEVICE, backend="torchao")
    assert result.ok and result.native, result.reason
    assert all(0.03 < error < 0.07 for error in result.errors.values())


def test_torchao_tensorwise_is_ours(their_torchao: None) -> None:
    """They agree up to a BF16 rounding of the weight gradients and, on Hopper,
    the faster accumulation of outputs in both.
    """
    ours = products("fp8-tensorwise", passes=2)
    theirs = products("fp8-tensorwise", passes=2, backend="torchao")
    for got, expected in zip(theirs, ours, strict=True):
        assert off(got, expected) < 3e-3


def test_compiled_torchao_is_as_near_to_bf16_as_eager(their_torchao: None, data: Path) -> None:
    """Compiled code keeps float32 where eager code rounds to BF16, which moves values to the next FP8 number. Over
    twelve layers, the two differ by as much as the error of either, so both are compared with the gradients of BF16.
    """
    found = {}
    for compile, precision in (
        ("off", {"name": "bf16"}),
        ("off", {"name": "fp8-tensorwise", "backend": "torchao"}),
        ("block", {"name": "fp8-tensorwise", "backend": "torchao"}),
    ):
        compute = {**QUICK, "compile": compile}
        given = config(data, compute=compute, precision=precision, model={"num_hidden_layers": 12})
        found[compile, precision["name"]] = first_gradients(given)
    for name, truth in found["off", "bf16"].items():
        compiled = off(found["block", "fp8-tensorwise"][name], truth)
        eager = off(found["off", "fp8-tensorwise"][name], truth)
        print(f"{name}: compiled {compiled:.3f}, eager {eager:.3f}")
        assert compiled < 1.3 * eager + 0.02, (name, compiled, eager)


@pytest.mark.parametrize("recipe", torchao.RECIPES)
def test_a_compiled_run_with_torchao_learns(
    recipe: str, their_torchao: None, data: Path, tmp_path: Path
) -> None:
    """The first steps are in BF16, so blocks are compiled for both."""
    curves = {}
    for name, precision in (
        ("plain", {"name": "bf16"}),
        ("torchao", {"name": recipe, "backend": "torchao", "warmup_steps": 2}),
    ):
        outcome = tiny_run.train(tmp_path, config(data, precision=precision), name)
        assert outcome.status == "finished"
        curves[name] = losses(outcome.run.path)
    assert curves["torchao"] == pytest.approx(curves["plain"], rel=0.03)
    assert curves["torchao"] != curves["plain"]


# transformer-engine


@pytest.mark.parametrize("recipe", transformer_engine.RECIPES)
def test_transformer_engine_passes_the_self_check(recipe: str, te: None) -> None:
    result = or_skip(recipe, "transformer-engine")
    assert result.ok and result.native, result.reason


@pytest.mark.parametrize("recipe", ["fp8-tensorwise", "fp8-delayed"])
def test_transformer_engine_computes_as_we_do(recipe: str, te: None) -> None:
    or_skip(recipe, "transformer-engine")
    ours = products(recipe, passes=2)
    theirs = products(recipe, passes=2, backend="transformer-engine")
    for got, expected in zip(theirs, ours, strict=True):
        assert off(got, expected) < 3e-3


@pytest.mark.parametrize("recipe", transformer_engine.RECIPES)
def test_a_run_with_transformer_engine_learns(recipe: str, te: None, data: Path, tmp_path: Path) -> None:
    or_skip(recipe, "transformer-engine")
    curves = {}
    for name, precision in (
        ("plain", {"name": "bf16"}),
        ("te", {"name": recipe, "backend": "transformer-engine"}),
    ):
        outcome = tiny_run.train(tmp_path, config(data, precision=precision), name)
        assert outcome.status == "finished"
        curves[name] = losses(outcome.run.path)
    assert curves["te"] == pytest.approx(curves["plain"], rel=0.05)
    assert curves["te"] != curves["plain"]
