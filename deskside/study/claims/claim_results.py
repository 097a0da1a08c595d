"""Comparison of published claims (facts/claims.toml) with the results of studies.

The measured change is the mean log-ratio over the seeds that both arms finished, with Student's 95 % interval, as
in every comparison of a study. verdicts.py has the rules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from deskside.facts.claims import Claim, claims, matching_ids
from deskside.study.claims.formulas import evaluate
from deskside.study.claims.verdicts import (
    Change,
    Verdict,
    by_model,
    decision_p,
    meets,
    verdict_of_change,
    verdict_of_value,
)
from deskside.study.results import NOT_ENDED, Arm, ClaimResult, Results
from deskside.study.stats.metrics import BY_KEY
from deskside.study.stats.statistics import is_exact, log_ratio, paired_values, significant
from deskside.utils.format import count

# Metrics that emulation changes: they say nothing about hardware with native support.
OF_SPEED = ("tokens_per_second", "mfu", "watts", "joules_per_token", "tokens", "seconds", "total_seconds")
OF_MEMORY = ("peak_memory_gib", "peak_reserved_gib")
TINY = 10e6  # parameters; the scale of a smaller model says "tiny"
CAPABILITY = {"fp8": 8.9, "fp4": 10.0}  # the compute capability from which tensor cores have the format


def judge(
    results: Results,
    ids: Sequence[str] = ("*",),
    known: Sequence[Claim] | None = None,
    others: Sequence[Results] = (),
) -> Results:
    """Return the study with a new result for every chosen claim.

    Args:
        ids: Which claims, with * and ?. Raises UsageError for an unknown id.
        known: All claims; by default those of facts/claims.toml.
        others: More studies to search. Each claim is judged by the study that fits it best: for speed one that
            had its host to itself, then the one with the most pairs, then the latest.
    """
    known = claims() if known is None else known
    wanted = matching_ids(ids, known)
    drafts = [(claim, _draft((results, *others), claim)) for claim in known if claim.id in wanted]
    weighed = {draft.id: draft.p for _, draft in drafts if draft.p is not None}
    passed = dict(zip(weighed, significant(list(weighed.values())), strict=True))
    found = [_final(draft, claim, len(weighed), passed.get(claim.id, True)) for claim, draft in drafts]
    return replace(results, claims=found)


def arms_of(results: Results, claim: Claim) -> tuple[Arm, Arm] | None:
    """Return the two arms that a measured claim compares, or None if the study lacks one."""
    arm, against = (_find(results, claim.group, levels) for levels in (claim.arm, claim.against))
    return None if arm is None or against is None else (arm, against)


def _find(results: Results, group: str, levels: Mapping[str, str]) -> Arm | None:
    """Return the only arm with these levels, and the baseline's level of every other factor, or None."""
    arms = [arm for arm in results.arms if arm.group == group]
    plain: dict[str, set[str]] = {}
    for arm in arms:
        if arm.baseline == arm.id:
            for factor, level in arm.levels.items():
                plain.setdefault(factor, set()).add(level)
    found = [
        arm
        for arm in arms
        if levels.keys() <= arm.levels.keys()
        and all(
            level == levels[factor] if factor in levels else level in plain.get(factor, ())
            for factor, level in arm.levels.items()
        )
    ]
    return found[0] if len(found) == 1 else None


def _draft(studies: Sequence[Results], claim: Claim) -> ClaimResult:
    """Judge one claim, before the correction for multiple claims."""
    if claim.kind == "open":
        return _result(claim, "not measured", claim.why)
    if claim.kind == "arithmetic":
        return _answered(claim)
    drafts = [draft for results in studies if (draft := _measured(results, claim)) is not None]
    if not drafts:
        return _result(claim, "not measured", f"Its two arms (group {claim.group}) were not run.")
    # Python's sort is stable, so of equals the latest comes last.
    *rest, (best, _) = sorted(drafts, key=lambda d: (d[1] is not None, not d[0].shared, d[0].n))
    again = [
        f"Another study{' on a shared host' if draft.shared else ''}: {change_in_words(claim, change)}."
        for draft, change in rest
        if change is not None
    ]
    return replace(best, explanation=" ".join([best.explanation, *again]))


def _measured(results: Results, claim: Claim) -> tuple[ClaimResult, Change | None] | None:
    """Judge a measured claim by one study. Returns None if the study lacks one of its arms."""
    found = arms_of(results, claim)
    if found is None:
        return None
    arm, against = found
    scale = scale_of(results, arm)
    lacking = _lacking(results, claim, arm, against)
    if lacking:
        return _result(claim, "needs other hardware", lacking, scale), None
    ours, theirs = paired_values(arm, against, claim.quantity)
    reason = _why_no_pair(claim, arm, against, ours, theirs)
    if reason:
        unfinished = not (arm.finished() and against.finished())
        pending = all(
            t.status in NOT_ENDED for one in (arm, against) if not one.finished() for t in one.trials
        )
        undecided: Verdict = "not measured" if unfinished and pending else "not shown"
        return _result(claim, undecided, reason, scale), None
    interval = log_ratio(ours, theirs)
    change = Change(interval.mean, interval.low, interval.high, interval.n)
    if is_exact(claim.quantity, ours, theirs):
        change = replace(change, low=interval.mean, high=interval.mean)
    verdict = verdict_of_change(claim, change)
    shared = claim.quantity in OF_SPEED and _is_shared(results, arm, against)
    sentence = sentence_of(claim, change, verdict, _absolute(claim, ours, theirs))
    if shared:
        sentence += " Other trials ran on the same host at the same time, which can slow both."
        scale += ", shared host"
    p = decision_p(claim, change)
    return _result(claim, verdict, sentence, scale, change, "measured", p=p, shared=shared), change


def _is_shared(results: Results, *arms: Arm) -> bool:
    """Return whether a finished trial of these arms overlapped in time with another trial of the study."""
    times = [
        (trial, datetime.fromisoformat(trial.started), datetime.fromisoformat(trial.ended))
        for arm in results.arms
        for trial in arm.trials
        if trial.started and trial.ended
    ]
    mine = [trial for arm in arms for trial in arm.finished()]
    return any(
        any(trial is one for one in mine) and other is not trial and began < until and since < ended
        for trial, began, ended in times
        for other, since, until in times
    )


def _absolute(claim: Claim, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the means of both arms as text, to show what a ratio is based on."""
    means = [number_text(math.fsum(values) / len(values)) for values in (ours, theirs)]
    metric = BY_KEY.get(claim.quantity)
    unit = metric.unit if metric is not None and metric.scale == 1 else ""
    return f"{means[0]} against {means[1]} {unit}".strip()


def _lacking(results: Results, claim: Claim, *arms: Arm) -> str:
    """Return a sentence on what this machine lacks for the claim, or ""."""
    gpu = results.machine.get("gpu") or {}
    name = str(gpu.get("name", "a CPU"))
    for need in claim.needs:
        if need == "gpu":
            missing = "" if gpu else "a GPU"
        elif need in CAPABILITY:
            capable = _capability(gpu) >= CAPABILITY[need]
            missing = "" if capable else f"tensor cores with {need.upper()}"
        else:
            missing = "" if need.casefold() in name.casefold() else f"an {need}"
        if missing:
            return f"It needs {missing}; this was {name}."
    if claim.quantity in OF_MEMORY and not gpu:
        return "It is about a GPU's memory; here it is what the process holds, torch and all."
    emulated = [arm.label for arm in arms if arm.emulated]
    if emulated and claim.quantity in OF_SPEED:
        return f"{emulated[0]} was emulated here, so its speed is not the format's."
    return ""


def _capability(gpu: Mapping[str, object]) -> float:
    try:
        return float(str(gpu.get("compute_capability", 0)))
    except ValueError:
        return 0.0


def _why_no_pair(claim: Claim, arm: Arm, against: Arm, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return why two arms cannot be compared in this quantity, or ""."""
    for one in (arm, against):
        if not one.finished():
            failed = next((trial for trial in one.trials if trial.reason), None)
            why = f": {failed.reason}" if failed else ""
            return f"No trial of {one.label} was finished ({one.status}{why})."
    if not ours or min(*ours, *theirs) <= 0:
        return f"{label(claim)} was not measured in both arms with the same seed."
    if claim.quantity in OF_MEMORY:
        sizes = [sorted(set(pair)) for pair in paired_values(arm, against, "micro_tokens")]
        if sizes[0] != sizes[1]:
            return "The arms ran with different micro-batches, so their memory cannot be compared."
    return ""


def _answered(claim: Claim) -> ClaimResult:
    found = evaluate(claim.formula)
    scale = f"{found.source}: {found.on}"
    if claim.value is None:
        change = Change(math.log1p(found.value), math.log1p(found.low), math.log1p(found.high), 0)
        verdict = verdict_of_change(claim, change)
        if found.source == "modelled":
            verdict = by_model(meets(claim, change))
        return _result(claim, verdict, sentence_of(claim, change, verdict), scale, change, found.source)
    amount = with_unit(found.value, claim.unit)
    if found.low != found.high:
        amount += f" ({number_text(found.low)} to {number_text(found.high)})"
    text = f"{found.source.capitalize()}: {amount}; claimed {claim.claimed_text}."
    result = _result(claim, verdict_of_value(claim, found), text, scale, basis=found.source)
    return replace(result, measured=found.value, low=found.low, high=found.high)


def _result(
    claim: Claim,
    verdict: Verdict,
    sentence: str,
    scale: str = "",
    change: Change | None = None,
    basis: str = "",
    **more: Any,
) -> ClaimResult:
    logs = (None, None, None) if change is None else (change.log, change.low, change.high)
    middle, low, high = (None if log is None else in_unit(claim, log) for log in logs)
    return ClaimResult(
        id=claim.id,
        text=claim.text,
        source=claim.source,
        claimed=claim.claimed_text,
        measured=middle,
        low=low,
        high=high,
        unit=claim.unit or ("times" if claim.show == "times" else "%"),
        n=0 if change is None else change.n,
        scale=scale,
        verdict=verdict,
        explanation=sentence,
        basis=basis,
        **more,
    )


def _final(draft: ClaimResult, claim: Claim, family: int, passed: bool) -> ClaimResult:
    """Apply the correction, and explain: the sentence, then why a contradicted claim fails, then the claim's note.

    family: the number of claims corrected together. passed: whether the decision survives the correction.
    """
    verdict, told = draft.verdict, [draft.explanation]
    if not passed and verdict != "not shown":
        alone = f'Alone this would be "{verdict}" (p = {draft.p:.2g})'
        told.append(f"{alone}; it is not significant among {family} measured claims.")
        verdict = "not shown"
    if verdict in ("contradicted", "not consistent with the model"):
        told.append(claim.explanation)
    told.append(claim.note)
    return replace(draft, verdict=verdict, explanation=" ".join(text for text in told if text))


def in_unit(claim: Claim, log: float) -> float:
    """Convert a log-ratio to the claim's unit: 0.24 times, or -76 %. Overflow is clipped."""
    log = min(log, 700.0)
    return math.exp(log) if claim.show == "times" else 100 * math.expm1(log)


def change_in_words(claim: Claim, change: Change) -> str:
    """Return "+8.4 % (+7.8 to +9.01, 3 seeds)", or the change alone if there is no interval."""

    def number(log: float) -> str:
        value = in_unit(claim, log)
        if claim.show == "times":
            return f"{value:.3f}" if 0.1 < value < 10 else number_text(value)
        return number_text(value, "+")

    how = f", {change.n} seeds" if change.n > 1 else (", one seed" if change.n else "")
    amount = f"{number(change.log)} {'times' if claim.show == 'times' else '%'}"
    if change.low is None or change.high is None:
        return f"{amount}{how}: too few for an interval"
    if change.low != change.high:
        return f"{amount} ({number(change.low)} to {number(change.high)}{how})"
    return f"{amount} (exact{how})" if change.n else amount


def sentence_of(claim: Claim, change: Change, verdict: Verdict, absolute: str = "") -> str:
    """Return a sentence with the measured or computed change and the claimed one."""
    subject, amount = "Measured" if change.n else "Computed", change_in_words(claim, change)
    means = f", {absolute}" if absolute else ""
    if change.low is None or change.high is None:
        return f"{subject} in {label(claim)}{means}: {amount}."
    sentence = f"{subject} {amount} in {label(claim)}{means}; claimed {claim.claimed_text}."
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


def with_unit(value: float, unit: str, sign: str = "") -> str:
    """Return "5.31 GiB", or "$5.31"."""
    return f"${number_text(value)}" if unit == "$" else f"{number_text(value, sign)} {unit}".strip()


def number_text(value: float, sign: str = "") -> str:
    """Return three significant digits, or a whole number from 1,000 on; with sign "+" also the sign of a gain."""
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.3g}"


def scale_of(results: Results, arm: Arm) -> str:
    """Return the scale of a measurement: "124m (124M parameters), 16M tokens, NVIDIA H200" or "tiny ..., CPU"."""
    group = next((group for group in results.groups if group.name == arm.group), None)
    sizes = [trial.metrics["parameters"] for trial in arm.finished() if "parameters" in trial.metrics]
    base = group.base if group else ""
    if sizes:
        tiny = "tiny, " if sizes[0] < TINY else ""
        base = f"{base} ({tiny}{count(sizes[0])} parameters)"
    gpu = results.machine.get("gpu") or {}
    parts = [base, group.budget if group else "", str(gpu.get("name", "CPU"))]
    return ", ".join(part for part in parts if part)
