"""The data and the single thread of the tests of training."""

from tests.train.conftest import data, one_thread

__all__ = ["data", "one_thread"]
