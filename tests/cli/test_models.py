"""`deskside models`: every family is listed with what the planner says for a GPU."""

import json

import pytest

from deskside.cli.main import main
from deskside.weights.hf_families import FAMILIES
from deskside.weights.published import published_checkpoints


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, list[dict[str, object]]]:
    assert main(["models", "--json", *options]) == 0
    result: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return result


def test_all_families_and_checkpoints_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    result = listed(capsys)
    assert [family["model_type"] for family in result["families"]] == list(FAMILIES)
    assert [row["name"] for row in result["checkpoints"]] == [c.name for c in published_checkpoints()]
    assert all("needs" not in row for row in result["checkpoints"])


def test_a_name_chooses_families_and_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    result = listed(capsys, "SmolLM")
    assert {family["model_type"] for family in result["families"]} == {"llama", "smollm3"}
    assert {str(row["name"]).split("/")[1][:6] for row in result["checkpoints"]} == {"SmolLM"}
    assert main(["models", "nothing-of-this-name"]) == 2


def test_what_fine_tuning_needs(capsys: pytest.CaptureFixture[str]) -> None:
    (small,) = listed(capsys, "Qwen2.5-0.5B", "--gpu", "rtx4090")["checkpoints"]
    (large,) = listed(capsys, "Mixtral-8x7B", "--gpu", "rtx4090")["checkpoints"]
    (shared,) = listed(capsys, "Qwen1.5-MoE", "--gpu", "rtx4090")["checkpoints"]
    needs = small["needs"]
    assert isinstance(needs, dict) and {need["answer"] for need in needs.values()} == {"yes"}
    # Weights, gradients and two moments in float32 are 16 bytes per parameter; frozen weights in BF16 are 2.
    parameters = small["parameters"]
    assert isinstance(parameters, int)
    assert needs["full"]["memory_bytes"] > 16 * parameters
    assert 2 * parameters < needs["lora"]["memory_bytes"] < needs["full"]["memory_bytes"]
    assert needs["qlora"]["memory_bytes"] < needs["lora"]["memory_bytes"]
    for need in large["needs"].values():  # type: ignore[attr-defined]
        assert need["answer"] == "no" and need["memory_bytes"] > 24 * 2**30 and need["reasons"]
    answers = {method: need["answer"] for method, need in shared["needs"].items()}  # type: ignore[attr-defined]
    assert answers == {"full": "no", "lora": "unsupported", "qlora": "unsupported"}


def test_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for name, argv in (("", ["models"]), ("phi", ["models", "phi", "--gpu", "rtx4090"])):
        assert main(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        shown = [c for c in published_checkpoints() if name in c.family.model_type]
        assert sum(line.startswith("  ") and "/" in line for line in lines) == len(shown)


def test_an_unknown_card_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--gpu", "abacus"]) == 2
    assert main(["models", "--gpu", "rtx4090", "--here"]) == 2
