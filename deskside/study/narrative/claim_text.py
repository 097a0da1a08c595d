"""A claim's numbers in words: its change with the interval, its value with the unit, the scale it was measured at."""

import math

from deskside.facts.claims import Claim
from deskside.study.claims.verdicts import Change, Verdict
from deskside.study.results import Arm, Results
from deskside.study.stats.metrics import BY_KEY

TINY = 10e6  # parameters; below, a scale says so


def in_unit(claim: Claim, log: float) -> float:
    """A log-ratio as the claim has it: 0.24 times, or -76 %. What no float holds is the largest one."""
    log = min(log, 700.0)
    return math.exp(log) if claim.show == "times" else 100 * math.expm1(log)


def change_in_words(claim: Claim, change: Change) -> str:
    """ "+8.4 % (+7.8 to +9.01, 3 seeds)", or without an interval where there is none."""

    def number(log: float) -> str:
        value = in_unit(claim, log)
        if claim.show == "times":
            return f"{value:.3f}" if 0.1 < value < 10 else number_text(value)
        return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.3g}"

    how = f", {change.n} seeds" if change.n > 1 else (", one seed" if change.n else "")
    amount = f"{number(change.log)} {'times' if claim.show == 'times' else '%'}"
    if change.low is None or change.high is None:
        return f"{amount}{how}: too few for an interval"
    if change.low != change.high:
        return f"{amount} ({number(change.low)} to {number(change.high)}{how})"
    return f"{amount} (exact{how})" if change.n else amount


def sentence_of(claim: Claim, change: Change, verdict: Verdict, absolute: str = "") -> str:
    """The numbers as a sentence."""
    subject, amount = "Measured" if change.n else "Computed", change_in_words(claim, change)
    means = f", {absolute}" if absolute else ""
    if change.low is None or change.high is None:
        return f"{subject} in {label(claim)}{means}: {amount}."
    sentence = f"{subject} {amount} in {label(claim)}{means}; claimed {claim.claimed}."
    if verdict == "contradicted" and change.low <= 0 <= change.high and claim.direction != "none":
        sentence += " The interval holds no change at all, and not the claimed one."
    elif (
        verdict == "contradicted"
        and claim.size is not None
        and (change.low > 0) == (claim.direction == "higher")
    ):
        sentence += " That is less than a twentieth of the claimed effect."
    return sentence


def label(claim: Claim) -> str:
    """Return the name of the claim's quantity."""
    return BY_KEY[claim.quantity].label if claim.quantity in BY_KEY else claim.quantity.replace("_", " ")


def with_unit(value: float, unit: str) -> str:
    """Return "5.31 GiB", or "$5.31"."""
    return f"${number_text(value)}" if unit == "$" else f"{number_text(value)} {unit}"


def number_text(value: float) -> str:
    """Return three significant digits, or a whole number from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def scale_of(results: Results, arm: Arm) -> str:
    """On what was measured: "124m (124M parameters), 16M tokens, NVIDIA H200"; "tiny ..., CPU"."""
    group = next((group for group in results.groups if group.name == arm.group), None)
    sizes = [trial.metrics["parameters"] for trial in arm.finished() if "parameters" in trial.metrics]
    base = group.base if group else ""
    if sizes:
        tiny = "tiny, " if sizes[0] < TINY else ""
        base = f"{base} ({tiny}{sizes[0] / 1e6:.3g}M parameters)"
    gpu = results.machine.get("gpu") or {}
    parts = [base, group.budget if group else "", str(gpu.get("name", "CPU"))]
    return ", ".join(part for part in parts if part)
