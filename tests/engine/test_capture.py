"""Requirements of a decoding step on a GPU: a CUDA graph can capture it, and a deterministic run can execute it.

A capture fails at whatever waits for the device: a value read by the host, a shape that depends on values, and a copy
from host memory, such as the constant of `x[index] = True`, which torch keeps in a tensor on the CPU
(github.com/pytorch/pytorch/pull/186486). Here, the step runs on "meta", where tensors have only shapes, so that
reading a value raises. The other cases are refused by a dispatch mode.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from deskside.engine import steps
from deskside.engine.engine import Engine
from deskside.engine.graphs import TOKENS
from deskside.engine.prompts import PackedPrompts
from deskside.engine.requests import EngineStepOptions, Request
from deskside.engine.sampling import GREEDY, Sampling, ranking_width
from deskside.engine.speculate import speculate
from deskside.engine.steps import CachedModel, Slots
from deskside.kernels import prefill, prefill_triton
from tests.engine.test_generate import SHAPE, VARIANTS, make

META = torch.device("meta")
SAMPLINGS = {
    "greedy": GREEDY,
    "unranked": Sampling(0.8, min_p=0.01),
    "top-k": Sampling(0.9, top_k=20, top_p=0.95),
    "sorted": Sampling(0.9, top_p=0.9),
}
LANES, PAGES = 4, 3
TOP = 5  # the most probable tokens of each position


class OnOneDevice(TorchDispatchMode):
    """Refuses every operator with a tensor on the CPU, and the one that `use_deterministic_algorithms` refuses on
    CUDA, because training draws samples at its end.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.cumsum.default:
            assert not args[0].is_floating_point(), "cumsum of floating-point numbers"
        for leaf in tree_leaves((args, kwargs, result)):
            assert not (isinstance(leaf, Tensor) and leaf.device.type == "cpu"), f"{function}: on the CPU"
        return result


class NoConstantsByIndex(TorchFunctionMode):
    """Refuses `x[index] = number`, because a GPU fetches the number from the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__setitem__ and any(isinstance(i, Tensor) for i in tree_leaves(args[1])):
            assert isinstance(args[2], Tensor), f"x[index] = {args[2]}: copied from the host"
        return function(*args, **(kwargs or {}))


def models(*layers: int) -> list[CachedModel]:
    """Return models on "meta" with these numbers of layers."""
    return [
        CachedModel(make(**VARIANTS["window"], num_hidden_layers=n).to(META), LANES * PAGES, 16, 48)
        for n in layers
    ]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("adjusted", "constrained"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", SAMPLINGS)
@torch.no_grad()
def test_a_step_stays_on_its_device(kind: str, adjusted: bool, constrained: bool, drafts: int) -> None:
    vocabulary = SHAPE["vocab_size"]
    target, draft = models(3, 1)
    slots = Slots(LANES, PAGES, vocabulary, META)
    if adjusted:
        slots.start_adjustments(0, Request((1, 2), 4, SAMPLINGS[kind], min_tokens=2))
    if constrained:
        slots.allow([0], torch.zeros(1, -(-vocabulary // 32), dtype=torch.int32))
    lanes = slots.to_device(range(LANES))
    step = (
        partial(speculate, target, draft, num_drafts=drafts) if drafts else partial(steps.decode, (target,))
    )
    options = EngineStepOptions(
        ranking_width([SAMPLINGS[kind]], vocabulary), adjusted, True, constrained, TOP
    )
    with OnOneDevice(), NoConstantsByIndex():
        packed = step(slots, lanes, bound=48, options=options).packed()
    assert packed.shape == (LANES, 1 + (3 + 2 * TOP) * (1 + drafts))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(("adjusted", "constrained"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", SAMPLINGS)
@torch.no_grad()
def test_a_prefill_pass_stays_on_its_device(
    kind: str, adjusted: bool, constrained: bool, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention kernel, which is tested in the interpreter, is replaced by its output's shape."""
    monkeypatch.setattr(prefill, "packed_kernel_supports", lambda heads, pool: True)
    monkeypatch.setattr(prefill_triton, "attend_packed", lambda q_NHC, *rest: torch.empty_like(q_NHC))
    vocabulary, tokens = SHAPE["vocab_size"], 32
    slots = Slots(LANES, PAGES, vocabulary, META)
    if adjusted:
        slots.start_adjustments(0, Request((1, 2), 4, SAMPLINGS[kind], min_tokens=2))
    if constrained:
        slots.allow([0], torch.zeros(1, -(-vocabulary // 32), dtype=torch.int32))
    options = EngineStepOptions(
        ranking_width([SAMPLINGS[kind]], vocabulary), adjusted, True, constrained, TOP
    )
    computing = tuple(models(3, 1) if drafts else models(3))
    prompts = PackedPrompts.of(torch.zeros(3 * LANES + 1 + tokens, dtype=torch.int64, device=META), LANES)
    with OnOneDevice(), NoConstantsByIndex():
        packed = steps.prefill(computing, slots, prompts, options).packed()
    assert packed.shape == (LANES, 4 + 2 * TOP)


class Operators(TorchDispatchMode):
    """Counts the operators that the host calls."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Replays:
    """Replaces graph capture: computes without a graph and does not count
    operators, because a replay is one launch.
    """

    def __init__(self) -> None:
        self.kinds: list[Hashable] = []

    def run(self, kind: Hashable, inputs: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        self.kinds.append(kind)
        with _disable_current_modes():
            return step(inputs)


def on_the_host(layers: int, prompts: Sequence[int]) -> tuple[int, list[Hashable]]:
    """Return how many operators the host calls for the first step of prompts of these lengths, and what it replays."""
    engine = Engine(make(num_hidden_layers=layers), max_batch=8, max_tokens=1024, page_size=16)
    engine._run_ahead, engine._graphs = True, Replays()  # type: ignore[assignment]
    engine._models[0].can_capture_prefill = lambda tokens: True  # type: ignore[method-assign]
    for number, length in enumerate(prompts):
        engine.submit(Request((number + 1,) * length, 4))
    with Operators() as operators:
        engine.step()
    return operators.count, engine._graphs.kinds  # type: ignore[union-attr]


def test_the_host_does_little_for_a_prefill_pass() -> None:
    """The number of operators that it calls does not depend on the number of layers."""
    counts, kinds = zip(
        *(on_the_host(layers, prompts) for layers in (1, 4) for prompts in ((60,), (3, 40, 17), (9,) * 8)),
        strict=True,
    )
    assert counts[:3] == counts[3:] and max(counts) <= 20
    options = EngineStepOptions(0, False, False)
    assert [k for (k,) in kinds] == [("prefill", tokens, options) for tokens in (64, 64, 128)] * 2


def test_shapes_do_not_grow_with_the_variety_of_prompts() -> None:
    """Every new shape costs memory that is never freed: plans of cuBLAS and cuDNN, and CUDA graphs."""
    engine = Engine(make(num_hidden_layers=1), max_batch=4, max_tokens=512, page_size=16)
    engine._run_ahead = True
    shapes = set()
    forward = engine._models[0].prefill

    def prefill(*arguments: Tensor) -> Tensor:
        shapes.add(tuple(argument.shape for argument in arguments))
        return forward(*arguments)

    engine._models[0].prefill = prefill  # type: ignore[method-assign]
    rng = random.Random(0)
    for _ in range(60):
        engine.run(
            [
                Request(tuple(rng.choices(range(97), k=rng.randint(1, 60))), 2)
                for _ in range(rng.randint(1, 6))
            ]
        )
    assert len(shapes) <= sum(size <= 256 for size in TOKENS)
