"""Stand-ins for CUDA graphs on a CPU, which see every operation of a captured function below autograd.

`Replaying` repeats the recorded operations on the recorded tensors without running any Python of the function, as a
graph does. `Checking` runs the function again and fails unless it does exactly what was recorded: the same operations
with the same numbers, on outside tensors at the same addresses. Its conversion of the weights is replayed, because
running it again would allocate the forms that a pass reads; `Allocating` does even that, which has to fail.

Both record in the first replay after a capture, because a capture itself must not run anything. A function without
any work for the device fails there: torch warns about the empty graph.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deskside.train.loop.graph_pool import Graph

# What waits for the device, or copies a constant of Python to it.
FORBIDDEN = ("_local_scalar_dense", "is_nonzero", "lift_fresh", "nonzero", "randint", "bernoulli_")


@dataclass(frozen=True)
class Call:
    """One operation with its arguments and results."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Recorder(TorchDispatchMode):
    """Records all operations. They are kept alive, so no address is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in FORBIDDEN, f"a graph cannot contain {name}"
        result = func(*args, **(kwargs or {}))
        self.calls.append(Call(func, args, kwargs or {}, result))
        return result


def tensors_in(*values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def device_work(calls: list[Call]) -> list[Call]:
    """Return the operations that write a tensor. Views need only the host, so they are no part of a graph."""
    work = [
        call
        for call in calls
        if call.function._schema.is_mutable
        or memory_of(tensors_in(call.result)) - memory_of(tensors_in(call.args, call.kwargs))
    ]
    assert work, "an empty graph was captured"
    return work


def trace(calls: list[Call]) -> list[tuple[Any, ...]]:
    """Return what must be the same in every run of a function: outside tensors by address, inner ones by number."""
    inner: dict[int, int] = {}

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            memory = value.untyped_storage().data_ptr()
            place = ("inner", inner[memory]) if memory in inner else ("outside", value.data_ptr())
            return (*place, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        if isinstance(value, list | tuple):
            return tuple(described(item) for item in value)
        return value

    found = []
    for number, call in enumerate(calls):
        arguments = described(call.args), tuple((k, described(v)) for k, v in sorted(call.kwargs.items()))
        found.append((str(call.function), *arguments))
        read = memory_of(tensors_in(call.args, call.kwargs))
        for memory in memory_of(tensors_in(call.result)) - read:
            inner.setdefault(memory, number)
    return found


class ReplayingGraph:
    """Repeats the operations of the first replay on the same tensors."""

    def __init__(self, work: Callable[[], None]):
        self.work: Callable[[], None] | None = work
        self.calls: list[Call] = []

    def replay(self) -> None:
        if self.work is not None:
            with Recorder() as recorder:
                self.work()
            self.calls, self.work = recorder.calls, None
            device_work(self.calls)  # fails if there is none
            return
        with torch.no_grad():
            for call in self.calls:
                self.repeat(call)

    @staticmethod
    def repeat(call: Call) -> None:
        results = list(tensors_in(call.result))
        new = memory_of(results) - memory_of(tensors_in(call.args, call.kwargs))
        if not new and not call.function._schema.is_mutable:
            return  # a view
        for old, again in zip(results, tensors_in(call.function(*call.args, **call.kwargs)), strict=True):
            if old.untyped_storage().data_ptr() in new:
                old.copy_(again)


class CheckingGraph:
    """Runs the function again and compares what it does with its first replay."""

    def __init__(self, work: Callable[[], None]):
        self.work = work
        self.first: list[tuple[Any, ...]] | None = None

    def replay(self) -> None:
        with Recorder() as recorder:
            self.work()
        found = trace(device_work(recorder.calls))
        if self.first is None:
            self.first = found
        for index, (now, before) in enumerate(zip(found, self.first, strict=False)):
            assert now == before, f"operation {index} of a replay differs:\n{now}\nat the capture:\n{before}"
        assert len(found) == len(self.first), "a replay has more or fewer operations than the capture"


class StandInPool:
    """A `GraphPool` of one of the stand-ins."""

    made: ClassVar[list["StandInPool"]]

    @staticmethod
    def graph(work: Callable[[], None]) -> Graph:
        raise NotImplementedError

    def __init__(self, device: torch.device):
        self.graphs: list[Graph] = []
        self.released = False
        self.replays = 0
        type(self).made.append(self)

    def capture(self, work: Callable[[], None]) -> Graph:
        assert not self.released
        graph, pool = self.graph(work), self

        class Counting:
            def replay(self) -> None:
                assert not pool.released, "a graph was replayed after its memory was freed"
                pool.replays += 1
                graph.replay()

        self.graphs.append(graph)
        return Counting()

    def reserved_bytes(self) -> int:
        return 0

    def release(self) -> None:
        self.released = True


class Replaying(StandInPool):
    made: ClassVar[list[StandInPool]] = []
    graph = ReplayingGraph


class Checking(StandInPool):
    made: ClassVar[list[StandInPool]] = []

    @staticmethod
    def graph(work: Callable[[], None]) -> Graph:
        return ReplayingGraph(work) if work.__name__ == "convert" else CheckingGraph(work)


class Allocating(StandInPool):
    made: ClassVar[list[StandInPool]] = []
    graph = CheckingGraph
