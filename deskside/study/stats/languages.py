"""Comparison of a study's arms in each language of the validation text.

A language of an arm is treated as an arm of its own, whose validation loss is the bits per byte of that language.
`compare` then computes estimates, paired differences, intervals and verdicts as for all other metrics. The languages of
an arm are its family of comparisons: each verdict is corrected for their number. Their unweighted mean is a comparison
apart, because the validation loss of a trial weighs each language by its bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from deskside.run.record import RunRecord, mapping, number, read_brief
from deskside.study.metrics import QUALITY
from deskside.study.results import Arm, Group, Results, Trial
from deskside.study.stats.compare import compare

MEAN = "mean of the languages"  # in place of a language: the unweighted mean over all
Records = Mapping[str, RunRecord]  # directory of a trial -> what is in it


@dataclass(frozen=True)
class ByLanguage:
    """The arms of a group in each language.

    Attributes:
        languages: All languages that were measured, in alphabetical order.
        arms: (arm id, language or MEAN) -> that language of the arm as an arm; absent if no trial measured it.
        missing: A sentence for each finished trial that lacks a language.
    """

    languages: list[str]
    arms: dict[tuple[str, str], Arm]
    missing: list[str]


def read_records(results: Results, folder: Path) -> Records:
    """Return what each finished trial of the study in `folder` has written, without directories that are gone."""
    runs = [trial.run for arm in results.arms for trial in arm.finished() if trial.run]
    return {run: read_brief(folder / run) for run in runs if (folder / run).is_dir()}


def by_language(results: Results, group: Group, records: Records) -> ByLanguage | None:
    """Compare the arms of a group in each language; None if no finished trial has results in several languages."""
    arms = results.arms_in(group)
    bpb_of = {
        (arm.id, trial.seed): _bits_per_byte(records.get(trial.run))
        for arm in arms
        for trial in arm.finished()
    }
    languages = sorted({language for values in bpb_of.values() for language in values})
    if len(languages) < 2:
        return None
    missing: list[str] = []
    for arm in arms:
        for trial in arm.finished():
            values = bpb_of[arm.id, trial.seed]
            if absent := [language for language in languages if language not in values]:
                where = "any language" if len(absent) == len(languages) else ", ".join(absent)
                missing.append(f"{arm.label}, seed {trial.seed}: no result for {where}.")
            elif values:
                values[MEAN] = fmean(values.values())
    parts = [
        (arm, language, trials)
        for arm in arms
        for language in (*languages, MEAN)
        if (
            trials := [
                Trial(seed, "finished", metrics={QUALITY: values[language]})
                for (arm_id, seed), values in bpb_of.items()
                if arm_id == arm.id and language in values
            ]
        )
    ]
    compared = compare(replace(results, groups=[], arms=[_as_arm(*part) for part in parts]))
    keys = [(arm.id, language) for arm, language, _ in parts]
    return ByLanguage(languages, dict(zip(keys, compared.arms, strict=True)), missing)


def _bits_per_byte(record: RunRecord | None) -> dict[str, float]:
    """Return the final bits per byte of each language of a run."""
    stored = mapping(record.summary.get("val_languages")) if record is not None else {}
    found = {language: number(mapping(values).get("bpb")) for language, values in stored.items()}
    return {language: bpb for language, bpb in found.items() if bpb is not None}


def _as_arm(arm: Arm, language: str, trials: list[Trial]) -> Arm:
    """Return one language of an arm as an arm, whose baseline is the same language of the arm's baseline."""
    return Arm(
        id=f"{arm.id}/{language}",
        label=language,
        group=f"{arm.id}/mean" if language == MEAN else arm.id,  # verdicts are corrected within a group
        levels={},
        baseline=f"{arm.baseline}/{language}",
        trials=trials,
    )
