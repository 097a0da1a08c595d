"""The split of a trace: of a hand-written one that imitates a GPU, and of a real one from this CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.step_kinds import OPTIMIZER_MARK
from benchmarks.step_profile import MarkedOptimizer, activities, record, split


def _event(cat: str, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


GPU_TRACE = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    _event("cpu_op", "aten::mm", 0, 10),
    _event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=1),
    _event("kernel", "nvjet_tst_1", 100, 50, tid=7, correlation=1),
    _event("user_annotation", OPTIMIZER_MARK, 20, 30),
    _event("cpu_op", "aten::bmm", 25, 10),
    _event("cuda_driver", "cuLaunchKernelEx", 26, 1, correlation=2),
    _event("kernel", "nvjet_tst_1", 160, 40, tid=7, correlation=2),
    _event("cuda_runtime", "cudaLaunchKernel", 60, 1, correlation=3),  # outside of all ranges
    # on another stream, in parallel with the last one
    _event("kernel", "mystery", 170, 20, tid=8, correlation=3),
    # its launch is unknown
    _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 210, 10, tid=7, correlation=4),
    _event("gpu_user_annotation", OPTIMIZER_MARK, 160, 40, tid=7),
]


def test_gpu_trace() -> None:
    found = activities(GPU_TRACE, "cuda")
    assert [(p.name, p.kind) for p in found] == [
        ("nvjet_tst_1", "gemm"),
        ("nvjet_tst_1", "optimizer"),
        ("mystery", "unclassified"),
        ("Memcpy DtoH (Device -> Pinned)", "memory"),
    ]
    assert found[1].inside == (OPTIMIZER_MARK, "aten::bmm")
    result = split(found, steps=2, step_ms=0.2, device="cuda")
    assert result["kinds"]["gemm"]["ms"] == pytest.approx(0.025)
    assert result["kinds"]["unclassified"]["names"] == {"mystery": pytest.approx(0.01)}
    assert result["busy_ms"] == pytest.approx(0.05)  # time in which both streams are busy is counted once
    assert result["idle_ms"] == pytest.approx(0.15)
    assert result["traced_step_ms"] == pytest.approx(0.06)
    assert result["traced_idle_ms"] == pytest.approx(0.01)


class _Sgd:
    """An optimizer that multiplies matrices, as Muon does."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.lr = weight, 0.1

    @torch.no_grad()
    def step(self) -> None:
        self.weight -= self.lr * (self.weight @ self.weight.T @ self.weight)


def test_cpu_trace_of_a_real_step() -> None:
    torch.set_num_threads(1)
    weight = torch.randn(256, 256, requires_grad=True)
    optimizer = MarkedOptimizer(_Sgd(weight))
    assert optimizer.lr == 0.1

    def step() -> None:
        q = (torch.ones(512, 256) @ weight).view(1, 4, 512, 64)
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        optimizer.step()

    found = activities(record(step, 2, torch.device("cpu")), "cpu")
    result = split(found, 2, 10.0, "cpu")
    assert {"gemm", "attention", "optimizer"} <= result["kinds"].keys()
    mine = [p for p in found if p.name == "aten::mm"]
    assert {p.kind for p in mine} == {"gemm", "optimizer"}
    assert all(OPTIMIZER_MARK in p.inside for p in mine if p.kind == "optimizer")
    # Operators without their children add up to no more than what was traced.
    assert 0 < result["busy_ms"] <= result["traced_step_ms"] * 1.02
