"""Verdicts on a given model: yes, yes-if or no, and what each remedy saves and costs."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deskside.budget.loss import LAW
from deskside.budget.memory import training_memory
from deskside.budget.shape import num_params
from deskside.budget.step_spec import GradientPlace
from deskside.config import merge
from deskside.plan.estimate import estimate
from deskside.plan.expected_loss import optimal_tokens
from deskside.plan.fastest_fit import LADDER
from deskside.plan.planner import make_plan
from deskside.plan.request import PlanRequest
from deskside.plan.result import memory_json
from deskside.plan.setting import Setting, pass_sizes
from deskside.plan.verdict import judge
from deskside.utils.errors import UsageError
from tests.examples import examples
from tests.plan import made
from tests.plan.made import ask
from tests.plan.test_claim_check import MOE

GIB = 2**30


def test_what_fits_is_a_yes_and_needs_no_remedy() -> None:
    plan = make_plan(made.request("tokens", 1e9, given=made.given("124m")))
    assert plan.verdict == "yes"
    assert plan.requested is not None and plan.requested.fits == "fits"
    assert plan.remedies == ()
    best = plan.best
    assert best is not None and len(plan.bands) == 1
    assert best.candidate.tokens[1] == 1_000_000_000
    assert merge.build([best.config]).schedule.length is not None


def test_yes_if_names_the_change_and_carries_it_out() -> None:
    """d24 does not fit into 12 GiB, but it does with more recomputation."""
    request = made.request("tokens", 1e9, memory_gib=12.0, given=made.given("d24"))
    plan = make_plan(request)
    assert plan.verdict == "yes-if"
    assert plan.requested is not None and plan.requested.fits != "fits"
    best = plan.best
    assert best is not None
    config = merge.build([best.config])
    assert config.compute.activation_checkpointing != "none"
    assert any(config.compute.activation_checkpointing in reason for reason in plan.reason_texts())
    *_, (_, shape, spec) = best.candidate.setting.step_specs()
    needed = training_memory(shape, spec).reserved * (1 + request.calibration.memory_spread)
    assert needed + request.calibration.overhead_bytes <= request.card.memory_bytes


def test_what_was_asked_by_hand_may_be_what_has_to_change() -> None:
    by_hand = {"compute": {"activation_checkpointing": "attention"}}
    model = made.given("d24", **by_hand)
    plan = make_plan(made.request("tokens", 1e9, memory_gib=7.0, given=model, overrides=by_hand))
    assert plan.verdict == "yes-if" and plan.best is not None
    assert merge.build([plan.best.config]).compute.activation_checkpointing in ("mlp", "block")
    rungs = [r.what for r in plan.remedies if r.what.startswith("activation checkpointing")]
    assert rungs == ["activation checkpointing of the MLP", "activation checkpointing of whole blocks"]


def test_no_says_what_would_be_needed() -> None:
    plan = make_plan(made.request("tokens", 1e9, memory_gib=4.0, given=made.given("d38")))
    assert plan.verdict == "no" and plan.best is None
    # Weights need 2 bytes each, whatever is recomputed or offloaded.
    assert plan.requested is not None
    assert 2 * num_params(plan.requested.setting.model) > 4 * GIB
    would = " ".join(plan.reason_texts())
    assert "a card with 32 GiB" in would and "of the depth series that fits" in would
    kinds = {remedy.kind for remedy in plan.remedies}
    assert kinds == {"change", "hardware", "other model", "elsewhere"}


def test_states_on_the_host_are_a_change() -> None:
    """Weights and gradients of d30 take 11 GiB, and Muon's states 6 GiB. With the
    states on the host, it fits into 16 GiB.
    """
    plan = make_plan(made.request("tokens", 1e9, memory_gib=16.0, given=made.given("d30")))
    assert plan.verdict == "yes-if" and plan.best is not None
    optim = merge.build([plan.best.config]).optim
    assert optim.name == "muon" and optim.offload
    assert any("--optim.offload" in reason for reason in plan.reason_texts())
    saving = {r.what: r for r in plan.remedies}["optimizer states in the host's memory"]
    assert saving.kind == "change" and saving.saves_bytes > 5 * GIB
    assert "of the host's memory" in saving.costs
    built = merge.build([saving.options]).optim
    assert built.offload and built.states == "float32"


def test_states_in_8_bits_are_a_change_and_never_sharded() -> None:
    by_hand = {"optim": {"name": "adamw"}}
    for gpus in (1, 2):
        request = made.request(
            "tokens", 1e9, memory_gib=14.0, gpus=gpus, given=made.given("d24", **by_hand), overrides=by_hand
        )
        remedies = {r.what: r for r in make_plan(request).remedies}
        small = remedies["optimizer states in 8 bits"]
        assert small.kind == "change" and small.saves_bytes > 0
        for remedy in remedies.values():
            config = merge.build([remedy.options])
            if config.parallel.mode == "shard":
                assert config.optim.states != "8bit" and not config.optim.offload
    assert any(merge.build([r.options]).parallel.mode == "shard" for r in remedies.values())


def test_sharding_over_the_named_gpus_is_a_change() -> None:
    options = {"memory_gib": 20.0, "given": made.given("d36")}
    one = make_plan(made.request("tokens", 1e9, **options))
    four = make_plan(made.request("tokens", 1e9, gpus=4, **options))
    assert one.verdict == four.verdict == "yes-if"
    assert one.best is not None and four.best is not None
    assert merge.build([one.best.config]).optim.gradients == "host"
    built = merge.build([four.best.config])
    assert (built.parallel.mode, built.optim.gradients) == ("shard", "device")
    assert four.best.command.startswith("deskside train d36 ") and four.best.command.endswith(" --gpus 4")


def test_sharding_does_not_shrink_the_gradients_of_several_passes() -> None:
    """d38's states spread over four GPUs would leave room in 20 GiB, but one pass of all rows does not fit beside
    them, and from the second pass on, every GPU holds whole gradients.
    """
    plan = make_plan(made.request("tokens", 1e9, memory_gib=20.0, gpus=4, given=made.given("d38")))
    assert plan.verdict == "yes-if" and plan.requested is not None and plan.best is not None
    built = merge.build([plan.best.config])
    assert (built.parallel.mode, built.optim.weights) == ("auto", "bfloat16")
    weights = num_params(plan.requested.setting.model)
    assert 16 * weights / 4 < 12 * GIB < 20 * GIB < (4 + 12 / 4) * weights * 1.1 + 2 * GIB


def test_every_change_saves_memory_and_only_changes_are_executable() -> None:
    request = made.request("tokens", 1e9, given=made.given("d38", optim={"name": "adamw"}))
    asked = judge(request).requested
    found = judge(request).remedies
    changes = [remedy for remedy in found if remedy.kind == "change"]
    assert {"Muon instead of AdamW", "activation checkpointing of whole blocks"} <= {r.what for r in changes}
    for remedy in changes:
        assert remedy.saves_bytes > 0
        assert remedy.speed is not None and remedy.speed > 0
        if "context" not in remedy.costs:  # shorter rows change no positions
            config = merge.build([*request.given.layers, remedy.options])  # type: ignore[union-attr]
            assert config.model.num_hidden_layers == 38
    # Each rung of the ladder saves more than the one before, and whole blocks cost the most speed.
    rungs = [r for r in changes if r.what.startswith("activation checkpointing")]
    assert [r.saves_bytes for r in rungs] == sorted(r.saves_bytes for r in rungs)
    assert min(rungs, key=lambda r: r.speed or 0).what.endswith("whole blocks")
    for remedy in found:
        if remedy.kind == "elsewhere":
            assert remedy.options == {} and "deskside" in remedy.costs
    muon = next(r for r in changes if r.what.startswith("Muon"))
    matrices = 4 * (num_params(asked.setting.model) - 2 * 2432 * 32768)
    assert muon.saves_bytes == pytest.approx(matrices * 1.05, rel=0.02)  # with the allocator's share


def test_a_micro_batch_by_hand_that_is_too_large_is_a_yes_if() -> None:
    by_hand = {"batch": {"tokens": 2**18, "micro_tokens": 2**18}}
    plan = make_plan(made.request("tokens", 1e9, given=made.given("124m", **by_hand), overrides=by_hand))
    assert plan.verdict == "yes-if"
    assert plan.best is not None and plan.best.candidate.setting.micro_tokens < 2**18
    assert any(remedy.what.startswith("micro-batch") for remedy in plan.remedies)


def test_a_model_that_is_too_large_for_the_hours_is_told_so() -> None:
    plan = make_plan(made.request(value=5.0, memory_gib=80.0, given=made.given("d30")))
    assert plan.verdict == "yes-if"
    assert any("tokens per parameter" in reason for reason in plan.reason_texts())
    # With the time that the reason names, it is a plain yes.
    assert make_plan(made.request(value=5000.0, memory_gib=80.0, given=made.given("d30"))).verdict == "yes"


def test_a_model_that_reads_too_little_is_told_so_though_it_fits() -> None:
    """The total loss contains the law's constant, which hides how much the model misses."""
    request = made.request(value=24.0, memory_gib=32.0, tflops=210.0, given=made.given("1.3b"))
    plan = make_plan(request)
    assert plan.requested is not None and plan.requested.fits == "fits" and plan.best is not None
    told = [reason for reason in plan.reason_texts() if "tokens per parameter" in reason]
    assert plan.verdict == "yes-if" and len(told) == 1 and "trained in the same way" in told[0]
    # The warning starts at a third of the best number of tokens, whatever the budget is. Tokens are not hours, so a
    # smaller model gains nothing.
    right = optimal_tokens(LAW, plan.best.candidate.weights)
    for share, said in ((0.3, True), (0.36, False)):
        other = make_plan(
            made.request("tokens", share * right, memory_gib=32.0, tflops=210.0, given=made.given("1.3b"))
        )
        assert other.verdict == "yes"
        assert any("tokens per parameter" in reason for reason in other.reason_texts()) == said


def test_a_size_is_compared_with_what_is_trained_alike() -> None:
    """The best size for some hours is not criticized because its rows are not staged, or because of its optimizer."""
    best = make_plan(made.request(value=24.0)).best
    assert best is not None and len(best.candidate.setting.stages) > 1
    for optimizer in ("muon", "adamw"):
        plan = make_plan(made.request(value=24.0, given=made.given(best.preset, optim={"name": optimizer})))
        assert not any("trained in the same way" in reason for reason in plan.reason_texts())


@pytest.mark.parametrize("states", ["float32", "8bit"])
@pytest.mark.parametrize("gradients", ["device", "host", "released"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_place_of_the_gradients_can_be_compared(optimizer: str, gradients: str, states: str) -> None:
    """A smaller model that is trained alike clips like it: released gradients cannot be clipped."""
    clip = 0.0 if gradients == "released" else 1.0
    optim = {"name": optimizer, "gradients": gradients, "grad_clip": clip, "states": states}
    plan = make_plan(made.request(given=made.given("124m", optim=optim, batch={"tokens": 16384})))
    assert plan.best is not None and plan.best.candidate.setting.gradients == gradients


def test_too_little_time_and_a_loss_out_of_reach_are_a_no() -> None:
    short = make_plan(made.request(value=0.005, given=made.given("124m")))
    assert short.verdict == "no" and "time is too short" in short.reason_texts()[0]
    deep = make_plan(made.request("loss", 0.70, given=made.given("124m")))
    assert deep.verdict == "no" and "out of reach" in deep.reason_texts()[0]
    for plan in (short, deep):
        # That the model fits is another reason.
        assert plan.reason_texts("against") == plan.reason_texts()[:1]


@settings(max_examples=examples(6, 15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["124m", "340m", "710m", "1.3b", "gpt2", "d12", "d20", "d30"]),
    st.floats(4, 100),
    st.floats(1.0, 4.0),
    st.sampled_from(["muon", "adamw"]),
)
def test_more_memory_never_turns_yes_into_no(preset: str, gib: float, more: float, optimizer: str) -> None:
    order = ("no", "yes-if", "yes")
    answers = []
    for memory in (gib, gib * more):
        model = made.given(preset, optim={"name": optimizer})
        plan = make_plan(made.request("tokens", 1e8, memory_gib=memory, given=model))
        answers.append(order.index(plan.verdict))
        if plan.best is not None:
            merge.build([plan.best.config])
            assert plan.best.estimate.memory_bytes[1] <= plan.request.card.memory_bytes
    assert answers[0] <= answers[1]


@pytest.mark.parametrize("sequence", [512, 2048, 16384, 131072])
def test_a_long_sequence_needs_more(sequence: int) -> None:
    layer = {
        "batch": {"sequence_length": sequence, "tokens": 2**19},
        "model": {"max_position_embeddings": sequence},
    }
    plan = make_plan(made.request("tokens", 1e9, given=made.given("124m", **layer), overrides=layer))
    assert plan.requested is not None
    assert plan.requested.setting.sequence_length == sequence
    assert plan.requested.accumulation * plan.requested.setting.micro_tokens == 2**19


def test_between_gpus_the_range_is_wider_and_the_link_is_named() -> None:
    """Only two H200 were measured together, so half of the communication time is added to the uncertainty."""
    known = made.calibration(spread=0.2)
    spreads = {}
    for gpus, link in ((1, 20e9), (4, 20e9), (4, 2e9)):
        calibration = replace(known, rates=replace(known.rates, link_bandwidth=link))
        model = made.given("124m")
        plan = make_plan(made.request("tokens", 1e9, gpus=gpus, calibration=calibration, given=model))
        assert plan.best is not None
        found = plan.best.estimate
        low, expected, high = found.tokens_per_second
        talk = found.step["communication"] / found.step_seconds
        assert 1 - low / expected == pytest.approx(math.sqrt(0.2**2 + (talk / 2) ** 2))
        assert high / expected - 1 == pytest.approx(1 - low / expected)
        assert found.speed_spread == pytest.approx(1 - low / expected)
        spreads[gpus, link] = found.speed_spread
        what = f"{link / 1e9:.0f} GB/s of PCIe 4.0 x16, modelled from the data sheet"
        told = f"communication: {what}; of several GPUs, only two H200 were measured"
        assert (told in plan.notes) == (gpus > 1)
    assert spreads[1, 20e9] == pytest.approx(0.2)
    assert spreads[1, 20e9] < spreads[4, 20e9] < spreads[4, 2e9] < 1


def test_a_range_never_reaches_a_standstill() -> None:
    plan = make_plan(
        made.request("tokens", 1e9, calibration=made.calibration(spread=1.0), given=made.given("124m"))
    )
    assert plan.best is not None and plan.best.estimate.tokens_per_second[0] > 0


@pytest.mark.parametrize(("unique", "told"), [(None, False), (300_000_000, False), (200_000_000, True)])
@pytest.mark.parametrize("preset", ["124m", None])
def test_text_that_is_read_too_often_is_told(unique: int | None, told: bool, preset: str | None) -> None:
    model = None if preset is None else made.given(preset)
    plan = make_plan(made.request("tokens", 1e9, given=model, unique_tokens=unique))
    assert any("200M tokens of text 5 times" in reason for reason in plan.reason_texts()) == told
    assert any("of text" in reason for reason in plan.reason_texts()) == told
    assumed = [note for note in plan.notes if note.startswith("text: 1B unique tokens are assumed")]
    assert len(assumed) == (unique is None)


def test_the_spread_of_the_calibration_is_the_range() -> None:
    for spread in (0.08, 0.3):
        known = replace(made.calibration(), speed_spread=spread)
        plan = make_plan(made.request("tokens", 1e9, calibration=known, given=made.given("124m")))
        assert plan.best is not None
        low, expected, high = plan.best.estimate.tokens_per_second
        assert (low / expected, high / expected) == (pytest.approx(1 - spread), pytest.approx(1 + spread))
        fastest, _, slowest = plan.best.candidate.seconds
        assert slowest > fastest


def fastest_of_all(request: PlanRequest, asked: Setting) -> float:
    """Return the tokens per second of the best setting that fits without another
    loss, found by pricing every choice.
    """
    known, capacity = request.calibration, request.card.memory_bytes
    speeds = []
    single: tuple[tuple[bool, bool, GradientPlace], ...] = tuple(
        (False, offload, place) for offload in (False, True) for place in ("device", "host")
    )
    several: tuple[tuple[bool, bool, GradientPlace], ...] = (
        (True, False, "device"), (False, True, "device"), (False, False, "device"),
    )  # fmt: skip
    for rung, chunk in LADDER:
        for sharded, offload, place in several if asked.gpus > 1 else single:
            where: dict[str, Any] = {"sharded": sharded, "offload_optimizer": offload, "gradients": place}
            way = replace(asked, activation_checkpointing=rung, loss_chunk_tokens=chunk, **where)
            for copies, size in itertools.product(("step", "use"), pass_sizes(way)):
                for offloading in {False, way.can_offload_activations}:
                    lean = replace(way, micro_tokens=size, copies=copies, activation_offloading=offloading)
                    found = estimate(lean, known, capacity)
                    if found.fits == "fits":
                        speeds.append(found.tokens_per_second[1])
    return max(speeds)


@pytest.mark.parametrize(("preset", "gpus", "gib"), [("1.3b", 1, 14.0), ("d38", 4, 32.0)])
def test_a_yes_if_uses_the_room_that_it_makes(preset: str, gpus: int, gib: float) -> None:
    """The number of rows per pass, which was reduced to one because nothing
    fitted, grows again once something fits.
    """
    request = made.request("tokens", 1e10, gpus=gpus, memory_gib=gib, given=made.given(preset))
    plan = make_plan(request)
    assert plan.verdict == "yes-if" and plan.best is not None and plan.requested is not None
    asked = plan.requested.setting
    assert asked.micro_tokens == asked.sequence_length  # one row
    chosen = plan.best.estimate
    assert chosen.tokens_per_second[1] == pytest.approx(fastest_of_all(request, asked), rel=1e-9)
    assert chosen.setting.micro_tokens > asked.sequence_length
    assert f"--batch.micro_tokens {chosen.setting.micro_tokens} " in f"{plan.best.command} "
    # No offered option is slower than one row per pass with the same change.
    rungs = {"attention": "attention", "the MLP": "mlp", "whole blocks": "block"}
    for remedy in plan.remedies:
        what = remedy.what.removeprefix("activation checkpointing of ")
        if what in rungs and remedy.fits == "fits":
            assert remedy.speed is not None
            rung = remedy.options["compute"]["activation_checkpointing"]
            assert rung == rungs[what]
            row = replace(asked, activation_checkpointing=rung)
            slow = estimate(row, request.calibration, request.card.memory_bytes)
            assert remedy.speed * plan.requested.tokens_per_second[1] >= slow.tokens_per_second[1]
    other = [remedy for remedy in plan.remedies if remedy.kind == "other model"]
    assert all("smaller" in remedy.costs and remedy.saves_bytes > 0 for remedy in other)


def test_a_pass_by_hand_stays_as_small_as_it_was_asked_for() -> None:
    by_hand = {"batch": {"micro_tokens": 2048}}
    model = made.given("1.3b", **by_hand)
    plan = make_plan(made.request("tokens", 1e10, memory_gib=23.5, given=model, overrides=by_hand))
    assert plan.verdict == "yes-if" and plan.best is not None
    assert plan.best.candidate.setting.micro_tokens == 2048
    assert all(r.options["batch"]["micro_tokens"] <= 2048 for r in plan.remedies if r.options)


@pytest.mark.parametrize(
    ("gpus", "tokens", "asked", "each", "passes"),
    [(4, 131072, 65536, 32768, 1), (2, 98304, 32768, 24576, 2)],
)
def test_a_pass_by_hand_is_a_gpus_share_at_most(
    gpus: int, tokens: int, asked: int, each: int, passes: int
) -> None:
    """As in training, where the rows of a pass divide those of a process."""
    options = {"batch": {"tokens": tokens, "micro_tokens": asked}}
    best = make_plan(ask(options, gpu="rtx4090", gpus=gpus, preset="124m", tokens="1B")).best
    assert best is not None and best.candidate.setting.micro_tokens == each
    assert best.estimate.accumulation == passes and f"--batch.micro_tokens {each} " in best.command


def test_a_single_stage_keeps_its_window_and_rows() -> None:
    """A single stage set by hand is the run that it says: its window is priced and executed."""
    layer: dict[str, Any] = {
        "model": {"window_pattern": "SSSL", "sliding_window": 1024, "max_position_embeddings": 8192},
        "schedule": {"stages": [{"until": 1.0, "sequence_length": 8192, "window": 256}]},
    }
    plan = make_plan(made.request("tokens", 1e9, given=made.given("124m", **layer), overrides=layer))
    assert plan.best is not None
    setting = plan.best.candidate.setting
    assert [(stage.sequence_length, stage.window) for stage in setting.stages] == [(8192, 256)]
    (stage,) = merge.build([plan.best.config]).schedule.stages
    assert (stage.sequence_length, stage.window) == (8192, 256)
    layer["schedule"]["stages"][0]["window"] = 1024
    wide = make_plan(made.request("tokens", 1e9, given=made.given("124m", **layer), overrides=layer)).best
    assert wide is not None
    assert wide.candidate.setting.flops_per_token > setting.flops_per_token


# All options that cost only speed. With them, a run needs the least memory that the ladder can reach.
LADDER_LEAST: dict[str, Any] = {
    "compute.activation_checkpointing": "block",
    "compute.loss_chunk_tokens": 512,
    "precision.weight_cache": False,
}
# Other options that a user could have set, and that the verdict may offer.
OPTIONS: dict[str, list[Any]] = {
    "optim.name": ["muon"],
    "optim.states": ["8bit"],
    "optim.offload": [True],
    "batch.sequence_length": [1024, 512],
    "precision.name": ["fp8"],
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in flat.items():
        part, name = key.split(".")
        found.setdefault(part, {})[name] = value
    return found


@settings(max_examples=examples(5, 10), deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    preset=st.sampled_from(["d12", "d20", "d26", "d32"]),
    optimizer=st.sampled_from(["adamw", "muon"]),
    saving=st.fixed_dictionaries(
        {}, optional={key: st.sampled_from(values) for key, values in OPTIONS.items()}
    ),
    room=st.floats(1.001, 1.02),
)
def test_what_an_option_makes_possible_is_offered_without_it(
    preset: str, optimizer: str, saving: dict[str, Any], room: float
) -> None:
    """The GPU has hardly more memory than the run with these options needs, where contradictions would show."""
    plain = {"optim.name": optimizer, "batch.sequence_length": 2048}
    changed = plain | LADDER_LEAST | saving
    changed["batch.micro_tokens"] = changed["batch.sequence_length"]

    def asked(gib: float, options: dict[str, Any]) -> PlanRequest:
        model, precision = made.given(preset, **nested(options)), options.get("precision.name")
        return made.request("tokens", 1e8, memory_gib=gib, given=model, precision=precision)

    needed = judge(asked(999.0, changed)).requested.memory_bytes[2]
    gib = room * needed / GIB
    with_options, without = judge(asked(gib, changed)), judge(asked(gib, plain))
    assert with_options.requested.fits == "fits" and with_options.answer == "yes"
    assert without.answer != "no"
    for verdict in (with_options, without):
        cards = [remedy.what for remedy in verdict.remedies if remedy.what.startswith("a card with")]
        assert all(float(what.split()[3]) > max(24, gib) for what in cards)


def test_the_mixture_that_was_said_not_to_fit_and_to_fit(tmp_path: Path) -> None:
    """3 billion parameters in 8 experts on an RTX 5090: "no" without --optim.offload, "yes-if" with it."""
    file = tmp_path / "moe.toml"
    file.write_text(MOE)
    answers = {}
    for offload in (None, True):
        overrides = {} if offload is None else {"optim": {"offload": offload}}
        request = ask(
            gpu="rtx5090", preset=str(file), tokens="52B", probes=str(tmp_path / "p"), overrides=overrides
        )
        answers[offload] = make_plan(request)
    assert {plan.verdict for plan in answers.values()} == {"yes-if"}
    best = answers[None].best
    assert best is not None and merge.build([best.config]).optim.offload
    cards = [r.what for plan in answers.values() for r in plan.remedies if r.what.startswith("a card with")]
    assert cards == []  # it fits on this one, with changes

    asked = ask(gpu="rtx5090", preset=str(file), tokens="52B", precision="nvfp4", probes=str(tmp_path / "p"))
    plan = make_plan(asked)
    assert plan.verdict == "yes-if" and plan.best is not None
    assert merge.build([plan.best.config]).precision.name == "nvfp4"  # as requested
    with pytest.raises(UsageError, match="fp16"):
        ask(gpu="rtx5090", preset=str(file), tokens="52B", precision="fp16", probes=str(tmp_path / "p"))


def test_an_unknown_architecture_is_said_and_has_a_wider_range() -> None:
    known, unknown = (
        make_plan(ask(gpu=name, preset="124m", tokens="1B")) for name in ("a100 80gb sxm", "mi300x")
    )
    assert not [reason for reason in known.reason_texts() if "calibrates" in reason]
    (said,) = [reason for reason in unknown.reason_texts() if "calibrates CDNA3" in reason]
    assert "ROCm" in said and "untested" in said
    assert known.best is not None and unknown.best is not None
    assert unknown.best.estimate.speed_spread > known.best.estimate.speed_spread


def test_passes_that_wait_for_the_host_are_said() -> None:
    small = {"batch": {"micro_tokens": 512, "sequence_length": 512, "tokens": 8192}}
    launched = {**small, "compute": {"cuda_graph": "off"}}
    plan = make_plan(ask(gpu="h200", preset="124m", tokens="1B", overrides=launched))
    assert plan.best is not None and plan.best.estimate.host_bound
    assert any(reason.startswith("host-bound") and "512 tokens" in reason for reason in plan.reason_texts())
    assert plan.best.estimate.speed_spread > 0.5
    replayed = make_plan(ask(gpu="h200", preset="124m", tokens="1B", overrides=small))
    assert replayed.best is not None and not replayed.best.estimate.host_bound
    assert replayed.best.estimate.tokens_per_second[1] > 3 * plan.best.estimate.tokens_per_second[1]
    assert replayed.best.estimate.memory.allocated > plan.best.estimate.memory.allocated
    assert any("CUDA graphs" in reason for reason in replayed.reason_texts())
    plain = make_plan(ask(gpu="h200", preset="124m", tokens="1B"))
    assert not any(
        reason.startswith("host-bound") or "CUDA graphs" in reason for reason in plain.reason_texts()
    )


def test_what_waits_on_the_host_has_to_fit_there() -> None:
    """d34 on 20 GiB needs host memory. With less host memory, less is offloaded, and
    the reasons and the JSON give the amount.
    """
    request = made.request("tokens", 1e9, memory_gib=20.0, given=made.given("d34"))
    needed = []
    for host_gib in (None, 64, 8):
        host_bytes = None if host_gib is None else host_gib * GIB
        plan = make_plan(replace(request, card=replace(request.card, host_bytes=host_bytes)))
        assert plan.verdict == "yes-if" and plan.best is not None
        needed.append(sum(plan.best.estimate.setting.host_memory.values()))
        assert any("of the host's memory" in reason for reason in plan.reason_texts()) == bool(needed[-1])
        host = memory_json(plan.request, plan.best.estimate)["host"]
        # of weights and states, which checkpoints are written from
        copy = host["items"].get("checkpoint", 0)
        assert sum(host["items"].values()) == needed[-1] + copy and host["available"] == host_bytes
        assert (copy > 0) == (host_gib != 8)
    assert needed[0] == needed[1] > 8 * GIB and needed[2] <= 0.9 * 8 * GIB


def test_a_run_that_fits_on_the_card_also_has_to_fit_on_its_host() -> None:
    by_hand = {"optim": {"name": "adamw", "offload": True}}
    request = made.request("tokens", 1e9, memory_gib=40.0, given=made.given("d30", **by_hand))
    assert make_plan(request).verdict == "yes"
    plan = make_plan(replace(request, card=replace(request.card, host_bytes=8 * GIB)))
    assert plan.verdict == "yes-if" and plan.best is not None
    assert plan.best.estimate.fits_host(8 * GIB)
    assert any("too much for the host" in reason for reason in plan.reason_texts())


@pytest.mark.parametrize("background", [True, False, "auto"])
@pytest.mark.parametrize("host_gib", [1, 64])
def test_checkpoints_in_the_background_need_host_memory(background: Any, host_gib: int) -> None:
    by_hand = {"optim": {"name": "adamw"}, "checkpoint": {"background": background}}
    setting = judge(made.request("tokens", 1e9, given=made.given("d12", **by_hand))).requested.setting
    items = setting.host_items(host_gib * GIB)
    copy = 12 * num_params(setting.model)
    written_in_background = background is True or (background == "auto" and host_gib == 64)
    assert items == ({"checkpoint": copy} if written_in_background else {})
    replicas, shards = (replace(setting, gpus=2, sharded=sharded) for sharded in (False, True))
    if background is True:
        assert replicas.host_items(None) == shards.host_items(None) == items


def test_every_gpu_has_its_own_states_on_the_host() -> None:
    """Uses AdamW, because Muon's momentum is shared."""
    by_hand = {"optim": {"name": "adamw", "offload": True}, "batch": {"tokens": 131072}}
    one, two = (
        judge(made.request("tokens", 1e9, gpus=gpus, given=made.given("d12", **by_hand))).requested.setting
        for gpus in (1, 2)
    )
    assert one.host_memory.keys() == {"optimizer states"}
    assert two.host_memory == {"optimizer states": 2 * one.host_memory["optimizer states"]}


def test_released_gradients_have_one_pass_in_every_stage() -> None:
    stages = [
        {"until": 0.5, "sequence_length": 512, "batch_tokens": 16384},
        {"until": 1.0, "sequence_length": 1024, "batch_tokens": 32768},
    ]
    by_hand = {"optim": {"name": "muon", "gradients": "released"}, "schedule": {"stages": stages}}
    plan = make_plan(made.request("tokens", 1e9, given=made.given("d12", **by_hand), overrides=by_hand))
    assert plan.verdict == "yes" and plan.best is not None
    specs = [spec for _, _, spec in plan.best.candidate.setting.step_specs()]
    assert [(spec.micro_tokens, spec.accumulation) for spec in specs] == [(16384, 1), (32768, 1)]
    assert merge.build([plan.best.config]).batch.micro_tokens == "auto"


def test_gradients_that_the_user_clips_are_not_released() -> None:
    batch = {"tokens": 2048, "sequence_length": 2048}
    verdicts = {}
    for clip in (0.0, 1.0):
        by_hand = {"optim": {"name": "muon", "grad_clip": clip}, "batch": batch}
        request = made.request(
            "tokens", 1e8, memory_gib=8.0, given=made.given("d30", **by_hand), overrides=by_hand
        )
        plan = make_plan(replace(request, card=replace(request.card, host_bytes=GIB)))
        released = [remedy for remedy in plan.remedies if "during the backward" in remedy.what]
        verdicts[clip] = (plan.verdict, bool(released))
        assert clip or (plan.best and plan.best.config["optim"]["gradients"] == "released")
    assert verdicts == {0.0: ("yes-if", True), 1.0: ("no", False)}


@pytest.mark.parametrize(
    "part",
    [{"precision": {"accumulate": "fused"}}, {"compute": {"cuda_graph": "on"}}],
    ids=["products", "graphs"],
)
def test_gradients_that_products_or_graphs_add_to_stay_on_the_card(part: dict[str, Any]) -> None:
    by_hand = {"optim": {"name": "muon"}, **part}
    request = made.request("tokens", 1e9, memory_gib=16.0, given=made.given("d30", **by_hand))
    plan = make_plan(request)
    assert plan.verdict == "yes-if" and plan.best is not None
    optim = merge.build([plan.best.config]).optim
    assert (optim.gradients, optim.weights, optim.offload) == ("device", "float32", True)
    for remedy in plan.remedies:
        found = remedy.options.get("optim", {})
        assert "gradients" not in found and "weights" not in found
        assert "activation_offloading" not in remedy.options.get("compute", {}) or "precision" in part


@pytest.mark.parametrize(
    ("gpu", "preset", "gpus", "context", "length", "optimizer"),
    [
        ("H200 SXM", "340m", 4, 4, 65_536, "muon"),  # a smaller model is better
        ("H200 SXM", "340m", 8, 4, 65_536, "adamw"),
        ("rtx3060 12gb", "1.3b", 2, 2, 16_384, "adamw"),  # does not fit as requested
        ("rtx3060 12gb", "710m", 4, 2, 8_192, "muon"),
    ],
)
def test_a_verdict_on_gpus_that_share_rows(
    gpu: str, preset: str, gpus: int, context: int, length: int, optimizer: str
) -> None:
    """Whatever the planner tries, the same GPUs share the rows."""
    overrides = {
        "parallel": {"context": context},
        "batch": {"sequence_length": length, "tokens": length * gpus // context},
        "model": {"max_position_embeddings": length},
        "optim": {"name": optimizer},
    }
    plan = make_plan(ask(overrides, gpu=gpu, gpus=gpus, preset=preset, hours=1.0))
    for band in plan.bands:
        assert merge.build([band.config]).parallel.context == context
