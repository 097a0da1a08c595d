"""Choose an attention backend by running it: correct first, then fastest.

A backend can be present and wrong: libraries have been seen whose gradients were all zero. So the output and the
three gradients of each candidate are compared with the reference in float32, on this device, at this shape; those
that pass are timed. The choice and everything that led to it is plain data, which a run records and a resumed run
reads back.
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
from deskside.kernels.functional import create_autograd_context, gradients
from deskside.utils.errors import RunError

# Relative Frobenius error against float32. Rounding q, k, v, p and o alone gives about 3e-3 in bfloat16 and 2e-3 for
# the gradients' sums; a wrong mask, scale or head mapping gives more than 1e-1.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
CHECK_BATCH = 2  # rows that are compared; the reference keeps all its scores for the backward
CHECK_SCORES = 2**27  # scores of the check, 512 MiB in float32, of which autograd keeps a few copies
TIMED_RUNS = {"cuda": 10, "cpu": 3}
HOPELESS = 3.0  # times the best so far: not timed any further
LEVEL = 0.02  # share of the fastest time within which two are level: as much as one backend differs from trial to trial


@dataclass(frozen=True)
class BackendChoice:
    """The chosen backend and the measurements behind the choice.

    seconds: name -> median seconds of forward and backward, called as the default step of a GPU does
    (`attention_forward`, `attention_backward`), behind work that is queued already. Where torch compiles the step, it
    calls the same kernels by way of autograd.
    errors: name -> the largest of four relative errors, and of four more where the backend has a pair.
    rejected: name -> reason.
    """

    name: str
    seconds: dict[str, float]
    errors: dict[str, float]
    rejected: dict[str, str]


def choose(need: Requirements, candidates: Sequence[str] | None = None, seed: int = 0) -> BackendChoice:
    """The fastest backend that computes this problem correctly here. Uses a few MiB to a few GiB for seconds.

    `candidates` limits the choice, and may ask for backends that are otherwise left out on this device. Raises
    UsageError for an unknown name and RunError when none passes.
    """
    if candidates is None:
        masked = need.window is not None or need.documents
        considered = [
            b
            for b in BACKENDS.values()
            if need.device.type not in b.on_request and (masked or not b.for_masks)
        ]
        considered.sort(key=lambda b: b.name == "reference")  # last: it is the way out, not a competitor
    else:
        considered = [backend_named(name) for name in candidates]
    rejected: dict[str, str] = {}
    errors: dict[str, float] = {}
    seconds: dict[str, float] = {}
    part = _checked_part(need)
    inputs, context = _problem(need, part.tokens, seed)
    expected: list[Tensor] | None = None
    create_autograd_context(need.device)

    for backend in considered:
        reason = backend.why_not(need)
        if reason is None and backend.name == "reference" and seconds:
            reason = "is slow and large; only used where nothing else works"
        if reason is not None:
            rejected[backend.name] = reason
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
        except (RuntimeError, ValueError, TypeError) as error:
            # A kernel that this device or torch cannot run says so by raising; the reason is recorded, not hidden.
            first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            rejected[backend.name] = f"failed: {first_line}"
    if not seconds:
        reasons = "; ".join(f"{name} {reason}" for name, reason in rejected.items())
        raise RunError(f"no attention backend works here at this shape: {reasons}")
    return BackendChoice(_fastest(seconds), seconds, errors, rejected)


def _fastest(seconds: dict[str, float]) -> str:
    """Return the fastest backend, preferring one with a manual backward among those within the noise."""
    level = (1 + LEVEL) * min(seconds.values())
    near = [name for name, spent in seconds.items() if spent <= level]
    return min(near, key=lambda name: (backend_named(name).pair is None, seconds[name]))


def worst_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative Frobenius error; infinite where something is not finite or all zero."""
    worst = 0.0
    for ours, truth in zip(got, expected, strict=True):
        ours, truth = ours.to(truth.dtype), truth
        if not bool(torch.isfinite(ours).all()) or not bool(ours.any()):
            return float("inf")
        worst = max(worst, float((ours - truth).norm() / truth.norm()))
    return worst


def _checked_part(need: Requirements) -> Requirements:
    """The part of the problem that is compared: its first rows, then first heads (two groups of them at least, for
    their mapping), and at last first tokens, so that the reference's scores fit beside a model on a small card.

    What is computed for these does not depend on the rest, as long as attention is causal and the later tokens'
    output has no gradient. So every backend runs the whole problem, once compiled, and the reference this part.
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


def _cut(tensors: Sequence[Tensor], part: Requirements) -> list[Tensor]:
    """The compared part of q, k, v or their gradients, and of the output or its gradient, in any order of four."""
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
    """The worst error of the function under autograd, and of the pair that hand-written gradients use."""
    *qkv, grad = inputs
    if part.tokens < grad.shape[1]:
        grad = grad.clone()
        grad[:, part.tokens :] = 0
    inputs = [*qkv, grad]
    return max(worst_error(_cut(way(inputs), part), expected) for way in _ways(backend, context))


def _problem(need: Requirements, checked_tokens: int, seed: int) -> tuple[list[Tensor], AttentionContext]:
    """Random q, k, v, the gradient of the output, and a context with two documents of unequal length per row, whose
    boundary is within the tokens that are checked."""
    generator = torch.Generator(need.device).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        shape = (need.batch, need.tokens, heads, need.head_dim)
        return torch.randn(shape, generator=generator, device=need.device).to(need.dtype)

    # Views of one tensor, as a fused projection gives them: a backend that has to copy them pays for it here too.
    sizes = [need.heads, need.kv_heads, need.kv_heads]
    tensors = [*normal(sum(sizes)).split(sizes, dim=2), normal(need.heads)]
    boundaries = None
    if need.documents:
        boundaries = _boundaries(need, max(1, checked_tokens // 3))
    return tensors, AttentionContext(causal=need.causal, window=need.window, cu_seqlens=boundaries)


def _boundaries(need: Requirements, cut: int) -> Tensor:
    starts = [row * need.tokens + offset for row in range(need.batch) for offset in (0, cut)]
    end = need.batch * need.tokens
    return torch.tensor([*starts, end, end], dtype=torch.int32, device=need.device)


def _reference(inputs: list[Tensor], context: AttentionContext, part: Requirements) -> list[Tensor]:
    """Output and gradients of the checked part, in float32 at least."""
    exact = torch.promote_types(part.dtype, torch.float32)
    backend = backend_named("reference")
    if part.documents:
        context = replace(context, cu_seqlens=_boundaries(part, max(1, part.tokens // 3)))
    context = prepare(replace(context, backend="reference"), replace(part, dtype=exact))
    return _ways(backend, context)[0]([t.to(exact) for t in _cut(inputs, part)])


def _ways(backend: AttentionBackend, context: AttentionContext) -> list[Callable[..., list[Tensor]]]:
    """Functions of [q, k, v, gradient of the output] that return [output, gradients of q, k, v].

    The first is the backend under autograd, the second its pair, if it has one.
    """

    def under_autograd(inputs: list[Tensor]) -> list[Tensor]:
        *qkv, grad = inputs
        q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in qkv]
        output = backend.function(q, k, v, context)
        return [output.detach(), *gradients([output], leaves, [grad])]

    def by_pair(inputs: list[Tensor]) -> list[Tensor]:
        assert backend.pair is not None
        q, k, v, grad = inputs
        output, kept = backend.pair.forward(q, k, v, context)
        return [output, *backend.pair.backward(kept, grad, context)]

    return [under_autograd] if backend.pair is None else [under_autograd, by_pair]


def _time(backend: AttentionBackend, context: AttentionContext, inputs: list[Tensor], best: float) -> float:
    """Median seconds of forward and backward. The check was the run to warm up.

    One that takes more than `HOPELESS` times the best so far is not timed any further.
    """
    device, run = inputs[0].device, partial(_ways(backend, context)[-1], inputs)
    first = 3 if device.type == "cuda" else 2  # two times to go by: one alone may hold a pause of the host
    times = _spans(run, device, first)
    if min(times) <= HOPELESS * best:
        times += _spans(run, device, TIMED_RUNS[device.type] - first)
    return statistics.median(times)


def _spans(run: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    """Seconds of each of so many runs, one behind the other; on a GPU of all but the first of them.

    A GPU that waits for its host counts the host's time before the first kernel too. In a step the queue is deep and
    hides it, so a kernel that is called slowly from Python must not lose the trial for that. Hence nothing is waited
    for between runs, and the first one only keeps the device at work while the others are queued. What the host takes
    longer to queue than the device to compute shows the host's time nevertheless.
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
