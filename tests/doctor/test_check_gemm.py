"""The doctor's rows for recipes: training's own self-check in the doctor's terms."""

import json

import pytest

from deskside.config.recipes import RECIPES
from deskside.doctor.check_gemm import as_result, head, recipe
from deskside.precision import CheckResult

QUANTIZED = [name for name, found in RECIPES.items() if found.quantized]
ERRORS = {"output": 0.03, "input gradient": 0.05, "weight gradient": 0.05}


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_recipe_trains_right_on_a_cpu_emulated(name: str) -> None:
    result = recipe(name, "cpu")
    assert result["verdict"] == "works", result
    assert result["details"]["native"] is False
    assert set(result["errors"]) == set(ERRORS)
    # An error below the format's noise means that nothing was quantized: E4M3 alone costs a product 3.7e-2.
    assert all(0.02 < error < RECIPES[name].tolerance for error in result["errors"].values())


def test_the_head_trains_right_on_a_cpu_emulated() -> None:
    result = head("cpu")
    assert (result["verdict"], result["details"]["native"]) == ("works", False), result
    assert set(result["errors"]) == {"loss", "hidden gradient", "weight gradient"}
    assert all(error < result["tolerance"] for error in result["errors"].values())
    assert all(result["errors"][name] > 0.02 for name in ("hidden gradient", "weight gradient"))


@pytest.mark.parametrize(
    ("found", "verdict", "reason", "native", "why"),
    [
        (CheckResult(True, ERRORS, "", True), "works", "", True, ""),
        (CheckResult(True, ERRORS, "", False), "works", "", False, ""),
        (CheckResult(True, ERRORS, "emulated: cannot run here: no cubin", False), "works", "", False,
         "cannot run here: no cubin"),
        (CheckResult(False, {}, "cannot run here: needs compute capability 8.9", True), "unsupported",
         "needs compute capability 8.9", True, ""),
        (CheckResult(False, ERRORS, "weight gradient is all zero", True), "wrong numbers",
         "weight gradient is all zero", True, ""),
    ],
)  # fmt: skip
def test_what_the_self_check_says_in_the_doctors_words(
    found: CheckResult, verdict: str, reason: str, native: bool, why: str
) -> None:
    result = as_result(found, 0.12)
    assert (result["verdict"], result["reason"]) == (verdict, reason)
    assert result["details"] == {"native": native, "emulated_because": why}


def test_an_error_that_is_not_finite_is_json() -> None:
    broken = CheckResult(False, {**ERRORS, "output": float("nan")}, "output is not finite")
    result = as_result(broken, 0.12)
    assert result["errors"]["output"] is None
    json.dumps(result, allow_nan=False)
