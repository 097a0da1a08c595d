"""Adapters in a configuration: contradictory options are refused in one line that names the remedy."""

from typing import Any

import pytest

from deskside.config.merge import build
from deskside.config.sections import AdapterConfig
from deskside.utils.errors import UsageError

ADAMW = {"optim": {"name": "adamw"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optim": {"name": "muon"}}, r"optim.name: muon is for whole matrices.*--optim.name adamw"),
        ({"precision": {"name": "fp8"}}, r"precision.name: adapters are trained in bf16.*fp8.*--precision.name bf16"),
        ({"precision": {"weight_cache": False}}, r"precision.weight_cache: has no effect here.*adapters"),
        ({"precision": {"accumulate": "fused"}}, r"precision.accumulate: has no effect here.*adapters"),
        ({"optim": {"name": "adamw", "scale": False}}, r"optim.scale: has no effect here.*optim.lr as it is"),
        (
            {"model": {"num_experts": 4, "num_experts_per_tok": 2, "scoring_func": "sigmoid",
                       "router_bias_update_rate": 1e-3}},
            r"model.router_bias_update_rate: has no effect here.*adapters",
        ),
        ({"parallel": {"mode": "shard"}}, r"parallel.mode: .*not sharded; use --parallel.mode replicate"),
        ({"compute": {"compile": "fused"}}, r"compute.compile: .*do not support adapters; use .*auto"),
        (
            {"compute": {"activation_checkpointing": "block", "activation_offloading": True}},
            r"compute.activation_offloading: .*adapters; leave it out",
        ),
        (
            {"adapter": {"dropout": 0.1}, "compute": {"activation_checkpointing": "mlp"}},
            r"adapter.dropout: .*checkpointing",
        ),
        (
            {"adapter": {"dropout": 0.1}, "model": {"num_experts": 4, "num_experts_per_tok": 2}},
            r"adapter.dropout: .*experts.*--adapter.targets",
        ),
        (
            {"adapter": {"targets": ["gate_proj"]}, "model": {"gated_mlp": False}},
            r"adapter.targets: this model has no gate_proj .*up_proj",
        ),
        (
            {
                "adapter": {"targets": ["gate_proj"]},
                "model": {"num_experts": 4, "num_experts_per_tok": 2, "gated_mlp": False},
            },
            r"adapter.targets: this model has no gate_proj",
        ),
        ({"adapter": {"targets": ["wq"]}}, r"adapter.targets: \['wq'\] is neither all nor a list of q_proj"),
        ({"adapter": {"targets": []}}, r"adapter.targets: \[\] is neither all"),
        (
            {"adapter": {"dora": True}, "model": {"num_experts": 4, "num_experts_per_tok": 2}},
            r"adapter.dora: .*experts.*--adapter.targets q_proj,k_proj,v_proj,o_proj",
        ),
        ({"adapter": {"dora": True, "dropout": 0.1}}, r"adapter.dropout: .*adapter.dora; use --adapter.dropout 0"),
        (
            {"adapter": {"modules_to_save": ["lm_head"]}, "model": {"tie_word_embeddings": True}},
            r"adapter.modules_to_save: .*embed_tokens",
        ),
        ({"adapter": {"modules_to_save": ["norm"]}}, r"adapter.modules_to_save.*'embed_tokens' or 'lm_head'"),
        ({"adapter": {"rank": 0}}, r"adapter.rank: input should be greater than 0"),
        ({"adapter": {"base": "fp4"}}, r"adapter.base: input should be 'bf16', 'int8' or 'nf4'"),
        ({"adapter": {"ranks": 8}}, r"adapter.ranks: there is no such option; did you mean adapter.rank"),
    ],
)  # fmt: skip
def test_contradictory_options_are_refused(given: dict[str, Any], message: str) -> None:
    adapter = {"adapter": {"rank": 8, **given.get("adapter", {})}}
    with pytest.raises(UsageError, match=message) as caught:
        build([{**ADAMW, **given, **adapter}])
    assert "\n" not in str(caught.value)


def test_without_adapters_nothing_changes() -> None:
    assert build([{}]).adapter is None
    assert build([{"precision": {"weight_cache": False}}]).precision.weight_cache is False


def test_adapters_drop_options_of_a_preset_without_effect() -> None:
    preset = {"precision": {"weight_cache": False}, "optim": {"name": "adamw", "scale": False}}
    config = build([preset, {"adapter": {"rank": 4, "targets": ["q_proj", "v_proj"]}}])
    assert config.adapter == AdapterConfig(rank=4, targets=("q_proj", "v_proj"))
    assert config.precision.weight_cache is True


def test_scale() -> None:
    assert AdapterConfig(rank=16, alpha=32).scale == 2
    assert AdapterConfig(rank=16, alpha=32, rank_stabilised=True).scale == 8


def test_adapters_drop_the_update_rate_of_the_model_they_start_from() -> None:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "router_bias_update_rate": 1e-3,
    }
    config = build([{"model": experts}, ADAMW, {"adapter": {"rank": 4}}])
    assert config.adapter is not None and config.model.router_bias_update_rate == 0
