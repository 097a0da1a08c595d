"""Prepared data for the few trials here that really train."""

from tests.train.conftest import data

__all__ = ["data"]
