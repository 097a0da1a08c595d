"""Routers and shared experts that no Hugging Face architecture supports are refused with the option that helps."""

from typing import Any

import pytest

from deskside.config.merge import build
from deskside.utils.errors import UsageError

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(
    ("model", "key", "remedy"),
    [
        ({"scoring_func": "sigmoid", "qk_norm": False}, "scoring_func", "qk_norm true"),
        ({"shared_expert_intermediate_size": 96}, "shared_expert_intermediate_size", "qk_norm false"),
        (
            {"scoring_func": "sigmoid", "shared_expert_intermediate_size": 100},
            "shared_expert_intermediate_size",
            "multiple of moe_intermediate_size = 96",
        ),
        ({"scoring_func": "sigmoid", "num_experts": 1, "num_experts_per_tok": 1}, "scoring_func", "softmax"),
        ({"router_bias_update_rate": 0.001}, "router_bias_update_rate", "scoring_func sigmoid"),
    ],
)
def test_refused(model: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        build([{"model": {**MOE, **model}}])
    assert str(caught.value).startswith(f"model.{key}: ") and remedy in str(caught.value)


def test_shards_and_adapters() -> None:
    sigmoid = {**MOE, "scoring_func": "sigmoid"}
    with pytest.raises(UsageError, match=r"^model\.scoring_func: .*replicate"):
        build([{"model": sigmoid, "parallel": {"mode": "shard"}}])
    shared = {**sigmoid, "shared_expert_intermediate_size": 96}
    with pytest.raises(UsageError, match=r"^adapter: "):
        build([{"model": shared, "optim": {"name": "adamw"}, "adapter": {"rank": 4}}])


@pytest.mark.parametrize(
    ("experts", "used", "warned"), [(0, 8, False), (1, 1, False), (8, 8, True), (8, 7, False)]
)
def test_a_mixture_whose_tokens_use_all_experts_is_said(experts: int, used: int, warned: bool) -> None:
    config = build(
        [{"model": {"num_experts": experts, **({"num_experts_per_tok": used} if experts else {})}}]
    )
    assert bool(config.model.all_experts_warning()) == warned
