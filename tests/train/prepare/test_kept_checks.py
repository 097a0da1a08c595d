"""Later runs do not repeat self-checks that passed, but they repeat failed checks and those that chose emulation."""

from pathlib import Path

import pytest
import torch

from deskside.precision.selfcheck import CheckResult
from deskside.train.parallel import World
from deskside.train.prepare import kept_checks, setup
from deskside.train.prepare.kept_checks import kept_check
from deskside.utils.trials import TrialCache
from tests.train import tiny_run
from tests.train.prepare.test_check_step import model


@pytest.mark.parametrize(
    ("result", "checks"),
    [
        (CheckResult(True, {"output": 2e-3}, ""), 1),
        (CheckResult(True, {"output": 2e-3}, "", native=False), 1),
        (CheckResult(True, {"output": 2e-3}, "emulated: cannot run here"), 2),
        (CheckResult(False, {"output": 0.5}, "output is off"), 2),
    ],
)
def test_only_what_passed_is_kept(result: CheckResult, checks: int, tmp_path: Path) -> None:
    calls = []

    def check() -> CheckResult:
        calls.append(1)
        return result

    for _ in range(2):
        assert kept_check(TrialCache(tmp_path), {"recipe": "fp8"}, check) == result
    assert len(calls) == checks
    kept_check(TrialCache(tmp_path), {"recipe": "bf16"}, check)
    assert len(calls) == checks + 1
    torch.use_deterministic_algorithms(True)
    try:
        kept_check(TrialCache(tmp_path), {"recipe": "bf16"}, check)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(calls) == checks + 2


def test_a_second_run_does_not_check_its_recipe_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(
        "nowhere", model={"vocab_size": 304}, precision={"name": "fp8-delayed", "head": "fp8"}
    )
    cpu, said = torch.device("cpu"), []
    first = setup.choose_recipe(config, cpu, said.append, cache=TrialCache(tmp_path))

    def repeated(*given: object, **named: object) -> None:
        raise AssertionError("it has passed already")

    for name in ("check", "check_head"):
        monkeypatch.setattr(setup, name, repeated)
    assert setup.choose_recipe(config, cpu, said.append, cache=TrialCache(tmp_path)) == first
    with pytest.raises(AssertionError):
        setup.choose_recipe(config, cpu, said.append)


def test_autograds_thread_has_a_context_without_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-checks and trials create it, but cached ones do not run, and rank 1 only ever gets a cached choice."""
    cpu, prepared = torch.device("cpu"), list[torch.device]()
    monkeypatch.setattr(setup, "create_cuda_context_for_autograd", prepared.append)
    config, world = tiny_run.config("nowhere", model={"vocab_size": 304}), World(cpu)
    setup.prepare_execution(config, setup.build_model(config, world, "fp32"), world, "fp32")
    assert prepared == [cpu]


def test_the_fused_block_is_checked_on_every_card_and_for_every_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks share the cache, in which the machine is identified by its first GPU."""
    checked: list[str] = []

    def check_block(made: object) -> CheckResult:
        checked.append(torch.cuda.get_device_name())
        return CheckResult(True, {"output": 2e-3}, "")

    monkeypatch.setattr(kept_checks, "check_block", check_block)
    for made in (model(), model().bfloat16()):
        for card in ("first", "second", "first"):
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None, card=card: card)
            kept_checks.check_block_once(made, torch.device("cuda"), TrialCache(tmp_path))
    assert checked == ["first", "second"] * 2
