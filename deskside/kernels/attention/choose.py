"""Choose an attention backend by running the candidates: the fastest of those that are correct.

Candidates that start quickly are tried first. One that takes long to start, because it has to be compiled, is tried
only if it could win that time back within the run (`Use`). The whole trial ends after `TRIAL_SECONDS`.

An installed backend can be wrong: some libraries have returned gradients that were all zero. So the output and the
three gradients of each candidate are compared with the reference in float32, on this device and at this shape; those
that pass are timed. The choice and its measurements are plain data, which a run records and a resumed run reads back.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from deskside.kernels.attention.context import (
    BACKENDS,
    AttentionBackend,
    AttentionContext,
    Requirements,
    backend_named,
    prepare,
)
from deskside.kernels.functional import create_cuda_context_for_autograd, gradients
from deskside.utils.errors import RunError, first_line

# Relative Frobenius error against float32. In bfloat16, rounding q, k, v, p and o gives about 3e-3, and the sums of the
# gradients 2e-3. A wrong mask, scale or head mapping gives more than 1e-1.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
CHECK_BATCH = 2  # rows that are compared; few, because the reference saves all scores for its backward
CHECK_SCORES = 2**27  # attention scores that are compared, 512 MiB in float32; autograd saves a few copies
CHECKED_SOFTCAP = 1.0  # the scores of random inputs are of size one, so that a missing cap would show
TIMED_RUNS = {"cuda": 10, "cpu": 3}
GIVE_UP_FACTOR = 3.0  # a candidate this much slower than the best so far is not timed further
TIE_MARGIN = 0.02  # relative difference in time that counts as a tie: the noise between trials
CANDIDATE_SECONDS = 2.0  # a candidate is timed less often if that takes longer
TRIAL_SECONDS = 30.0  # no further candidate is started after this time, if one works
FORWARD_AND_BACKWARD = 3.5  # times the forward FLOPs: two matmuls in the forward, five in the backward


@dataclass(frozen=True)
class Use:
    """The use that a run will make of the chosen backend, which bounds what a faster one can save.

    passes: forward and backward passes of this problem. peak_flops: FLOP/s that no kernel exceeds on this device.
    """

    passes: float
    peak_flops: float

    def saved_seconds(self, need: Requirements, best: float) -> float:
        """Return the most that another backend can save in the run. best: seconds of one pass so far."""
        # With documents, the number of query-key pairs in a run is not known.
        fastest = 0.0 if need.documents else flops(need) / self.peak_flops
        return self.passes * max(0.0, best - fastest)


@dataclass(frozen=True)
class BackendChoice:
    """The chosen backend and the measurements behind the choice.

    seconds: name -> median seconds of forward and backward with the GPU's queue full, through the backend's `pair`, as
        in the default training step on a GPU, or under autograd if it has none. A step under torch.compile calls the
        same kernels through autograd.
    errors: name -> the largest relative error of the output and the gradients, under autograd and through `pair`.
    rejected: name -> reason.
    not_tried: name -> the reason why a candidate has no result in this trial. A later run may try it.
    """

    name: str
    seconds: dict[str, float]
    errors: dict[str, float]
    rejected: dict[str, str]
    not_tried: dict[str, str]


def considered_backends(need: Requirements) -> list[str]:
    """Return the names of the backends that `choose` tries on this device, in the order in which it tries them."""
    masked = need.window is not None or need.documents or need.softcap or need.sinks
    names = [
        backend.name
        for backend in sorted(BACKENDS.values(), key=lambda backend: backend.start_seconds)
        if need.device.type not in backend.on_request and (masked or not backend.for_masks)
    ]
    return sorted(names, key=lambda name: name == "reference")  # last, as it is only a fallback


def choose(
    need: Requirements,
    candidates: Sequence[str] | None = None,
    seed: int = 0,
    use: Use | None = None,
    earlier: BackendChoice | None = None,
) -> BackendChoice:
    """Return the fastest backend that is correct for this problem on this device. Takes seconds and up to a few GiB.

    `candidates` limits the choice, and may include backends that are otherwise left out on this device. Raises
    UsageError for an unknown name, and RunError if no backend passes.

    use: what the choice is for; None: every candidate is tried. earlier: a trial of other candidates for the same
    problem, whose results are part of the choice.
    """
    considered = [backend_named(name) for name in candidates or considered_backends(need)]
    rejected: dict[str, str] = dict(earlier.rejected) if earlier else {}
    errors: dict[str, float] = dict(earlier.errors) if earlier else {}
    seconds: dict[str, float] = dict(earlier.seconds) if earlier else {}
    not_tried: dict[str, str] = {}
    began = time.perf_counter()
    part = _checked_part(need)
    inputs, context = _problem(need, part.tokens, seed)
    expected: list[Tensor] | None = None
    create_cuda_context_for_autograd(need.device)

    for backend in considered:
        reason = backend.unsupported_reason(need)
        if reason is None and backend.name == "reference" and seconds:
            reason = "is slow and large; only used where nothing else works"
        if reason is not None:
            rejected[backend.name] = reason
            continue
        if seconds and (reason := _reason_to_skip(backend, need, min(seconds.values()), use, began)):
            not_tried[backend.name] = reason
            continue
        if expected is None:
            expected = _reference(inputs, context, part)
        try:
            prepared = prepare(replace(context, backend=backend.name), need)
            errors[backend.name] = _error(backend, prepared, inputs, expected, part)
            if not errors[backend.name] <= TOLERANCE[need.dtype]:
                rejected[backend.name] = (
                    f"wrong: relative error {errors[backend.name]:.1e}, allowed {TOLERANCE[need.dtype]:.0e}"
                )
                continue
            best = min(seconds.values(), default=float("inf"))
            seconds[backend.name] = _time(backend, prepared, inputs, best)
        except torch.OutOfMemoryError:  # in a later run, there may be more memory
            not_tried[backend.name] = "out of memory"
        except (RuntimeError, ValueError, TypeError) as error:
            # A kernel that this device or torch version cannot run raises one of these; the reason is recorded.
            rejected[backend.name] = f"failed: {first_line(error)}"
    if not seconds:
        reasons = "; ".join(f"{name} {reason}" for name, reason in (rejected | not_tried).items())
        raise RunError(
            f"no attention backend works at this shape; change head_dim, the window or the dtype: {reasons}"
        )
    return BackendChoice(_fastest(seconds), seconds, errors, rejected, not_tried)


def _reason_to_skip(
    backend: AttentionBackend, need: Requirements, best: float, use: Use | None, began: float
) -> str | None:
    """Return why a candidate is not worth trying, None if it is. best: seconds of the fastest backend so far."""
    if time.perf_counter() - began > TRIAL_SECONDS:
        return f"the trial had already taken {TRIAL_SECONDS:.0f} s"
    if use is None or use.saved_seconds(need, best) >= backend.start_seconds:
        return None
    return (
        f"starting it takes about {backend.start_seconds:.0f} s, and it can save this run at most "
        f"{use.saved_seconds(need, best):.1f} s"
    )


def flops(need: Requirements) -> float:
    """Return the FLOPs of forward and backward, counting only the query-key pairs that the mask leaves."""
    window = min(need.window or need.tokens, need.tokens)
    pairs = need.tokens * window - window * (window - 1) // 2
    return FORWARD_AND_BACKWARD * 4 * need.batch * need.heads * need.head_dim * pairs


def _fastest(seconds: dict[str, float]) -> str:
    """Return the fastest backend. Among ties, prefer one with an explicit backward (`pair`)."""
    limit = (1 + TIE_MARGIN) * min(seconds.values())
    ties = [name for name, time_taken in seconds.items() if time_taken <= limit]
    return min(ties, key=lambda name: (backend_named(name).pair is None, seconds[name]))


def worst_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative Frobenius error; infinite if a tensor is not finite.

    Where every query sees one key, the gradients of q and k are zero. Their errors are relative to the largest tensor.
    """
    sizes = [float(tensor.norm()) for tensor in expected]
    worst = 0.0
    for actual_tensor, expected_tensor, size in zip(actual, expected, sizes, strict=True):
        actual_tensor = actual_tensor.to(expected_tensor.dtype)
        if not bool(torch.isfinite(actual_tensor).all()):
            return float("inf")
        worst = max(worst, float((actual_tensor - expected_tensor).norm()) / (size or max(sizes)))
    return worst


def _checked_part(need: Requirements) -> Requirements:
    """Return the part of the problem that is compared with the reference, small enough for the memory of a small card.

    It has the first rows; then, as far as needed, fewer heads (but two groups are kept, to check the head mapping);
    then fewer tokens. Causal attention of the first tokens does not depend on later ones, if the gradient of later
    outputs is zero. So each backend runs the whole problem, as in training, and the reference runs this part only.
    """
    batch, kv_heads, tokens = min(need.batch, CHECK_BATCH), need.kv_heads, need.tokens
    group = need.heads // need.kv_heads

    def scores() -> int:
        return batch * group * kv_heads * tokens**2

    while kv_heads > 2 and scores() > CHECK_SCORES:
        kv_heads = max(2, kv_heads // 2)
    while need.causal and tokens > 512 and scores() > CHECK_SCORES:
        tokens //= 2
    return replace(need, batch=batch, heads=group * kv_heads, kv_heads=kv_heads, tokens=tokens)


def _checked_slices(tensors: Sequence[Tensor], part: Requirements) -> list[Tensor]:
    """Return the part that is compared of q, k, v or their gradients, and of the output or its gradient."""
    largest = max(tensor.shape[2] for tensor in tensors)
    return [
        tensor[: part.batch, : part.tokens, : part.heads if tensor.shape[2] == largest else part.kv_heads]
        for tensor in tensors
    ]


def _error(
    backend: AttentionBackend,
    context: AttentionContext,
    inputs: list[Tensor],
    expected: list[Tensor],
    part: Requirements,
) -> float:
    """Return the largest error of the backend, under autograd and, if it has one, through its explicit backward."""
    *qkv, grad = inputs
    if part.tokens < grad.shape[1]:
        grad = grad.clone()
        grad[:, part.tokens :] = 0
    inputs = [*qkv, grad]
    return max(
        worst_error(_checked_slices(runner(inputs), part), expected) for runner in _runners(backend, context)
    )


def _problem(need: Requirements, checked_tokens: int, seed: int) -> tuple[list[Tensor], AttentionContext]:
    """Return random q, k, v and gradient of the output, and a context.

    With documents, each row has two of unequal length, whose boundary lies within the checked tokens.
    """
    generator = torch.Generator(need.device).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        shape = (need.batch, need.tokens, heads, need.head_dim)
        return torch.randn(shape, generator=generator, device=need.device).to(need.dtype)

    # Views of one tensor, as from a fused projection, so that a backend that has to copy them is timed with the copies.
    sizes = [need.heads, need.kv_heads, need.kv_heads]
    tensors = [*normal(sum(sizes)).split(sizes, dim=2), normal(need.heads)]
    softcap = CHECKED_SOFTCAP if need.softcap else None
    boundaries = None
    if need.documents:
        boundaries = _boundaries(need, max(1, checked_tokens // 3))
    sinks_H = None
    if need.sinks:
        sinks_H = torch.linspace(-2.0, 2.0, need.heads, device=need.device)
    context = AttentionContext(
        causal=need.causal, softcap=softcap, sinks_H=sinks_H, window=need.window, cu_seqlens=boundaries
    )
    return tensors, context


def _boundaries(need: Requirements, second_document: int) -> Tensor:
    """Return cu_seqlens of two documents per row, the second from `second_document` on."""
    starts = [row * need.tokens + offset for row in range(need.batch) for offset in (0, second_document)]
    end = need.batch * need.tokens
    return torch.tensor([*starts, end, end], dtype=torch.int32, device=need.device)


def _reference(inputs: list[Tensor], context: AttentionContext, part: Requirements) -> list[Tensor]:
    """Return the reference's output and gradients of the checked part, in float32 or wider."""
    wide_dtype = torch.promote_types(part.dtype, torch.float32)
    backend = backend_named("reference")
    if part.documents:
        context = replace(context, cu_seqlens=_boundaries(part, max(1, part.tokens // 3)))
    if context.sinks_H is not None:
        context = replace(context, sinks_H=context.sinks_H[: part.heads])
    context = prepare(replace(context, backend="reference"), replace(part, dtype=wide_dtype))
    return _runners(backend, context)[0]([t.to(wide_dtype) for t in _checked_slices(inputs, part)])


def _runners(backend: AttentionBackend, context: AttentionContext) -> list[Callable[..., list[Tensor]]]:
    """Return functions [q, k, v, gradient of the output] -> [output, gradients of q, k, v].

    The first calls the backend under autograd, the second calls its explicit forward and backward, if it has them.
    """

    def under_autograd(inputs: list[Tensor]) -> list[Tensor]:
        *qkv, grad = inputs
        q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in qkv]
        output = backend.function(q, k, v, context)
        return [output.detach(), *gradients([output], leaves, [grad])]

    def explicitly(inputs: list[Tensor]) -> list[Tensor]:
        assert backend.pair is not None
        q, k, v, grad = inputs
        output, saved = backend.pair.forward(q, k, v, context)
        return [output, *backend.pair.backward(saved, grad, context)]

    return [under_autograd] if backend.pair is None else [under_autograd, explicitly]


def _time(backend: AttentionBackend, context: AttentionContext, inputs: list[Tensor], best: float) -> float:
    """Return the median seconds of forward and backward. The correctness check before was the warm-up."""
    device, run = inputs[0].device, partial(_runners(backend, context)[-1], inputs)
    # Enough for two times, as a single one may include a pause of the host.
    first_runs = 3 if device.type == "cuda" else 2
    times = _run_seconds(run, device, first_runs)
    if min(times) <= GIVE_UP_FACTOR * best:
        affordable = int(CANDIDATE_SECONDS / max(min(times), 1e-6))
        if more := min(TIMED_RUNS[device.type] - first_runs, affordable):
            times += _run_seconds(run, device, more)
    return statistics.median(times)


def _run_seconds(run: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    """Return the seconds of each of `runs` consecutive runs, on a GPU without the first.

    In a training step the GPU's queue is full, which hides the time of the host, so a backend that is slow to launch
    from Python should not lose for that. Therefore nothing synchronizes between runs, and the first run only keeps the
    GPU busy while the others are queued. If launching takes longer than computing, the host's time still shows.
    """
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(runs):
            run()
            marks.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(marks)]
    events = []
    for _ in range(runs):
        run()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
