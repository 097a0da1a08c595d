"""The copies of weights in other formats, against counting by hand."""

from dataclasses import replace
from typing import Any

import pytest

from deskside.budget.memory import instants
from deskside.budget.shape import block_matrix_params
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig

FP8 = frozenset({"fp8"})


def test_converted_weights_stay_from_step_to_step() -> None:
    """W and W^T of the 12 blocks in FP8 take two bytes per weight at all times, the update included."""
    shape = ModelConfig()
    work = StepSpec(2048, 65536, 32768, precision="fp8", native=FP8)  # type: ignore[arg-type]
    head = 2 * shape.vocab_size * shape.hidden_size
    copies = {name: memory.items["copies"] for name, memory in instants(shape, work).items()}
    blocks = 2 * block_matrix_params(shape)
    assert copies == {"loss": blocks + head, "backward": blocks, "gradients": blocks, "update": blocks}
    with_head = instants(shape, replace(work, fp8_head=True))
    assert {m.items["copies"] for m in with_head.values()} == {blocks + head}


@pytest.mark.parametrize(
    ("precision", "native", "kept", "per_weight"),
    [
        ("nvfp4", FP8, 0, 2.0),
        ("nvfp4", FP8, 3, 2.0),
        ("nvfp4-eden", FP8, 3, 3.5),
        ("nvfp4", FP8 | {"nvfp4"}, 0, 1.125),
        ("fp8-nvfp4", FP8, 0, 3.0),
    ],
)
def test_copies_by_recipe(precision: Any, native: Any, kept: int, per_weight: float) -> None:
    shape, work = (
        ModelConfig(),
        StepSpec(2048, 65536, 32768, precision=precision, native=native, kept_blocks=kept),
    )
    assert instants(shape, work)["update"].items["copies"] == int(per_weight * block_matrix_params(shape))


def test_bf16_copies_last_where_they_are_cached() -> None:
    shape, work = ModelConfig(), StepSpec(2048, 65536, 32768, activation_checkpointing="block")
    passing = instants(shape, work)
    cached = instants(shape, replace(work, copies="step"))
    blocks = 2 * block_matrix_params(shape)
    assert passing["backward"].items["copies"] == passing["update"].items["copies"] == 0
    assert cached["backward"].items["copies"] == cached["update"].items["copies"] == blocks
    fp32 = instants(shape, replace(work, copies="step", precision="fp32"))
    assert fp32["update"].items["copies"] == 0
    for precision in ("bf16", "fp8"):
        uncached = replace(work, copies="use", precision=precision, activation_checkpointing="none")  # type: ignore[arg-type]
        at_use = instants(shape, uncached)
        # The cast of the head is created in the loss.
        assert at_use["backward"].items["copies"] == 0 < at_use["loss"].items["copies"]
