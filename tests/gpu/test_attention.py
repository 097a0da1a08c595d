"""Every attention backend on this GPU against float64: output and three gradients, in each way it is called."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks import step_profile
from deskside.kernels.attention import (
    BACKENDS,
    AttentionContext,
    Requirements,
    attention_backward,
    attention_forward,
    choose,
    prepare,
)
from deskside.kernels.attention.choose import worst_error
from deskside.ops.composite import attention
from tests.gpu import card

pytestmark = card.NEEDS_CARD
TOKENS, ROWS, TOLERANCE = 384, 3, 1e-2
PROFILED = 3  # runs of one backend
# major compute capability; the other backends run on any
BACKWARD_FROM = {"fa4": 9, "cudnn": 8, "flash": 8, "varlen": 8}

HEADS = {"12x3x64": (12, 3, 64), "6x2x128": (6, 2, 128), "4x4x64": (4, 4, 64)}
MASKS = {
    "full": (None, False, None),
    "window": (100, False, None),
    "documents": (None, True, None),
    "window and documents": (100, True, None),
    "capped": (None, False, 2.0),
    "capped window and documents": (100, True, 2.0),
    "sinks": (None, False, None),
}
CASES = [  # each way and each shape, but not every combination, because FlexAttention compiles for each
    ("12x3x64", "eager"),
    ("12x3x64", "compiled"),
    ("12x3x64", "by hand"),
    ("6x2x128", "by hand"),
    ("4x4x64", "eager"),
]
NAMES = sorted(
    name for name, backend in BACKENDS.items() if "cuda" in backend.devices and name != "reference"
)


def problem(shape: str, masks: str) -> tuple[Requirements, AttentionContext]:
    """Return the requirements, and a context with documents of all kinds: one
    token, a whole row, and empty padding.
    """
    heads, kv_heads, head_dim = HEADS[shape]
    window, documents, softcap = MASKS[masks]
    device = torch.device(card.DEVICE)
    need = Requirements(
        *(ROWS, TOKENS, heads, kv_heads, head_dim),
        torch.bfloat16,
        device,
        window=window,
        documents=documents,
        softcap=softcap is not None,
        sinks=masks == "sinks",
    )
    ends = [0, 1, 130, TOKENS, 2 * TOKENS, 2 * TOKENS + 255, 3 * TOKENS, 3 * TOKENS, 3 * TOKENS]
    cu = torch.tensor(ends, dtype=torch.int32, device=device) if documents else None
    sinks = torch.linspace(-1.0, 2.0, heads, device=device) if masks == "sinks" else None
    context = AttentionContext(
        softcap=softcap, sinks_H=sinks, window=window, cu_seqlens=cu, max_seqlen=TOKENS if documents else None
    )
    return need, context


def projection(need: Requirements) -> Tensor:
    """Return a (B, T, (H + 2 K) C) tensor, of which q, k and v are views."""
    width = (need.heads + 2 * need.kv_heads) * need.head_dim
    generator = torch.Generator(need.device).manual_seed(0)
    return torch.randn(need.batch, need.tokens, width, generator=generator, device=need.device).to(need.dtype)


def views(fused_BTX: Tensor, need: Requirements) -> list[Tensor]:
    sizes = [need.heads * need.head_dim, need.kv_heads * need.head_dim, need.kv_heads * need.head_dim]
    return [part.unflatten(-1, (-1, need.head_dim)) for part in fused_BTX.split(sizes, dim=-1)]


def by_autograd(fused: Tensor, need: Requirements, context: AttentionContext, compiled: bool) -> list[Tensor]:
    function = torch.compile(attention, fullgraph=True, dynamic=False) if compiled else attention
    fused = fused.detach().requires_grad_()
    o = function(*views(fused, need), context)  # type: ignore[call-arg]
    (gradient,) = torch.autograd.grad(o, fused, grad_of(need).to(o.dtype))
    return [o.detach(), *views(gradient, need)]


def by_hand(fused: Tensor, need: Requirements, context: AttentionContext) -> list[Tensor]:
    with torch.no_grad():
        o, saved = attention_forward(*views(fused, need), context)  # type: ignore[call-arg]
        return [o, *attention_backward(saved, grad_of(need).to(o.dtype))]


def grad_of(need: Requirements) -> Tensor:
    generator = torch.Generator(need.device).manual_seed(1)
    shape = (need.batch, need.tokens, need.heads, need.head_dim)
    return torch.randn(shape, generator=generator, device=need.device).to(need.dtype)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(("shape", "way"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_float64(name: str, shape: str, masks: str, way: str) -> None:
    need, context = problem(shape, masks)
    reason = BACKENDS[name].unsupported_reason(need)
    if reason is not None:
        pytest.skip(reason)
    if torch.cuda.get_device_capability()[0] < BACKWARD_FROM.get(name, 0):
        pytest.skip(f"{name} has no backward on this compute capability")
    fused = projection(need)
    exact_need = replace(need, dtype=torch.float64)
    exact = by_autograd(fused.double(), exact_need, prepare(context, exact_need), compiled=False)
    context = prepare(replace(context, backend=name), need)
    if way == "by hand":
        got = by_hand(fused, need, context)
    else:
        got = by_autograd(fused, need, context, compiled=way == "compiled")
    assert worst_error(got, exact) < TOLERANCE


@pytest.mark.parametrize("masks", MASKS)
def test_the_trial_finds_a_fast_one(masks: str) -> None:
    """At this size, the plain backends are far slower, so the failure of a fast kernel would be noticed."""
    window, documents, softcap = MASKS[masks]
    device = torch.device(card.DEVICE)
    shape, capped = (4, 2048, 12, 3, 64), softcap is not None
    need = Requirements(
        *shape,
        torch.bfloat16,
        device,
        window=window,
        documents=documents,
        softcap=capped,
        sinks=masks == "sinks",
    )
    choice = choose(need)
    assert choice.name not in {"reference", "chunked", "efficient"}, choice
    assert not [reason for reason in choice.rejected.values() if reason.startswith("wrong")], choice.rejected


@card.ALONE
def test_a_window_costs_less_than_full_attention() -> None:
    """The window has sixteen times fewer scores in long rows, so its best backend must be
    far cheaper than that of full attention.

    The kernels' own durations in the profiler's trace are added up, instead of the time between two events, because a
    busy host lengthens the gaps between kernels.
    """
    device = torch.device(card.DEVICE)
    full = Requirements(8, 8192, 12, 3, 64, torch.bfloat16, device)
    best = {window: cheapest(replace(full, window=window)) for window in (None, 512)}
    assert 0 < best[512] < best[None] / 3, best


def cheapest(need: Requirements) -> float:
    """Return the kernel time in microseconds of one forward and backward, for the backend with the lowest."""
    fused, grad = projection(need), grad_of(need)
    return min(busy(name, fused, grad, need) for name in choose(need).seconds)


def busy(name: str, fused: Tensor, grad: Tensor, need: Requirements) -> float:
    context = prepare(AttentionContext(window=need.window, backend=name), need)

    @torch.no_grad()
    def run() -> None:
        _, saved = attention_forward(*views(fused, need), context)  # type: ignore[call-arg]
        attention_backward(saved, grad)

    events = step_profile.record(run, PROFILED, need.device)
    return sum(piece.duration for piece in step_profile.activities(events, need.device.type)) / PROFILED
