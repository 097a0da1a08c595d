"""What a step on a card must keep to: a CUDA graph holds it, and a deterministic run may take it.

A capture fails at whatever waits for the device: a value read by the host, a shape that depends on values, and a copy
from the host's memory, such as the constant of `x[index] = True`, which torch keeps in a tensor on the CPU
(github.com/pytorch/pytorch/pull/186486). The step runs on "meta" here, which has shapes alone, so that reading a value
raises by itself; the rest is refused by hand.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deskside.engine import steps
from deskside.engine.sampling import GREEDY, Sampling, ranking_width
from deskside.engine.speculate import speculate
from deskside.engine.steps import CachedModel, Slots, StepOptions
from tests.engine.test_generate import SHAPE, VARIANTS, make

META = torch.device("meta")
SAMPLINGS = {
    "greedy": GREEDY,
    "unranked": Sampling(0.8, min_p=0.01),
    "top-k": Sampling(0.9, top_k=20, top_p=0.95),
    "sorted": Sampling(0.9, top_p=0.9),
}
LANES, PAGES = 4, 3


class OnOneDevice(TorchDispatchMode):
    """Refuses every operator that has to do with a tensor on the CPU, and the one that `use_deterministic_algorithms`
    refuses on CUDA: training draws samples at its end."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.cumsum.default:
            assert not args[0].is_floating_point(), "cumsum of floating-point numbers"
        for leaf in tree_leaves((args, kwargs, result)):
            assert not (isinstance(leaf, Tensor) and leaf.device.type == "cpu"), f"{function}: on the CPU"
        return result


class NoConstantsByIndex(TorchFunctionMode):
    """Refuses `x[index] = number`, whose number a GPU fetches from the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__setitem__ and any(isinstance(i, Tensor) for i in tree_leaves(args[1])):
            assert isinstance(args[2], Tensor), f"x[index] = {args[2]}: copied from the host"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("kind", SAMPLINGS)
@torch.no_grad()
def test_a_step_stays_on_its_device(kind: str, penalised: bool, drafts: int) -> None:
    vocabulary = SHAPE["vocab_size"]
    target, draft = (
        CachedModel(make(**VARIANTS["window"], num_hidden_layers=n).to(META), LANES * PAGES, 16, 48)
        for n in (3, 1)
    )
    slots = Slots(LANES, PAGES, vocabulary, META)
    if penalised:
        slots.start_seen(0, (1, 2))
    lanes = slots.to_device(range(LANES))
    step = partial(speculate, target, draft, num_drafts=drafts) if drafts else partial(steps.decode, target)
    options = StepOptions(ranking_width([SAMPLINGS[kind]], vocabulary), penalised, logprobs=True)
    with OnOneDevice(), NoConstantsByIndex():
        packed = step(slots, lanes, bound=48, options=options).packed()
    assert packed.shape == (LANES, 1 + 3 * (1 + drafts))
