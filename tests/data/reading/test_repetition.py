import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from deskside.data.reading.mixing import temperature_weights
from deskside.data.reading.repetition import describe_epochs, epochs_at_temperature, highest_temperature

# Millions of tokens of an English corpus with eight Indian languages, whose smallest is read most often.
SIZES = {"en": 72_000_000, "ml": 2_900_000, "hi": 2_400_000, "gu": 1_000_000}


def test_epochs_are_tokens_over_the_sizes() -> None:
    found = epochs_at_temperature(SIZES, 1.0, 2 * sum(SIZES.values()))
    assert found == pytest.approx(dict.fromkeys(SIZES, 2.0))
    equal = epochs_at_temperature(SIZES, math.inf, 4e6)
    assert equal == pytest.approx({name: 1e6 / size for name, size in SIZES.items()})


def test_the_temperature_of_a_limit() -> None:
    """Against the root that scipy finds for the smallest component, which is always read most often."""
    tokens, sizes = 200e6, np.array(list(SIZES.values()))

    def excess(temperature: float) -> float:
        weights = np.array(temperature_weights(sizes, temperature))
        return float(tokens * weights[-1] / weights.sum() / sizes[-1]) - 4

    found = highest_temperature(SIZES, tokens, 4)
    assert found == math.floor(100 * brentq(excess, 1, 50)) / 100


@given(
    st.lists(st.integers(1, 10**12), min_size=2, max_size=40),
    st.floats(1, 10**13),
    st.floats(1, 50),
)
@settings(max_examples=200, deadline=None)
def test_the_temperature_keeps_the_limit_and_the_next_one_does_not(
    sizes: list[int], tokens: float, limit: float
) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}

    def most(temperature: float) -> float:
        return max(epochs_at_temperature(named, temperature, tokens).values())

    found = highest_temperature(named, tokens, limit)
    if found is None:
        assert most(1) > limit
        return
    assert most(found) <= limit
    assert found == math.inf or most((round(100 * found) + 1) / 100) > limit


def test_the_warning_names_a_temperature_only_where_one_helps() -> None:
    def line(temperature: float, tokens: float) -> str:
        epochs = epochs_at_temperature(SIZES, temperature, tokens)
        return describe_epochs(epochs, "language_temperature", SIZES)

    assert "beyond" not in line(3.33, 10e6)
    found = line(3.33, 200e6)
    assert ": ml, hi, gu;" in found
    temperature = float(found.split("--data.language_temperature ")[1].split()[0])
    assert temperature == highest_temperature(SIZES, 200e6, 4)
    assert "--data" not in line(3.33, 1e9) and "en, ml, hi, gu" in line(1.0, 1e9)
    assert "--data" not in describe_epochs({"a": 9.0, "b": 1.0})  # weights of the user's own
