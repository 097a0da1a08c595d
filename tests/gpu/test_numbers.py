"""The host reads a step's numbers while the card is busy with what was launched after that step."""

import torch

from deskside.train.step import Numbers
from tests.gpu.card import DEVICE, NEEDS_CARD, spin

pytestmark = NEEDS_CARD


def use_page_locked_memory(values: torch.Tensor) -> None:
    """The first steps of a run allocate it, which may wait for the card; all others use it again."""
    for numbers in [Numbers(values) for _ in range(4)]:
        assert numbers.read() == (1.5, 2.25, False)


def test_reading_waits_for_this_step_alone() -> None:
    values = torch.tensor([1.5, 2.25, 0.0], device=DEVICE)
    use_page_locked_memory(values)
    torch.cuda.synchronize()

    step = Numbers(values)
    values.copy_(torch.tensor([7.0, 8.0, 1.0], device=DEVICE))  # the next step writes to the same place
    spin(1000)
    following = Numbers(values)
    launched = torch.cuda.Event()
    launched.record()
    assert step.read() == (1.5, 2.25, False)
    assert not launched.query(), "reading step k waited for step k + 1"
    assert following.read() == (7.0, 8.0, True)
