"""What rules out CUDA graphs in a run."""

from typing import Any

import pytest
import torch

from deskside.config import merge
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop.graph_support import can_capture, check_execution
from deskside.utils.errors import UsageError


@pytest.mark.parametrize(
    ("parts", "attention", "expected"),
    [
        ({}, "cudnn", True),
        ({"optim": {"weights": "bfloat16"}}, "cudnn", False),
        ({"model": {"num_experts": 16}}, "cudnn", False),
        ({"dropout": 0.1}, "cudnn", False),
        ({}, "flex", False),
    ],
)
def test_what_can_be_captured(parts: dict[str, Any], attention: str, expected: bool) -> None:
    config, backends = merge.build([parts]), AttentionBackends(attention)
    assert can_capture(config, torch.device("cuda"), True, backends) == expected
    assert not can_capture(config, torch.device("cuda"), False, backends)
    assert not can_capture(config, torch.device("cpu"), True, backends)


def test_a_cpu_and_unfused_execution_are_refused() -> None:
    with pytest.raises(UsageError, match=r"compute\.cuda_graph: needs a GPU, and this run is on a CPU"):
        check_execution(torch.device("cpu"), "fused")
    with pytest.raises(UsageError, match=r"compute\.cuda_graph: needs fused kernels.* compute.compile block"):
        check_execution(torch.device("cuda"), "block")
    check_execution(torch.device("cuda"), "fused")
