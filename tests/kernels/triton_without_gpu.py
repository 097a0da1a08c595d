"""Triton kernels without a GPU: run in Triton's interpreter, or compiled for cards that are not there."""

import importlib.util
import os
from types import ModuleType
from typing import Any
from unittest import mock

import pytest


def interpreted(name: str) -> ModuleType:
    """A fresh copy of a module of kernels whose kernels run in the interpreter, on CPU tensors."""
    pytest.importorskip("triton")
    found = importlib.util.find_spec(name)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        found.loader.exec_module(module)
    return module


def assembly(kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int) -> str:
    """PTX of a kernel for a compute capability; triton's own ptxas has then accepted it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    full = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, full, {(kernel.arg_names.index(k),): v for k, v in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return str(compiled.asm["ptx"])
