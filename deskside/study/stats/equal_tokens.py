"""Validation loss at equal tokens, which separates how well an arm learns from how fast it trains.

In equal time a slow arm sees fewer tokens, so its final loss depends on its speed as well. Here the loss of each trial
is interpolated at one number of tokens: the most that every finished trial with the same baseline has reached. Trials
with another baseline are ignored, even in the same group. Otherwise, in a group of four model sizes with a baseline
each, the slowest size could set a number of tokens before the first evaluation of the fastest.

The interpolation between two evaluations is linear in the logarithm of the tokens; there is no extrapolation. With a
decaying learning rate, the faster arms are evaluated in the middle of their decay and the slowest one at its end, which
favors the slowest. A budget in tokens avoids this, because the value is then the loss at the end.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from deskside.study.results import Arm, Trial

KEY = "val_bpb_equal_tokens"


def with_equal_tokens(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms with `val_bpb_equal_tokens` recomputed in every finished trial that has enough evaluations."""
    families: dict[tuple[str, str], list[Arm]] = {}
    for arm in arms:
        families.setdefault((arm.group, arm.baseline), []).append(arm)
    tokens = {key: common_tokens(family) for key, family in families.items()}
    return [
        replace(arm, trials=[_with_metric(trial, tokens[arm.group, arm.baseline]) for trial in arm.trials])
        for arm in arms
    ]


def common_tokens(arms: Sequence[Arm]) -> float | None:
    """Return the most tokens that every finished trial of these arms has reached, or None without evaluations."""
    evaluations = [_evaluations(trial) for arm in arms for trial in arm.finished()]
    return min((points[-1][0] for points in evaluations if points), default=None)


def loss_at(trial: Trial, tokens: float) -> float | None:
    """Interpolate a trial's bits per byte at this many tokens; None before its first or after its last evaluation."""
    left: tuple[float, float] | None = None
    for right_tokens, right_loss in _evaluations(trial):
        if right_tokens == tokens:
            return right_loss
        if right_tokens > tokens:
            if left is None:
                return None
            left_tokens, left_loss = left
            weight = math.log(tokens / left_tokens) / math.log(right_tokens / left_tokens)
            return left_loss + weight * (right_loss - left_loss)
        left = right_tokens, right_loss
    return None


def _evaluations(trial: Trial) -> list[tuple[float, float]]:
    """Return (tokens, bits per byte) of every evaluation in ascending order of tokens.

    The final evaluation is among them if the curve has it, which it does if the others read the same text
    (`execute/measure.py`). Otherwise a fast arm would have the loss of a part of the text, and the slowest one that of
    all of it.
    """
    loss_by_tokens: dict[float, float] = {}
    for row in trial.curve:
        tokens, loss = row.get("tokens"), row.get("val_bpb")
        if tokens is not None and loss is not None and 0 < tokens < math.inf and math.isfinite(loss):
            loss_by_tokens[tokens] = loss
    return sorted(loss_by_tokens.items())


def _with_metric(trial: Trial, tokens: float | None) -> Trial:
    """Return a finished trial with its loss at this many tokens among its metrics, if it can be interpolated."""
    if trial.status != "finished":
        return trial
    metrics = {key: value for key, value in trial.metrics.items() if key != KEY}
    loss = None if tokens is None else loss_at(trial, tokens)
    return replace(trial, metrics=metrics if loss is None else {**metrics, KEY: loss})
