"""Log-probabilities computed in chunks, compared with log_softmax in float64, gradients included."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from deskside.align.logprobs import pad_sequences, token_logprobs
from tests.budget.test_adapters import Live


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(50, 16, generator=generator) / 2).to(dtype).requires_grad_()
    tokens = torch.randint(50, (37,), generator=generator)
    return hidden, weight, tokens, torch.randn(37, generator=generator)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [5, 37, 64])
def test_values_and_gradients(softcap: float | None, temperature: float, chunk: int) -> None:
    hidden, weight, tokens, grad = inputs(torch.float64)
    found, entropy = token_logprobs(
        hidden, weight, tokens, temperature=temperature, softcap=softcap, chunk_tokens=chunk
    )
    d_hidden, d_weight = torch.autograd.grad(found, (hidden, weight), grad.double())
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wanted = F.log_softmax(logits / temperature, -1)
    chosen = wanted[torch.arange(37), tokens]
    e_hidden, e_weight = torch.autograd.grad(chosen, (hidden, weight), grad.double())
    torch.testing.assert_close(found, chosen, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(wanted.exp() * wanted).sum(-1).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_hidden, e_hidden, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(d_weight, e_weight, rtol=1e-11, atol=1e-12)
    assert not entropy.requires_grad


@pytest.mark.parametrize("trained", [True, False], ids=["weight trains", "weight is frozen"])
def test_six_bytes_for_each_logit_of_a_chunk(trained: bool) -> None:
    """In 16 bits, a chunk holds its logits and their float32 form, or that form and its
    gradient. Nothing survives until the next chunk.
    """
    chunk, V = 64, 4096
    hidden = torch.randn(4 * chunk, 8).bfloat16().requires_grad_()
    weight = torch.randn(V, 8).bfloat16().requires_grad_(trained)
    tokens = torch.randint(V, (4 * chunk,))
    with Live(hidden, weight, tokens) as live:
        before = live.peak
        found, _ = token_logprobs(hidden, weight, tokens, chunk_tokens=chunk)
        forward = live.peak - before
        found.sum().backward()
        backward = live.peak - before
    beside = 0.1 * chunk * V + (4 * V * 8 + 2 * V * 8) * trained  # the weight gradient, in two formats
    assert 4 * chunk * V <= forward <= 6 * chunk * V
    assert 6 * chunk * V <= backward <= 6 * chunk * V + beside


def test_gradcheck() -> None:
    hidden, weight, tokens, _ = inputs(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, tokens[:5], softcap=4.0, temperature=0.9, chunk_tokens=2)[0],
        (hidden[:5].detach().requires_grad_(), weight),
    )


def test_bfloat16_is_as_good_as_its_products() -> None:
    hidden, weight, tokens, grad = inputs(torch.bfloat16)
    found, _ = token_logprobs(hidden, weight, tokens, chunk_tokens=8)
    assert found.dtype == torch.float32
    found.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact, _ = token_logprobs(wide[0], wide[1], tokens)
    exact.backward(grad.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=0.04)
    for mine, theirs in zip((hidden, weight), wide, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        error = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.01


def test_a_frozen_weight_gets_no_gradient_and_hidden_does() -> None:
    hidden, weight, tokens, grad = inputs(torch.float32)
    frozen = weight.detach()
    token_logprobs(hidden, frozen, tokens)[0].backward(grad)
    assert hidden.grad is not None and frozen.grad is None


def test_no_tokens_at_all() -> None:
    hidden, weight, tokens, _ = inputs(torch.float32)
    found, entropy = token_logprobs(hidden[:0], weight, tokens[:0])
    found.sum().backward()
    assert found.shape == entropy.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()


class Noted(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def test_by_sequence_asks_the_device_nothing() -> None:
    """No operator is used whose output size depends on the mask, because it would
    wait for the device in forward or backward.
    """
    values, mask = torch.arange(3.0, requires_grad=True), torch.tensor([[True, True], [True, False]])
    with Noted() as noted:
        pad_sequences(values, mask).sum().backward()
    waits = ("masked_select", "masked_scatter", "nonzero", "aten::index.Tensor", "local_scalar", "item")
    assert not [name for name in noted.names if any(word in name for word in waits)]
    assert "aten::index_add" in "".join(noted.names), noted.names  # the backward pass was recorded too


def test_by_sequence_of_nothing() -> None:
    assert not pad_sequences(torch.empty(0), torch.zeros(2, 3, dtype=torch.bool)).any()


def test_by_sequence_is_padding_and_passes_gradients_back() -> None:
    values = torch.arange(1.0, 7.0, requires_grad=True)
    lengths = torch.tensor([2, 0, 3, 1])
    mask = torch.arange(3) < lengths[:, None]
    padded = pad_sequences(values, mask)
    assert padded.tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5], [6, 0, 0]]
    (padded * torch.tensor([[1.0], [2], [3], [4]])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1, 1, 3, 3, 3, 4]
