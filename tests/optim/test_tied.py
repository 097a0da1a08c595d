"""An embedding that equals the head at first, compared with a tied model, then with an untied one."""

import pytest
import torch

from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.optim.build import Optimizer, build
from tests.optim.models import NO_SCALING, Tiny, backward, make, weights

CONFIGS = [AdamWConfig(lr=0.01), MuonConfig(lr=0.01, embedding_lr=0.02), MuonConfig()]


def train(model: Tiny, optimizer: Optimizer, steps: range) -> list[float]:
    """Train steps of a run of ten. Return the gradient norms."""
    norms = []
    for step in steps:
        backward(model, step)
        optimizer.set_progress(1.0, step / 10, step)
        norms.append(float(optimizer.clip_and_norm(0.5)))
        optimizer.step(torch.tensor(0.0))
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "muon, another rate", "muon"])
def test_it_is_a_tied_model_and_then_an_untied_one(config: AdamWConfig | MuonConfig) -> None:
    own, tied, untied = make(), make(tied=True), make()
    own.load_state_dict(tied.state_dict())
    optimizer = build(own, config, NO_SCALING, tied_until=0.4)
    oracle = build(tied, config, NO_SCALING)
    assert train(own, optimizer, range(4)) == pytest.approx(train(tied, oracle, range(4)))
    assert torch.equal(own.embed.weight, own.head.weight)
    for name, value in weights(tied).items():  # the tied weight is called embed.weight
        torch.testing.assert_close(weights(own)[name], value, atol=1e-6, rtol=0)

    untied.load_state_dict(own.state_dict())
    free = build(untied, config, NO_SCALING)
    tensors, data = oracle.state_dict_flat()
    heads = {key.replace("embed.weight", "head.weight"): t for key, t in tensors.items() if "embed" in key}
    free.load_state_dict_flat({**tensors, **heads}, {**data})
    assert train(own, optimizer, range(4, 8)) == train(untied, free, range(4, 8))
    assert all(torch.equal(value, weights(untied)[name]) for name, value in weights(own).items())
    assert not torch.equal(own.embed.weight, own.head.weight)


def test_a_skipped_step_keeps_them_equal_and_unchanged() -> None:
    model = make()
    model.head.load_state_dict({"weight": model.embed.weight}, strict=False)
    optimizer = build(model, MuonConfig(), NO_SCALING, tied_until=1.0)
    train(model, optimizer, range(2))
    before = weights(model)
    backward(model, 2)
    optimizer.set_progress(1.0, 0.2, 2)
    optimizer.step(torch.tensor(1.0))
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
