"""The plan shown before a study starts: every arm and its changes, at 80 columns, and as JSON."""

import io
import json

import pytest

from deskside.study.forecast import LocalMachine, forecast
from deskside.study.narrative.dry_run import _value_text, changes, plan_json, print_plan
from deskside.study.spec import parse_spec
from deskside.study.spec.expand import expand
from deskside.utils.printer import Printer
from tests.plan.made import ask

CARD = LocalMachine(ask(gpu="rtx4090", preset="124m", probes="nowhere"))
UNKNOWN = LocalMachine(None, "nothing was measured here")


def shown(name: str, machine: LocalMachine, devices: int = 1) -> str:
    study = parse_spec.load(name)
    found = expand(study)
    known = {arm.id: forecast(arm, machine, study.memory_fraction) for arm in found.arms}
    out = io.StringIO()
    print_plan(study, found, known, machine, devices, Printer(out, 80))
    return out.getvalue()


@pytest.mark.parametrize("name", parse_spec.preset_names())
def test_everything_is_there_within_80_columns(name: str) -> None:
    text = shown(name, CARD)
    assert max(len(line) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    study = parse_spec.load(name)
    for group in study.groups:
        assert group.name in words or not study.grouped
    found = expand(study)
    trials = sum(found.seeds[arm.group] for arm in found.arms)
    assert f"{trials} trials of {len(found.arms)} arms: about" in words


def test_an_arm_shows_what_it_changes() -> None:
    lines = shown("matrix16", CARD).splitlines()
    (base,) = [line for line in lines if line.startswith("medium, MHA, BF16")]
    (gqa,) = [line for line in lines if line.startswith("medium, GQA, BF16")]
    assert base.split()[3] == "*"
    assert "model.num_key_value_heads 3" in gqa
    assert "*" not in gqa


def test_an_unknown_time_is_said_and_not_guessed() -> None:
    text = " ".join(shown("batch-quick", UNKNOWN).split())
    assert "training: not known nothing was measured here" in text
    assert "GiB" not in text
    # A budget in time is known.
    assert "48 trials of 16 arms: about" in " ".join(shown("matrix16", UNKNOWN).split())


def test_changes_are_the_keys_that_the_study_sets() -> None:
    study = parse_spec.load("optimizer")
    arms = {arm.id: arm for arm in expand(study).arms}
    assert changes(study, arms["rate-optimizer_adamw-0.002"], arms["rate-baseline"]) == {
        "optim.name": "adamw",
        "optim.lr": 0.002,
    }
    assert changes(study, arms["rate-baseline"], arms["rate-baseline"]) == {}


def test_a_long_text_is_no_list_of_entries() -> None:
    assert _value_text("data/the-english-part-of-a-corpus") == "data/the-english-part-of-a-corpus"
    assert _value_text(["q_proj", "k_proj", "v_proj"]) == "(3 entries)"


def test_json_says_the_same() -> None:
    study = parse_spec.load("precision")
    found = expand(study, only=["loss"])
    known = {arm.id: forecast(arm, CARD) for arm in found.arms}
    plain = json.loads(json.dumps(plan_json(study, found, known, CARD, devices=4), allow_nan=False))
    assert [arm["id"] for arm in plain["arms"]] == [arm.id for arm in found.arms]
    assert (plain["trials"], plain["devices"]) == (27, 4)
    total = sum(3 * (known[arm.id].seconds_total or 0) for arm in found.arms)
    assert plain["seconds"] == pytest.approx(total / 4)
    assert plain["groups"][0]["factors"]["precision"][0] == "bf16"
    fp8 = next(arm for arm in plain["arms"] if arm["id"] == "loss-precision_fp8-delayed")
    assert fp8["changes"] == {"precision.name": "fp8-delayed"}
    assert fp8["baseline"] == "loss-precision_bf16"
