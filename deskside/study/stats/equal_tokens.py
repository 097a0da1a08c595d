"""Validation loss at equal tokens: what an arm has learned from as much text as the slowest one has seen.

With equal time a slow arm sees fewer tokens, so its loss says how fast it is as much as how well it learns. Here the
loss of each trial is read off its own curve at one number of tokens: the most that every finished trial with the same
baseline has reached. (Not of the whole group: where arms of four sizes have baselines of their own, the largest would
push the others back to before their first evaluation, for comparisons that nobody makes.)

Between two evaluations it is linear in the logarithm of the tokens. Outside of them there is no number. In a run with
a decaying learning rate a faster arm is read off in the middle of its decay, the slowest one at its end, which favours
the slower arm: a study with a budget in tokens has no such doubt, and there the number is the loss at the end.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from deskside.study.results import Arm, Trial

KEY = "val_bpb_equal_tokens"


def with_equal_tokens(arms: Sequence[Arm]) -> list[Arm]:
    """The same arms, finished trials with `val_bpb_equal_tokens` where it can be told, and without elsewhere."""
    families: dict[tuple[str, str], list[Arm]] = {}
    for arm in arms:
        families.setdefault((arm.group, arm.baseline), []).append(arm)
    at = {key: common_tokens(family) for key, family in families.items()}
    return [
        replace(arm, trials=[_filled(trial, at[arm.group, arm.baseline]) for trial in arm.trials])
        for arm in arms
    ]


def common_tokens(arms: Sequence[Arm]) -> float | None:
    """The most tokens at which every finished trial of these arms was trained; None where none says."""
    reached = [
        max(tokens for tokens, _ in points)
        for arm in arms
        for trial in arm.finished()
        if (points := _evaluations(trial))
    ]
    return min(reached, default=None)


def loss_at(trial: Trial, tokens: float) -> float | None:
    """A trial's bits per byte at this many tokens; None before its first evaluation and after its last."""
    points = _evaluations(trial)
    for place, (right, loss) in enumerate(points):
        if right == tokens:
            return loss
        if right > tokens:
            if place == 0:
                return None
            left, before = points[place - 1]
            share = math.log(tokens / left) / math.log(right / left)
            return before + share * (loss - before)
    return None


def _evaluations(trial: Trial) -> list[tuple[float, float]]:
    """(tokens, bits per byte) in rising order, each number of tokens once; the end of the run overrules its curve."""
    found: dict[float, float] = {}
    ends = [{"tokens": trial.metrics.get("tokens"), "val_bpb": trial.metrics.get("val_bpb")}]
    for row in (*trial.curve, *ends):
        tokens, loss = row.get("tokens"), row.get("val_bpb")
        if tokens is not None and loss is not None and 0 < tokens < math.inf and math.isfinite(loss):
            found[tokens] = loss
    return sorted(found.items())


def _filled(trial: Trial, tokens: float | None) -> Trial:
    if trial.status != "finished":
        return trial
    metrics = {key: value for key, value in trial.metrics.items() if key != KEY}
    loss = None if tokens is None else loss_at(trial, tokens)
    return replace(trial, metrics=metrics if loss is None else {**metrics, KEY: loss})
