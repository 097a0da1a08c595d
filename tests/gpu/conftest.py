"""The data sets of the training and loader tests, and a fresh compiler for each test."""

from collections.abc import Iterator

import pytest
import torch

from tests.data.conftest import prepared as prepared
from tests.train.conftest import data as data


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Reset torch.compile, which counts compilations for each function and gives up after a limit."""
    yield
    torch._dynamo.reset()
