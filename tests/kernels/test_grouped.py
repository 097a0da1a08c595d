"""The choice of the backend of a grouped product. For the kernels, see test_moe.py and test_cross_compile.py."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deskside.kernels.moe import Routing, grouped, reference

CPU, BF16, FP16 = torch.device("cpu"), torch.bfloat16, torch.float16


def chosen(
    capability: tuple[int, int], dtype: torch.dtype, rows: int, size: int = 64, wrong: tuple[str, ...] = ()
) -> str:
    with (
        mock.patch.object(grouped, "capability", lambda device: capability),
        mock.patch.object(grouped, "agrees", lambda backend, *a: backend not in wrong),
    ):
        return grouped.grouped_backend(CPU, dtype, (4, 8, size), rows)


@pytest.mark.parametrize(
    ("capability", "large", "few"),
    [((7, 5), "loop", "loop"), ((8, 0), "triton", "triton"), ((8, 9), "triton", "triton"),
     ((9, 0), "torch", "triton"), ((10, 0), "torch", "triton"), ((12, 0), "triton", "triton")],
)  # fmt: skip
def test_torch_is_used_only_where_it_does_not_wait_for_the_host(
    capability: tuple[int, int], large: str, few: str
) -> None:
    assert chosen(capability, BF16, 1024) == large
    assert chosen(capability, BF16, 8) == few


def test_what_torch_does_not_support_goes_to_triton_and_the_rest_to_the_loop() -> None:
    assert chosen((9, 0), FP16, 1024) == "triton"
    assert chosen((9, 0), BF16, 1024, size=60) == "triton"
    assert chosen((9, 0), torch.float32, 1024) == "loop"
    assert chosen((9, 0), torch.float32, 8) == "triton"
    assert chosen((9, 0), torch.float64, 8) == "loop"
    assert chosen((9, 0), BF16, 1024, wrong=("torch",)) == "triton"
    assert chosen((9, 0), BF16, 8, wrong=("triton",)) == "torch"
    assert chosen((8, 9), BF16, 1024, wrong=("triton",)) == "loop"


def products(matmul: Callable[..., Tensor]) -> Any:
    return mock.patch.dict(grouped.PRODUCTS, {"triton": (matmul, reference.grouped_weight_gradient)})


def test_a_backend_that_is_wrong_on_this_device_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = reference.gathered_gated
    monkeypatch.setattr(grouped, "triton_gathered_gated", lambda *arguments: gated(*arguments))
    with products(reference.grouped_matmul):
        assert grouped.agrees.__wrapped__("triton", CPU, BF16)

    def shifted(x: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
        return reference.grouped_matmul(x, weight, (ends_E - 1).clamp(min=0), transpose)

    def refuses(*arguments: object) -> Tensor:
        raise RuntimeError("no kernel image is available")

    def zero(*arguments: Any) -> Tensor:
        return reference.grouped_matmul(*arguments).zero_()

    def not_a_number(*arguments: Any) -> Tensor:
        return reference.grouped_matmul(*arguments).fill_(float("nan"))

    for broken in (shifted, refuses, zero, not_a_number):
        with products(broken), pytest.warns(UserWarning, match="not used"):
            assert not grouped.agrees.__wrapped__("triton", CPU, BF16)

    def ungated(x: Tensor, weight: Tensor, routing: Routing, activation: str, has_gate: bool) -> Tensor:
        return reference.gathered_gated(x, weight[:, :68], routing, activation, False)

    monkeypatch.setattr(grouped, "triton_gathered_gated", ungated)
    with products(reference.grouped_matmul), pytest.warns(UserWarning, match="not used"):
        assert not grouped.agrees.__wrapped__("triton", CPU, BF16)


def test_small_groups_get_small_tiles() -> None:
    heights = [grouped.grouped_tiles(CPU, BF16, rows).L for rows in (0, 1, 17, 33, 64, 65, 5000)]
    assert heights == [16, 16, 32, 64, 64, 128, 128]
