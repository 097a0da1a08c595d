"""Garbage collection is paused for imports and restored afterwards; the CUDA context is created with a fake driver."""

import ctypes
import gc
import subprocess
import sys
from typing import Any

import pytest

from deskside.utils.quick_start import create_cuda_context, quick_imports


def test_garbage_is_not_collected_during_the_imports_only() -> None:
    """Runs in another process, whose objects are not frozen for the later tests."""
    code = """
import gc
from deskside.utils.quick_start import quick_imports
try:
    with quick_imports():
        assert not gc.isenabled()
        import deskside.config.run
        raise ImportError
except ImportError:
    pass
assert gc.isenabled() and gc.get_freeze_count() > 1000
class Node: pass
import weakref
node = Node(); node.self = node; gone = weakref.ref(node); del node
gc.collect()
assert gone() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_nothing_changes_where_torch_is_imported_already() -> None:
    import torch  # noqa: F401

    frozen, enabled = gc.get_freeze_count(), gc.isenabled()
    with quick_imports():
        assert gc.isenabled() is enabled
    assert (gc.get_freeze_count(), gc.isenabled()) == (frozen, enabled)


class Driver:
    """The part of the CUDA driver that is used. `fails` names the function that returns an error."""

    def __init__(self, fails: str = ""):
        self.calls: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGet":
                self.device = arguments[1]
            return int(name == self.fails)

        return call


@pytest.mark.parametrize(
    ("fails", "called"),
    [
        ("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ("cuInit", ["cuInit"]),
        ("cuDeviceGet", ["cuInit", "cuDeviceGet"]),
    ],
)
def test_the_context_is_that_of_this_process_s_gpu(
    fails: str, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("LOCAL_RANK", "3")
    create_cuda_context().join()
    assert driver.calls == called
    if fails != "cuInit":
        assert driver.device == 3


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    create_cuda_context().join()
