import torch
from torch import Tensor

from deskside.kernels.functional import gradients


def test_gradients_are_torchs_to_the_last_bit() -> None:
    """Several outputs, one that the others are made from, a leaf that is used twice, dtypes of their own."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(5, 7, generator=generator).requires_grad_() for _ in range(2)]

    def outputs() -> list[Tensor]:
        first = (leaves[0] @ leaves[1].T).sin()
        return [first, (first * first).to(torch.bfloat16), leaves[0].exp()]

    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs()]
    expected = torch.autograd.grad(outputs(), leaves, upstream)
    made = outputs()
    with torch.no_grad():  # as inside of a backward pass
        found = gradients(made, leaves, upstream)
    assert len(found) == 2
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
