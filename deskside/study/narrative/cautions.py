"""Cautions that a study's numbers need: arms that overfit, and GPUs that other processes used."""

from deskside.study.narrative.findings import has_time_budget
from deskside.study.narrative.overfitting import overfitting
from deskside.study.results import Results, Trial
from deskside.study.stats.languages import Records
from deskside.utils.format import plural


def cautions(results: Results, records: Records) -> list[str]:
    """Return the cautions of a study, in sentences; none if there is nothing to say."""
    return [*_shared_gpus(results), *overfitting(results, records)]


def trials_on_shared_gpus(results: Results) -> list[Trial]:
    """Return the trials during which another process computed on their GPU (train/loop/gpu_sharing.py)."""
    return [trial for arm in results.arms for trial in arm.trials if trial.metrics.get("gpu_shared")]


def _shared_gpus(results: Results) -> list[str]:
    shared = trials_on_shared_gpus(results)
    if not shared:
        return []
    total = sum(len(arm.finished()) for arm in results.arms)
    affected = "Speed, power and energy"
    if any(has_time_budget(group) for group in results.groups):
        affected += ", and losses at equal time,"
    return [
        f"Another process computed on the GPU during {len(shared)} of {plural(total, 'trial')}. {affected} of these "
        "trials cannot be compared. Repeat them on GPUs that nothing else uses."
    ]
