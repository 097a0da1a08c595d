"""linear_cross_entropy compared with torch's cross_entropy in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.kernels.cross_entropy import (
    FutureTargets,
    LossOptions,
    linear_cross_entropy,
    multi_token_cross_entropy,
    token_losses,
)

N, D, V = 23, 12, 40


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64)
    targets = torch.randint(0, V, (N,), generator=g)
    targets[[0, 7, 22]] = -100
    return hidden, weight, targets


def expected(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, z: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = (t.double().clone().requires_grad_() for t in (hidden, weight))
    logits = hidden @ weight.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    losses = losses + z * torch.logsumexp(logits, -1) ** 2 * (targets != -100)
    return losses.detach(), losses.sum().detach(), *torch.autograd.grad(losses.sum() * 3.0, (hidden, weight))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("chunk_tokens", [7, 23, 64])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
def test_loss_and_gradients(
    softcap: float | None, z_loss: float, chunk_tokens: int, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets = problem()
    hidden, weight = hidden.to(dtype), weight.to(dtype).to(torch.promote_types(dtype, torch.float32))
    losses, total, d_hidden, d_weight = expected(hidden, weight, targets, softcap, z_loss)
    hidden.requires_grad_(), weight.requires_grad_()
    options = LossOptions(softcap, z_loss, chunk_tokens)
    loss = linear_cross_entropy(hidden, weight, targets, options)
    (loss * 3.0).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert weight.grad.dtype == weight.dtype and hidden.grad.dtype == dtype
    for got, truth in ((loss, total), (hidden.grad, d_hidden), (weight.grad, d_weight)):
        assert (got.double() - truth).norm() <= tolerance * truth.norm()
    assert not hidden.grad[7].any()
    per_token = token_losses(hidden, weight, targets, options)
    assert per_token.shape == (N,) and per_token[7] == 0
    assert (per_token.double() - losses).norm() <= tolerance * losses.norm()
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, options), loss.detach())


def future_of(targets: Tensor) -> FutureTargets:
    """Return two later targets per token. Some are ignored, and some equal another target of their token."""
    targets_NK = torch.stack((targets.roll(-1), targets.roll(-2)), 1)
    targets_NK[5] = targets[5]
    targets_NK[6, 1] = targets_NK[6, 0]
    targets_NK[9] = -100
    return FutureTargets(targets_NK, torch.tensor([0.5, 0.2]))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
def test_several_tokens(softcap: float | None, z_loss: float, dtype: torch.dtype, tolerance: float) -> None:
    """The loss is the weighted sum of torch's cross_entropy over each target. The z-loss counts once."""
    hidden, weight, targets = problem()
    future = future_of(targets)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    options = LossOptions(softcap, z_loss, chunk_tokens=7)
    total, next_token = multi_token_cross_entropy(hidden, weight, targets, future, options)
    assert not next_token.requires_grad
    (total * 3.0).backward()
    assert hidden.grad is not None and weight.grad is not None
    _, truth, *gradients = expected(hidden.detach(), weight.detach(), targets, softcap, z_loss)
    assert (next_token.double() - truth).abs() <= tolerance * truth
    for place, factor in enumerate(future.weights_K.double()):
        _, term, *more = expected(hidden.detach(), weight.detach(), future.targets_NK[:, place], softcap, 0.0)
        truth = truth + factor * term
        gradients = [a + factor * b for a, b in zip(gradients, more, strict=True)]
    for got, wanted in zip((total, hidden.grad, weight.grad), (truth, *gradients), strict=True):
        assert (got.double() - wanted).norm() <= tolerance * wanted.norm()
    none = FutureTargets(torch.full_like(future.targets_NK, -100), future.weights_K)
    total, next_token = multi_token_cross_entropy(hidden, weight, targets, none, options)
    assert total == next_token
    torch.testing.assert_close(total, linear_cross_entropy(hidden, weight, targets, options))


def test_only_the_needed_gradient() -> None:
    hidden, weight, targets = problem()
    *_, d_hidden, d_weight = expected(hidden, weight, targets, None, 0.0)
    weight.requires_grad_()
    (linear_cross_entropy(hidden, weight, targets, LossOptions(chunk_tokens=8)) * 3).backward()
    torch.testing.assert_close(weight.grad, d_weight)
    frozen = weight.detach()
    hidden.requires_grad_()
    (linear_cross_entropy(hidden, frozen, targets, LossOptions(chunk_tokens=8)) * 3).backward()
    torch.testing.assert_close(hidden.grad, d_hidden)


def test_all_tokens_ignored() -> None:
    hidden, weight, targets = problem()
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0 and hidden.grad is not None and not hidden.grad.any()


def test_never_holds_more_logits_than_one_chunk() -> None:
    """The largest tensor that is created has chunk x V entries, not N x V."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point:
                    largest = max(largest, tensor.numel())
            return out

    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(64, 4, requires_grad=True)
    with Watch():
        targets = torch.zeros(512, dtype=torch.int64)
        linear_cross_entropy(hidden, weight, targets, LossOptions(chunk_tokens=64)).backward()
    assert largest <= max(64 * 64, 512 * 4)


def test_compiled_chunk_equals_the_eager_one() -> None:
    """The chunk function takes a different path when it is compiled, as on CUDA.
    It is captured without code generation.
    """
    from deskside.kernels.cross_entropy import chunk_loss_and_grad

    hidden, weight, targets = problem()
    logits = hidden @ weight.T
    capped = LossOptions(5.0, 0.01)
    for options, future in ((LossOptions(), None), (capped, None), (capped, future_of(targets))):
        compiled = torch.compile(chunk_loss_and_grad, fullgraph=True, backend="eager")
        got = compiled(logits.clone(), targets, options, future)
        expected = chunk_loss_and_grad(logits.clone(), targets, options, future)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_bf16_equals_float64() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 64, generator=g).cuda().bfloat16().requires_grad_()
    weight = (torch.randn(512, 64, generator=g) * 0.1).cuda().requires_grad_()
    targets = torch.randint(0, 512, (100,), generator=g).cuda()
    loss = linear_cross_entropy(hidden, weight, targets, LossOptions(chunk_tokens=32))
    (loss * 3.0).backward()
    _, total, d_hidden, d_weight = expected(hidden.detach(), weight.detach(), targets, None, 0.0)
    assert hidden.grad is not None and weight.grad is not None
    for got, truth in ((loss, total), (hidden.grad, d_hidden), (weight.grad, d_weight)):
        assert (got.double() - truth).norm() <= 2e-2 * truth.norm()
