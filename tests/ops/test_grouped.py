"""The grouped product under autograd and torch.compile, compared with one product per row."""

import torch
from torch import Tensor

from deskside.ops.grouped import grouped_linear

ENDS = torch.tensor([3, 3, 10, 12], dtype=torch.int32)  # the second expert has no rows
ROWS = torch.tensor([0, 0, 0, *[2] * 7, 3, 3])


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(12, 8, generator=generator), torch.randn(4, 16, 8, generator=generator)
    return x.double().requires_grad_(), weight.double().requires_grad_()


def test_gradients_are_autograds() -> None:
    x, weight = operands()
    grad = torch.randn(16, 12, dtype=torch.float64).T  # not contiguous
    out = grouped_linear(x, weight, ENDS)
    truth = torch.einsum("sk,smk->sm", x, weight[ROWS])
    torch.testing.assert_close(out, truth)
    ours, theirs = (torch.autograd.grad(y, (x, weight), grad) for y in (out, truth))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    (only_x,) = torch.autograd.grad(grouped_linear(x, weight.detach(), ENDS), x, grad)
    assert torch.equal(only_x, ours[0])


def test_the_compiler_sees_one_operator() -> None:
    x, weight = operands()
    torch.library.opcheck(torch.ops.deskside.grouped_matmul.default, (x, weight, ENDS, True))
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    one, other = (f(x, weight, ENDS) for f in (compiled, grouped_linear))
    assert torch.equal(one, other)
    grads = (torch.autograd.grad(y.sum(), (x, weight)) for y in (one, other))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
