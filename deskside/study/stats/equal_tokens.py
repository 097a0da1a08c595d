"""Validation loss at equal tokens, which separates how well an arm learns from how fast it trains.

In equal time a slow arm sees fewer tokens, so its final loss depends on its speed as well. Here the loss of each trial
is interpolated at one number of tokens: the most that every finished trial with the same baseline has reached. The
whole group is not used, because if arms of four sizes have baselines of their own, the slowest size would move the
others back to before their first evaluation, although nothing compares them.

The interpolation between two evaluations is linear in the logarithm of the tokens; there is no extrapolation. With a
decaying learning rate the faster arms are evaluated in the middle of their decay and the slowest one at its end, which
favors the slower arm. A budget in tokens avoids this: the value is then the loss at the end.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from deskside.study.results import Arm, Trial

KEY = "val_bpb_equal_tokens"


def with_equal_tokens(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms with `val_bpb_equal_tokens` computed anew in every finished trial that allows it."""
    families: dict[tuple[str, str], list[Arm]] = {}
    for arm in arms:
        families.setdefault((arm.group, arm.baseline), []).append(arm)
    at = {key: common_tokens(family) for key, family in families.items()}
    return [
        replace(arm, trials=[_filled(trial, at[arm.group, arm.baseline]) for trial in arm.trials])
        for arm in arms
    ]


def common_tokens(arms: Sequence[Arm]) -> float | None:
    """Return the most tokens that every finished trial of these arms has reached, or None without evaluations."""
    reached = [
        max(tokens for tokens, _ in points)
        for arm in arms
        for trial in arm.finished()
        if (points := _evaluations(trial))
    ]
    return min(reached, default=None)


def loss_at(trial: Trial, tokens: float) -> float | None:
    """Interpolate a trial's bits per byte at this many tokens; None outside its first and last evaluation."""
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
    """Return (tokens, bits per byte) by tokens. The final evaluation replaces a curve point at the same tokens."""
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
