"""Dropout: Philox's published test vectors, the statistics of torch's dropout,
and autograd's gradients of a fixed mask.
"""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from deskside.kernels.dropout import dropout, kept, philox, threshold
from tests.kernels.interpreter import interpreted

N, D, RATE = 512, 768, 0.1


def position(seed: int = 1, stream: int = 2, step: int = 3, first: int = 0) -> Tensor:
    return torch.tensor([seed, stream, step, first])


def mask(**changes: int) -> Tensor:
    return kept(position(**changes), N, D, threshold(RATE))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # `kat_vectors` of Random123 (github.com/DEShawResearch/random123)
        ((0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_its_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: str
) -> None:
    low, high = map(torch.tensor, key)
    words = philox(tuple(map(torch.tensor, counter)), (low, high))
    assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_the_kernel_has_the_same_masks() -> None:
    """Runs in Triton's interpreter, which rounds bfloat16 differently from a GPU."""
    kernels, same_words = interpreted("dropout_interpreted", "both")
    for name, (only_one, difference) in kernels.items():
        assert only_one == 0 and difference <= (2**-7 if "bfloat16" in name else 2**-23), name
    assert same_words


def test_values_are_kept_as_often_as_by_torch() -> None:
    """Compares the share over all values, and the distribution over tokens and
    channels of the number of kept values.
    """
    share = threshold(RATE) / 2**16
    ours = mask()
    error = math.sqrt(share * (1 - share) / (N * D))
    assert abs(float(ours.double().mean()) - (1 - share)) < 4 * error
    torch.manual_seed(0)
    theirs = torch.nn.functional.dropout(torch.ones(N, D), RATE) != 0
    for dim in (0, 1):
        assert stats.ks_2samp(ours.sum(dim), theirs.sum(dim)).pvalue > 0.001
    x = torch.rand(N, D) + 1
    mean = torch.stack([dropout(x, position(step=step), RATE) for step in range(8)]).mean(0) / x - 1
    deviation = math.sqrt(share / (1 - share) / 8)
    assert abs(float(mean.mean())) < 4 * deviation / math.sqrt(N * D)
    assert float(mean.std()) == pytest.approx(deviation, rel=0.02)


def test_masks_are_independent() -> None:
    """Compares masks over seeds, streams, steps, tokens and channels, also those that share a call of Philox."""
    ours = mask()
    others = [mask(seed=4), mask(seed=1 + 2**40), mask(stream=3), mask(step=4), mask(step=3 + 2**20)]
    others += [ours.roll(1, 0), ours.roll(1, 1), ours.roll(D // 8, 1), ours.roll(D // 2, 1), mask(first=N)]
    for other in others:
        correlation = torch.corrcoef(torch.stack([ours.flatten(), other.flatten()]).double())[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(N * D)


def test_a_mask_does_not_depend_on_how_a_step_is_divided() -> None:
    x = torch.randn(4, 8, 37)
    whole = dropout(x, position(), 0.5)
    parts = [dropout(part, position(first=16 * i), 0.5) for i, part in enumerate(x.chunk(2))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole != 0, kept(position(), 32, 37, 2**15).view_as(x))
    assert torch.equal(dropout(x.bfloat16(), position(), 0.5), whole.bfloat16())


def test_gradients_are_those_of_autograd_with_a_fixed_mask() -> None:
    x = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    (ours,) = torch.autograd.grad(dropout(x, position(), 0.3), x, upstream)
    keep = kept(position(), 15, 24, threshold(0.3)).view_as(x)
    factor = 1 / (1 - threshold(0.3) / 2**16)
    (theirs,) = torch.autograd.grad(x * keep * factor, x, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=0)


@pytest.mark.full
def test_torch_accepts_the_operator() -> None:
    x = torch.randn(3, 5, 24, requires_grad=True)
    torch.library.opcheck(torch.ops.deskside.dropout.default, (x, position(), threshold(0.3)))
