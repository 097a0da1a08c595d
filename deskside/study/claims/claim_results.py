"""Comparison of published claims (facts/claims.toml) with the results of studies.

The measured change is the mean log-ratio over the seeds that both arms finished, with Student's 95 % interval, as
in every comparison of a study. verdicts.py has the rules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from deskside.facts.claims import Claim, chosen, claims
from deskside.study.claims.formulas import evaluate
from deskside.study.claims.verdicts import (
    Answer,
    Change,
    Verdict,
    by_model,
    decision_p,
    meets,
    verdict_of_change,
    verdict_of_value,
)
from deskside.study.results import OPEN, Arm, ClaimResult, Results
from deskside.study.stats.metrics import BY_KEY
from deskside.study.stats.statistics import is_exact, log_ratio, pairs, significant
from deskside.utils.format import count

# Metrics that emulation changes: they say nothing about hardware with native support.
OF_SPEED = ("tokens_per_second", "mfu", "watts", "joules_per_token", "tokens", "seconds", "total_seconds")
OF_MEMORY = ("peak_memory_gib", "peak_reserved_gib")
TINY = 10e6  # parameters; the scale of a smaller model says "tiny"
CAPABILITY = {"fp8": 8.9, "fp4": 10.0}  # the compute capability from which tensor cores have the format


@dataclass(frozen=True)
class _Draft:
    """The judgment of one claim before the correction for multiple claims. p: None if it needs no correction."""

    claim: Claim
    verdict: Verdict
    sentence: str
    scale: str
    change: Change | None = None
    p: float | None = None
    basis: str = ""
    shared: bool = False
    answer: Answer | None = None


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
    wanted = chosen(ids, known)
    drafts = [_drafted((results, *others), claim) for claim in known if claim.id in wanted]
    weighed = [draft for draft in drafts if draft.p is not None]
    passed = significant([draft.p for draft in weighed if draft.p is not None])
    rejected = {draft.claim.id for draft, ok in zip(weighed, passed, strict=True) if not ok}
    found = [_result(draft, len(weighed), draft.claim.id not in rejected) for draft in drafts]
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


def _drafted(studies: Sequence[Results], claim: Claim) -> _Draft:
    if claim.kind == "open":
        return _Draft(claim, "not measured", claim.why, "")
    if claim.kind == "arithmetic":
        return _answered(claim)
    drafts = [draft for results in studies if (draft := _measured(results, claim)) is not None]
    if not drafts:
        return _Draft(claim, "not measured", f"Its two arms (group {claim.group}) were not run.", "")
    # Python's sort is stable, so of equals the latest comes last.
    ranked = sorted(drafts, key=lambda d: (d.change is not None, not d.shared, d.change.n if d.change else 0))
    best, rest = ranked[-1], [draft for draft in ranked[:-1] if draft.change is not None]
    again = [
        f"Another study{_host(d)}: {change_in_words(claim, d.change)}." for d in rest if d.change is not None
    ]
    return replace(best, sentence=" ".join([best.sentence, *again]))


def _host(draft: _Draft) -> str:
    return " on a shared host" if draft.shared else ""


def _measured(results: Results, claim: Claim) -> _Draft | None:
    """Judge a measured claim by one study, or return None if the study lacks one of its arms."""
    found = arms_of(results, claim)
    if found is None:
        return None
    arm, against = found
    scale = scale_of(results, arm)
    lacking = _lacking(results, claim, arm, against)
    if lacking:
        return _Draft(claim, "needs other hardware", lacking, scale)
    ours, theirs = pairs(arm, against, claim.quantity)
    reason = _why_no_pair(claim, arm, against, ours, theirs)
    if reason:
        unfinished = not (arm.finished() and against.finished())
        pending = all(t.status in OPEN for one in (arm, against) if not one.finished() for t in one.trials)
        return _Draft(claim, "not measured" if unfinished and pending else "not shown", reason, scale)
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
    return _Draft(claim, verdict, sentence, scale, change, p, "measured", shared)


def _is_shared(results: Results, *arms: Arm) -> bool:
    """Return whether a finished trial of these arms overlapped in time with another trial of the study."""
    spans = [(id(t), t.started, t.ended) for arm in results.arms for t in arm.trials if t.started and t.ended]
    times = [
        (who, datetime.fromisoformat(began), datetime.fromisoformat(ended)) for who, began, ended in spans
    ]
    mine = {id(t) for arm in arms for t in arm.finished()}
    return any(
        who in mine and other != who and began < until and since < ended
        for who, began, ended in times
        for other, since, until in times
    )


def _absolute(claim: Claim, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the means of both arms as text, to show what a ratio is based on."""
    means = [number_text(math.fsum(values) / len(values)) for values in (ours, theirs)]
    unit = (
        BY_KEY[claim.quantity].unit if claim.quantity in BY_KEY and BY_KEY[claim.quantity].scale == 1 else ""
    )
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
        sizes = [sorted(set(pair)) for pair in pairs(arm, against, "micro_tokens")]
        if sizes[0] != sizes[1]:
            return "The arms ran with different micro-batches, so their memory cannot be compared."
    return ""


def _answered(claim: Claim) -> _Draft:
    found = evaluate(claim.formula)
    scale = f"{found.source}: {found.on}"
    if claim.value is None:
        change = Change(math.log1p(found.value), math.log1p(found.low), math.log1p(found.high), 0)
        verdict = verdict_of_change(claim, change)
        if found.source == "modelled":
            verdict = by_model(meets(claim, change))
        sentence = sentence_of(claim, change, verdict)
        return _Draft(claim, verdict, sentence, scale, change, basis=found.source)
    verdict = verdict_of_value(claim, found)
    amount = with_unit(found.value, claim.unit)
    if found.low != found.high:
        amount += f" ({number_text(found.low)} to {number_text(found.high)})"
    text = f"{found.source.capitalize()}: {amount}; claimed {claim.claimed}."
    return _Draft(claim, verdict, text, scale, basis=found.source, answer=found)


def _result(draft: _Draft, family: int, passed: bool) -> ClaimResult:
    """Return the final result. Its explanation is the sentence, then why a contradicted claim fails, then the
    claim's note.

    family: the number of claims corrected together. passed: whether the decision survives the correction.
    """
    claim, change, verdict = draft.claim, draft.change, draft.verdict
    sentence = draft.sentence
    if not passed and verdict != "not shown":
        alone = f'Alone this would be "{verdict}" (p = {draft.p:.2g})'
        sentence += f" {alone}; it is not significant among {family} measured claims."
        verdict = "not shown"
    against = verdict in ("contradicted", "not consistent with the model")
    told = [sentence, claim.explanation if against else "", claim.note]
    shown_as = ClaimResult(
        id=claim.id,
        text=claim.text,
        source=claim.source,
        claimed=claim.claimed,
        measured=None if change is None else in_unit(claim, change.log),
        low=None if change is None or change.low is None else in_unit(claim, change.low),
        high=None if change is None or change.high is None else in_unit(claim, change.high),
        unit=claim.unit or ("times" if claim.show == "times" else "%"),
        n=0 if change is None else change.n,
        scale=draft.scale,
        verdict=verdict,
        explanation=" ".join(text for text in told if text),
        basis=draft.basis,
        p=draft.p,
        shared=draft.shared,
    )
    if draft.answer is None:
        return shown_as
    return replace(shown_as, measured=draft.answer.value, low=draft.answer.low, high=draft.answer.high)


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
        return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.3g}"

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
