"""Kernels are compiled in threads without a launch, by Triton's own compiler for a GPU that this machine lacks."""

import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from deskside.kernels.compile_ahead import compile_ahead, count_compilations  # noqa: E402
from deskside.kernels.fused import launch, triton_gated, triton_norm  # noqa: E402
from deskside.kernels.fused.reference import Cast  # noqa: E402

DEVICE = 99  # no other test has compiled kernels for it
CUDA = torch.device("cuda", 0)


class FakeDriver:
    """The part of Triton's driver that a launch uses. The GPU is an H100, and launches are only counted."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.indices: list[int] = []  # the current device of each thread
        self.launchers: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=lambda name, binary, shared, device: (object(), object(), 32, 0, 1024),
        )

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        self.launchers.append(metadata.name)
        return lambda *arguments: self.launched.append(metadata.name)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    from triton import knobs
    from triton.runtime import driver as active

    fake = FakeDriver()
    monkeypatch.setattr(torch.cuda, "set_device", fake.indices.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(active, "_active", fake)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield fake
    for kernel in (triton_norm.add_norm, triton_gated.gated, triton_gated.gated_fp8, wrong):
        kernel.device_caches.pop(DEVICE, None)


def computation() -> None:
    x = torch.empty(64, 256, dtype=torch.bfloat16)
    launch.add_norm(x, x, torch.empty(256), 1e-6)
    launch.gated(x, "silu", True)
    launch.gated(x, "silu", True)  # the same kernel again
    launch.gated(x, "silu", True, Cast(torch.float8_e4m3fn, torch.empty(()), torch.empty(())))


KERNELS = ["add_norm", "gated", "gated_fp8"]


@triton.jit
def wrong(X, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(BLOCK > 64, "does not compile")
    tl.store(X, 0.0)


def test_kernels_are_compiled_by_threads_and_not_launched(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, errors = set(), []
    ended = threading.Event()  # a kernel that is compiled before the computation ends is launched within it
    preload = triton.runtime.jit.JITFunction.preload

    def watched(self: Any, data: str) -> Any:
        threads.add(threading.current_thread().name)
        try:
            assert ended.wait(60)
            return preload(self, data)
        except Exception:  # which the next launch would raise
            errors.append(traceback.format_exc())
            raise

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "preload", watched)
    with compile_ahead(CUDA):
        computation()
        ended.set()
    assert not errors, "\n".join(errors)
    assert sorted(driver.launchers) == KERNELS and driver.launched == []
    assert threads and threading.main_thread().name not in threads

    def compiled_again(*given: Any, **named: Any) -> None:
        raise AssertionError("it is compiled already")

    for kernel in (triton_norm.add_norm, triton_gated.gated, triton_gated.gated_fp8):
        monkeypatch.setattr(kernel, "compile", compiled_again)
    computation()
    assert sorted(driver.launched) == ["add_norm", "gated", "gated", "gated_fp8"]


def test_one_thread_parses_at_a_time(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, inside, most = triton.runtime.jit.JITCallable.parse, [], []

    def watched(self: Any) -> Any:
        inside.append(self)
        most.append(len(inside))
        time.sleep(0.05)  # the other threads start to parse, if they may
        inside.remove(self)
        return parse(self)

    monkeypatch.setattr(triton.runtime.jit.JITCallable, "parse", watched)
    with compile_ahead(CUDA):
        computation()
    assert len(most) >= len(KERNELS) and max(most) == 1
    assert triton.runtime.jit.JITCallable.parse is watched


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cuda", 3)])
def test_threads_compile_for_the_device(device: str, index: int, driver: FakeDriver) -> None:
    with compile_ahead(torch.device(device)):
        computation()
    assert set(driver.indices) == {index}


def test_what_does_not_compile_raises_when_it_is_launched(driver: FakeDriver) -> None:
    x = torch.empty(16)
    with compile_ahead(CUDA):
        wrong[(1,)](x, 64)
    with pytest.raises(triton.CompilationError):
        wrong[(1,)](x, 64)


def test_an_error_of_the_computation_ends_the_context(driver: FakeDriver) -> None:
    from triton import knobs

    with pytest.raises(torch.OutOfMemoryError), compile_ahead(CUDA):
        computation()
        raise torch.OutOfMemoryError
    assert knobs.runtime.jit_cache_hook is None
    driver.launched.clear()
    computation()
    assert len(driver.launched) == 4


def test_without_a_gpu_nothing_changes() -> None:
    with compile_ahead(torch.device("cpu")):
        pass


def test_compilations_are_counted(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.compilation, "listener", None)
    counts = count_compilations()
    with compile_ahead(CUDA):
        computation()
    computation()
    assert (counts.compiled, counts.loaded) == (3, 0) and counts.seconds > 0
    for kernel in (triton_norm.add_norm, triton_gated.gated, triton_gated.gated_fp8):
        kernel.device_caches.pop(DEVICE)  # as in another process, which finds Triton's files
    computation()
    assert (counts.compiled, counts.loaded) == (3, 3)
