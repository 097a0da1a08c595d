"""The cached choice of an attention backend is reused, and a longer run adds
the candidates that became worth trying.
"""

import importlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels.attention import BACKENDS, AttentionContext
from deskside.kernels.attention.cached_choice import choose_cached
from deskside.kernels.attention.choose import Use, choose, considered_backends, flops
from deskside.kernels.attention.context import register
from deskside.utils.errors import RunError
from deskside.utils.trials import TrialCache
from tests.kernels.test_attention import need

START_SECONDS = {"quick": 0.0, "compiled": 10.0, "slower to compile": 11.0}
PASS_SECONDS = {"quick": 0.02, "compiled": 0.01, "slower to compile": 0.005}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count calls of two correct backends on a fake clock. "compiled" is twice as fast but takes long to start."""
    counted: Counter[str] = Counter()
    now = 0.0

    def taking(name: str) -> Any:
        def function(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
            nonlocal now
            now += PASS_SECONDS[name]
            counted[name] += 1
            return BACKENDS["reference"].function(q, k, v, context)

        return function

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for name, seconds in START_SECONDS.items():
        register(replace(BACKENDS["reference"], name=name, function=taking(name), start_seconds=seconds))
    yield counted
    for name in START_SECONDS:
        del BACKENDS[name]


NAMES = ("quick", "compiled")
SHORT, LONG = Use(400, 1e18), Use(600, 1e18)  # 0.02 s each: 8 and 12 s, against 10 s


def test_a_choice_is_measured_once(calls: Counter[str], tmp_path: Path) -> None:
    cache = TrialCache(tmp_path)
    choice, source = choose_cached(need(), cache, NAMES)
    assert (choice.name, source) == ("compiled", "measured") and choice.not_tried == {}
    before = Counter(calls)
    again, source = choose_cached(need(), TrialCache(tmp_path), NAMES, SHORT)
    assert (again, source) == (choice, "cached") and calls == before
    (kept,) = cache.trials()
    assert kept.seconds == pytest.approx(sum(PASS_SECONDS[name] * calls[name] for name in NAMES))
    for other in (need(tokens=32), need(window=4), need(documents=True)):
        assert choose_cached(other, cache, NAMES)[1] == "measured"
    assert choose_cached(need(), cache, NAMES[:1])[1] == "measured"


def test_a_choice_with_deterministic_kernels_is_another_one(calls: Counter[str], tmp_path: Path) -> None:
    cache = TrialCache(tmp_path)
    assert choose_cached(need(), cache, NAMES)[1] == "measured"
    torch.use_deterministic_algorithms(True)
    try:
        found = [choose_cached(need(), cache, NAMES)[1] for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == ["measured", "cached"]


def test_a_candidate_that_cannot_pay_for_its_start_is_tried_by_a_longer_run(
    calls: Counter[str], tmp_path: Path
) -> None:
    cache = TrialCache(tmp_path)
    choice, source = choose_cached(need(), cache, NAMES, SHORT)
    assert (choice.name, source, calls["compiled"]) == ("quick", "measured", 0)
    assert set(choice.not_tried) == {"compiled"} and set(choice.seconds) == {"quick"}
    assert choose_cached(need(), cache, NAMES, SHORT) == (choice, "cached")
    quick = calls["quick"]
    longer, source = choose_cached(need(), cache, NAMES, LONG)
    assert (longer.name, source, calls["quick"]) == ("compiled", "measured", quick)
    assert longer.not_tried == {}
    assert longer.seconds == pytest.approx({name: PASS_SECONDS[name] for name in NAMES})
    assert choose_cached(need(), cache, NAMES, SHORT) == (longer, "cached")


def test_what_is_still_left_out_is_not_forgotten(calls: Counter[str], tmp_path: Path) -> None:
    """Each run is slightly longer than the one before."""
    cache, found = TrialCache(tmp_path), []
    for use in (SHORT, Use(520, 1e18), Use(2000, 1e18)):
        choice, source = choose_cached(need(), cache, tuple(START_SECONDS), use)
        assert source == "measured"
        found.append((choice.name, set(choice.not_tried)))
    assert found == [
        ("quick", {"compiled", "slower to compile"}),
        ("compiled", {"slower to compile"}),
        ("slower to compile", set()),
    ]
    assert choose_cached(need(), cache, tuple(START_SECONDS), SHORT)[1] == "cached"


def test_a_candidate_that_ran_out_of_memory_is_tried_again(
    calls: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs may have used the memory, so the cached choice must not exclude the candidate for ever."""
    fast = BACKENDS["compiled"]

    def full(*given: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setitem(BACKENDS, "compiled", replace(fast, function=full))
        choice, _ = choose_cached(need(), TrialCache(tmp_path), NAMES)
        assert choice.name == "quick" and set(choice.not_tried) == {"compiled"} and not choice.rejected
        with pytest.raises(RunError, match="out of memory"):
            choose(need(), ["compiled"])
    assert choose_cached(need(), TrialCache(tmp_path), NAMES)[0].name == "compiled"


def test_what_no_kernel_can_compute_faster_is_not_hoped_for() -> None:
    problem = need()
    use = Use(1000, flops(problem) / 0.02)
    assert use.saved_seconds(problem, 0.02) == use.saved_seconds(problem, 0.01) == 0.0
    assert use.saved_seconds(problem, 0.03) == pytest.approx(10.0)
    assert use.saved_seconds(need(documents=True), 0.02) == pytest.approx(20.0)


def test_a_trial_that_has_taken_long_starts_no_further_candidate(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("deskside.kernels.attention.choose"), "TRIAL_SECONDS", 0.05)
    choice = choose(need(), NAMES)
    assert choice.name == "quick" and set(choice.not_tried) == {"compiled"} and calls["compiled"] == 0


def test_what_starts_slowly_is_tried_after_the_rest(calls: Counter[str]) -> None:
    names = considered_backends(need(window=4))
    assert names.index("compiled") > names.index("quick") and names[-1] == "reference"
    assert names.index("fa4") > names.index("sdpa")
