"""Verdicts on synthetic studies with known effects, and independent arithmetic."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, ttest_1samp

from deskside.facts.claims import Claim, claims
from deskside.study.claims import formulas
from deskside.study.claims.claim_results import arms_of, judge, number_text
from deskside.study.claims.verdicts import (
    MIN_SHARE,
    Answer,
    Change,
    accepted,
    verdict_of_change,
    verdict_of_value,
)
from deskside.study.metrics import BY_KEY
from deskside.study.results import Arm, ClaimResult, Factor, Group, Results, Trial
from deskside.study.spec import parse_spec
from deskside.study.spec.expand import expand
from deskside.study.stats.compare import compare
from deskside.utils.errors import UsageError

H200 = {"device": "cuda", "gpu": {"name": "NVIDIA H200", "compute_capability": "9.0"}}
RTX5090 = {"device": "cuda", "gpu": {"name": "NVIDIA GeForce RTX 5090", "compute_capability": "12.0"}}
CPU = {"device": "cpu"}


def claim(**changes: Any) -> Claim:
    plain: dict[str, Any] = {
        "id": "c",
        "text": "B is faster",
        "source": "A Book, Chapter",
        "kind": "measured",
        "quantity": "tokens_per_second",
        "direction": "higher",
        "claimed_on": "RTX 5090",
        "size": (0.10, 0.10),
        "group": "g",
        "arm": {"kind": "b"},
        "against": {"kind": "a"},
    }
    return Claim(**{**plain, **changes})


def study(
    effects: dict[str, float],
    seeds: int = 3,
    noise: float = 0.002,
    machine: dict[str, Any] = H200,
    quantity: str = "tokens_per_second",
    baseline: str = "a",
    **arm: Any,
) -> Results:
    """Return a study with arm a and others that have exp(effect) times its
    quantity, with noise and an effect of each seed.
    """
    draw = random.Random(3)
    shared = [draw.gauss(0, 0.05) for _ in range(seeds)]
    arms = []
    for name, effect in {"a": 0.0, **effects}.items():
        trials = [
            Trial(
                seed + 1,
                "finished",
                metrics={
                    quantity: 100 * math.exp(effect + shared[seed] + draw.gauss(0, noise)),
                    "parameters": 124e6,
                    "micro_tokens": 4096.0,
                },
            )
            for seed in range(seeds)
        ]
        options = arm if name == "b" else {}
        arms.append(Arm(f"g-{name}", name, "g", {"kind": name}, f"g-{baseline}", trials=trials, **options))
    group = Group("g", "", "124m", "full", "16M tokens", [Factor("kind", "kind", ["a", *effects])], [])
    return Results("s", "", "", "", list(range(1, seeds + 1)), 0.85, machine, [group], arms)


def judged(results: Results, one: Claim) -> ClaimResult:
    [found] = judge(results, known=[one]).claims
    return found


# The rules


@pytest.mark.parametrize(
    ("effect", "claimed", "verdict"),
    [
        (0.10, {}, "holds"),
        (0.06, {}, "holds"),  # slightly more than half of it: within the tolerance
        (0.02, {}, "holds in direction"),
        (0.50, {}, "holds in direction"),
        (0.02, {"size": (1.0, 1.0)}, "contradicted"),  # significant, but a thirtieth of what was claimed
        (0.003, {"size": None}, "holds"),
        (-0.10, {}, "contradicted"),
        (0.0, {}, "contradicted"),  # an effect of half the claimed size would have been detected
        (0.0, {"size": None}, "not shown"),
        (0.05, {"size": None}, "holds"),
        (-0.05, {"size": None}, "contradicted"),
        (-0.30, {"direction": "lower", "size": (-0.40, -0.20)}, "holds"),
        (-0.05, {"direction": "lower", "size": (-0.40, -0.20)}, "holds in direction"),
        (0.05, {"direction": "lower", "size": (-0.40, -0.20)}, "contradicted"),
        (0.0, {"direction": "none", "size": None, "tolerance": 0.03}, "holds"),
        (0.10, {"direction": "none", "size": None, "tolerance": 0.03}, "contradicted"),
        (-0.10, {"direction": "none", "size": None, "tolerance": 0.03}, "contradicted"),
        (0.03, {"direction": "none", "size": None, "tolerance": 0.03}, "not shown"),
    ],
)
def test_a_known_effect_gets_its_verdict(effect: float, claimed: dict[str, Any], verdict: str) -> None:
    assert judged(study({"b": effect}), claim(**claimed)).verdict == verdict


def test_too_few_seeds_and_too_much_noise_show_nothing() -> None:
    one = judged(study({"b": 0.1}, seeds=1), claim())
    assert one.verdict == "not shown" and one.low is None and "too few" in one.explanation
    assert one.measured == pytest.approx(10.5, abs=1)
    noisy = judged(study({"b": 0.1}, noise=0.3), claim())
    assert noisy.verdict == "not shown" and noisy.low is not None and noisy.low < 0


def test_no_effect_where_a_large_one_is_claimed_contradicts_it() -> None:
    found = judged(study({"b": 0.0}), claim(size=(6.0, 6.0), show="times"))
    assert found.verdict == "contradicted" and "not the claimed one" in found.explanation
    wide = judged(study({"b": 0.0}, noise=0.3), claim())
    assert wide.verdict == "not shown" and "claimed one" not in wide.explanation


@pytest.mark.parametrize("show", ["percent", "times"])
def test_the_measured_change_is_the_comparisons(show: Any) -> None:
    """They are the numbers that compare.py gives the report, in the claim's unit."""
    results = compare(study({"b": 0.1}))
    [there] = [c for c in results.arms[1].comparisons if c.metric == "tokens_per_second"]
    found = judged(results, claim(show=show))
    scale, shift = (1, 1) if show == "times" else (100, 0)
    assert there.relative_low is not None and there.relative_high is not None
    expected = [there.relative, there.relative_low, there.relative_high]
    assert [found.measured, found.low, found.high] == pytest.approx([scale * e + shift for e in expected])
    assert (found.n, found.unit) == (3, "times" if show == "times" else "%")
    assert found.scale == "124m (124M parameters), 16M tokens, NVIDIA H200"


def test_either_side_may_be_the_studys_baseline_or_neither() -> None:
    for baseline in "abc":
        results = study({"b": 0.1, "c": -0.2}, baseline=baseline)
        assert judged(results, claim()).verdict == "holds"
        other = claim(arm={"kind": "a"}, against={"kind": "b"}, direction="lower", size=(-0.1, -0.1))
        assert judged(results, other).verdict == "holds"
        third = judged(results, claim(arm={"kind": "b"}, against={"kind": "c"}, size=None))
        assert third.measured == pytest.approx(100 * math.expm1(0.3), abs=1)


@given(
    size=st.floats(0.01, 5),
    tolerance=st.floats(0, 0.9),
    share=st.floats(-2, 3),
    width=st.floats(1e-6, 2),
)
def test_verdicts_follow_the_interval_and_mirror(
    size: float, tolerance: float, share: float, width: float
) -> None:
    """A gain judged against b, and the same numbers judged as a loss against a, get the same verdict."""
    effect = math.log1p(size)
    change = Change(share * effect, (share - width) * effect, (share + width) * effect, 3)
    up = claim(size=(size, size), tolerance=tolerance)
    loss = math.expm1(-effect)
    down = claim(size=(loss, loss), tolerance=tolerance, direction="lower")
    assert change.low is not None and change.high is not None
    mirrored = Change(-change.log, -change.high, -change.low, 3)
    verdict = verdict_of_change(up, change)
    near = min(
        abs(edge - end)
        for edge in (0, MIN_SHARE * effect, *accepted(up), *(-a for a in accepted(down)))
        for end in (change.low, change.high)
    )
    if near > 1e-9:
        assert verdict_of_change(down, mirrored) == verdict
    if change.low <= 0 <= change.high:
        # The tolerance is a share of the claimed effect, so this is the accepted range in other words.
        if not (near > 1e-9):
            return
        assert verdict == ("not shown" if share + width > 1 - tolerance else "contradicted")
    elif change.high < 0:
        assert verdict == "contradicted"
    elif share + width > MIN_SHARE or near <= 1e-9:
        assert verdict in ("holds", "holds in direction")
        if share - width <= 1 <= share + width:
            assert verdict == "holds"
    else:
        assert verdict == (
            "holds" if tolerance > 1 - MIN_SHARE and share + width >= 1 - tolerance else "contradicted"
        )


@given(factor=st.floats(1e-6, 1e6), effect=st.sampled_from([-0.3, 0.0, 0.02, 0.1, 0.4]))
def test_the_unit_of_what_is_measured_changes_nothing(factor: float, effect: float) -> None:
    results = study({"b": effect})
    scaled = replace(
        results,
        arms=[
            replace(
                arm,
                trials=[
                    replace(t, metrics={**t.metrics, "tokens_per_second": factor * t.metrics["tokens_per_second"]})
                    for t in arm.trials
                ],
            )
            for arm in results.arms
        ],
    )  # fmt: skip
    first, second = judged(results, claim()), judged(scaled, claim())
    assert first.verdict == second.verdict
    assert first.measured == pytest.approx(second.measured, abs=1e-6)


# Hardware, and what cannot be compared


@pytest.mark.parametrize(
    ("needs", "machine", "lacks"),
    [
        (("fp4",), H200, "tensor cores with FP4"),
        (("fp4",), RTX5090, ""),
        (("fp8",), H200, ""),
        (("fp8",), CPU, "tensor cores with FP8"),
        (("fp8",), {"device": "cuda", "gpu": {"name": "RTX 3090", "compute_capability": "8.6"}}, "FP8"),
        (("gpu",), CPU, "a GPU"),
        (("gpu",), H200, ""),
        (("RTX 5090",), H200, "an RTX 5090; this was NVIDIA H200"),
        (("RTX 5090",), RTX5090, ""),
        ((), CPU, ""),
    ],
)
def test_what_a_machine_lacks_decides_before_its_numbers(
    needs: tuple[str, ...], machine: dict[str, Any], lacks: str
) -> None:
    found = judged(study({"b": -0.5}, machine=machine), claim(needs=needs))
    if lacks:
        assert found.verdict == "needs other hardware" and lacks in found.explanation
        assert found.measured is None
    else:
        assert found.verdict == "contradicted"


@pytest.mark.parametrize("quantity", ["tokens_per_second", "mfu", "watts", "joules_per_token"])
def test_emulation_never_contradicts_a_speed(quantity: str) -> None:
    found = judged(study({"b": -0.5}, quantity=quantity, emulated=True), claim(quantity=quantity))
    assert found.verdict == "needs other hardware" and "emulated" in found.explanation


@pytest.mark.parametrize("quantity", ["val_loss", "perplexity", "peak_memory_gib"])
def test_emulated_numbers_speak_of_loss_and_memory(quantity: str) -> None:
    found = judged(study({"b": -0.5}, quantity=quantity, emulated=True), claim(quantity=quantity))
    assert found.verdict == "contradicted"


def test_memory_of_different_micro_batches_is_not_compared() -> None:
    results = study({"b": -0.5}, quantity="peak_memory_gib")
    other = [replace(t, metrics={**t.metrics, "micro_tokens": 2048.0}) for t in results.arms[1].trials]
    results = replace(results, arms=[results.arms[0], replace(results.arms[1], trials=other)])
    found = judged(results, claim(quantity="peak_memory_gib", direction="lower", size=(-0.4, -0.4)))
    assert found.verdict == "not shown" and "micro-batches" in found.explanation


def test_the_memory_of_a_process_is_not_a_gpus() -> None:
    results = study({"b": -0.5}, quantity="peak_memory_gib", machine=CPU)
    found = judged(results, claim(quantity="peak_memory_gib"))
    assert found.verdict == "needs other hardware" and found.measured is None


def test_the_sentence_has_the_numbers_in_the_claims_unit() -> None:
    exact = study({"b": math.log(1.5)}, noise=0.0)
    told = judged(exact, claim(size=(0.84, 0.84), show="times")).explanation
    assert told == (
        "Measured 1.500 times (1.500 to 1.500, 3 seeds) in speed, 151 against 101 tokens/s; claimed 1.84 times."
    )
    told = judged(study({"b": 4.0}, noise=0.3), claim()).explanation
    assert told.startswith("Measured +6,270 % (") and "e+" not in told
    scale = "tiny, 500,000 parameters"
    small = replace(
        exact, arms=[replace(a, trials=[replace(t, metrics={**t.metrics, "parameters": 5e5}) for t in a.trials])
                     for a in exact.arms], machine=CPU,
    )  # fmt: skip
    assert judged(small, claim()).scale == f"124m ({scale}), 16M tokens, CPU"


def test_memory_that_no_seed_changes_needs_no_interval() -> None:
    results = study({"b": math.log(0.97)}, quantity="peak_memory_gib")
    arms = [
        replace(
            arm,
            trials=[replace(t, metrics={**t.metrics, "peak_memory_gib": size}) for t in arm.trials],
        )
        for arm, size in zip(results.arms, (20.0, 19.4), strict=True)
    ]
    one = claim(quantity="peak_memory_gib", direction="lower", size=(-0.4, -0.25))
    found = judged(replace(results, arms=arms), one)
    assert found.verdict == "holds in direction" and found.low == found.high == pytest.approx(-3.0)
    assert "exact" in found.explanation


def test_failed_trials_are_no_numbers() -> None:
    results = study({"b": 0.1})
    failed = [Trial(seed, "oom", "one row does not fit") for seed in (1, 2, 3)]
    none = replace(results, arms=[results.arms[0], replace(results.arms[1], trials=failed)])
    found = judged(none, claim())
    assert found.verdict == "not shown" and "one row does not fit" in found.explanation
    two = [*results.arms[1].trials[:2], failed[2]]
    some = replace(results, arms=[results.arms[0], replace(results.arms[1], trials=two)])
    assert judged(some, claim()).n == 2
    unmeasured = judged(study({"b": 0.1}, quantity="watts"), claim())
    assert unmeasured.verdict == "not shown" and "not measured" in unmeasured.explanation


def test_a_note_and_the_explanation_of_a_contradiction_are_told() -> None:
    one = claim(note="Read so.", explanation="Because.")
    assert judged(study({"b": -0.1}), one).explanation.endswith("Because. Read so.")
    held = judged(study({"b": 0.1}), one).explanation
    assert held.endswith("Read so.") and "Because" not in held


# Choosing claims


def test_claims_are_chosen_by_name_and_pattern() -> None:
    known = [claim(id="a-speed"), claim(id="b-speed"), claim(id="b-loss"), claim(id="else", group="other")]
    results = study({"b": 0.1})
    found = judge(results, known=known).claims
    assert [(c.id, c.verdict) for c in found[:3]] == [(c, "holds") for c in ("a-speed", "b-speed", "b-loss")]
    assert [c.id for c in judge(results, ["b-*"], known).claims] == ["b-speed", "b-loss"]
    assert judge(results, [], known).claims == []
    with pytest.raises(UsageError, match="b-speed"):
        judge(results, ["b-sped"], known)


def test_a_model_never_decides_a_claim() -> None:
    """The model's range is wide, so a value within it is not shown by it."""
    found = judge(planned("claims")).claims
    modelled = [one for one in found if one.basis == "modelled"]
    assert len(modelled) > 20
    assert {one.verdict for one in modelled} == {"consistent with the model", "not consistent with the model"}
    assert not [one.id for one in found if "the model" in one.verdict and one.basis != "modelled"]


def test_a_decision_must_stand_among_all_measured_claims() -> None:
    """One real effect is just significant alone, among many without effect. scipy's
    adjustment decides what remains significant.
    """
    results = study({"b": 0.004, "c": 0.3, **{f"n{i}": 0.0 for i in range(18)}}, noise=0.005)
    known = [
        claim(id=name, arm={"kind": name}, size=None) for name in ("b", "c", *(f"n{i}" for i in range(18)))
    ]
    found = judge(results, known=known).claims
    alone = {one.id: judge(results, [one.id], known).claims[0] for one in known}
    p = [one.p for one in found if one.p is not None]
    assert len(p) == 20
    stands = {one.id: bool(q <= 0.05) for one, q in zip(found, false_discovery_control(p), strict=True)}
    for one in found:
        decided = alone[one.id].verdict != "not shown"
        assert (one.verdict != "not shown") == (decided and stands[one.id])
        if decided and not stands[one.id]:
            assert "among 20 measured claims" in one.explanation
    assert stands["c"] and alone["b"].verdict == "holds" and not stands["b"]


@pytest.mark.parametrize("effect", [-0.1, 0.0, 0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("size", [None, (0.1, 0.1)])
def test_p_is_of_the_hypothesis_that_the_verdict_rejects(effect: float, size: Any) -> None:
    """scipy's one-sample test: against no effect, or against the nearest effect that the claim accepts."""
    one = claim(size=size)
    results = study({"b": effect}, noise=0.01)
    found = judged(results, one)
    ours, theirs = ([t.metrics["tokens_per_second"] for t in arm.trials] for arm in reversed(results.arms))
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    low, high = accepted(one)
    ps = [ttest_1samp(logs, at).pvalue for at in (0.0, low, high) if math.isfinite(at)]
    assert any(found.p == pytest.approx(p) for p in ps)
    assert found.p is not None and (found.p <= 0.05) == (found.verdict != "not shown")


def test_speed_beside_other_trials_is_marked_and_a_quiet_study_goes_first() -> None:
    def timed(results: Results, apart: bool) -> Results:
        arms, minute = [], 0
        for arm in results.arms:
            trials = []
            for one in arm.trials:
                minute += 2 * apart
                trials.append(replace(one, started=f"2026-01-01T00:{minute:02}:00+00:00",
                                      ended=f"2026-01-01T00:{minute + 1:02}:00+00:00"))  # fmt: skip
            arms.append(replace(arm, trials=trials))
        return replace(results, arms=arms)

    shared, quiet = timed(study({"b": -0.1}), False), timed(study({"b": 0.1}), True)
    found = judged(shared, claim())
    assert found.shared and found.verdict == "contradicted" and found.scale.endswith("shared host")
    assert not judged(quiet, claim()).shared
    memory = timed(study({"b": 0.1}, quantity="peak_memory_gib"), False)
    assert not judged(memory, claim(quantity="peak_memory_gib")).shared
    for first, second in ((shared, quiet), (quiet, shared)):
        [one] = judge(first, known=[claim()], others=[second]).claims
        assert one.verdict == "holds" and not one.shared and "-9" in one.explanation
    [only] = judge(replace(quiet, arms=[]), known=[claim()], others=[shared]).claims
    assert only.shared and only.n == 3


def test_judging_again_changes_nothing() -> None:
    results = judge(study({"b": 0.1}), known=[claim()])
    assert judge(results, known=[claim()]) == results


# The claims that ship, and the studies that measure them


def planned(name: str) -> Results:
    """Return the study before its first trial."""
    expansion = expand(parse_spec.load(name))
    arms = [Arm(arm.id, arm.label, arm.group, arm.levels, arm.baseline) for arm in expansion.arms]
    return Results(name, "", "", "", [1], 0.85, H200, expansion.groups, arms)


def test_every_measured_claim_has_its_two_arms_in_the_study() -> None:
    results = planned("claims")
    used = set()
    for one in claims():
        if one.kind == "measured":
            found = arms_of(results, one)
            assert found is not None, one.id
            arm, against = found
            assert arm.id != against.id
            for asked, got in ((one.arm, arm), (one.against, against)):
                assert asked.items() <= got.levels.items(), one.id
            assert one.quantity in BY_KEY
            used |= {arm.id, against.id}
    assert used == {arm.id for arm in results.arms}  # no arm is run in vain


def test_arms_of_a_claim_differ_in_what_it_names_alone() -> None:
    results = planned("claims")
    for one in claims():
        if one.kind == "measured":
            found = arms_of(results, one)
            assert found is not None
            arm, against = found
            factors = arm.levels.keys() | against.levels.keys()
            differ = {factor for factor in factors if arm.levels.get(factor) != against.levels.get(factor)}
            assert differ <= {*one.arm, *one.against}, one.id


def test_the_quick_study_speaks_to_claims_of_every_one_of_its_arms() -> None:
    results = planned("claims-quick")
    found = [pair for one in claims() if one.kind == "measured" and (pair := arms_of(results, one))]
    assert {arm.id for pair in found for arm in pair} == {arm.id for arm in results.arms}


def test_micro_batches_are_fixed_wherever_memory_is_claimed() -> None:
    configs = {arm.id: arm.config for arm in expand(parse_spec.load("claims")).arms}
    results = planned("claims")
    for one in claims():
        if one.quantity == "peak_memory_gib" and one.kind == "measured":
            pair = arms_of(results, one)
            assert pair is not None
            sizes = {configs[arm.id].batch.micro_tokens for arm in pair}
            assert len(sizes) == 1 and "auto" not in sizes, one.id


def test_the_two_mlps_have_as_many_parameters() -> None:
    models = {arm.id: arm.config.model for arm in expand(parse_spec.load("claims")).arms}
    gated, plain = models["architecture-baseline"], models["architecture-mlp_gelu"]
    assert 3 * gated.intermediate_size == 2 * plain.intermediate_size
    assert (gated.gated_mlp, plain.gated_mlp) == (True, False)


# Arithmetic by hand


def test_every_claim_has_a_result_whatever_was_run() -> None:
    """A study that was run with --only, or not at all, omits no claim."""
    for arms in ([], planned("claims").arms):
        found = {c.id: c for c in judge(replace(planned("claims"), arms=arms)).claims}
        assert list(found) == [one.id for one in claims()]
        for one in claims():
            nothing = found[one.id].verdict in ("not measured", "needs other hardware")
            assert nothing == (one.kind != "arithmetic")
            assert found[one.id].explanation
            assert bool(found[one.id].basis) == (one.kind == "arithmetic")
    written = {one.id: one.explanation for one in claims()}
    against = ("contradicted", "not consistent with the model")
    assert not [one.id for one in found.values() if one.verdict in against and not written[one.id]]
    assert {one.formula for one in claims() if one.formula} == formulas.FORMULAS.keys()


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        # keys and values: one head of four remains, one of eight, one of twelve
        ("gqa4-cache", 100 * (1 / 4 - 1), "holds"),
        ("gqa8-cache", 100 * (1 / 8 - 1), "holds"),
        ("mqa-cache", 100 * (1 / 12 - 1), "holds"),
        # 4 bits and a sixteenth of 8, against 16
        ("fp4-storage", 100 * (4.5 / 16 - 1), "holds"),
        ("moe-weights", 3 * 4.5 / 8, "contradicted"),
        ("training-time", 49e9 / 1.3e6 / 3600, "holds"),
        ("cost-per-billion-a100", 0.79 * 1e9 / 188_000 / 3600, "contradicted"),
        # $16,000 against $40 per hour, less 3.6 kW at $0.10
        ("break-even", 16_000 / (40 - 0.36), "contradicted"),
        ("card-power", 575, "contradicted"),
        ("card-power-low", 575, "contradicted"),
        ("card-bandwidth", 1.792, "contradicted"),
        ("card-memory", 32, "contradicted"),
        ("fp4-on-h100", 0, "contradicted"),
        # 8 x 0.97 x 575 W and a host of 100 W, 90 % of which arrive; 10.47 hours at $0.10
        ("cluster-power", (8 * 0.97 * 575 + 100) / 0.9 / 1000, "not consistent with the model"),
        (
            "pretraining-cost",
            (8 * 0.97 * 575 + 100) / 0.9 / 1000 * 49e9 / 1.3e6 / 3600 * 0.1,
            "not consistent with the model",
        ),
        (
            "cost-per-billion",
            (8 * 0.97 * 575 + 100) / 0.9 / 1000 * 1e9 / 1.3e6 / 3600 * 0.1,
            "not consistent with the model",
        ),
    ],
)
def test_arithmetic_again_by_hand(name: str, value: float, verdict: str) -> None:
    [found] = judge(planned("claims-quick"), [name]).claims
    assert found.measured == pytest.approx(value, rel=2e-3)
    assert found.verdict == verdict


def test_numbers_have_no_exponent_around_a_thousand() -> None:
    assert [number_text(value) for value in (99.96, 999.4, 999.7, -999.7)] == [
        "100",
        "999",
        "1,000",
        "-1,000",
    ]


def test_one_second_per_step_by_hand() -> None:
    """24 layers: q and o of 16 heads, k and v of 4, two of eight experts of three matrices, a router; the head; half
    of 16,384 tokens in attention. 512K tokens at 1,676 TFLOP/s.
    """
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 2 * 3 * 2048 * 2048 + 8 * 2048
    per_token = 6 * (24 * layer + 50304 * 2048) + 12 * 24 * 2048 * 16384 / 2
    [found] = judge(planned("claims-quick"), ["moe-step"]).claims
    assert found.measured == pytest.approx(per_token * 32 * 16384 / 1676e12, rel=1e-6)
    assert found.verdict == "contradicted"
    [length] = judge(planned("claims-quick"), ["moe-length"]).claims
    assert found.measured is not None
    assert length.measured == pytest.approx(found.measured * 100_000 / 3600)


def test_modelled_answers_say_so_and_have_a_range() -> None:
    for name in ("speed-124m", "moe-memory", "day-on-4090", "cluster-speed", "batch-memory"):
        [found] = judge(planned("claims-quick"), [name]).claims
        assert found.scale.startswith("modelled: ")
        assert found.low is not None and found.measured is not None and found.high is not None
        assert found.low < found.measured < found.high


@pytest.mark.parametrize(
    ("direction", "low", "high", "verdict"),
    [
        ("about", 95, 105, "holds"),
        ("about", 111, 120, "contradicted"),
        ("about", 105, 120, "holds"),
        ("at most", 50, 60, "holds"),
        ("at most", 111, 120, "contradicted"),
        ("at most", 105, 130, "not shown"),
        ("at least", 150, 160, "holds"),
        ("at least", 70, 80, "contradicted"),
        ("at least", 70, 95, "not shown"),
    ],
)
def test_values_hold_where_the_range_meets_them(
    direction: Any, low: float, high: float, verdict: str
) -> None:
    one = claim(
        kind="arithmetic", group="", arm={}, against={}, size=None, formula="f", direction=direction,
        value=(100.0, 100.0), unit="W", tolerance=0.1,
    )  # fmt: skip
    answer = Answer(low, (low + high) / 2, high, "published prices", "a card")
    assert verdict_of_value(one, answer) == verdict
    met = "not consistent with the model" if verdict == "contradicted" else "consistent with the model"
    assert verdict_of_value(one, replace(answer, source="modelled")) == met
