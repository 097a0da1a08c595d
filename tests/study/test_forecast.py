"""The forecast of a trial's time, compared with arithmetic on the planner's own figures."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deskside.config.duration import Duration
from deskside.config.sections import DataConfig
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.rows import PackedDataset
from deskside.study.forecast import CPU_SETUP_SECONDS, LocalMachine, TrialForecast, forecast, total_seconds
from deskside.study.spec.expand import PlannedArm, expand
from deskside.study.spec.parse_spec import load
from deskside.study.spec.spec import Budget
from tests.plan.made import ask
from tests.train import tiny_run

UNKNOWN = LocalMachine(None, "nothing was measured here")


def card(name: str = "rtx4090") -> LocalMachine:
    return LocalMachine(ask(gpu=name, preset="124m", probes="nowhere"))


def arm(study: str, only: str, budget: Duration | None = None) -> PlannedArm:
    found = expand(load(study), only=[only], budget=Budget(budget) if budget else None)
    return next(arm for arm in found.arms if arm.id == only)


BF16, FP4 = "size_small-gqa_off-fp4_off", "size_small-gqa_off-fp4_on"


def test_time_is_the_budget_and_what_lies_around_it() -> None:
    found = forecast(arm("matrix16", BF16), card())
    assert found.seconds_training == 1800
    assert found.seconds_total is not None
    assert 1800 + card().setup_seconds < found.seconds_total < 2200
    assert found.source == "published"


def test_tokens_are_divided_by_the_modelled_speed() -> None:
    """The speed is the one that `deskside plan` gives for this model on this GPU, in tokens and in time."""
    short, long = (forecast(arm("matrix16", BF16, Duration(n * 10**8, "tokens")), card()) for n in (1, 2))
    timed = forecast(arm("matrix16", BF16, Duration(1000, "seconds")), card())
    steps = forecast(arm("matrix16", BF16, Duration(1000, "steps")), card())
    assert short.seconds_training and long.seconds_training and timed.tokens and steps.tokens
    assert long.seconds_training == pytest.approx(2 * short.seconds_training)
    assert 1e8 / short.seconds_training == pytest.approx(timed.tokens / 1000)
    assert steps.tokens == 1000 * 65536


def test_a_larger_model_and_an_emulated_precision_take_longer() -> None:
    budget = Duration(10**8, "tokens")
    small, large, emulated = (
        forecast(arm("matrix16", name, budget), card()) for name in (BF16, "size_xlarge-gqa_off-fp4_off", FP4)
    )
    assert small.seconds_training and large.seconds_training and emulated.seconds_training
    assert large.seconds_training > 4 * small.seconds_training
    assert emulated.seconds_training > small.seconds_training
    assert (small.note, emulated.note) == ("", "low-precision format emulated here")


def test_the_micro_batch_is_fitted_into_the_fraction() -> None:
    ceiling = 24 * 0.98
    for fraction in (0.85, 0.6):
        found = forecast(arm("matrix16", "size_xlarge-gqa_off-fp4_off"), card(), fraction)
        assert found.memory_gib is not None
        assert 0.1 * ceiling < found.memory_gib < fraction * ceiling


def test_what_cannot_fit_is_said() -> None:
    found = forecast(arm("batch", "micro_524288"), card())
    assert found.note.startswith("not expected to fit: 1")
    assert found.memory_gib is not None and found.memory_gib > 100


def test_where_nothing_was_measured_nothing_is_guessed() -> None:
    tokens = forecast(arm("matrix16", BF16, Duration(10**8, "tokens")), UNKNOWN)
    assert (tokens.seconds_total, tokens.seconds_training, tokens.memory_gib, tokens.source) == (
        None,
        None,
        None,
        "",
    )
    timed = forecast(arm("matrix16", BF16), UNKNOWN)
    assert (timed.seconds_training, timed.tokens, timed.source) == (1800, None, "budget")
    assert timed.seconds_total == 1800 + CPU_SETUP_SECONDS


@pytest.mark.parametrize("budget", [Duration(10**8, "tokens"), Duration(1000, "seconds")])
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_is_not_forecast_as_one_on_the_gpu(budget: Duration) -> None:
    plain = arm("matrix16", BF16, budget)
    compute = plain.config.compute.model_copy(update={"device": "cpu"})
    on_cpu = replace(plain, config=plain.config.model_copy(update={"compute": compute}))
    assert forecast(on_cpu, card()) == forecast(plain, UNKNOWN) != forecast(plain, card())
    assert card().running(on_cpu.config).why_unknown and card().running(plain.config) == card()


def test_evaluation_counts(tmp_path: Path) -> None:
    """The whole validation split is evaluated at the end and a part of it during the
    run, at a third of a step's time per token.
    """
    (tmp_path / "index.json").write_text(json.dumps({"splits": {"val": {"tokens": 50_000_000}}}))
    plain = arm("matrix16", BF16)
    data = plain.config.data.model_copy(update={"path": str(tmp_path)})
    prepared = replace(plain, config=plain.config.model_copy(update={"data": data}))
    without, found = forecast(plain, card()), forecast(prepared, card())
    assert found.tokens and found.seconds_total and without.seconds_total
    speed = found.tokens / 1800
    # Without the data, only the evaluations during the run are known, and one more at the end.
    assert found.seconds_total - without.seconds_total == pytest.approx((50_000_000 - 1_000_000) / speed / 3)
    (tmp_path / "index.json").write_text("{")
    assert forecast(prepared, card()) == without


def test_totals() -> None:
    def of(seconds: float | None) -> TrialForecast:
        return TrialForecast(seconds, None, None, None, "")

    assert total_seconds([of(10.0), of(20.0), of(30.0)]) == 60
    assert total_seconds([of(10.0), of(20.0), of(30.0)], devices=2) == 30
    assert total_seconds([of(10.0), of(90.0)], devices=4) == 90
    assert total_seconds([of(10.0), of(None)]) is None


def test_no_torch() -> None:
    """A dry run answers at once, because nothing that it needs imports torch."""
    code = (
        "import sys\n"
        "from deskside.study import forecast\n"
        "from deskside.study.narrative import dry_run\n"
        "from deskside.study.spec import expand, parse_spec\n"
        "study = parse_spec.load('matrix16'); found = expand.expand(study); here = forecast.local_machine('nowhere')\n"
        "known = {a.id: forecast.forecast(a, here, study.memory_fraction) for a in found.arms}\n"
        "dry_run.print_plan(study, found, known, here)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "48 trials of 16 arms" in done.stdout


@pytest.mark.parametrize("key", ["language_temperature", "source_temperature"])
def test_the_epochs_of_a_mixture_are_those_of_the_run(key: str, tmp_path: Path) -> None:
    """Against the rows that a run draws, whose weights are rounded to whole rows of a period."""
    texts = [("en" if n % 4 else "xx", f"{n:03} {tiny_run.TEXT}") for n in range(120)]
    lines = [
        json.dumps({"text": text, "lang": name, "source": f"{name}:{n}"})
        for n, (name, text) in enumerate(texts)
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    options = CorpusOptions(vocab_size=300, val_fraction=0.3, workers=1, quiet=True)
    prepare([str(tmp_path / "text.jsonl")], tmp_path / "data", options)
    planned = arm("languages", "baseline", Duration(10**4, "tokens"))
    data = DataConfig.model_validate({"path": str(tmp_path / "data"), key: 5.0})
    mixed = replace(planned, config=planned.config.model_copy(update={"data": data}))
    # Shuffled packing has no padding.
    dataset = PackedDataset(tmp_path / "data", "train", 64, packing="shuffled", **{key: 5.0})
    drawn = dataset.epochs(10**4 // 64)
    line = forecast(mixed, UNKNOWN).mixture
    for name, epochs in drawn.items():
        (found,) = re.findall(rf"\b{name} ([\d.]+)", line.split(";")[0])
        assert float(found) == pytest.approx(epochs, rel=0.03)  # the last row is short
    assert f"--data.{key} " in line

    natural = data.model_copy(update={key: None})
    missing = data.model_copy(update={"path": str(tmp_path / "nowhere")})
    for other in (natural, missing):
        config = planned.config.model_copy(update={"data": other})
        assert forecast(replace(planned, config=config), UNKNOWN).mixture == ""
