"""Products of quack-kernels on a GPU: numbers, repetition, training steps and their CUDA graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels.choose_matmul import MatmulChoice, MatmulShape, choose_matmul
from deskside.kernels.quack_matmul import gated_matmul, gated_matmul_gradient, matmul, tiles_of
from deskside.utils.trials import TrialCache
from tests.gpu.card import DEVICE, NEEDS_CARD
from tests.gpu.test_graphed_pass import assert_same, stepper, train
from tests.kernels.quack_reference import launch

TILES = tiles_of(torch.device(DEVICE)) if torch.cuda.is_available() else ()
pytestmark = [
    *NEEDS_CARD,
    pytest.mark.skipif(not TILES, reason="needs quack-kernels and a GPU that it supports"),
]


def random(*size: int, seed: int = 0, std: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*size, generator=generator, device=DEVICE) * std).bfloat16()


def close(found: Tensor, expected: Tensor) -> None:
    """Within what one rounding to BF16 of sums in another order explains."""
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 3e-3
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("N", "K", "M"), [(4096, 768, 1152), (1000, 128, 384), (131, 2048, 768)])
def test_plain(N: int, K: int, M: int, tile: Any) -> None:
    a, b = random(N, K), random(M, K, seed=1)
    close(matmul(a, b.T, tile), a.float() @ b.float().T)
    close(matmul(random(N, M), b, tile), random(N, M).float() @ b.float())
    assert torch.equal(matmul(a, b.T, tile), matmul(a, b.T, tile))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("N", "D", "F"), [(4096, 768, 2048), (1000, 128, 384), (131, 256, 640)])
def test_gated(N: int, D: int, F: int, tile: Any) -> None:
    x, first, second = random(N, D), random(2 * F, D, std=D**-0.5), random(D, F, std=0.02)
    grad = random(N, D, seed=1, std=1e-3)
    inner, hidden = gated_matmul(x, first, tile)
    expected = {"D": inner.float(), "hidden": hidden.float()}
    launch("gate", tile, x, first.T, out=expected)
    close(inner, expected["D"])
    close(hidden, expected["hidden"])
    found = gated_matmul_gradient(grad, second, inner, tile)
    gradient = {"D": inner.float()}
    launch("gate_gradient", tile, grad, second, inner, out=gradient)
    close(found, gradient["D"])
    assert torch.equal(found, gated_matmul_gradient(grad, second, inner, tile))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 90.0, -90.0])
def test_extreme_gates(value: float) -> None:
    """What is not finite must reach the loss, and large gates must not become so."""
    x = torch.ones(128, 128, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.zeros(256, 128, device=DEVICE, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 1], weight[3, 1] = value, 1.0, 1.0  # gate and up 0, up 1
    hidden = gated_matmul(x, weight, TILES[0])[1]
    expected = torch.nn.functional.silu(torch.tensor(value))
    torch.testing.assert_close(hidden[0, 0].float().cpu(), expected, rtol=1e-2, atol=1e-30, equal_nan=True)
    assert not hidden[:, 1:].any()


def test_a_trial_finds_right_kernels() -> None:
    shape = MatmulShape(4096, ((1152, 768), (768, 768)), (768, 2048))
    facts = choose_matmul(shape, torch.device(DEVICE), float("inf"), TrialCache(None))
    assert facts is not None
    assert all(len(product["microseconds"]) == 1 + len(TILES) for product in facts["plain"])
    assert [len(times) for times in facts["gated"]["microseconds"]] == [1 + len(TILES)] * 2
    MatmulChoice.of(facts)


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_with_it_learn_the_same(graphs: bool) -> None:
    wide = {"intermediate_size": 256}
    expected = train(stepper("bf16", "flash", wide), 2, False)
    tile = TILES[-1]
    sizes = ((256, 128), (128, 128), (512, 128), (128, 256))
    plain = {(kind, *size): tile for kind in ("output", "input_gradient") for size in sizes}
    runs, lines = [], list[str]()
    for with_graphs in {False, graphs}:
        run = stepper("bf16", "flash", wide)
        run.precision.use_matmul(MatmulChoice(plain, (tile, tile)))
        if with_graphs:
            run.use_graphs(lines.append)
        runs.append(train(run, 2, False))
    assert len(lines) == int(graphs)
    losses = [[loss for loss, _, _ in run[:-1]] for run in (runs[0], expected)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert_same(runs[0], runs[-1])
