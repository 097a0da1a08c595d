"""What is free on a card, by the allocator's numbers, and the cache that it has room for."""

from functools import partial
from typing import Any

import pytest
import torch

from deskside.engine import device
from tests.engine.test_generate import make


@pytest.mark.parametrize(("share", "free"), [(1.0, 100 - 30 - 20), (0.6, 60 - 20)])
def test_free_is_what_nobody_has_and_what_torch_does_not_use(
    share: float, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 bytes others have 30, and torch 45 of which 20 are used."""
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
    monkeypatch.setattr(device, "free_bytes", lambda device: 1000 * each)
    assert device.cache_tokens(model, 500, 32) == 500
    assert device.cache_tokens(model, 1000, 32) == 850
    assert device.cache_tokens(model, 1000, 900) == 900
