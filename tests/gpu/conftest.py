"""Data as the tests of training and of the loader have it, and a fresh compiler for each test."""

from collections.abc import Iterator

import pytest
import torch

from tests.data.conftest import prepared as prepared
from tests.train.conftest import data as data


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """torch.compile counts what it compiled for each function, and gives up after some: that must not add up."""
    yield
    torch._dynamo.reset()
