"""A growing vocabulary: new tokens start as the mean of the others, which stay unchanged."""

import torch

from deskside.train.state.init_weights import resize_vocabulary


def test_unused_rows_are_taken_and_new_ones_added() -> None:
    torch.manual_seed(0)
    weights = {
        "embed.weight": torch.randn(5, 3),
        "head.weight": torch.randn(5, 3),
        "layers.0.x": torch.randn(5, 3),
    }
    result = resize_vocabulary(weights, 8, [3, 6])
    for name in ("embed.weight", "head.weight"):
        old, new = weights[name], result[name]
        mean = old[[0, 1, 2, 4]].mean(0)  # of tokens that training has seen
        assert new.shape == (8, 3) and torch.equal(new[[0, 1, 2, 4]], old[[0, 1, 2, 4]])
        assert all(torch.allclose(new[n], mean) for n in (3, 5, 6, 7))
    assert result["layers.0.x"] is weights["layers.0.x"]


def test_a_tied_model_has_no_head_to_grow_and_none_may_need_to() -> None:
    weights = {"embed.weight": torch.randn(5, 3)}
    result = resize_vocabulary(weights, 5, [])
    assert result.keys() == weights.keys() and torch.equal(result["embed.weight"], weights["embed.weight"])
