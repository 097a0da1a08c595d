"""The engine's random numbers are reproducible, independent of each other, and have the stated distributions."""

import pytest
import torch
from scipy import stats

from deskside.engine.counter_rng import ACCEPT, DRAW, PROPOSE, exponentials, stream_of, uniforms
from deskside.utils.errors import UsageError


def rows(count: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count,), stream_of(seed)), torch.arange(count)


def test_distributions() -> None:
    """Kolmogorov-Smirnov tests at fixed seeds, along each of the three arguments."""
    n = 20_000
    stream, count = rows(n)
    tokens = torch.arange(n)[None]
    for sample in (
        uniforms(stream, count, ACCEPT),
        uniforms(
            torch.tensor([stream_of(1, i) for i in range(n)]), torch.zeros(n, dtype=torch.int64), ACCEPT
        ),
        uniforms(torch.tensor([stream_of(i) for i in range(n)]), torch.zeros(n, dtype=torch.int64), DRAW),
    ):
        assert stats.kstest(sample.numpy(), "uniform").pvalue > 0.01
    for sample in (
        exponentials(stream[:1], count[:1], DRAW, tokens)[0],
        exponentials(stream, count, DRAW, torch.zeros(n, 1, dtype=torch.int64))[:, 0],
    ):
        assert stats.kstest(sample.numpy(), "expon").pvalue > 0.01


def test_neighbours_are_not_correlated() -> None:
    stream, count = rows(3_000)
    u = torch.stack([uniforms(stream, count, purpose) for purpose in (DRAW, PROPOSE, ACCEPT)])
    e = exponentials(stream, count, DRAW, torch.arange(4).expand(3_000, 4)).T
    table = torch.cat((u, e.double(), u[:1].roll(1, 1)))
    off = torch.corrcoef(table) - torch.eye(len(table))
    assert float(off.abs().max()) < 0.06


def test_a_rows_numbers_depend_on_nothing_else() -> None:
    stream, count = rows(50)
    tokens = torch.arange(7).expand(50, 7)
    many = exponentials(stream, count, DRAW, tokens)
    one = exponentials(stream[9:10], count[9:10], DRAW, torch.tensor([[5, 2]]))
    assert one.tolist() == [[many[9, 5].item(), many[9, 2].item()]]


def test_streams_differ_and_are_the_same_again() -> None:
    streams = {stream_of(seed, sample) for seed in (0, 1, 2, 2**63, 2**64, 2**70) for sample in range(50)}
    assert len(streams) == 300
    assert stream_of(4, 2) == stream_of(4, 2)
    assert all(-(2**63) <= stream < 2**63 for stream in streams)
    with pytest.raises(UsageError, match="seed"):
        stream_of(-1)
