"""Restrict the calling process with seccomp and resource limits, irrevocably."""

import ctypes
import importlib
import math
import os
import platform
import resource
import signal
import struct

PRELOADED = (
    "abc", "array", "base64", "bisect", "builtins", "calendar", "cmath", "collections", "collections.abc", "copy",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json",
    "math", "numbers", "operator", "random", "re", "secrets", "statistics", "string", "struct", "sys", "textwrap",
    "time", "types", "typing", "unicodedata", "zlib", "_strptime", "encodings.idna",
)  # fmt: skip

# Audit number of the architecture and allowed system calls: reading, writing and closing open files, memory, clocks,
# waiting, random numbers, and exit. None opens a file or a socket, starts a process or a thread, sends a signal, or
# changes a signal handler, which could disable the wall-clock alarm.
SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 7, 8, 9, 10, 11, 12, 15, 23, 24, 25, 28, 35, 39, 60, 79, 96, 98, 100, 131, 186, 201, 202, 219,
         228, 229, 230, 231, 270, 271, 318, 324, 334),
    ),
    "aarch64": (
        0xC00000B7,
        (17, 57, 62, 63, 64, 72, 73, 80, 93, 94, 98, 101, 113, 114, 115, 124, 128, 132, 139, 153, 165, 169, 172, 178,
         214, 215, 216, 222, 226, 233, 278, 283, 293),
    ),
}  # fmt: skip

# Constants of prctl(2): PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER.
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _BY_FILTER = 38, 22, 2


class LockError(Exception):
    """The process cannot be restricted on this system."""


def preload() -> None:
    """Import modules that solutions commonly need, because a locked process cannot open their files."""
    for name in PRELOADED:
        importlib.import_module(name)


def lock(processor_seconds: float, wall_seconds: float, memory_bytes: int) -> None:
    """Restrict this process. Raises LockError, OSError or ValueError if that is impossible or has no effect."""
    limits = {
        resource.RLIMIT_CPU: math.ceil(processor_seconds),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 16,
    }
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    if platform.machine() not in SYSTEM_CALLS:
        raise LockError(f"the system calls of {platform.machine() or 'this processor'} are not known")
    _filter(*SYSTEM_CALLS[platform.machine()])
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except PermissionError:
        return
    raise LockError("the system-call filter does not take effect")


def _filter(architecture: int, allowed: tuple[int, ...]) -> None:
    """Install a seccomp filter. Calls of another architecture kill the process; others not allowed fail with EPERM."""

    def instruction(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
        """Return an instruction of classic BPF. The jumps are numbers of instructions to skip."""
        return struct.pack("<HBBI", code, jump_true, jump_false, value)

    load, jump_if_equal, ret = 0x20, 0x15, 0x06
    program = [
        instruction(load, 0, 0, 4),  # seccomp_data.arch
        instruction(jump_if_equal, 1, 0, architecture),
        instruction(ret, 0, 0, 0x80000000),  # SECCOMP_RET_KILL_PROCESS
        instruction(load, 0, 0, 0),  # seccomp_data.nr
        *(instruction(jump_if_equal, len(allowed) - i, 0, number) for i, number in enumerate(allowed)),
        instruction(ret, 0, 0, 0x00050001),  # SECCOMP_RET_ERRNO with EPERM
        instruction(ret, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    pointer = struct.pack("<H6xQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise LockError("prctl(PR_SET_NO_NEW_PRIVS) failed")
    if libc.prctl(_SET_SECCOMP, _BY_FILTER, ctypes.c_char_p(pointer), 0, 0):
        raise LockError("prctl(PR_SET_SECCOMP) failed")
