"""Every entry of the table of families: what it exports, transformers computes equally; see benchmarks/families.py."""

from pathlib import Path

import pytest

from benchmarks.families import measure
from deskside.weights.hf_families import FAMILIES


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    parity = measure(FAMILIES[model_type], tmp_path)
    assert parity.logits < 1e-4 and parity.back < 1e-4 and parity.adapters < 1e-4
    assert parity.gradients < 1e-4 and parity.losses < 1e-5
    assert parity.greedy == 1
