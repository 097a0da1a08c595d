"""The time of a kernel does not include the time of its launch."""

import time

import torch

from deskside.kernels.device_time import device_seconds
from tests.gpu.card import NEEDS_CARD

pytestmark = NEEDS_CARD

CARD = torch.device("cuda", 0)


def test_a_slow_launch_does_not_count() -> None:
    x = torch.zeros(1024, device=CARD)

    def run() -> None:
        time.sleep(3e-4)
        x.add_(1.0)

    assert device_seconds(run, CARD) < 1e-4
