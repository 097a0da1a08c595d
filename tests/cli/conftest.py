"""Prepared data, and the single thread of the tests that train."""

from tests.data.conftest import prepared
from tests.train.conftest import data, one_thread, short_ends

__all__ = ["data", "one_thread", "prepared", "short_ends"]
