"""Judgement of published claims (facts/claims.toml) by the results of studies and by formulas.

verdicts.py has the rules.
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
    decision_p,
    meets,
    verdict_of_change,
    verdict_of_model,
    verdict_of_value,
)
from deskside.study.metrics import BY_KEY, SPEED_AND_POWER
from deskside.study.results import NOT_ENDED, Arm, ClaimBasis, ClaimResult, ClaimVerdict, Results
from deskside.study.stats.statistics import is_exact, log_ratio, paired_values, significant
from deskside.utils.format import count

# With an emulated number format, these metrics are not those of hardware with native support.
SPEED_METRICS = (*SPEED_AND_POWER, "tokens")
MEMORY_METRICS = ("peak_memory_gib", "peak_reserved_gib")
TINY_PARAMETERS = 10e6  # a model with fewer parameters is called "tiny" in `scale_of`
MIN_COMPUTE_CAPABILITY = {"fp8": 8.9, "fp4": 10.0}  # of tensor cores with the format


def judge(
    results: Results,
    ids: Sequence[str] = ("*",),
    known: Sequence[Claim] | None = None,
    others: Sequence[Results] = (),
) -> Results:
    """Return the study with a new result for every selected claim.

    Args:
        ids: Ids of the claims, with * and ?. Raises UsageError for an unknown id.
        known: All claims; by default those of facts/claims.toml.
        others: More studies with measurements. Each claim is judged by one study that measured it: for speed preferably
            one without concurrent trials on its host, then the one with the most seeds, then the last in the sequence.
    """
    known = claims() if known is None else known
    selected_ids = matching_ids(ids, known)
    drafts = [(claim, _draft((results, *others), claim)) for claim in known if claim.id in selected_ids]
    p_values = {draft.id: draft.p for _, draft in drafts if draft.p is not None}
    passed = dict(zip(p_values, significant(list(p_values.values())), strict=True))
    final = [_corrected(draft, claim, len(p_values), passed.get(claim.id, True)) for claim, draft in drafts]
    return replace(results, claims=final)


def arms_of(results: Results, claim: Claim) -> tuple[Arm, Arm] | None:
    """Return the two arms that a measured claim compares, or None if the study lacks one."""
    arm, against = (_find_arm(results, claim.group, levels) for levels in (claim.arm, claim.against))
    return None if arm is None or against is None else (arm, against)


def _find_arm(results: Results, group: str, levels: Mapping[str, str]) -> Arm | None:
    """Return the arm with these levels and a baseline's level of every other factor; None unless one arm matches."""
    arms = [arm for arm in results.arms if arm.group == group]
    allowed: dict[str, set[str]] = {}  # factor -> levels
    for arm in arms:
        if arm.baseline == arm.id:
            for factor, level in arm.levels.items():
                allowed.setdefault(factor, set()).add(level)
    allowed |= {factor: {level} for factor, level in levels.items()}
    matches = [
        arm
        for arm in arms
        if levels.keys() <= arm.levels.keys()
        and all(level in allowed.get(factor, ()) for factor, level in arm.levels.items())
    ]
    return matches[0] if len(matches) == 1 else None


def _draft(studies: Sequence[Results], claim: Claim) -> ClaimResult:
    """Judge one claim, before the correction for multiple claims."""
    if claim.kind == "open":
        return _result(claim, "not measured", claim.why)
    if claim.kind == "arithmetic":
        return _computed(claim)
    drafts = [draft for results in studies if (draft := _measured(results, claim)) is not None]
    if not drafts:
        return _result(claim, "not measured", f"Its two arms (group {claim.group}) were not run.")
    # The best study is sorted to the end. Python's sort is stable, so of equal ones it is the last.
    *rest, (best, _) = sorted(drafts, key=lambda d: (d[1] is not None, not d[0].shared, d[0].n))
    other_studies = [
        f"Another study{' on a shared host' if draft.shared else ''}: {change_in_words(claim, change)}."
        for draft, change in rest
        if change is not None
    ]
    return replace(best, explanation=" ".join([best.explanation, *other_studies]))


def _measured(results: Results, claim: Claim) -> tuple[ClaimResult, Change | None] | None:
    """Judge a measured claim by one study. Returns (result, measured change), or None if the study lacks an arm."""
    arms = arms_of(results, claim)
    if arms is None:
        return None
    arm, against = arms
    scale = scale_of(results, arm)
    missing = _missing_requirement(results, claim, arm, against)
    if missing:
        return _result(claim, "needs other hardware", missing, scale), None
    ours, theirs = paired_values(arm, against, claim.quantity)
    reason = _why_not_comparable(claim, arm, against, ours, theirs)
    if reason:
        unfinished = [arm for arm in arms if not arm.finished()]
        may_finish = all(trial.status in NOT_ENDED for arm in unfinished for trial in arm.trials)
        undecided: ClaimVerdict = "not measured" if unfinished and may_finish else "not shown"
        return _result(claim, undecided, reason, scale), None
    interval = log_ratio(ours, theirs)
    change = Change(interval.mean, interval.low, interval.high, interval.n)
    if is_exact(claim.quantity, ours, theirs):
        change = replace(change, low=interval.mean, high=interval.mean)
    verdict = verdict_of_change(claim, change)
    shared = claim.quantity in SPEED_METRICS and _shared_host(results, arm, against)
    sentence = change_sentence(claim, change, verdict, _means_text(claim, ours, theirs))
    if shared:
        sentence += " Other trials ran on the same host at the same time, which can slow both."
        scale += ", shared host"
    p = decision_p(claim, change)
    return _result(claim, verdict, sentence, scale, change, "measured", p=p, shared=shared), change


def _shared_host(results: Results, *arms: Arm) -> bool:
    """Return True if a finished trial of these arms overlapped in time with another trial of the study."""
    intervals = [
        (trial, datetime.fromisoformat(trial.started), datetime.fromisoformat(trial.ended))
        for arm in results.arms
        for trial in arm.trials
        if trial.started and trial.ended
    ]
    # By identity, because equal trials of two arms are different trials.
    measured = {id(trial) for arm in arms for trial in arm.finished()}
    for trial, started, ended in intervals:
        for other, other_started, other_ended in intervals:
            overlaps = other is not trial and started < other_ended and other_started < ended
            if id(trial) in measured and overlaps:
                return True
    return False


def _means_text(claim: Claim, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the means of both arms, such as "98,000 against 105,000 tokens/s"."""
    means = [number_text(math.fsum(values) / len(values)) for values in (ours, theirs)]
    metric = BY_KEY.get(claim.quantity)
    unit = metric.unit if metric is not None and metric.scale == 1 else ""
    return f"{means[0]} against {means[1]} {unit}".strip()


def _missing_requirement(results: Results, claim: Claim, *arms: Arm) -> str:
    """Return a sentence about what the machine of a study lacks to judge the claim, or ""."""
    gpu = results.machine.get("gpu") or {}
    name = str(gpu.get("name", "a CPU"))
    for need in claim.needs:
        if need == "gpu":
            missing = "" if gpu else "a GPU"
        elif need in MIN_COMPUTE_CAPABILITY:
            capable = _compute_capability(gpu) >= MIN_COMPUTE_CAPABILITY[need]
            missing = "" if capable else f"tensor cores with {need.upper()}"
        else:
            missing = "" if need.casefold() in name.casefold() else f"an {need}"
        if missing:
            return f"It needs {missing}; this was {name}."
    if claim.quantity in MEMORY_METRICS and not gpu:
        return "It is about a GPU's memory; here it is what the process holds, torch and all."
    emulated = [arm.label for arm in arms if arm.emulated]
    if emulated and claim.quantity in SPEED_METRICS:
        return f"{emulated[0]} was emulated here, so its speed is not the format's."
    return ""


def _compute_capability(gpu: Mapping[str, object]) -> float:
    try:
        return float(str(gpu.get("compute_capability", 0)))
    except ValueError:  # an AMD card
        return 0.0


def _why_not_comparable(
    claim: Claim, arm: Arm, against: Arm, ours: Sequence[float], theirs: Sequence[float]
) -> str:
    """Return why two arms cannot be compared in the claim's quantity, or "".

    ours, theirs: the values of `arm` and `against` with the same seeds.
    """
    for compared in (arm, against):
        if not compared.finished():
            failed = next((trial for trial in compared.trials if trial.reason), None)
            reason = f": {failed.reason}" if failed else ""
            return f"No trial of {compared.label} was finished ({compared.status}{reason})."
    if not ours or min(*ours, *theirs) <= 0:
        return f"{quantity_label(claim)} was not measured in both arms with the same seed."
    if claim.quantity in MEMORY_METRICS:
        our_sizes, their_sizes = paired_values(arm, against, "micro_tokens")
        if set(our_sizes) != set(their_sizes):
            return "The arms ran with different micro-batches, so their memory cannot be compared."
    return ""


def _computed(claim: Claim) -> ClaimResult:
    """Judge an arithmetic claim by its formula."""
    answer = evaluate(claim.formula)
    scale = f"{answer.source}: {answer.on}"
    if claim.value is None:
        change = Change(math.log1p(answer.value), math.log1p(answer.low), math.log1p(answer.high), 0)
        verdict = verdict_of_change(claim, change)
        if answer.source == "modelled":
            verdict = verdict_of_model(meets(claim, change))
        return _result(claim, verdict, change_sentence(claim, change, verdict), scale, change, answer.source)
    amount = with_unit(answer.value, claim.unit)
    if answer.low != answer.high:
        amount += f" ({number_text(answer.low)} to {number_text(answer.high)})"
    text = f"{answer.source.capitalize()}: {amount}; claimed {claim.claimed_text}."
    result = _result(claim, verdict_of_value(claim, answer), text, scale, basis=answer.source)
    return replace(result, measured=answer.value, low=answer.low, high=answer.high)


def _result(
    claim: Claim,
    verdict: ClaimVerdict,
    sentence: str,
    scale: str = "",
    change: Change | None = None,
    basis: ClaimBasis = "",
    **other_fields: Any,
) -> ClaimResult:
    """Return the result of a claim, with the change converted to the claim's unit. sentence: the explanation."""
    logs = (None, None, None) if change is None else (change.log, change.low, change.high)
    measured, low, high = (None if log is None else in_claim_unit(claim, log) for log in logs)
    return ClaimResult(
        id=claim.id,
        text=claim.text,
        source=claim.source,
        claimed=claim.claimed_text,
        measured=measured,
        low=low,
        high=high,
        unit=claim.unit or ("times" if claim.show == "times" else "%"),
        n=0 if change is None else change.n,
        scale=scale,
        verdict=verdict,
        explanation=sentence,
        basis=basis,
        **other_fields,
    )


def _corrected(draft: ClaimResult, claim: Claim, family_size: int, passed: bool) -> ClaimResult:
    """Apply the correction for multiple claims to the verdict, and complete the explanation.

    Args:
        family_size: Number of claims that are corrected together.
        passed: True if the decision is significant after the correction.
    """
    verdict, sentences = draft.verdict, [draft.explanation]
    if not passed and verdict != "not shown":
        alone = f'Alone this would be "{verdict}" (p = {draft.p:.2g})'
        sentences.append(f"{alone}; it is not significant among {family_size} measured claims.")
        verdict = "not shown"
    if verdict in ("contradicted", "not consistent with the model"):
        sentences.append(claim.explanation)
    sentences.append(claim.note)
    return replace(draft, verdict=verdict, explanation=" ".join(text for text in sentences if text))


def in_claim_unit(claim: Claim, log: float) -> float:
    """Convert a log-ratio to the claim's unit: 0.24 times, or -76 %."""
    log = min(log, 700.0)  # exp overflows a float64 above 709.78
    return math.exp(log) if claim.show == "times" else 100 * math.expm1(log)


def change_in_words(claim: Claim, change: Change) -> str:
    """Return a change with its interval and seeds: "+8.4 % (+7.8 to +9.01, 3 seeds)"."""

    def number(log: float) -> str:
        value = in_claim_unit(claim, log)
        if claim.show == "times":
            return f"{value:.3f}" if 0.1 < value < 10 else number_text(value)
        return number_text(value, "+")

    seeds = ""
    if change.n:
        seeds = f", {change.n} seeds" if change.n > 1 else ", one seed"
    amount = f"{number(change.log)} {'times' if claim.show == 'times' else '%'}"
    if change.low is None or change.high is None:
        return f"{amount}{seeds}: too few for an interval"
    if change.low != change.high:
        return f"{amount} ({number(change.low)} to {number(change.high)}{seeds})"
    return f"{amount} (exact{seeds})" if change.n else amount


def change_sentence(claim: Claim, change: Change, verdict: ClaimVerdict, means: str = "") -> str:
    """Return a sentence with the measured or computed change and the claimed one. means: from `_means_text`."""
    basis, amount = "Measured" if change.n else "Computed", change_in_words(claim, change)
    subject = quantity_label(claim) + (f", {means}" if means else "")
    if change.low is None or change.high is None:
        return f"{basis} in {subject}: {amount}."
    sentence = f"{basis} {amount} in {subject}; claimed {claim.claimed_text}."
    if verdict == "contradicted" and claim.direction != "none":
        claimed_side = (change.low > 0) == (claim.direction == "higher")
        if change.low <= 0 <= change.high:
            sentence += " The interval holds no change at all, and not the claimed one."
        elif claim.size is not None and claimed_side:
            sentence += " That is less than a twentieth of the claimed effect."
    return sentence


def quantity_label(claim: Claim) -> str:
    """Return the label of the claim's quantity, such as "validation loss"."""
    return BY_KEY[claim.quantity].label if claim.quantity in BY_KEY else claim.quantity.replace("_", " ")


def with_unit(value: float, unit: str, sign: str = "") -> str:
    """Return a value with its unit: "5.31 GiB", or "$5.31". sign: as in `number_text`."""
    return f"${number_text(value)}" if unit == "$" else f"{number_text(value, sign)} {unit}".strip()


def number_text(value: float, sign: str = "") -> str:
    """Return a number with at most three significant digits, from 1,000 on without decimals. With sign "+": "+8.4"."""
    return f"{value:{sign},.0f}" if abs(value) >= 999.5 else f"{value:{sign}.3g}"


def scale_of(results: Results, arm: Arm) -> str:
    """Return the model, budget and hardware of a measurement: "124m (124M parameters), 16M tokens, NVIDIA H200"."""
    group = next((group for group in results.groups if group.name == arm.group), None)
    sizes = [trial.metrics["parameters"] for trial in arm.finished() if "parameters" in trial.metrics]
    base = group.base if group else ""
    if sizes:
        tiny = "tiny, " if sizes[0] < TINY_PARAMETERS else ""
        base = f"{base} ({tiny}{count(sizes[0])} parameters)"
    gpu = results.machine.get("gpu") or {}
    parts = [base, group.budget if group else "", str(gpu.get("name", "CPU"))]
    return ", ".join(part for part in parts if part)
