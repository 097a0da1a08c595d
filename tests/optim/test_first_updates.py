"""`RunConfig.embedding_std` is half the size of what Muon's first updates of the blocks add to the residual stream."""

from typing import Any

import pytest
import torch

from deskside.budget.scaling import scales
from deskside.config.model import INITIALIZER_RANGE
from deskside.config.run import RunConfig
from deskside.model.init import InitOptions, allocate, initialize
from deskside.model.transformer import Transformer
from deskside.optim.build import build

WIDTH, VOCABULARY = 128, 512


def config(layers: int, lr: float) -> RunConfig:
    model = {
        "num_hidden_layers": layers, "hidden_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 2 * WIDTH, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return RunConfig.model_validate(
        {"data": {"path": "data"}, "model": model, "optim": {"name": "muon", "lr": lr, "scale": False}}
    )


def added_by_blocks(
    model: Transformer, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Return what the blocks add to the embeddings (B, T, D)."""
    streams: list[torch.Tensor] = []
    add_norm = model.final.add_norm

    def keep(residual: torch.Tensor, delta: torch.Tensor) -> Any:
        streams.append(residual + delta)
        return add_norm(residual, delta)

    monkeypatch.setattr(model.final, "add_norm", keep)
    with torch.no_grad():
        model(tokens)
        return streams[0] - model.embed(tokens)


@pytest.mark.parametrize(("layers", "lr"), [(4, 0.01), (12, 0.01), (12, 0.04)])
def test_blocks_add_the_same_to_every_token(layers: int, lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(layers, lr)
    model = allocate(asked.model, "cpu")
    initialize(model, 1, InitOptions(embedding_std=INITIALIZER_RANGE))
    optimizer = build(model, asked.optim, scales(WIDTH, 2**19, 10**9))
    generator = torch.Generator().manual_seed(0)
    frequencies = 1 / torch.arange(1.0, VOCABULARY + 1)  # Zipf's law
    tokens = torch.multinomial(frequencies, 8 * 129, replacement=True, generator=generator).view(8, 129)
    for step in range(3):
        optimizer.set_progress(1.0, 0.0, step)
        (model.loss(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    added = added_by_blocks(model, tokens[:, :-1], monkeypatch)
    size, common = (float(t.pow(2).mean().sqrt()) for t in (added, added.mean((0, 1))))
    assert common > 0.85 * size
    assert 2 * asked.embedding_std() / 1.5 < size < 1.5 * 2 * asked.embedding_std()
