"""The host reads a step's metrics while the GPU works on later launches."""

import time

import torch

from deskside.train.loop.step import DeviceEvent, StepMetrics
from tests.gpu.card import DEVICE, NEEDS_CARD, spin

pytestmark = NEEDS_CARD


def use_page_locked_memory(values: torch.Tensor) -> None:
    """Allocate it in the first steps, which may wait for the GPU. All later steps reuse it."""
    for numbers in [StepMetrics(values) for _ in range(4)]:
        assert numbers.read() == (1.5, 2.25, False)


def test_reading_waits_for_this_step_alone() -> None:
    values = torch.tensor([1.5, 2.25, 0.0], device=DEVICE)
    use_page_locked_memory(values)
    torch.cuda.synchronize()

    step = StepMetrics(values)
    values.copy_(torch.tensor([7.0, 8.0, 1.0], device=DEVICE))  # the next step writes to the same place
    spin(1000)
    following = StepMetrics(values)
    launched = torch.cuda.Event()
    launched.record()
    assert step.read() == (1.5, 2.25, False)
    assert not launched.query(), "reading step k waited for step k + 1"
    assert following.read() == (7.0, 8.0, True)


def test_a_step_ends_when_the_card_is_done_and_not_when_it_is_read() -> None:
    values = torch.tensor([1.5, 2.25, 0.0], device=DEVICE)
    use_page_locked_memory(values)
    torch.cuda.synchronize()

    begin = DeviceEvent(values.device)
    spin(20)
    step = StepMetrics(values)
    launched = time.perf_counter()
    spin(20)
    following = StepMetrics(values)
    time.sleep(1.0)
    assert following.read() == step.read() == (1.5, 2.25, False)
    assert time.perf_counter() - launched >= 1.0
    seconds = [step.end.seconds_since(begin), following.end.seconds_since(step.end)]
    assert all(0.005 < s < 0.5 for s in seconds) and 0.5 < seconds[0] / seconds[1] < 2.0
