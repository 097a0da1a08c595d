"""The list of slow tests that `make test` leaves to `make test-full`. `benchmarks/suite.py` writes it."""

from pathlib import Path

LIST = Path(__file__).with_name("long_form.txt")


def read_list() -> list[str]:
    """Return the entries: names of tests as pytest shows them, or those of functions for all of their tests."""
    return LIST.read_text(encoding="utf-8").splitlines()


def function_of(test: str) -> str:
    """Return the name of a test without that of its parameters."""
    return test.partition("[")[0]
