"""Findings on overfitting in studies with known curves."""

import json
from dataclasses import replace
from pathlib import Path

from deskside.study.narrative.overfitting import MARGIN, overfit_arms, overfitting
from deskside.study.results import Results, Trial
from deskside.study.stats.languages import read_records
from tests.study.made import results as made
from tests.study.made_languages import FALLING, LANGUAGES, RISING, bits_per_byte, curve, write
from tests.study.small import arm, study


def trial(losses: tuple[float, ...], seed: int = 1, training: tuple[float, float] = (4.0, 1.0)) -> Trial:
    return Trial(seed, "finished", metrics={"val_bpb": 2.0, "tokens": 1000.0}, curve=curve(losses, training))


def with_trials(*trials: Trial) -> Results:
    return study([replace(arm("base", []), trials=list(trials))])


def test_every_seed_must_rise_by_more_than_the_margin() -> None:
    assert overfit_arms(with_trials(trial(RISING), trial(RISING, 2)))
    assert not overfit_arms(with_trials(trial(RISING), trial(FALLING, 2)))
    assert overfit_arms(with_trials(trial(RISING), Trial(2, "oom")))  # only finished trials count
    for rise in (1 + 0.9 * MARGIN, 1 + 1.1 * MARGIN):
        found = overfit_arms(with_trials(trial((1.5, 1.2, 1.2, 1.2 * rise))))
        assert bool(found) == (rise > 1 + MARGIN)


def test_a_training_loss_that_rises_as_well_is_not_overfitting() -> None:
    assert not overfit_arms(with_trials(trial(RISING, training=(1.0, 4.0))))


def test_the_final_evaluation_on_other_text_does_not_count() -> None:
    """The metric val_bpb of these trials is 2.0, far above all evaluations during the training."""
    assert not overfit_arms(with_trials(trial(FALLING)))
    assert not overfit_arms(made())
    assert not overfit_arms(study([arm("base", [1.0, 1.1]), arm("other", [None, None])]))  # without curves


def test_findings_name_arms_values_languages_and_what_was_repeated(tmp_path: Path) -> None:
    languages = dict.fromkeys(LANGUAGES, FALLING) | {"bn": RISING, "gu": (1.0, 0.8, 1.1, 1.6)}
    epochs = {"bn": 7.6, "en": 1.1, "gu": 12.4}
    results = write(tmp_path, bits_per_byte(2), RISING, languages, mixture_epochs=epochs)
    whole, by_language, repeated, advice = overfitting(results, read_records(results, tmp_path))
    assert whole.startswith("Overfitting in \u201cdense\u201d and \u201cmoe\u201d: in every seed, ")
    assert "moe: lowest 1.2000 at 40 % of the training, last 1.3000;" in whole
    assert "the loss of bn and gu rose" in by_language and "(gu most, by 100 % on average)" in by_language
    assert by_language.endswith("that of en, hi, ta and te did in no seed.")
    assert repeated.endswith(": gu 12 and bn 8 times.")
    assert "fewer minutes, more text or --data.language_temperature closer to 1 (here 3.33)." in advice


def test_arms_that_ended_with_their_best_weights_are_not_said_to_be_compared_later(tmp_path: Path) -> None:
    results = write(tmp_path, bits_per_byte(2), RISING, best_step=20)
    (found,) = overfitting(results, read_records(results, tmp_path))
    assert found.startswith("Overfitting in ")
    summary = tmp_path / "runs" / "moe-s2" / "summary.json"  # one ended with its last weights
    content = json.loads(summary.read_text())
    del content["best_step"]
    summary.write_text(json.dumps(content))
    assert len(overfitting(results, read_records(results, tmp_path))) == 2


def test_a_language_alone_is_told_without_the_whole_text(tmp_path: Path) -> None:
    languages = dict.fromkeys(LANGUAGES, FALLING) | {"gu": RISING}
    results = write(tmp_path, bits_per_byte(2), FALLING, languages)
    assert not overfit_arms(results)
    by_language, advice = overfitting(results, read_records(results, tmp_path))
    assert "the loss of gu rose" in by_language and "language_temperature" not in advice


def test_seeds_that_disagree_about_a_language_are_told(tmp_path: Path) -> None:
    languages = dict.fromkeys(LANGUAGES, FALLING) | {"gu": RISING}
    results = write(tmp_path, bits_per_byte(2), FALLING, languages)
    metrics = tmp_path / "runs" / "moe-s2" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[-1]["val_bpb/ta"] = 2.0
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dense, moe, _ = overfitting(results, read_records(results, tmp_path))
    assert "some seeds" not in dense and dense.endswith("that of bn, en, hi, ta and te did in no seed.")
    assert moe.endswith("; that of ta did in some seeds; that of bn, en, hi and te did in no seed.")


def test_without_overfitting_nothing_is_said_and_groups_are_told_apart(tmp_path: Path) -> None:
    results = write(tmp_path / "a", bits_per_byte(1))
    assert overfitting(results, read_records(results, tmp_path / "a")) == []
    results = write(tmp_path / "b", bits_per_byte(1), RISING)
    other = replace(results.groups[0], name="b", title="Another", budget="100M tokens")
    arms = [*results.arms, replace(results.arms[0], id="x", label="x", group="b", baseline="x")]
    found = overfitting(replace(results, groups=[*results.groups, other], arms=arms), {})
    assert [line.split(":")[0] for line in found] == ["main", "main", "Another", "Another"]
    assert "use fewer minutes or more text." in found[1] and "use a smaller budget or more text." in found[3]
