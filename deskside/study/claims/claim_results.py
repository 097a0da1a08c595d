"""Others' claims (facts/claims.toml) held against studies: what was claimed, what was measured, and a verdict.

The measured change is the mean log-ratio over the seeds that both arms finished, with Student's interval of 95 %, as in
every comparison of a study (pairs.py). verdicts.py has the rules of the verdicts, claim_words.py the sentences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from deskside.facts.claims import Claim, chosen, claims
from deskside.study.claims.answers import Answer
from deskside.study.claims.arithmetic import answer
from deskside.study.claims.verdicts import (
    Change,
    Verdict,
    by_model,
    decision_p,
    meets,
    verdict_of_change,
    verdict_of_value,
)
from deskside.study.narrative.claim_text import (
    change_in_words,
    in_unit,
    label,
    number_text,
    scale_of,
    sentence_of,
    with_unit,
)
from deskside.study.results import OPEN, Arm, ClaimResult, Results
from deskside.study.stats.metrics import BY_KEY
from deskside.study.stats.statistics import is_exact, log_ratio, pairs, significant

# What emulated products decide, and not the format.
OF_SPEED = ("tokens_per_second", "mfu", "watts", "joules_per_token", "tokens", "seconds", "total_seconds")
OF_MEMORY = ("peak_memory_gib", "peak_reserved_gib")
CAPABILITY = {"fp8": 8.9, "fp4": 10.0}  # the compute capability from which tensor cores have the format


@dataclass(frozen=True)
class _Draft:
    """A claim before the adjustment for many. p: None where there is nothing to adjust."""

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
    """Return the study with one result for every chosen claim; those that it had are replaced.

    ids: which claims, with * and ?. known: all claims that there are, those of facts/claims.toml if not given.
    others: more studies, whose trials count as well; each claim goes by the study that speaks to it best (a quiet host
    first for speed, then the most pairs, then the latest). Raises UsageError for an id that there is none of.
    """
    known = claims() if known is None else known
    wanted = chosen(ids, known)
    drafts = [_drafted((results, *others), claim) for claim in known if claim.id in wanted]
    weighed = [draft for draft in drafts if draft.p is not None]
    stands = significant([draft.p for draft in weighed if draft.p is not None])
    fallen = {draft.claim.id for draft, stand in zip(weighed, stands, strict=True) if not stand}
    found = [_result(draft, len(weighed), draft.claim.id not in fallen) for draft in drafts]
    return replace(results, claims=found)


def arms_of(results: Results, claim: Claim) -> tuple[Arm, Arm] | None:
    """(the arm, what it is compared with) of a measured claim; None where the study does not have both."""
    arm, against = (_find(results, claim.group, levels) for levels in (claim.arm, claim.against))
    return None if arm is None or against is None else (arm, against)


def _find(results: Results, group: str, levels: Mapping[str, str]) -> Arm | None:
    """The arm with these levels, and the baseline's of every other factor; None unless there is just one."""
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
    """What one study says of a measured claim; None where it does not have both arms."""
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
    """Whether a finished trial of these arms ran while another trial of the study did."""
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
    """Both arms' means, so that a ratio cannot hide what it is a ratio of."""
    means = [number_text(math.fsum(values) / len(values)) for values in (ours, theirs)]
    unit = (
        BY_KEY[claim.quantity].unit if claim.quantity in BY_KEY and BY_KEY[claim.quantity].scale == 1 else ""
    )
    return f"{means[0]} against {means[1]} {unit}".strip()


def _lacking(results: Results, claim: Claim, *arms: Arm) -> str:
    """What this machine lacks for the claim, as a sentence; empty where nothing is missing."""
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
    """Why two arms cannot be compared in this quantity; empty where they can."""
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
    found = answer(claim.formula)
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


def _result(draft: _Draft, family: int, stands: bool) -> ClaimResult:
    """note and, of what was contradicted, the explanation follow the sentence. family: how many were weighed."""
    claim, change, verdict = draft.claim, draft.change, draft.verdict
    sentence = draft.sentence
    if not stands and verdict != "not shown":
        alone = f'Alone this would be "{verdict}" (p = {draft.p:.2g})'
        sentence += f" {alone}; among {family} measured claims it does not stand."
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
