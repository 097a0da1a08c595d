import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.config.sections import DataConfig
from deskside.data.reading.mixing import PERIOD, Mixture, temperature_weights
from deskside.data.reading.repetition import describe_epochs, epochs_at_temperature, highest_temperature

# An English corpus with eight Indian languages, of which four are here; the smallest is read most often.
SIZES = {"en": 72_000_000, "ml": 2_900_000, "hi": 2_400_000, "gu": 1_000_000}


def drawn(sizes: dict[str, int], temperature: float, rows: int) -> dict[str, float]:
    """Return the epochs of components of so many rows, counted in the order of the mixture."""
    mixture = Mixture.of(temperature_weights(np.array(list(sizes.values())), temperature))
    component, _ = mixture.locate(np.arange(rows))
    counts = np.bincount(component, minlength=len(sizes))
    return {name: int(count) / size for (name, size), count in zip(sizes.items(), counts, strict=True)}


def test_epochs_are_those_of_the_order() -> None:
    sizes = {"en": 9000, "hi": 700, "gu": 11}
    for temperature in (1.0, 2.5, math.inf):
        expected = drawn(sizes, temperature, 5 * PERIOD)
        assert epochs_at_temperature(sizes, temperature, 5 * PERIOD) == pytest.approx(expected)
    halved = {name: size // 2 for name, size in sizes.items()}  # two tokens in a row
    in_rows = epochs_at_temperature(sizes, 2.5, 5 * PERIOD, halved)
    assert in_rows["en"] == pytest.approx(2 * drawn(sizes, 2.5, 5 * PERIOD)["en"])


def test_a_tiny_component_gets_a_row_of_each_period() -> None:
    """It is read more often than its share of the tokens says, so no temperature helps."""
    sizes = {"en": 100_000_000, "xx": 10_000}
    assert epochs_at_temperature(sizes, 1.0, 1e8)["xx"] == pytest.approx(1e8 / PERIOD / 10_000)
    assert highest_temperature(sizes, 1e8, 4) is None


@given(
    st.lists(st.integers(1, 10**12), min_size=2, max_size=40),
    st.floats(1, 10**13),
    st.floats(1, 50),
)
@settings(max_examples=100, deadline=None)
def test_the_temperature_keeps_the_limit(sizes: list[int], tokens: float, limit: float) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}

    def most(temperature: float) -> float:
        return max(epochs_at_temperature(named, temperature, tokens).values())

    found = highest_temperature(named, tokens, limit)
    if found is None:
        assert most(1) > limit
        return
    assert most(found) <= limit
    assert found == math.inf or most(math.inf) > limit


def test_the_warning_names_a_temperature_only_where_one_helps() -> None:
    def line(temperature: float, tokens: float) -> str:
        data = DataConfig(language_temperature=temperature)
        return describe_epochs(epochs_at_temperature(SIZES, temperature, tokens), data, SIZES)

    assert "beyond" not in line(3.33, 10e6)
    found = line(3.33, 200e6)
    assert ": ml, hi, gu;" in found
    temperature = float(found.split("--data.language_temperature ")[1].split()[0])
    assert temperature == highest_temperature(SIZES, 200e6, 4)
    assert "beyond" not in line(temperature, 200e6) and "beyond" in line(temperature + 0.5, 200e6)
    assert "--data" not in line(3.33, 1e9) and "en, ml, hi, gu" in line(1.0, 1e9)
    by_hand = DataConfig(weights={"en": 1.0, "hi": 1.0})
    assert "--data" not in describe_epochs({"en": 1.0, "hi": 9.0}, by_hand, SIZES)


def test_a_temperature_that_is_no_lower_is_not_advised() -> None:
    """An epoch of a run has padding, which may bring a component over the limit where tokens do not."""
    data = DataConfig(language_temperature=1.0)
    assert "--data" not in describe_epochs({"en": 1.0, "hi": 4.1}, data, {"en": 10**6, "hi": 10**6})
