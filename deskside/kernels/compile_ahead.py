"""Compile Triton kernels in several threads before they are needed, and count compilations.

Triton compiles a kernel when it is first launched, one after the other: about 30 kernels before the first step, each
with a run of ptxas and of the C compiler in separate processes. Here, a computation runs once and skips the launches
of kernels that are not compiled yet. Each of them is passed to a thread instead, and the computation continues.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

MAX_THREADS = 16


@contextlib.contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Context manager: skip the launches of kernels that are not compiled, and compile them in threads until its end.

    What is computed within the context is undefined. Kernels may compute floating-point numbers only: a skipped kernel
    leaves its output uninitialized, and uninitialized indices would make another kernel read outside of its tensors.

    A kernel that does not compile raises at its next launch. On a device other than a GPU, the context does nothing.
    """
    if device.type != "cuda":
        yield
        return
    from triton import knobs
    from triton.runtime.jit import JITCallable

    jobs: dict[tuple[Any, str], Future[None]] = {}
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
    # Triton compiles for the current device, which a new thread does not inherit.
    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(index,)) as pool:

        def submit(
            *, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **other: Any
        ) -> bool:
            """Triton's hook before a compilation. Returns True to skip compilation and launch."""
            if is_manual_warmup:  # called by `_compile` itself
                return False
            if (fn.jit_function, key) not in jobs:
                job = pool.submit(_compile, fn.jit_function, compile["specialization_data"])
                jobs[fn.jit_function, key] = job
            return True

        with (
            _set(JITCallable, "parse", _one_thread_at_a_time(JITCallable.parse)),
            _set(knobs.runtime, "jit_cache_hook", submit),
        ):
            yield
            # Within the hook, so that no other thread compiles and launches a kernel in the meantime.
            for job in jobs.values():
                job.exception()


def _compile(function: Any, specialization: str) -> None:
    """Compile a `JITFunction`, and build its launcher, which Triton would build at the first launch."""
    from triton.runtime import driver

    kernel = function.preload(specialization)
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def _one_thread_at_a_time(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `JITCallable.parse` under a lock.

    Before Python 3.11.8 and 3.12.2, `ast.parse` counts its recursion depth for all threads together. It raises
    "SystemError: AST constructor recursion depth mismatch" in a thread that is interrupted by another thread's call
    (https://github.com/python/cpython/issues/106905).
    """
    lock = threading.RLock()

    @functools.wraps(parse)
    def locked(function: Any) -> Any:
        with lock:
            return parse(function)

    return locked


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclass
class Compilations:
    """Counts of Triton kernels: compiled, and loaded from Triton's cache on disk. seconds: of compiling, all threads.

    Launchers, which the C compiler builds, are not included in the seconds.
    """

    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, float]:
        """Return the counts under the names that plan.json uses."""
        return {
            "kernels_compiled": self.compiled,
            "kernels_loaded": self.loaded,
            "kernel_seconds": round(self.seconds, 3),
        }


def count_compilations() -> Compilations:
    """Return counts that Triton keeps up to date from now on, in all threads."""
    from triton import knobs

    counts, lock = Compilations(), threading.Lock()

    def listen(*, times: Any, cache_hit: bool, **other: Any) -> None:
        with lock:
            counts.loaded += cache_hit
            counts.compiled += not cache_hit
            counts.seconds += 0.0 if cache_hit else times.total / 1e6

    knobs.compilation.listener = listen
    return counts
