"""The advice derived from facts and results: each rule is tested on a machine with the defect and on one without."""

from typing import Any

import pytest

from deskside.doctor import advice
from tests.doctor import samples

BROKEN = {"verdict": "wrong numbers", "reason": "gradient of embed.weight is all zero"}
CUDA_GONE: dict[str, Any] = {"device": "cpu", "gpus": [], "cuda_error": "no CUDA-capable device is detected"}


def found_problems(facts: dict[str, Any] | None = None, **changes: dict[str, Any]) -> list[dict[str, str]]:
    results = samples.results(**changes)
    advice.add_bf16_ratios(results)
    return advice.find_problems(facts or samples.facts(), results)


def problems(facts: dict[str, Any] | None = None, **changes: dict[str, Any]) -> str:
    return "\n".join(
        f"{m['severity']}: {m['problem']} -> {m['remedy']}" for m in found_problems(facts, **changes)
    )


def chosen(facts: dict[str, Any] | None = None, **changes: dict[str, Any]) -> dict[str, dict[str, str]]:
    results = samples.results(**changes)
    advice.add_bf16_ratios(results)
    return {
        choice["what"]: choice for choice in advice.recommend(facts or samples.facts(), results, quick=False)
    }


def test_ratios_are_to_the_bf16_matmul() -> None:
    results = samples.results()
    advice.add_bf16_ratios(results)
    by_id = advice.by_id(results)
    assert by_id["bf16"]["to_bf16"] == 1
    assert by_id["mxfp8"]["to_bf16"] == pytest.approx(640 / 205, rel=1e-2)
    assert by_id["copy"]["to_bf16"] is None and by_id["compile"]["to_bf16"] is None
    assert by_id["fp8_row"]["to_bf16"] is None


def test_use() -> None:
    use = chosen()
    assert use["precision"]["value"] == "bf16" and use["precision"]["option"] == "--precision.name bf16"
    assert "2.5 times" in use["precision"]["why"]
    assert use["attention"]["value"] == "cudnn", (
        "the fastest with grouped heads, not `efficient` without them"
    )
    assert use["attention, window"]["value"] == "flex"
    step = use["step"]
    assert (step["value"], step["option"]) == ("hand-written kernels", "--compute.compile auto")
    assert "hand-written 2.10 (first step 4 s), torch.compile 1.63 (first step 21 s)" in step["why"]
    low = use["low precision"]
    assert low["value"] == "fp8-delayed" and low["option"] == "--precision.name fp8-delayed"
    assert "torch MXFP8 3.12 x BF16, torch FP8 tensor 1.94 x BF16" in low["why"]
    assert "NVFP4" not in low["why"], "wrong numbers are never advised"
    assert "emulated, right numbers and no faster than BF16: fp8-rowwise, nvfp4" in low["why"]


def test_use_where_no_recipe_is_native() -> None:
    emulated = {"details": {"native": False, "emulated_because": "compute capability 8.6 has no FP8"}}
    low = chosen(**{"recipe_fp8-delayed": emulated})["low precision"]
    assert low["value"] == "none native" and low["option"] == ""
    assert "own kernels" not in low["why"] and "products alone" not in low["why"]
    zero = {"verdict": "wrong numbers", "reason": "input gradient is all zero"}
    low = chosen(**{"recipe_fp8-delayed": zero})["low precision"]
    assert "fp8-delayed" not in low["value"] + low["why"] + low["option"]


def test_use_without_bf16_or_a_compiler() -> None:
    use = chosen(step_bf16=BROKEN)
    assert use["precision"]["value"] == "fp32" and "bf16: wrong numbers" in use["precision"]["why"]
    failed = {"verdict": "unsupported", "reason": "Failed to find C compiler"}
    step = chosen(compile=failed, fused=failed)["step"]
    assert (step["value"], step["option"]) == ("eager", "--compute.compile off")
    assert "torch.compile: unsupported, Failed to find C compiler" in step["why"]


def test_a_step_whose_kernels_are_wrong_is_compiled_unless_that_is_slower() -> None:
    wrong = {"verdict": "wrong numbers", "reason": "gradients is off by 1.0e+00, allowed 8e-02"}
    step = chosen(fused=wrong)["step"]
    assert (step["value"], step["option"]) == ("torch.compile", "--compute.compile block")
    assert "hand-written: wrong numbers, gradients is off" in step["why"]
    slower = {"details": {"compile_seconds": 9.0, "times_eager": 0.8}}
    assert chosen(fused=wrong, compile=slower)["step"]["option"] == "--compute.compile off"
    assert "hand-written kernels: wrong numbers: gradients is off" in problems(fused=wrong)
    assert "-> train with --compute.compile block" in problems(fused=wrong)
    assert "-> train with --compute.compile off" in problems(fused=wrong, compile=wrong)


def test_a_cpu_does_not_compile() -> None:
    step = chosen(samples.facts(device="cpu", gpus=[]))["step"]
    assert (step["value"], step["option"]) == ("eager", "--compute.compile auto")
    assert step["why"].startswith("training does not compile on a CPU unless told to")


def test_wrong_attention_is_not_advised() -> None:
    use = chosen(attention_cudnn={"verdict": "wrong numbers", "reason": "dq is all zero"})
    assert use["attention"]["value"] == "sdpa"


def test_nothing_is_advised_where_training_cannot_work() -> None:
    facts, results = samples.facts(), samples.results(step_fp32=BROKEN, step_bf16=BROKEN)
    assert not advice.can_train(results)
    assert advice.recommend(facts, results, quick=False) == []
    first = advice.find_problems(facts, results)[0]
    assert first["severity"] == "stops training" and "all zero" in first["problem"]
    assert advice.can_train(samples.results(step_bf16=BROKEN)), "FP32 alone is enough"
    full = {"verdict": "out of memory", "reason": "CUDA out of memory"}
    first = found_problems(step_fp32=full, step_bf16=full)[0]
    assert first["severity"] == "stops training" and "free memory" in first["remedy"]


def test_a_good_machine_has_only_what_was_planted() -> None:
    found = found_problems(
        nvfp4={"verdict": "works", "reason": ""}, te_nvfp4={"verdict": "works", "reason": ""}
    )
    assert found == []


def test_what_is_wrong_comes_before_what_is_slow() -> None:
    facts = samples.facts(shm={"path": "/dev/shm", "total_gib": 0.06, "free_gib": 0.06}, c_compiler=None)
    found = found_problems(facts)
    order = [advice.MOST_SEVERE_FIRST.index(m["severity"]) for m in found]  # type: ignore[arg-type]
    assert order == sorted(order)
    assert found[0]["severity"] == "wrong numbers" and "NVFP4" in found[0]["problem"]
    text = problems(facts)
    assert "note: /dev/shm is 61 MiB" in text and "--shm-size" in text
    assert "may fail: no C compiler" in text and "build-essential" in text
    assert "note: transformer-engine NVFP4: crashed" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shm": None}, "note: /dev/shm is missing"),
        ({"shm": None, "gpus": 2 * samples.FACTS["gpus"]}, "may fail: /dev/shm is missing"),
        ({"disk_free_gib": 3.0}, "may fail: 3.0 GiB of disk"),
        ({"temporary": {"path": "/tmp", "total_gib": 1.0, "free_gib": 0.5}}, "may fail: /tmp has 0.5 GiB"),
        ({"memory_available_gib": 2.0}, "may fail: 2.0 GiB of host memory"),
        ({"memory_limit_gib": 4.0}, "may fail: 4.0 GiB of host memory"),
        ({"triton": None}, "stops training: Triton is missing"),
        ({"python_headers": False}, "may fail: Python.h is missing"),
        ({"cudnn": 90100}, "slow: cuDNN 9.1.0 is loaded instead of the 9.19.0.56"),
        ({"cards": 2, "visible_devices": "0"}, "note: torch sees 1 of 2 GPUs (CUDA_VISIBLE_DEVICES=0)"),
        (
            {"architectures": ["sm_80", "sm_90a"]},
            "stops training: NVIDIA GeForce RTX 5090 has compute capability 12.0",
        ),
        (CUDA_GONE, "slow: 1 GPU(s) idle, torch says: no CUDA-capable device"),
        (
            {**CUDA_GONE, "driver_cuda": "12.4"},
            "update the driver: 580.95.05 runs CUDA 12.4, torch needs 13.0",
        ),
        ({**CUDA_GONE, "cuda": None}, "this torch is built for CPUs"),
    ],
)
def test_defects_of_the_machine(changes: dict[str, Any], expected: str) -> None:
    assert expected in problems(samples.facts(**changes))
    assert expected not in problems()


def test_code_for_older_chips_of_the_family_runs() -> None:
    for built in (["sm_75", "sm_120"], ["sm_80", "compute_90"]):
        assert "compute capability" not in problems(samples.facts(architectures=built))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"used_bytes": 9 * samples.GIB},
            "may fail: GPU 0: 9.0 of 31.8 GiB are taken by others -> end what uses",
        ),
        (
            {"used_bytes": 9 * samples.GIB, "processes": [{"pid": 7, "name": "python", "bytes": 1}]},
            "end python (7)",
        ),
        (
            {"power": {"limit_watts": 400.0, "default_watts": 575.0}},
            "slow: GPU 0: the power limit is 400 W, its default 575 W",
        ),
        (
            {
                "data_sheet": {
                    "name": "x",
                    "bf16_flops": 900e12,
                    "bandwidth": 1e12,
                    "watts": 1.0,
                    "source": "published",
                }
            },
            "reaches 205 TFLOP/s (measured) of the data sheet's 900 (published)",
        ),
    ],
)
def test_defects_of_a_card(changes: dict[str, Any], expected: str) -> None:
    facts = samples.facts()
    facts["gpus"][0] |= changes
    assert expected in problems(facts)
    assert expected not in problems()


def test_the_link_counts_under_load_only() -> None:
    assert "PCIe" not in problems(), "an idle card shows generation 1"
    link = advice.by_id(samples.results())["copy"]["details"]["link"]
    narrow = link | {"generation": 3, "lanes": 4}
    assert "note: GPU 0: PCIe 3 x4 under load, of 5 x16" in problems(copy={"details": {"link": narrow}})


def test_heat() -> None:
    assert "89 degrees" in problems(bf16={"details": {"watts": 500.0, "celsius": 89, "throttled": True}})


def test_unknown_facts_of_a_card_are_no_defects() -> None:
    facts = samples.facts()
    facts["gpus"][0] |= {
        "power": {"limit_watts": None, "default_watts": None},
        "pcie": {"generation": None},
        "used_bytes": None,
        "total_bytes": None,
        "data_sheet": None,
    }
    found = problems(facts, copy={"details": {"link": {}}})
    assert "GPU 0" not in found


def test_power_names_its_publication() -> None:
    power = advice.power(samples.facts())
    assert power is not None and power["limit_watts"] == 575
    first = power["lower_limits"][0]
    assert first["source"] == "published" and first["publication"]
    assert all(0 < p["speed_share"] <= 1 and 0 < p["power_share"] < 1 for p in power["lower_limits"])
    facts = samples.facts()
    facts["gpus"][0]["name"] = "NVIDIA Unheard-of 1"
    unknown = advice.power(facts)
    assert unknown is not None and unknown["lower_limits"] == [] and "no measurements" in unknown["reason"]
    assert advice.power(samples.facts(gpus=[])) is None
