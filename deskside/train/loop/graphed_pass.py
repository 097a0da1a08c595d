"""A pass of a training step, forward and backward of one micro-batch, as a CUDA graph (`compute.cuda_graph`).

The host takes longer to launch the few hundred kernels of a small pass than the GPU takes to run them. A graph is a
single launch. It repeats the kernels of its capture at the same addresses with the same arguments, so all that a pass
reads and writes outside of itself stays in the same memory for the whole run: the weights, which the optimizer updates
in place, the delayed scales, and what this module adds:

    inputs      the tensors of the micro-batch, which is copied into them
    count       the number of targets of the step, by which the loss is divided
    sums        loss and metrics of the step, to which every pass adds
    gradients   of all weights, zero at the start of a step, to which every backward adds

A second graph, replayed once a step before its first pass, converts the weights into the forms that the products read.
Both graphs share a memory pool. Passes without a graph use the same tensors, so they can be mixed with replays in a
step. The first steps of a kind have no graph, because they compile kernels. A replay runs no hooks, so replicas sum
their gradients after the last pass of a step, and not while its backward runs.

Whatever else determines the operations of a pass is part of its `PassKind`. If that changes, the graphs are dropped and
the pass is captured again. The activations of a captured pass stay reserved until then, also during updates and
evaluations. The search for the micro-batch leaves room for them (`GraphedPass.reserving`), and the planner counts them
(`budget/memory.py`).
"""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from deskside.budget.memory import RESERVED_SHARE
from deskside.data.reading.loader import Batch
from deskside.precision.convert import QuantizedModel
from deskside.precision.quantized_linear import ConvertedWeight
from deskside.precision.quantized_operand import QuantizedOperand
from deskside.train.loop.graph_pool import (
    CudaGraphPool,
    Graph,
    GraphPool,
    PassMemory,
    memory_error,
)
from deskside.utils.errors import RunError, chain_of, first_line
from deskside.utils.format import gib

WARM_UP_STEPS = 2  # steps of a kind that run before its pass is captured
MAX_CAPTURES = 8  # in a run; each takes about as long as a few passes, and a run has few stages

Forms = tuple[QuantizedOperand, QuantizedOperand]


class TargetCount:
    """The number of targets of a step on the device.

    torch multiplies a tensor on a GPU by the reciprocal of a Python number instead of dividing by it, and the losses of
    runs with and without graphs have to be the same to the bit.
    """

    def __init__(self, device: torch.device):
        self._count = torch.ones((), device=device)

    def set(self, count: int) -> None:
        self._count.fill_(count)

    def divide(self, total: Tensor) -> Tensor:
        """Return `total` (a float32 scalar) / count, as torch computes it for a Python number."""
        return total * self._count.reciprocal() if total.is_cuda else total / self._count


@dataclass(frozen=True)
class PassKind:
    """The operations of a pass and the addresses of its tensors: passes of one kind can replay the same graph.

    tensors: the name, shape and dtype of each tensor of the batch. window: of the stage. quantized: the recipe is
    active. delayed: its delayed scales are ready. objective: `Objective.pass_state`. weights: addresses.
    """

    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]
    window: int | None
    quantized: bool
    delayed: bool
    objective: Hashable
    weights: tuple[int, ...]


@dataclass
class _Captured:
    """The graphs of a kind of pass. convert: converts `converted` into `forms`; None if there are none."""

    pool: GraphPool
    convert: Graph | None
    run: Graph
    converted: list[ConvertedWeight]
    forms: list[Forms]


class _CaptureFailed(Exception):
    """There was not enough memory for a capture."""

    def __init__(self, error: BaseException):
        super().__init__(
            f"not enough memory to capture a pass ({first_line(error).split('. ')[0].rstrip('.')})"
        )


class GraphedPass:
    """Runs the passes of steps: without a graph at first, then by replaying a captured one.

    Args:
        parameters: The trained weights.
        run_pass: Adds the gradients of a micro-batch to those of the weights, and its loss and metrics to sums, without
            waiting for the device, and with nothing else that changes from pass to pass.
        state: Returns the attention window and the state of the objective, for `PassKind`.
        before_replay: Called before weights are read by a replay.
        num_sums: Length of `sums`.
        event: Called with a line about every capture.
        new_pool: Makes the pool of a capture; `CudaGraphPool` by default.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        precision: QuantizedModel,
        run_pass: Callable[[Batch, Tensor, TargetCount], None],
        state: Callable[[], tuple[int | None, Hashable]],
        before_replay: Callable[[], None],
        num_sums: int,
        event: Callable[[str], None],
        new_pool: Callable[[torch.device], GraphPool] | None = None,
    ):
        self._parameters, self._precision = parameters, precision
        self._run_pass, self._state, self._before_replay, self._event = run_pass, state, before_replay, event
        self._new_pool = new_pool or CudaGraphPool
        self.device = parameters[0].device
        self.gradients: list[Tensor] = []
        self._allocate_gradients()
        self.sums = torch.zeros(num_sums, device=self.device)
        self.count = TargetCount(self.device)
        self.captures = 0
        self._kind: PassKind | None = None
        self._inputs: Batch | None = None
        self._converted: list[ConvertedWeight] = []
        self._captured: _Captured | None = None
        self._stopped = False  # nothing is captured any more in this run
        self._weights: tuple[int, ...] = ()
        self.memory = PassMemory(self.device)
        self._reserves = False  # see `reserving`
        self._needed = 0  # bytes of a pass of this dry step
        self._reserved: object | None = None
        self._dry = self._converted_in_step = False
        self._steps = 0  # completed steps of this kind that ran a pass without a graph
        self._ran_in_step = False  # a pass of this kind without a graph, in a step that counts

    def begin_step(self, dry: bool = False) -> None:
        """Give all weights zeroed gradient tensors. A dry step is never captured, and does not count."""
        if not self.gradients:
            self._allocate_gradients()
        torch._foreach_zero_(self.gradients)
        for parameter, gradient in zip(self._parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self._weights = tuple(parameter.data_ptr() for parameter in self._parameters)
        self._steps += int(self._ran_in_step)
        self._dry, self._converted_in_step, self._ran_in_step = dry, False, False
        self._needed, self._reserved = 0, None

    def begin_passes(self) -> Tensor:
        """Begin the sums of a step, and return them."""
        return self.sums.zero_()

    def end_passes(self) -> None:
        """End the passes of a step. Raises torch.OutOfMemoryError in a dry step that reserves memory."""
        if self._dry:
            self._reserve()

    @contextlib.contextmanager
    def reserving(self) -> Iterator[None]:
        """Context manager in which dry steps reserve the memory that a captured pass keeps.

        It is reserved during everything after the passes of a step. The step raises torch.OutOfMemoryError if there is
        too little memory.
        """
        self._reserves = True
        try:
            yield
        finally:
            self._reserves, self._reserved = False, None

    @property
    def is_reserved(self) -> bool:
        """True in a dry step that has reserved the memory of a captured pass."""
        return self._reserved is not None

    def _reserve(self) -> None:
        if self._reserves and self._needed and self._reserved is None:
            self._reserved = self.memory.reserve(int(self._needed * (1 + RESERVED_SHARE)))

    def run(self, batch: Batch) -> None:
        """Run the pass of a micro-batch."""
        inputs = self._load(batch)
        if self._captured is None and self._should_capture():
            try:
                self._capture(inputs)
            except _CaptureFailed as failure:
                self._stop(str(failure))
        if self._captured is not None:
            self._replay(self._captured)
            return
        if self._reserves:
            self.memory.begin()
        self._run_pass(inputs, self.sums, self.count)
        if self._reserves:
            self._needed = max(self._needed, self.memory.needed())
        self._converted = self._precision.cached_weights()
        self._ran_in_step = not self._dry

    def release(self) -> None:
        """Free the graphs, their memory and the gradients. A later step allocates gradients and may capture again."""
        self._drop()
        self.gradients.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def _allocate_gradients(self) -> None:
        self.gradients = [torch.zeros_like(parameter, requires_grad=False) for parameter in self._parameters]

    def _drop(self) -> None:
        """Drop the graphs and free their memory. Another pass of the same kind may be captured again."""
        captured, self._captured, self._converted = self._captured, None, []
        self._kind, self._inputs, self._steps, self._ran_in_step = None, None, 0, False
        if captured is not None:
            self._free(captured.pool, captured.forms)

    def _load(self, batch: Batch) -> Batch:
        """Copy a batch into the inputs of its kind, and return them. Drops the graphs of another kind."""
        tensors = _tensors_of(batch)
        kind = self._kind_of(tensors)
        if kind != self._kind or self._inputs is None:
            self._drop()
            self._kind = kind
            new = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in tensors.items()}
            self._inputs = replace(batch, **new)  # type: ignore[arg-type]
        for name, tensor in tensors.items():
            getattr(self._inputs, name).copy_(tensor)
        self.count.set(batch.num_valid_step)
        return self._inputs

    def _kind_of(self, tensors: dict[str, Tensor]) -> PassKind:
        window, objective = self._state()
        return PassKind(
            tensors=tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()),
            window=window,
            quantized=self._precision.active,
            delayed=self._precision.scales.ready,
            objective=objective,
            weights=self._weights,
        )

    def _should_capture(self) -> bool:
        if self._dry or self._stopped or self._steps < WARM_UP_STEPS:
            return False
        if self.captures == MAX_CAPTURES:
            self._stop(f"{MAX_CAPTURES} kinds of passes were captured, which is the limit")
        return not self._stopped

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._event(f"compute.cuda_graph: {why}; passes run without a graph from now on")

    def _capture(self, inputs: Batch) -> None:
        """Capture the pass, and before it the conversion of the weights, which is replayed for this step too.

        Raises _CaptureFailed if there is too little memory, and RunError if the pass cannot be captured.
        """
        self._before_replay()  # a graph cannot wait for what was queued outside of it
        converted = self._converted
        self._precision.forget_weights()  # their memory is free for the new forms
        began = time.perf_counter()
        self.captures += 1
        forms: list[Forms] = []
        pool: GraphPool | None = None
        try:
            pool = self._new_pool(self.device)
            convert = self._capture_conversion(pool, converted, forms)
            run = pool.capture(lambda: self._run_pass(inputs, self.sums, self.count))
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            cause = memory_error(error)
            if cause is None:
                raise RunError(
                    f"compute.cuda_graph: a pass of this run cannot be captured ({first_line(error)}); use "
                    "--compute.cuda_graph off"
                ) from error
            failure = _CaptureFailed(cause)
            for one in chain_of(error):
                one.__traceback__ = None  # it keeps the tensors of the pass alive
        else:
            self._captured = _Captured(pool, convert, run, converted, forms)
            seconds, tokens = time.perf_counter() - began, inputs.tokens_BT.numel()
            self._event(
                f"captured a pass of {tokens:,} tokens as a CUDA graph in {seconds:.2f} s (capture {self.captures}); "
                f"{gib(pool.reserved_bytes())} stay reserved for it"
            )
            return
        # Not in the except block, where the exception still keeps tensors in the pool alive.
        if pool is not None:
            self._free(pool, forms)
        raise failure

    def _capture_conversion(
        self, pool: GraphPool, converted: list[ConvertedWeight], forms: list[Forms]
    ) -> Graph | None:
        """Capture the conversion of the weights and replay it. Return its graph, and write the forms to `forms`."""
        if not converted:
            return None

        def convert() -> None:
            forms[:] = [weight.convert() for weight in converted]

        graph = pool.capture(convert)
        graph.replay()
        self._converted_in_step = True
        return graph

    def _replay(self, captured: _Captured) -> None:
        if not self._converted_in_step:
            self._begin_replays(captured)
        captured.run.replay()

    def _begin_replays(self, captured: _Captured) -> None:
        """Convert the weights of this step, and let passes without a graph read their forms too."""
        self._before_replay()
        if captured.convert is not None:
            captured.convert.replay()
        for weight, forms in zip(captured.converted, captured.forms, strict=True):
            weight.use(forms)
        self._converted_in_step = True

    def _free(self, pool: GraphPool, forms: list[Forms]) -> None:
        """Free the memory of a pool and of these forms in it, and drop the cached forms."""
        forms.clear()
        self._precision.forget_weights()
        pool.release()


def _tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names of their fields."""
    values = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return {name: value for name, value in values if isinstance(value, Tensor)}
