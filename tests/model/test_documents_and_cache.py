"""Packed documents and cached generation agree with plain forward passes."""

import itertools
from typing import Any

import pytest
import torch

from deskside.kernels.attention import AttentionContext, document_positions
from deskside.utils.errors import UsageError
from tests.model.tiny import LEARNED, MOE, WINDOWS, make, tokens


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("changes", [{}, WINDOWS, LEARNED, MOE])
def test_packed_documents_equal_separate_runs(changes: dict[str, Any], backend: str) -> None:
    model = make(**changes)
    x = tokens()
    rows = [[6, 11], [3, 10, 4]]
    ends = [0]
    for length in [n for row in rows for n in row]:
        ends.append(ends[-1] + length)
    cu_seqlens = torch.tensor([*ends, 34, 34], dtype=torch.int32)
    context = AttentionContext(cu_seqlens=cu_seqlens, backend=backend)
    packed = model(x, context, document_positions(cu_seqlens, 2, 17)).flatten(0, 1)
    for begin, end in itertools.pairwise(ends):
        alone = model(x.flatten()[None, begin:end])[0]
        torch.testing.assert_close(packed[begin:end], alone, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(packed, model(x).flatten(0, 1), atol=1e-3)


def test_a_backend_that_cannot_is_named() -> None:
    with pytest.raises(UsageError, match="'sdpa' has no sliding window"):
        make(**WINDOWS)(tokens(), AttentionContext(backend="sdpa"))
    both = AttentionContext(backend="sdpa", window_backend="chunked")
    model = make(**WINDOWS)
    torch.testing.assert_close(model(tokens(), both), model(tokens()))


# Cache


@pytest.mark.parametrize("changes", [{}, WINDOWS, LEARNED, MOE, {"norm_position": "post"}])
def test_cached_equals_uncached(changes: dict[str, Any]) -> None:
    model = make(**changes)
    x = tokens(2, 40)
    full = model(x)
    cache = model.new_cache(2, 64)
    parts = [model.forward_cached(part, cache) for part in x.split([9, 1, 1, 20, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, WINDOWS, LEARNED])
def test_cached_greedy_text_equals_uncached_for_prompts_of_unequal_length(changes: dict[str, Any]) -> None:
    model = make(**changes)
    prompts = tokens(3, 11)
    counts = torch.tensor([11, 4, 7])
    cache = model.new_cache(3, 64)
    step = model.forward_cached(prompts, cache, counts, logits_of="last").argmax(-1)
    generated = [step]
    for _ in range(12):
        step = model.forward_cached(step, cache).argmax(-1)
        generated.append(step)
    for row in range(3):
        text = prompts[row : row + 1, : counts[row]]
        for _ in range(13):
            text = torch.cat((text, model(text)[:, -1:].argmax(-1)), 1)
        assert text[0, counts[row] :].tolist() == [int(s[row]) for s in generated]
    assert cache.lengths_B.tolist() == [23, 16, 19]


@pytest.mark.parametrize("changes", [{}, MOE, {"parallel_residual": True, "norm": "layernorm"}])
def test_the_last_mlp_leaves_out_tokens_without_logits(changes: dict[str, Any]) -> None:
    model = make(**changes)
    prompts, counts = tokens(3, 11), torch.tensor([11, 4, 7])
    shapes: list[torch.Size] = []
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: shapes.append(output[0].shape))
    caches = [model.new_cache(3, 64) for _ in range(2)]
    full = model.forward_cached(prompts, caches[0], counts)
    assert shapes == [(3, 11, full_width := model.config.hidden_size)] * len(model.layers)
    shapes.clear()
    last = model.forward_cached(prompts, caches[1], counts, logits_of="last")
    assert shapes == [(3, 11, full_width)] * (len(model.layers) - 1) + [(3, 1, full_width)]
    torch.testing.assert_close(last[:, 0], full[torch.arange(3), counts - 1], atol=1e-5, rtol=1e-4)
    assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)
    assert torch.equal(caches[0].lengths_B, caches[1].lengths_B)


def test_cache_can_be_cut_back() -> None:
    model, x = make(), tokens(1, 20)
    cache = model.new_cache(1, 32)
    model.forward_cached(x[:, :10], cache)
    first = model.forward_cached(x[:, 10:15], cache)
    cache.lengths_B.fill_(10)
    model.forward_cached(x[:, 5:6], cache)
    cache.lengths_B.fill_(10)
    torch.testing.assert_close(model.forward_cached(x[:, 10:15], cache), first)


def test_too_long_is_said() -> None:
    model = make()
    with pytest.raises(UsageError, match="max_position_embeddings: 65"):
        model(tokens(1, 65))
    with pytest.raises(UsageError, match="8 tokens"):
        model.forward_cached(tokens(1, 9), model.new_cache(1, 8))
