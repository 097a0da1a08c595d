"""Child processes that are right, wrong, refuse, hang or crash: every planted
fault is found and attributed correctly.
"""

from pathlib import Path
from typing import Any

import pytest

from deskside.config.recipes import RECIPES
from deskside.doctor import check_list
from deskside.doctor.check_list import Check, run_all

PLANTED = "tests.doctor.planted"
NUMBERS = (
    "right_product slightly_wrong_product zero_gradient_product zero_gradient_attention windowless_attention "
    "zero_gradient_recipe"
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def planted(function: str, child: str = "", timeout: float = 60.0, **arguments: Any) -> Check:
    name = function + "".join(str(v) for v in arguments.values())
    module = f"{PLANTED}_numbers" if function in NUMBERS.split() else PLANTED
    return Check(name, "matmul", name, f"{module}:{function}", arguments, child, timeout)


def results(*checks: Check) -> dict[str, dict[str, Any]]:
    said: list[str] = []
    found = run_all(checks, said.append)
    assert [r["id"] for r in found] == [c.id for c in checks]
    assert said
    return {r["id"]: r for r in found}


def test_what_is_planted_is_found() -> None:
    found = results(
        planted("right_product", "one"),
        planted("slightly_wrong_product", "one"),
        planted("zero_gradient_product", "one"),
        planted("zero_gradient_attention", "one"),
        planted("windowless_attention", "one"),
        planted("zero_gradient_recipe", "one"),
        planted("refuse", "one"),
        planted("out_of_memory", "one"),
    )
    assert found["right_product"]["verdict"] == "works", found["right_product"]
    assert found["right_product"]["speed"]["value"] > 0

    slightly = found["slightly_wrong_product"]
    assert slightly["verdict"] == "wrong numbers"
    assert "against the rounded operands: output is off by 3.0e-02" in slightly["reason"]

    zero = found["zero_gradient_product"]
    assert zero["verdict"] == "wrong numbers"
    assert "input gradient is all zero" in zero["reason"] and "weight gradient is all zero" in zero["reason"]
    assert "output" not in zero["reason"]

    attention = found["zero_gradient_attention"]
    assert attention["verdict"] == "wrong numbers"
    assert attention["reason"] == "dq is all zero; dk is all zero; dv is all zero"
    assert attention["errors"]["output"] < 1e-5 and attention["errors"]["dq"] == 1.0

    recipe = found["zero_gradient_recipe"]
    assert recipe["verdict"] == "wrong numbers"
    assert "weight gradient is all zero" in recipe["reason"] and "input" not in recipe["reason"]

    window = found["windowless_attention"]
    assert window["verdict"] == "wrong numbers" and "output is off by" in window["reason"]

    assert found["refuse"]["verdict"] == "unsupported"
    assert found["refuse"]["reason"] == "scaled products need compute capability 10.0"
    assert found["out_of_memory"]["verdict"] == "out of memory"


def test_a_hang_is_a_timeout() -> None:
    found = results(planted("hang", timeout=2.0))["hang"]
    assert (found["verdict"], found["reason"]) == ("timeout", "no answer within 2 s")


@pytest.mark.full
def test_a_crash_is_charged_to_the_check_that_crashed() -> None:
    found = results(
        planted("fine", "shared", number=1), planted("crash", "shared"), planted("fine", "shared", number=2)
    )
    assert found["fine1"]["verdict"] == found["fine2"]["verdict"] == "works"
    assert found["fine1"]["details"]["pid"] != found["fine2"]["details"]["pid"]
    assert found["crash"]["verdict"] == "crashed"
    assert found["crash"]["reason"] == "the process was ended by SIGABRT"


def test_checks_that_come_back_share_their_child() -> None:
    found = results(planted("fine", "shared", number=1), planted("fine", "shared", number=2))
    assert found["fine1"]["details"]["pid"] == found["fine2"]["details"]["pid"]


@pytest.mark.full
def test_an_unexpected_error_is_told_in_its_own_words() -> None:
    found = results(planted("odd_error"), planted("poisoned"))
    odd = found["odd_error"]
    assert odd["verdict"] == "unsupported"
    assert odd["reason"] == "LookupError: an error that no library is expected to raise"
    assert found["poisoned"]["verdict"] == "crashed"


def test_what_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = check_list.Library("no_such_module_here", "absent", "pip install absent", (("a", "a", "a", {}),))
    monkeypatch.setattr(check_list, "LIBRARIES", (absent,))
    (check,) = [c for c in check_list.all_checks(FACTS, quick=False) if c.group == "libraries"]
    (found,) = run_all([check], lambda _: None)
    assert (found["verdict"], found["reason"], found["name"]) == (
        "not installed",
        "pip install absent",
        "absent",
    )


def test_installed_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "planted_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('imported')\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check_list.is_installed("planted_package")
    assert check_list.is_installed("planted_package.inner")
    assert not check_list.is_installed("planted_package.cute")
    assert not check_list.is_installed("planted_absent.cute")


FACTS: dict[str, Any] = {
    "device": "cuda",
    "cxx_compiler": None,
    "gpus": [{"compute_capability": "9.0"}],
    "attention_backends": [
        {"name": "cudnn", "full": None, "window": "has no sliding window"},
        {"name": "flex", "full": None, "window": None},
    ],
}


def test_listing_covers_what_the_issue_asks_for() -> None:
    ids = [c.id for c in check_list.all_checks(FACTS, quick=False)]
    assert len(ids) == len(set(ids))
    assert {"bf16", "fp16", "fp32", "fp8_tensor", "fp8_row", "mxfp8", "nvfp4", "copy", "experts_bf16"} <= set(
        ids
    )
    assert {"attention_cudnn", "attention_cudnn_window", "attention_flex", "attention_flex_window"} <= set(
        ids
    )
    assert {"step_fp32", "step_bf16", "fused", "compile"} <= set(ids)
    quantized = {f"recipe_{name}" for name, recipe in RECIPES.items() if recipe.quantized}
    assert {id for id in ids if id.startswith("recipe_")} == quantized
    quick = check_list.all_checks(FACTS, quick=True)
    assert {c.child for c in quick if c.group != "precision"} == {"quick"}, "a quick look takes one child"
    assert {"bf16", "attention", "step_fp32", "step_bf16", "recipe_fp8-delayed"} <= {c.id for c in quick}
    ampere = check_list.all_checks({**FACTS, "gpus": [{"compute_capability": "8.6"}]}, quick=True)
    assert {c.id for c in quick} - {c.id for c in ampere} == {"recipe_fp8-delayed"}, (
        "emulated, so never faster"
    )
    if FACTS["device"] == "cuda":
        assert check_list.essential_checks(FACTS, 40.0) == quick
        assert check_list.essential_checks(FACTS, 20.0) == [c for c in quick if c.group != "precision"]
    least = check_list.essential_checks({**FACTS, "device": "cpu"}, 20.0)
    assert [c.id for c in least] == ["fp32", "attention", "step_fp32"], "go's look at a CPU"


def test_what_a_backend_declares_is_not_run() -> None:
    by_id = {c.id: c for c in check_list.all_checks(FACTS, quick=False)}
    declared = by_id["attention_cudnn_window"].precomputed_result
    assert declared == {"verdict": "unsupported", "reason": "has no sliding window", "declared": True}
    assert by_id["attention_cudnn"].precomputed_result is None


def test_compile_on_a_cpu_without_a_compiler_says_so() -> None:
    facts = {**FACTS, "device": "cpu"}
    (check,) = [c for c in check_list.all_checks(facts, quick=False) if c.id == "compile"]
    assert check.precomputed_result is not None and "no C++ compiler" in check.precomputed_result["reason"]
    facts["cxx_compiler"] = "/usr/bin/g++"
    (check,) = [c for c in check_list.all_checks(facts, quick=False) if c.id == "compile"]
    assert check.precomputed_result is None
