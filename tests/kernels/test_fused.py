"""The fused kernels in Triton's interpreter compared with their torch reference, and that reference with autograd."""

from importlib import import_module
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from deskside.kernels import fused
from deskside.kernels.fused import Cast, Fp8, QkvLayout
from tests.kernels.interpreter import interpreted

# the interpreter truncates to FP8 instead of rounding: rarely up to a whole step of 1/8
INTERPRETED_FP8 = 0.08


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    pytest.importorskip("triton")
    made: dict[str, float] = interpreted("fused_interpreted", "main")
    return made


def test_kernels_equal_their_reference(found: dict[str, float]) -> None:
    exact = {name: error for name, error in found.items() if "fp8" not in name or "amax" in name}
    assert len(exact) > 30
    assert max(exact.values()) < 1e-6, max(exact, key=exact.__getitem__)


def test_casts_are_near_their_reference(found: dict[str, float]) -> None:
    cast = {name: error for name, error in found.items() if "fp8" in name and "amax" not in name}
    assert len(cast) > 15
    assert max(cast.values()) < 2 * INTERPRETED_FP8, max(cast, key=cast.__getitem__)


def test_the_norms_backward_is_autograds() -> None:
    torch.manual_seed(0)
    residual, delta, grad, above = (torch.randn(12, 32, dtype=torch.float64) for _ in range(4))
    weight = torch.rand(32, dtype=torch.float64) + 0.5
    leaves = [t.clone().requires_grad_() for t in (residual, weight)]
    out = leaves[0] + delta
    normed = F.rms_norm(out, (32,), leaves[1], 1e-6)
    expected = torch.autograd.grad((out, normed), leaves, (above, grad))
    out, _, rstd = fused.add_norm(residual, delta, weight, 1e-6)
    got = fused.add_norm_backward(grad, out, rstd, weight, above)
    for ours, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("C", [64, 128])
def test_the_grid_of_ropes_gradient_fits_a_gpu(C: int) -> None:
    """CUDA's grids have at most 65,535 blocks in all dimensions but the first. A pass may have 4 million tokens."""
    jit = pytest.importorskip("triton.runtime.jit")
    launch = import_module("deskside.kernels.fused.launch")
    layout, N = QkvLayout(4, 2, C, 1e-6), 2**22
    grids: list[tuple[int, ...]] = []
    with mock.patch.object(jit.JITFunction, "run", lambda *args, grid, **options: grids.append(grid)):
        qkv, *grads = (torch.empty(N, heads, C, device="meta") for heads in (8, 4, 2, 2))
        launch.qk_norm_rope(qkv.flatten(1), None, None, None, layout)
        launch.qk_norm_rope_backward(grads, qkv.flatten(1), None, None, None, layout)
    assert len(grids) == 2 and all(size <= 65535 for _, *others in grids for size in others)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_saturates_and_notes_the_largest(dtype: torch.dtype) -> None:
    cast = Cast(dtype, torch.tensor(1e6), torch.zeros(()))
    x = torch.tensor([[1.0, -3.0], [0.0, 2.0]])
    out = fused.cast_fp8(x, cast)
    assert isinstance(out, Fp8)
    limit = torch.finfo(dtype).max
    assert out.rows.float().tolist() == [[limit, -limit], [0.0, limit]]
    assert torch.equal(out.columns.float(), out.rows.float().T)
    assert cast.amax == 3.0
