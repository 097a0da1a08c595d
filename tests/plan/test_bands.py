"""The open search: every band fits, finishes and can be executed, and more resources never make it worse."""

import itertools
import math
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deskside.budget.loss import LAW, expected_bpb
from deskside.budget.memory import training_memory
from deskside.budget.shape import matmul_params
from deskside.budget.speed import tokens_per_second
from deskside.budget.step_spec import StepSpec
from deskside.cli.train import COMMAND
from deskside.config import merge, presets
from deskside.config.depth_series import of_depth
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.plan import bands, candidates, expected_loss, fastest_fit, run_length
from deskside.plan.planner import make_plan
from deskside.plan.request import PlanRequest
from deskside.plan.result import Plan
from deskside.plan.setting import setting_from_config
from tests.examples import examples
from tests.plan import made

FEW = settings(max_examples=examples(5, 12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
CARDS = st.fixed_dictionaries(
    {
        "memory_gib": st.floats(6, 96),
        "tflops": st.floats(15, 900),
    }
)


def target_loss(request: PlanRequest) -> float:
    found = {band.name: band.candidate for band in bands.choose_bands(request)}
    return found["target"].loss[1] if found else math.inf


def check(plan: Plan) -> None:
    """Assert the properties of every plan."""
    request = plan.request
    previous = 0
    for band in plan.bands:
        setting = band.candidate.setting
        # It fits: the modelled peak of every stage, with the allocator's overhead, and the context.
        for _, shape, spec in setting.step_specs():
            memory = training_memory(shape, spec)
            need = memory.reserved + request.calibration.overhead_bytes
            assert need <= request.card.memory_bytes
            if band.name != "stretch" and band.estimate.fits == "fits":
                high = memory.reserved * (1 + request.calibration.memory_spread)
                assert high + request.calibration.overhead_bytes <= request.card.memory_bytes
        # It finishes: the planned tokens take no longer than the time, at the speed of each stage.
        seconds = run_length.pretrain_seconds(request)
        if seconds is not None:
            needed = sum(
                band.candidate.tokens[1] * stage.share * stage.tokens / setting.tokens_per_step
                / tokens_per_second(shape, spec, request.calibration.rates)
                for stage, shape, spec in setting.step_specs()
            )  # fmt: skip
            assert needed + run_length.setup_seconds(request) == pytest.approx(seconds, rel=1e-6)
        # It can be executed, and the execution equals the plan.
        config = merge.build([band.config])
        assert carried_out(config, request) == carried_out(merge.build(layers_of(band.command)), request)
        again = setting_from_config(config, request.gpus, setting.precision)
        assert (again.stages[-1], again.micro_tokens, again.activation_checkpointing, again.optimizer) == (
            setting.stages[-1],
            setting.micro_tokens,
            setting.activation_checkpointing,
            setting.optimizer,
        )
        assert [s.sequence_length for s in again.stages] == [s.sequence_length for s in setting.stages]
        assert (again.sharded, again.loss_chunk_tokens) == (setting.sharded, setting.loss_chunk_tokens)
        assert config.batch.tokens % (config.batch.sequence_length * request.gpus) == 0
        assert (config.model.num_hidden_layers, config.model.hidden_size) == (
            setting.model.num_hidden_layers,
            setting.model.hidden_size,
        )
        if request.budget.kind not in (None, "loss"):
            assert band.candidate.weights > previous  # safe is smaller than target, and target than stretch
            previous = band.candidate.weights
    if plan.bands:
        assert plan.best is not None
    else:
        assert plan.verdict == "no" and plan.reason_texts()


def layers_of(command: str) -> list[dict[str, Any]]:
    """Return the configuration layers that `deskside train` would create from a command line."""
    words = shlex.split(command)
    words = words[words.index("train") + 1 :]
    options, given_keys = COMMAND.parse_config(words)
    assert options.preset is not None
    return [*presets.layers(options.preset), given_keys]


def carried_out(config: RunConfig, request: PlanRequest) -> dict[str, Any]:
    """Return the resolved configuration, without the location of the data."""
    found = config.model_dump(mode="json")
    del found["data"]["path"]
    return found


@settings(FEW, max_examples=examples(4, 7))
@given(
    CARDS,
    st.floats(0.05, 400),
    st.sampled_from([1, 1, 2, 3, 8]),
    st.sampled_from([256, 512, 1024, 2048, 3000, 4096, 8192]),
)
def test_every_band_fits_finishes_and_can_be_executed(
    card: dict[str, float], hours: float, gpus: int, sequence: int
) -> None:
    check(make_plan(made.request(value=hours, gpus=gpus, sequence_length=sequence, **card)))


@FEW
@given(CARDS, st.floats(0.1, 400), st.floats(1.001, 4))
def test_more_hours_never_give_a_worse_target(card: dict[str, float], hours: float, more: float) -> None:
    less = target_loss(made.request(value=hours, **card))
    assert target_loss(made.request(value=hours * more, **card)) <= less + 1e-9


@FEW
@given(CARDS, st.sampled_from([("tokens", 1.0), ("flops", 1e9)]), st.floats(1e7, 1e12), st.floats(1.01, 10))
def test_more_tokens_or_flops_never_give_a_worse_target(
    card: dict[str, float], kind: tuple[str, float], tokens: float, more: float
) -> None:
    name, value = kind[0], kind[1] * tokens
    less = target_loss(made.request(name, value, **card))
    assert target_loss(made.request(name, value * more, **card)) <= less + 1e-9


@FEW
@given(CARDS, st.floats(0.1, 100), st.floats(1.0, 3.0))
def test_more_memory_never_makes_anything_worse(card: dict[str, float], hours: float, more: float) -> None:
    answers = ("no", "yes-if", "yes")
    small = make_plan(made.request(value=hours, **card))
    large = make_plan(made.request(value=hours, memory_gib=card["memory_gib"] * more, tflops=card["tflops"]))
    assert answers.index(large.verdict) >= answers.index(small.verdict)


@pytest.mark.parametrize("loss", [1.2, 0.95, 0.85])
def test_a_loss_is_reached_in_the_least_time(loss: float) -> None:
    request = made.request("loss", loss)
    plan = make_plan(request)
    check(plan)
    best = plan.best
    assert best is not None and best.name == "target" and plan.verdict == "yes"
    assert best.loss[1] == pytest.approx(loss, rel=1e-3)
    # No other size gets there sooner, with the tokens that the law requires for it.
    found = {c.shape.preset: c for c in candidates.search(request)}
    assert len(found) > 5
    for other in found.values():
        assert other.seconds[1] >= best.candidate.seconds[1] - 1e-6
        if other.setting.optimizer == "muon":
            assert LAW.at(other.weights, other.tokens[1]) == pytest.approx(loss, rel=1e-3)


def test_a_loss_bands_ends_are_the_ends_of_the_law() -> None:
    """They are the law's own range, because the widening for far extrapolation cannot be promised."""
    by_name = {band.name: band for band in make_plan(made.request("loss", 0.9)).bands}
    assert by_name["safe"].loss[1] * LAW.high == pytest.approx(0.9, rel=1e-3)
    assert by_name["target"].loss[1] == pytest.approx(0.9, rel=1e-3)
    assert by_name["stretch"].loss[1] * LAW.low == pytest.approx(0.9, rel=1e-3)
    times = [by_name[name].candidate.seconds[1] for name in ("stretch", "target", "safe")]
    assert times == sorted(times)


def test_the_target_is_where_a_brute_force_finds_it() -> None:
    """Brute force prices every depth, rung and micro-batch one by one, at one batch and without stages."""
    request = made.request(
        value=6.0,
        sequence_length=512,
        overrides={"batch": {"tokens": 2**18}, "optim": {"name": "muon"}},
    )
    known = request.calibration
    seconds = run_length.pretrain_seconds(request)
    assert seconds is not None
    losses = {}
    for depth in range(2, 31, 2):
        model = ModelConfig(**of_depth(depth)["model"])
        speeds = []
        for rung, chunk in fastest_fit.LADDER:
            for power, copies in itertools.product(range(10), ("step", "use")):
                spec = StepSpec(
                    512,
                    2**18,
                    512 * 2**power,
                    activation_checkpointing=rung,
                    copies=copies,  # type: ignore[arg-type]
                    loss_chunk_tokens=chunk,  # type: ignore[arg-type]
                )
                need = (
                    training_memory(model, spec).reserved * (1 + known.memory_spread) + known.overhead_bytes
                )
                if need <= request.card.memory_bytes:
                    speeds.append(tokens_per_second(model, spec, known.rates))
        if speeds:
            tokens = (seconds - run_length.SETUP_SECONDS) * max(speeds)
            losses[f"d{depth}"] = expected_bpb(LAW, matmul_params(model), tokens)[1]
    best = min(losses, key=lambda name: losses[name])
    found = {c.shape.preset: c for c in candidates.search(request)}
    assert found[best].loss[1] == pytest.approx(losses[best], rel=1e-3)
    target = next(band for band in bands.choose_bands(request) if band.name == "target")
    assert target.candidate.loss[1] <= losses[best] * 1.001


def test_out_of_reach_and_too_short_say_so() -> None:
    assert "out of reach" in make_plan(made.request("loss", 0.3)).reason_texts()[0]
    assert "too short" in make_plan(made.request("hours", 0.005)).reason_texts()[0]
    for few in (made.request("tokens", 1), made.request("flops", 1e-5), made.request(unique_tokens=1)):
        assert make_plan(few).verdict == "no"
        assert "too small" in make_plan(few).reason_texts()[0]
    tiny = make_plan(made.request("tokens", 1e9, memory_gib=1.0))
    assert tiny.verdict == "no" and "not even the smallest model fits" in tiny.reason_texts()[0]
    long = make_plan(made.request("loss", 0.68))
    assert long.verdict == "no" and any("more than a year" in reason for reason in long.reason_texts())


def test_adamw_needs_more_tokens_and_is_taken_where_muon_is_too_slow() -> None:
    assert expected_loss.muon_advantage(1e8) == pytest.approx(1.4)
    assert expected_loss.muon_advantage(1.2e9) == pytest.approx(1.1)
    assert expected_loss.muon_advantage(1e10) == pytest.approx(1.1)
    normal = make_plan(made.request(value=24.0)).best
    assert normal is not None and normal.candidate.setting.optimizer == "muon"
    # With one row per step, Muon's iteration is most of the step.
    small = made.request(value=24.0, overrides={"batch": {"tokens": 2048}})
    best = make_plan(small).best
    assert best is not None and best.candidate.setting.optimizer == "adamw"
    muon = made.request(value=24.0, overrides={"batch": {"tokens": 2048}, "optim": {"name": "muon"}})
    forced = make_plan(muon).best
    assert forced is not None and forced.loss[1] >= best.loss[1]


def test_options_by_hand_are_kept() -> None:
    chosen = {
        "batch": {"tokens": 131072},
        "compute": {"activation_checkpointing": "block"},
        "optim": {"name": "adamw"},
        "model": {"vocab_size": 50304},
        "seed": 7,
    }
    plan = make_plan(made.request(value=5.0, overrides=chosen))
    assert plan.bands
    for band in plan.bands:
        config = merge.build([band.config])
        assert config.batch.tokens == 131072
        assert config.compute.activation_checkpointing == "block"
        assert (config.optim.name, config.model.vocab_size, config.seed) == ("adamw", 50304, 7)
    check(plan)


def test_repeated_data_is_worth_less() -> None:
    free = make_plan(made.request(value=24.0)).best
    repeated = make_plan(made.request(value=24.0, unique_tokens=100_000_000)).best
    assert free is not None and repeated is not None
    assert repeated.loss[1] > free.loss[1]


def test_the_caller_may_know_the_time_better() -> None:
    """`deskside go` passes the run's own seconds, to which the split of the hours is not applied again."""
    request = made.request(value=1.0, pretrain_seconds=1800.0, setup_seconds=60.0)
    best = make_plan(request).best
    assert best is not None
    rate = best.estimate.tokens_per_second[1]
    assert best.candidate.tokens[1] == pytest.approx((1800 - 60) * rate)
    assert merge.build([best.config]).schedule.length is not None
    assert str(merge.build([best.config]).schedule.length) == "30m"


def test_a_small_corpus_does_not_feed_a_model_of_any_size() -> None:
    """However long the budget, there are no more than two weights per unique token.
    With enough text, the model grows further.
    """
    sizes = {}
    for hours in (2, 24, 240):
        plan = make_plan(made.request("hours", hours, unique_tokens=70_000_000))
        assert plan.best is not None
        sizes[hours] = plan.best.candidate.weights
        assert all(band.candidate.weights <= 140_000_000 for band in plan.bands)
    assert sizes[24] == sizes[240]
    free = make_plan(made.request("hours", 240))
    assert free.best is not None and free.best.candidate.weights > sizes[240]


@pytest.mark.parametrize("host_gib", [None, 2, 1])
def test_states_on_the_host_fit_there(host_gib: int | None) -> None:
    request = made.request(overrides={"optim": {"offload": True}})
    host_bytes = None if host_gib is None else host_gib * made.GIB
    plan = make_plan(replace(request, card=replace(request.card, host_bytes=host_bytes)))
    assert plan.best is not None
    needed = [sum(band.candidate.setting.host_memory.values()) for band in plan.bands]
    assert max(needed) <= 0.9 * (host_bytes or math.inf)
