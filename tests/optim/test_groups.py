"""The classification of parameters by role."""

import pytest
import torch
from torch import nn

from deskside.optim.groups import classify_parameters
from deskside.utils.errors import UsageError
from tests.optim.models import make


def test_every_parameter_once_with_role_and_slices() -> None:
    model = make(moe=True)
    found = {info.name: (info.role, info.slices) for info in classify_parameters(model)}
    assert found == {
        "embed.weight": ("embedding", ()),
        "qkv.0.weight": ("matrix", ((0, 16), (16, 20), (20, 24))),
        "down.weight": ("matrix", ((0, 16),)),
        "down.bias": ("vector", ()),
        "experts.gate_up_weight": ("matrix", ((0, 8), (8, 16))),
        "experts.down_weight": ("matrix", ((0, 16),)),
        "gain": ("vector", ()),
        "head.weight": ("head", ()),
    }
    assert [info.name for info in classify_parameters(model)] == [
        name for name, _ in model.named_parameters()
    ]


def test_a_tied_table_is_the_head_and_stands_once() -> None:
    roles = {info.name: info.role for info in classify_parameters(make(tied=True))}
    assert roles["embed.weight"] == "head"
    assert "head.weight" not in roles
    headless = make()
    del headless.head
    assert {info.name: info.role for info in classify_parameters(headless)}["embed.weight"] == "head"


def test_frozen_parameters_are_left_out() -> None:
    model = make()
    model.down.weight.requires_grad = False
    assert "down.weight" not in [info.name for info in classify_parameters(model)]


def test_an_unknown_matrix_is_named() -> None:
    model = make()
    model.extra = nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r"'extra.weight' \(2, 3\)"):
        classify_parameters(model)


def test_slices_must_cover_the_weight() -> None:
    model = make()
    model.down.slices = model.qkv[0].slices
    with pytest.raises(UsageError, match="do not cover its 16 rows"):
        classify_parameters(model)


def test_names_do_not_depend_on_compilation() -> None:
    model = make()
    plain = [info.name for info in classify_parameters(model)]
    model.down = torch.compile(model.down, backend="eager")
    assert [info.name for info in classify_parameters(model)] == plain
