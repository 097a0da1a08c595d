"""Linear layers of few tokens on the card, against float64."""

import pytest
import torch
import torch.nn.functional as F

from deskside.kernels import narrow
from deskside.kernels.functional import activate
from tests.gpu.card import DEVICE, NEEDS_CARD

pytestmark = NEEDS_CARD


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 6e-3), (torch.float32, 2e-6)])
@pytest.mark.parametrize("tokens", [1, 16, 33, 64])
@pytest.mark.parametrize(("width", "outputs"), [(768, 2048), (2048, 768), (1000, 40)])
def test_equals_float64(tokens: int, width: int, outputs: int, dtype: torch.dtype, within: float) -> None:
    torch.manual_seed(0)
    x, delta = (torch.randn(tokens, width, device=DEVICE, dtype=dtype) for _ in range(2))
    weight, bias = (
        torch.randn(2 * outputs, width, device=DEVICE, dtype=dtype),
        torch.randn(2 * outputs, device=DEVICE),
    )
    norm = torch.rand(width, device=DEVICE) + 0.5
    assert narrow.covers(x, weight)
    made = F.linear(x.double(), weight.double(), bias.double())
    assert float((narrow.linear(x, weight, bias).double() - made).norm() / made.norm()) < within
    for number in range(3):  # the first launch compiles; later ones may start early
        sums, ours = narrow.add_norm_linear(x, delta, (norm, 1e-6), weight, bias, ("silu", True))
        assert torch.equal(sums, x + delta), number
        normed = F.rms_norm(sums.double(), (width,), norm.double(), 1e-6)
        truth = activate("silu", *F.linear(normed, weight.double(), bias.double()).chunk(2, dim=-1))
        assert float((ours.double() - truth).norm() / truth.norm()) < within, number


def test_a_chain_of_layers_in_a_graph_reads_what_the_one_before_it_wrote() -> None:
    """Kernels that start early wait for those before them: replays with new inputs equal the chain without a graph."""
    torch.manual_seed(1)
    weights = [torch.randn(768, 768, device=DEVICE, dtype=torch.bfloat16) / 28 for _ in range(24)]
    static = torch.randn(4, 768, device=DEVICE, dtype=torch.bfloat16)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = narrow.linear(x, weight)
        return x

    chain(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static)
    for seed in range(20):
        static.copy_(torch.randn(4, 768, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, chain(static.clone())), seed
