"""Compile every Triton kernel for GPUs that this machine lacks.

Triton's compiler needs no GPU: it takes a kernel, the types of its arguments and a compute capability, and returns
PTX and machine code. A machine without a GPU can therefore check that a kernel builds for each generation, which
instructions it uses there, and that it fits into the shared memory of a consumer GPU.

The MODULES below have `COMPILE_CASES`, one per kind of launch. A case is either written out or `recorded`: the
function that launches the kernel is called with tensors without data, and its arguments to the kernel are recorded
instead of launched. Tiles, warps and types are then those of a real launch.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MODULES = ("tests.kernels.nvfp4_launch_cases", "tests.kernels.launch_cases")
CAPABILITIES = (86, 89, 90, 100, 120)
# The bytes that a block may use: CUDA programming guide, "technical specifications per compute capability".
SHARED_MEMORY = {86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class CompileCase:
    """One launch. signature: type of each argument ("*bf16", "i32", "constexpr"); constants: value of each constexpr.

    capabilities: targets of the compilation. divisible: integer arguments that are divisible by 16 in this launch,
    which lets Triton load several values at once. All pointers are assumed to be aligned to 16.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    capabilities: tuple[int, ...] = CAPABILITIES
    divisible: tuple[str, ...] = ("N", "K", "L", "R", "S")


@dataclass(frozen=True)
class Compiled:
    """The result of a compilation. ptx: the assembly. shared: bytes of shared memory that one block uses."""

    ptx: str
    shared: int
    machine_code: bytes

    def stack_bytes(self) -> int:
        """Return the bytes of stack memory per thread, which holds what does not fit into registers."""
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.machine_code)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return max(int(stack) for stack in re.findall(r"STACK:(\d+)", usage))


def signature(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of all arguments in order: those given, "constexpr" for
    constants, and 32-bit integers for the rest.
    """
    return {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}


def recorded(
    name: str,
    capabilities: tuple[int, ...],
    launch: Callable[..., object],
    *arguments: object,
    number: int = 0,
) -> CompileCase:
    """Return launch `number` of those that `launch(*arguments)` makes. Tensors
    may be on the meta device; nothing runs.
    """
    from triton.runtime.jit import JITFunction

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append((kernel, args, options))

    with mock.patch.object(JITFunction, "run", run):
        launch(*arguments)
    kernel, args, options = calls[number]
    given = dict(zip(kernel.arg_names, args, strict=False))
    given |= {key: options.pop(key) for key in list(options) if key in kernel.arg_names}
    constexpr = {p.name for p in kernel.params if p.is_constexpr}
    # As in a launch by Triton: None and 1 become constants, and multiples of 16 are marked as such.
    constants = {k: v for k, v in given.items() if k in constexpr or v is None or (type(v) is int and v == 1)}
    types = {k: _type(v) for k, v in given.items() if k not in constants}
    divisible = tuple(k for k, v in given.items() if type(v) is int and k in types and v % 16 == 0)
    return CompileCase(
        name, kernel, signature(kernel, types, constants), constants, options, capabilities, divisible
    )


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def all_cases() -> list[CompileCase]:
    """Return the cases of every module. Imports Triton."""
    return [case for module in MODULES for case in import_module(module).COMPILE_CASES]


def compile_case(case: CompileCase, capability: int) -> Compiled:
    """Compile for 89, 90, 100, ... Raises Triton's error if it cannot."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, (name, kind) in enumerate(case.signature.items())
        if kind.startswith("*") or name in case.divisible
    }
    source = ASTSource(
        fn=case.kernel, signature=dict(case.signature), constexprs=dict(case.constants), attrs=aligned
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(case.options))
    return Compiled(made.asm["ptx"], made.metadata.shared, made.asm["cubin"])
