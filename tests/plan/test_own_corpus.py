"""Own-corpus mode: what it changes, and that it changes nothing else."""

from pathlib import Path
from typing import Any

import pytest

from deskside.budget.loss import MAX_EPOCHS, MAX_WEIGHTS_PER_TOKEN
from deskside.budget.scaling import decay_for_epochs, scales
from deskside.config import merge
from deskside.optim.lr_schedule import lr_factor
from deskside.plan.planner import make_plan
from deskside.plan.result import Plan
from deskside.utils.errors import UsageError
from tests.plan import made
from tests.plan.made import ask

UNIQUE = 20_000_000


def best(**options: Any) -> Plan:
    plan = make_plan(made.request(**{"value": 1.0, "unique_tokens": UNIQUE, **options}))
    assert plan.best is not None
    return plan


def test_many_epochs_are_regularised_and_the_model_is_the_same() -> None:
    plain, own = best(), best(own_corpus=True)
    for before, after in zip(plain.bands, own.bands, strict=True):
        assert before.candidate == after.candidate
        assert after.config["optim"]["weight_decay_epochs"] == MAX_EPOCHS
        assert after.config["checkpoint"]["keep_best"] is True
        assert after.config["data"]["packing"] == "shuffled"
        assert "weight_decay_epochs" not in before.config.get("optim", {})
        # Without the mode, a run of many epochs also ends with its best checkpoint.
        assert before.config["checkpoint"] == after.config["checkpoint"]
        assert before.config["evaluate"] == after.config["evaluate"]
        built = merge.build([after.config])
        every, length = built.evaluate.every, built.schedule.length
        assert every.unit == length.unit and every.value * 20 < length.value
        assert "--optim.weight_decay_epochs 4.0" in after.command and after.candidate.weights <= 2 * UNIQUE
    (said,) = [reason for reason in own.reason_texts() if reason.startswith("your 20M tokens")]
    assert f"{own.best.candidate.tokens[1] / UNIQUE:.3g}"[:2] in said and "best checkpoint" in said


def test_few_epochs_are_not() -> None:
    many = 10**12
    plain, own = best(unique_tokens=many), best(unique_tokens=many, own_corpus=True)
    assert [band.config for band in plain.bands] == [band.config for band in own.bands]
    assert "needs no regularization" in " ".join(own.reason_texts())
    assert all("keep_best" not in band.config.get("checkpoint", {}) for band in plain.bands)


@pytest.mark.parametrize(
    "given",
    [{"average": {"name": "ema"}}, {"evaluate": {"every": None}}, {"checkpoint": {"keep_best": False}}],
)
def test_without_the_mode_a_run_that_cannot_keep_its_best_checkpoint_is_planned(
    given: dict[str, Any],
) -> None:
    plan = best(overrides=given)
    assert not plan.best.config.get("checkpoint", {}).get("keep_best", False)
    assert "best checkpoint" not in " ".join(plan.reason_texts())


def test_sharded_weights_are_planned_without_their_best_checkpoint() -> None:
    large = {"kind": "tokens", "value": 1e9, "memory_gib": 20.0, "given": made.given("d36"), "gpus": 4}
    plan = best(**large)
    assert plan.best.candidate.setting.sharded and "checkpoint" not in plan.best.config
    with pytest.raises(UsageError, match=r"^--own-corpus: .*parallel\.mode replicate"):
        best(own_corpus=True, **large)


@pytest.mark.parametrize("unique, expected", [(100_000, 16_384), (1_000_000, 120_000), (20_000_000, 262_144)])
def test_evaluations_take_a_small_part_of_a_run_of_forty_epochs(unique: int, expected: int) -> None:
    plan = best(unique_tokens=unique, value=10.0)
    assert plan.best.candidate.tokens[1] == 40 * unique
    assert plan.best.config["evaluate"]["tokens"] == expected


def test_what_the_user_gives_stays() -> None:
    # As given by the command line: text that is not validated yet.
    given = {"optim": {"weight_decay_epochs": "8"}, "checkpoint": {"keep_best": "false"}, "dropout": "0.1"}
    own = best(own_corpus=True, overrides=given)
    config, epochs = own.best.config, own.best.candidate.tokens[1] / UNIQUE
    assert config["optim"]["weight_decay_epochs"] == 8 and config["checkpoint"]["keep_best"] is False
    said = " ".join(own.reason_texts())
    assert f"weight decay is {epochs / 8:.1f} times" in said and "best checkpoint" not in said
    assert config["dropout"] == 0.1 and "0.1 of the values" in said


def test_what_a_file_of_the_user_sets_stays(tmp_path: Path) -> None:
    """A key in a file has the rank of an option, unlike the presets that it builds on."""
    file = tmp_path / "mine.toml"
    lines = (
        '[data]\npacking = "best-fit"',
        '[evaluate]\nevery = "500 steps"',
        "[optim]\nweight_decay_epochs = 8.0",
    )
    file.write_text("\n".join(('base = "124m"', *lines)))
    request = ask(gpu="rtx4090", hours=1.0, preset=str(file), unique_tokens="20M", own_corpus=True)
    plan = make_plan(request)
    assert plan.best is not None
    config = plan.best.config
    assert config["data"]["packing"] == "best-fit" and config["evaluate"]["every"] == "500 steps"
    assert config["optim"]["weight_decay_epochs"] == 8 and config["checkpoint"]["keep_best"] is True
    assert "documents are shuffled" not in " ".join(plan.reason_texts())
    assert "--data.packing" not in plan.best.command and "--checkpoint.keep_best true" in plan.best.command


@pytest.mark.parametrize("given", [{"average": {"name": "ema"}}, {"evaluate": {"every": None}}])
def test_a_refusal_names_the_mode(given: dict[str, Any]) -> None:
    """The user has not set keep_best, so the error names the mode that did."""
    with pytest.raises(UsageError, match=r"^--own-corpus: .*--checkpoint\.keep_best false"):
        best(own_corpus=True, overrides=given)
    kept = {**given, "checkpoint": {"keep_best": False}}
    assert best(own_corpus=True, overrides=kept).best.config["checkpoint"]["keep_best"] is False


@pytest.mark.parametrize("optim", [{"scale": False}, {"weight_decay": 0.0}])
def test_a_decay_that_cannot_grow_stays(optim: dict[str, Any]) -> None:
    own = best(own_corpus=True, overrides={"optim": optim})
    assert "weight_decay_epochs" not in own.best.config["optim"]
    assert own.best.config["data"]["packing"] == "shuffled" and "weight decay is" not in " ".join(
        own.reason_texts()
    )


def test_a_limit_on_size_is_said() -> None:
    """With a long time, the best model is the largest that the text allows."""
    plan = make_plan(made.request(value=48.0, unique_tokens=UNIQUE, own_corpus=True))
    assert plan.best.candidate.weights <= MAX_WEIGHTS_PER_TOKEN * UNIQUE
    assert "larger models than 40M weights" in " ".join(plan.reason_texts())


def test_it_needs_the_size_of_the_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--unique-tokens"):
        ask(gpu="rtx4090", hours=1.0, own_corpus=True)
    with pytest.raises(UsageError, match="pretraining"):
        adapter = {"adapter": {"rank": 8}, "optim": {"name": "adamw"}}
        ask(adapter, gpu="rtx4090", hours=1.0, preset="340m", unique_tokens="1M", own_corpus=True)


def test_the_decay_per_epoch_is_that_of_four_epochs_and_of_slowrun() -> None:
    """The sum of learning rate x decay over a run, with our schedules. slowrun at
    fd342f0 has 1.93 and 2.25 per epoch.
    """
    optim, schedule = merge.build([]).optim, merge.build([]).schedule
    steps, batch = 4000, 2**16
    for epochs in (4, 8, 11, 15):
        scaling = scales(768, batch, steps * batch)
        decay = decay_for_epochs(epochs, MAX_EPOCHS) * scaling.weight_decay * optim.weight_decay
        rates = [lr_factor(schedule, step / steps, steps) * (1 - step / steps) for step in range(steps)]
        total = optim.lr * scaling.lr * decay * sum(rates)
        assert total / epochs == pytest.approx(1.94, rel=0.01)
    assert decay_for_epochs(3, 4) == decay_for_epochs(100, None) == 1.0
    assert decay_for_epochs(40, 4) == decay_for_epochs(32_397, 4) == 10.0
    with pytest.raises(UsageError, match="needs --optim"):
        merge.build([{"optim": {"scale": False, "weight_decay_epochs": 4}}])
