"""Free memory on a GPU according to the allocator, and the cache that fits into it."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from deskside.engine import device
from deskside.engine.fused import FusedBlocks
from deskside.engine.graphs import TOKENS
from deskside.engine.steps import CachedModel
from deskside.kernels import prefill, prefill_triton
from tests.budget.test_adapters import Live
from tests.engine.test_generate import VARIANTS, make


@pytest.mark.parametrize(("share", "free"), [(1.0, 100 - 30 - 20), (0.6, 60 - 20)])
def test_free_is_what_nobody_has_and_what_torch_does_not_use(
    share: float, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has 100 bytes. Other processes use 30, and torch has reserved 45 and uses 20 of them."""
    given = {"mem_get_info": (25, 100), "memory_reserved": 45, "memory_allocated": 20}
    answers: dict[str, Any] = {**given, "get_per_process_memory_fraction": share}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, partial(lambda found, *_: found, answer))
    assert device.free_bytes(torch.device("cuda")) == free
    assert device.free_bytes(torch.device("cpu")) is None


def test_a_cache_leaves_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(num_hidden_layers=2)
    each = model.kv_bytes_per_token(torch.float32)
    assert device.cache_tokens(model, 1000, 32) == 1000
    monkeypatch.setattr(device, "free_bytes", lambda device: 10**6 * each)
    assert device.cache_tokens(model, 500, 32) == 500
    assert device.cache_tokens(model, 10**6, 32) == 850_000
    assert device.cache_tokens(model, 10**6, 900_000) == 900_000
    # exceeds what the share leaves
    passes = 2 * device.prefill_bytes(model.config, 4, device.PREFILL_TOKENS)
    monkeypatch.setattr(device, "free_bytes", lambda device: passes + 100 * each)
    assert device.cache_tokens(model, 1000, 32) == 100


@pytest.mark.parametrize("name", ["gqa", "mha", "moe", "moe, sigmoid, shared"])
@pytest.mark.parametrize("width", [64, 16])
def test_the_bytes_of_a_prefill_pass_are_its_peak(name: str, width: int) -> None:
    """The peak is that of all storages that exist at the same time."""
    sizes = {"moe_intermediate_size" if "moe" in name else "intermediate_size": width}
    model = make(**VARIANTS[name] | sizes, max_position_embeddings=1024).requires_grad_(False)
    computing, tokens = CachedModel(model, 20, 64, 1024), 1024
    computing.blocks = FusedBlocks(model)
    table, zero = torch.arange(1, 17)[None], torch.zeros(1, dtype=torch.int64)
    packed, ends = torch.arange(tokens)[None] % 97, torch.tensor([0, tokens])
    given = [
        *model.parameters(),
        *model.buffers(),
        computing.cache.k,
        computing.cache.v,
        table,
        zero,
        packed,
        ends,
    ]
    with (
        mock.patch.object(prefill, "packed_kernel_supports", lambda *_: True),
        mock.patch.object(prefill_triton, "attend_packed", lambda q_NHC, *rest: torch.empty_like(q_NHC)),
        Live(*given) as live,
    ):
        before = live.peak
        computing.prefill(packed, table, zero, ends)
    expected = device.prefill_bytes(model.config, 4, tokens)
    # The kernels' torch forms, which run here, allocate more than the kernels do.
    assert 0.7 * expected < live.peak - before <= 1.4 * expected


def test_large_cards_take_more_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    assert device.prefill_tokens(model) == device.PREFILL_TOKENS
    each = device.prefill_bytes(model.config, 4, 1)
    weight = SimpleNamespace(device=torch.device("cuda"))
    there: Any = SimpleNamespace(
        config=model.config, activation_dtype=torch.float32, embed=SimpleNamespace(weight=weight)
    )
    for room, tokens in ((5000, 4096), (12288, 12288), (10**6, TOKENS[-1])):
        card = SimpleNamespace(total_memory=room * each / device.PREFILL_SHARE)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, card=card: card)
        assert device.prefill_tokens(there) == tokens
