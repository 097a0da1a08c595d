"""Values computed from other values of the same arm."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.study.spec.expressions import resolve
from deskside.utils.errors import UsageError

KV = "num_key_value_heads"


def kv(*layers: Mapping[str, object]) -> object:
    """Return num_key_value_heads of the highest layer after evaluation."""
    return resolve([{"model": layer} for layer in layers])[-1]["model"][KV]


@given(heads=st.integers(1, 500), number=st.integers(1, 20))
def test_the_arithmetic_is_pythons(heads: int, number: int) -> None:
    base = {"num_attention_heads": heads * number}
    assert kv(base, {KV: "= model.num_attention_heads"}) == heads * number
    assert kv(base, {KV: f"= model.num_attention_heads / {number}"}) == heads
    assert kv(base, {KV: f"=model.num_attention_heads*{number}"}) == heads * number * number


def test_the_merged_value_counts_whatever_the_layer() -> None:
    layers = resolve(
        [
            {"model": {"num_attention_heads": 8, KV: "= model.num_attention_heads"}},
            {"model": {"num_attention_heads": "12"}},  # the command line gives text
        ]
    )
    assert layers[0]["model"][KV] == 12


def test_defaults_and_the_derived_head_count() -> None:
    assert kv({KV: "= model.num_attention_heads"}) == 12
    shape = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": "= model.head_dim * 2"}
    assert resolve([{"model": shape}])[0]["model"]["intermediate_size"] == 48


def test_one_expression_may_use_another() -> None:
    assert (
        kv(
            {"num_attention_heads": "= model.hidden_size / 64", "hidden_size": 256},
            {KV: "= model.num_attention_heads / 2"},
        )
        == 2
    )


def test_a_replaced_expression_is_not_read() -> None:
    layers = resolve([{"model": {KV: "= model.num_attention_heads / 7"}}, {"model": {KV: 3}}])
    assert layers == [{"model": {}}, {"model": {KV: 3}}]


def test_the_given_layers_stay_as_they_were() -> None:
    layer = {"model": {KV: "= model.num_attention_heads"}}
    resolve([layer])
    assert layer == {"model": {KV: "= model.num_attention_heads"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("= model.num_attention_heads / 5", "is 12, which is not divisible by 5"),
        ("= model.num_attention_heads / 0", "which is not divisible by 0"),
        ("= model.num_attention_head", "there is no such option; did you mean model.num_attention_heads"),
        ("= model.num_attention_heads + 1", "cannot be computed; write"),
        ("= 4", "cannot be computed; write"),
        ("= model.norm", "model.norm: is 'rmsnorm'"),
        (f"= model.{KV} / 2", "depends on itself"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kv({KV: text})
