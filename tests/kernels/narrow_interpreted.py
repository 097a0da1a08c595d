"""The kernels of linear layers of few tokens in Triton's interpreter, beside torch in float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.kernels import narrow
from deskside.kernels.functional import activate


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


def main() -> dict[str, float]:
    """The error of each case: ragged sizes, more channels than a step takes, one token and many."""
    torch.manual_seed(0)
    found: dict[str, float] = {}
    for N, K, outputs in ((1, 48, 40), (16, 300, 16), (17, 64, 33), (64, 130, 16)):
        x, delta, weight = torch.randn(N, K), torch.randn(N, K), torch.randn(outputs, K)
        bias, norm = torch.randn(outputs), torch.rand(K) + 0.5
        for b in (None, bias):
            truth = F.linear(x.double(), weight.double(), None if b is None else b.double())
            found[f"linear {N} {K} {outputs} {b is None}"] = error(narrow.linear(x, weight, b), truth)
        summed = (x + delta).double()
        normed = F.rms_norm(summed, (K,), norm.double(), 1e-6)
        for name, gated in ((None, False), ("silu", True), ("gelu_new", True), ("relu2", False)):
            both = torch.randn(outputs * (1 + gated), K)
            b = torch.randn(len(both)) if N == 17 else None
            made = F.linear(normed, both.double(), None if b is None else b.double())
            truth = made if name is None else activate(name, *made.chunk(2 if gated else 1, dim=-1))
            kind = None if name is None else (name, gated)
            sums, out = narrow.add_norm_linear(x, delta, (norm, 1e-6), both, b, kind)
            found[f"{name} {N} {K} {outputs}"] = error(out, truth)
            found[f"{name} {N} {K} {outputs}: sum"] = float((sums - summed).abs().max())
    return found
