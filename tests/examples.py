"""The number of examples of a slow property: fewer in the default suite than in the long form."""

from hypothesis import settings


def examples(every_run: int, long: int) -> int:
    """Return the number of examples for the profile that conftest.py has loaded, of which only one repeats its own."""
    return every_run if settings.default.derandomize else long
