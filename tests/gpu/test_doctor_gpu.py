"""The doctor on a GPU: one complete examination (minutes), and properties
that hold for any GPU that torch supports.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.config.recipes import RECIPES
from deskside.doctor.check_list import Check, run_all
from deskside.doctor.examine import examine
from tests.gpu.card import ALONE, NEEDS_CARD

pytestmark = [*NEEDS_CARD, ALONE, pytest.mark.timeout(580)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def examination() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "deskside", "doctor", "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    found: dict[str, Any] = json.loads(done.stdout)
    print(json.dumps(found, indent=1))  # pytest -s shows all measurements
    assert done.returncode == 0, found["why"]
    return found


@pytest.fixture(scope="module")
def checks(examination: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["id"]: check for check in examination["checks"]}


def test_nothing_hangs_crashes_or_is_wrong(checks: dict[str, dict[str, Any]]) -> None:
    own = [c for c in checks.values() if c["group"] != "libraries"]
    bad = [c for c in own if c["verdict"] not in ("works", "unsupported")]
    assert not bad, json.dumps(bad, indent=1)
    silent = [c["id"] for c in checks.values() if c["verdict"] != "works" and not c["reason"]]
    assert not silent


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "copy", "step_fp32", "step_bf16", "compile"])
def test_what_every_card_must_do(name: str, checks: dict[str, dict[str, Any]]) -> None:
    assert checks[name]["verdict"] == "works", checks[name]


@pytest.mark.parametrize("name", ["sdpa", "flash", "cudnn", "efficient", "varlen", "flex", "reference"])
def test_attention(name: str, checks: dict[str, dict[str, Any]]) -> None:
    found = checks[f"attention_{name}"]
    assert found["verdict"] == "works", found
    assert max(found["errors"].values()) < 2e-2 and found["speed"]["value"] > 0


@pytest.mark.parametrize("name", ["varlen", "flex", "chunked", "reference"])
def test_windowed_attention(name: str, checks: dict[str, dict[str, Any]]) -> None:
    assert checks[f"attention_{name}_window"]["verdict"] == "works", checks[f"attention_{name}_window"]


def test_scaled_formats_where_the_card_has_them(checks: dict[str, dict[str, Any]]) -> None:
    capability = torch.cuda.get_device_capability()
    for name in ("fp8_tensor", "fp8_row"):
        expected = "works" if capability >= (8, 9) else "unsupported"
        assert checks[name]["verdict"] == expected, checks[name]
    for name in ("mxfp8", "nvfp4"):
        expected = "works" if capability >= (10, 0) else "unsupported"
        assert checks[name]["verdict"] == expected, checks[name]
    for name in ("fp8_tensor", "fp8_row", "mxfp8", "nvfp4"):
        if checks[name]["verdict"] == "works":
            exact = checks[name]["details"]["errors_against_rounded_operands"]
            assert max(exact.values()) < 1e-2
            assert checks[name]["to_bf16"] == pytest.approx(
                checks[name]["speed"]["value"] / checks["bf16"]["speed"]["value"], rel=1e-2
            )


def test_recipes_train_right_and_fp8_on_tensor_cores(checks: dict[str, dict[str, Any]]) -> None:
    capability = torch.cuda.get_device_capability()
    for name, recipe in RECIPES.items():
        if not recipe.quantized:
            continue
        found = checks[f"recipe_{name}"]
        assert found["verdict"] == "works", found
        assert set(found["errors"]) == {"output", "input gradient", "weight gradient"}
        if name in ("fp8-tensorwise", "fp8-delayed"):
            assert found["details"]["native"] == (capability >= (8, 9)), found


def test_rates_are_those_of_a_card(checks: dict[str, dict[str, Any]]) -> None:
    assert checks["bf16"]["speed"]["value"] > 5e12
    assert checks["bf16"]["to_bf16"] == 1.0
    assert checks["copy"]["speed"]["value"] > 1e11
    assert checks["copy"]["details"]["link"]["host_to_device"]["value"] > 1e9
    for check in checks.values():
        if check.get("speed", {}).get("unit") == "FLOP/s":
            # Nothing is faster than 12 times BF16 (NVFP4 is 4 or 8 times). A higher rate would mean that work was
            # skipped.
            assert check["to_bf16"] < 12, check


def test_facts(examination: dict[str, Any]) -> None:
    machine = examination["machine"]
    assert machine["device"] == "cuda" and machine["cuda_error"] == ""
    gpu = machine["gpus"][0]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert 0 < gpu["free_bytes"] <= gpu["total_bytes"]
    assert not any("data sheet's" in m["problem"] for m in examination["fix"]), examination["fix"]
    use = {choice["what"]: choice["value"] for choice in examination["use"]}
    assert use["precision"] == "bf16" and use["step"] == "hand-written kernels" and "attention" in use


def test_quick_look_is_quick() -> None:
    began = time.monotonic()
    found = examine(quick=True)
    seconds = time.monotonic() - began
    assert found["trains"], found["why"]
    assert {c["verdict"] for c in found["checks"]} == {"works"}
    assert seconds < 30, f"{seconds:.0f} s"  # about 12 s if torch is in the disk cache


def test_a_poisoned_card_is_charged_to_the_check_that_did_it() -> None:
    planted = "tests.doctor.planted"
    found = run_all(
        [
            Check("before", "matmul", "before", f"{planted}:fine", {}, "shared"),
            Check("poison", "matmul", "poison", f"{planted}:poison_cuda", {}, "shared"),
            Check(
                "bf16",
                "matmul",
                "bf16",
                "deskside.doctor.check_gemm:plain",
                {"dtype": "bf16", "device": "cuda"},
                "shared",
            ),
        ],
        lambda _: None,
    )
    assert [c["verdict"] for c in found] == ["works", "crashed", "works"], found
    assert "CUDA error" in found[1]["reason"]
