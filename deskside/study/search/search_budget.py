"""The division of a search's hours: length and number of its trials, and the share of the confirmation."""

from dataclasses import dataclass

from deskside.study.search.search_folder import confirmation_rounds
from deskside.utils.errors import UsageError
from deskside.utils.format import duration, plural

WHOLE_TRIALS = 24  # trials that should fit; successive halving makes about twice as many of them
FEWEST_WHOLE_TRIALS = 4
CONFIRM_SHARE = 0.4  # of the hours, at most, for a confirmation at the target's length


@dataclass(frozen=True)
class Division:
    """The division of a search's hours.

    Attributes:
        target_seconds, trial_seconds: Training time.
        confirm_at_target: True if the confirmation trains the target.
        confirm_seconds: On the clock.
        whole_trials: Trials that fit if none is ended early.
    """

    target_seconds: float
    trial_seconds: float
    confirm_at_target: bool
    confirm_seconds: float
    whole_trials: float


def divide(
    seconds: float,
    devices: int,
    setup: float,
    seeds: int,
    target: float | None = None,
    trial: float | None = None,
) -> Division:
    """Return the division of `seconds` on the clock. Raises UsageError if too few trials would fit.

    Args:
        devices: Trials that run at once.
        setup: Seconds of a trial apart from its training.
        seeds: Of the confirmation.
        target: Training time of the run that is searched for; None if it is that of a trial.
        trial: Training time of a trial if the user gave it.
    """
    rounds = confirmation_rounds(seeds, devices)
    at_target = target is not None and rounds * (target + setup) <= CONFIRM_SHARE * seconds
    shortest = setup  # a trial should not set up for longer than it trains
    if trial is None:
        if target is not None and at_target:
            trial = (seconds - rounds * (target + setup)) * devices / WHOLE_TRIALS - setup
        else:
            trial = seconds * devices / (WHOLE_TRIALS + rounds * devices) - setup
        trial = trial if target is None else min(trial, target)
        if trial < min(shortest, target or shortest):
            needed = 2 * setup * (WHOLE_TRIALS + rounds * devices) / devices / (1 - CONFIRM_SHARE * at_target)
            raise UsageError(
                f"--hours: {duration(seconds)} are too short for {WHOLE_TRIALS} trials that take {duration(setup)} to "
                f"start; give --hours {needed / 3600:.2g} or more, or --minutes-per-trial"
            )
    target = max(target or trial, trial)
    at_target = at_target or target == trial
    confirm = rounds * ((target if at_target else trial) + setup)
    whole = (seconds - confirm) * devices / (trial + setup)
    if whole < FEWEST_WHOLE_TRIALS:
        needed = confirm + FEWEST_WHOLE_TRIALS * (trial + setup) / devices
        raise UsageError(
            f"--hours: {duration(seconds)} are too short for trials of {duration(trial)} and their confirmation with "
            f"{plural(seeds, 'seed')}; give --hours {needed / 3600:.2g} or more, or a shorter --minutes-per-trial"
        )
    return Division(target, trial, at_target, confirm, whole)
