"""Whether a setting's passes are replayed as CUDA graphs, and what that does to its memory and speed."""

from dataclasses import replace

import pytest

from deskside.config import merge, presets
from deskside.plan.estimate import StepEstimate, estimate
from deskside.plan.setting import Setting, StageSetting, setting_from_config
from tests.plan.made import GIB, calibration


def setting(graphs: str, micro_tokens: int = 2048, precision: str = "bf16") -> Setting:
    batch = {"sequence_length": 512, "tokens": 16 * micro_tokens, "micro_tokens": micro_tokens}
    config = merge.build([*presets.layers("124m"), {"batch": batch, "compute": {"cuda_graph": graphs}}])
    return setting_from_config(config, 1, precision, native=frozenset({"fp8"}))  # type: ignore[arg-type]


def estimated(asked: Setting, capacity: float = 24 * GIB) -> StepEstimate:
    return estimate(asked, calibration(790.0, 4.8e12), int(capacity))


def numbers(found: StepEstimate) -> tuple[int, dict[str, float], bool]:
    return found.memory.allocated, found.step, found.replays


def test_runs_decide_by_themselves_by_default() -> None:
    assert merge.build([presets.layers("124m")[0]]).compute.cuda_graph == "auto"


@pytest.mark.parametrize("precision", ["bf16", "fp8-delayed"])
def test_a_step_that_the_host_limits_is_replayed(precision: str) -> None:
    auto, on, off = (numbers(estimated(setting(mode, 2048, precision))) for mode in ("auto", "on", "off"))
    assert auto == on and on[2] and not off[2]
    assert on[0] > off[0] and sum(on[1].values()) < 0.5 * sum(off[1].values())


def test_a_step_that_the_card_limits_is_not_replayed() -> None:
    auto, off = (numbers(estimated(setting(mode, 65536))) for mode in ("auto", "off"))
    assert auto == off


def test_what_cannot_be_captured_is_not_replayed() -> None:
    assert not estimated(replace(setting("auto"), weights="bfloat16")).replays


def test_without_room_for_a_captured_pass_a_run_launches_its_kernels() -> None:
    """The room that both need differs; between the two, `auto` equals `off`, and never needs more than there is."""
    on, off = (estimated(setting(mode)).memory_bytes[2] for mode in ("on", "off"))
    short = estimated(setting("auto"), (on + off) / 2)
    assert short.fits == "fits" and numbers(short) == numbers(estimated(setting("off")))
    assert estimated(setting("auto"), on + 1).replays


def test_the_longest_stage_decides_for_all() -> None:
    long, short = StageSetting(0.6, 512, 131072, None), StageSetting(0.4, 512, 131072, None)
    several = replace(setting("auto", 65536), stages=(long, short))
    assert not estimated(several).replays
    assert estimated(replace(several, micro_tokens=2048)).replays
