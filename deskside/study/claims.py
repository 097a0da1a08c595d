"""Others' claims (facts/claims.toml) held against studies: what was claimed, what was measured, and a verdict.

The measured change is the mean log-ratio over the seeds that both arms finished, with Student's interval of 95 %, as in
every comparison of a study (pairs.py). A claim of "-30 %, tolerance 0.5" accepts half to one and a half of its effect
on that scale; a claim of "no change" accepts its tolerance on both sides. With the interval in hand:

    holds               the interval leaves out zero, and meets what the claim accepts; without a claimed size, it
                        leaves out zero on the claimed side; for "no change", it lies within the tolerance
    holds in direction  it leaves out zero on the claimed side, and misses the claimed size
    contradicted        it leaves out zero on the other side, or holds zero and leaves out all that the claim accepts,
                        or ends before a twentieth of the claimed effect; for "no change", it lies beyond the tolerance
    not shown           it holds both zero and what the claim accepts (for "no change", it reaches over the tolerance),
                        there are too few seeds to give one, no pair of trials was finished, two peaks of memory are
                        of different micro-batches, or the decision does not stand among all measured claims (below)
    needs other hardware  the claim needs what this machine lacks (a claim about memory: a GPU), or it is about speed
                        and an arm was emulated here
    not measured        its arms are in none of the studies, or nothing here can speak to it

"Not shown" is not "contradicted": an interval that holds the claimed effect and none at all speaks for neither.

Many claims are judged at once, so a decision must also stand among all measured claims by the rule of Benjamini and
Hochberg (statistics.py): of those that are decided, one in twenty is expected to be decided wrongly. Each claim brings
the p-value of the hypothesis that its decision rejects: no effect, or the nearest effect that the claim accepts.

Memory and loss of emulated arms are judged: the numbers are the format's own, and what emulation allocates beyond
native products is below 1 % of a step's peak (budget/memory.py).

A claim that compares nothing (450 W) is answered by arithmetic.py. Arithmetic, data sheets and published prices decide
it: it holds where the answer's range meets it, and is contradicted where it does not. A model decides nothing, because
its range is wide and meets nearly anything: such a claim is "consistent with the model" or "not consistent with the
model", whatever the model says of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from scipy.special import stdtr, stdtrit

from deskside.facts.claims import Claim, chosen, claims
from deskside.study.arithmetic import Answer, answer
from deskside.study.metrics import BY_KEY
from deskside.study.pairs import is_exact, log_ratio, pairs
from deskside.study.results import OPEN, Arm, ClaimResult, Results
from deskside.study.statistics import LEVEL, shown

Verdict = Literal[
    "holds",
    "holds in direction",
    "not shown",
    "contradicted",
    "consistent with the model",
    "not consistent with the model",
    "needs other hardware",
    "not measured",
]
# What emulated products decide, and not the format.
OF_SPEED = ("tokens_per_second", "mfu", "watts", "joules_per_token", "tokens", "seconds", "total_seconds")
OF_MEMORY = ("peak_memory_gib", "peak_reserved_gib")
CAPABILITY = {"fp8": 8.9, "fp4": 10.0}  # the compute capability from which tensor cores have the format
TINY = 10e6  # parameters; below, a scale says so
LEAST_SHARE = 0.05  # of a claimed effect, in logarithms: -0.3 % of memory for a claimed -60 % is no agreement


@dataclass(frozen=True)
class Change:
    """A measured or computed change, in logarithms. low, high: None where there are too few seeds."""

    log: float
    low: float | None
    high: float | None
    n: int


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
    stands = shown([draft.p for draft in weighed if draft.p is not None])
    fallen = {draft.claim.id for draft, stand in zip(weighed, stands, strict=True) if not stand}
    found = [_result(draft, len(weighed), draft.claim.id not in fallen) for draft in drafts]
    return replace(results, claims=found)


def arms_of(results: Results, claim: Claim) -> tuple[Arm, Arm] | None:
    """(the arm, what it is compared with) of a measured claim; None where the study does not have both."""
    arm, against = (_find(results, claim.group, levels) for levels in (claim.arm, claim.against))
    return None if arm is None or against is None else (arm, against)


def verdict_of_change(claim: Claim, change: Change) -> Verdict:
    """The verdict on a claimed change by the rules at the head of this file."""
    if change.low is None or change.high is None:
        return "not shown"
    if claim.direction == "none":
        low, high = accepted(claim)
        if low <= change.low and change.high <= high:
            return "holds"
        return "contradicted" if change.high < low or change.low > high else "not shown"
    if change.low <= 0 <= change.high:
        return "not shown" if claim.size is None or _meets(claim, change) else "contradicted"
    if (change.low > 0) != (claim.direction == "higher"):
        return "contradicted"
    if _meets(claim, change):
        return "holds"
    assert claim.size is not None  # a direction alone is met by now
    least = LEAST_SHARE * min(abs(math.log1p(end)) for end in claim.size)
    return "holds in direction" if max(abs(change.low), abs(change.high)) >= least else "contradicted"


def verdict_of_value(claim: Claim, found: Answer) -> Verdict:
    """The verdict on a claimed value: whether the answer's range meets it."""
    assert claim.value is not None  # it is what such a claim has
    low, high = claim.value[0] * (1 - claim.tolerance), claim.value[1] * (1 + claim.tolerance)
    if found.source == "modelled":
        reaches = claim.direction == "at least" or found.low <= high
        return _by_model(reaches and (claim.direction == "at most" or found.high >= low))
    if claim.direction == "at most":
        met, sure = found.low <= high, found.value <= high
    elif claim.direction == "at least":
        met, sure = found.high >= low, found.value >= low
    else:
        met = sure = found.low <= high and found.high >= low
    return ("holds" if sure else "not shown") if met else "contradicted"


def accepted(claim: Claim) -> tuple[float, float]:
    """The log-ratios that a claim of a change accepts."""
    if claim.direction == "none":
        return math.log1p(-claim.tolerance), math.log1p(claim.tolerance)
    if claim.size is None:
        return (0.0, math.inf) if claim.direction == "higher" else (-math.inf, 0.0)
    near, far = sorted((math.log1p(end) for end in claim.size), key=abs)
    less, more = near * max(0.0, 1 - claim.tolerance), far * (1 + claim.tolerance)
    return min(less, more), max(less, more)


def _meets(claim: Claim, change: Change) -> bool:
    low, high = accepted(claim)
    assert change.low is not None and change.high is not None  # the caller has seen to it
    return change.low <= high and change.high >= low


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


def decision_p(claim: Claim, change: Change) -> float | None:
    """The two-sided p-value of the hypothesis that the verdict on a change rejects; None without an interval.

    That is no effect where the interval leaves out zero, and otherwise the nearest effect that the claim accepts. A
    claim of no change rejects both ends of its tolerance, or the end that it lies beyond.
    """
    if change.low is None or change.high is None or change.n == 0:
        return None
    low, high = accepted(claim)
    if claim.direction == "none":
        if low < change.log < high:
            return max(_p_against(change, low), _p_against(change, high))
        return _p_against(change, low if change.log <= low else high)
    none = _p_against(change, 0.0)
    if not change.low <= 0 <= change.high or claim.size is None or _meets(claim, change):
        return none
    return _p_against(change, low if change.log < low else high)


def _p_against(change: Change, effect: float) -> float:
    assert change.low is not None and change.high is not None  # the caller has seen to it
    half = (change.high - change.low) / 2
    if half == 0:
        return 1.0 if change.log == effect else 0.0
    error = half / float(stdtrit(change.n - 1, (1 + LEVEL) / 2))
    return 2 * float(stdtr(change.n - 1, -abs(change.log - effect) / error))


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
    again = [f"Another study{_host(d)}: {_amount_of(claim, d.change)}." for d in rest if d.change is not None]
    return replace(best, sentence=" ".join([best.sentence, *again]))


def _host(draft: _Draft) -> str:
    return " on a shared host" if draft.shared else ""


def _measured(results: Results, claim: Claim) -> _Draft | None:
    """What one study says of a measured claim; None where it does not have both arms."""
    found = arms_of(results, claim)
    if found is None:
        return None
    arm, against = found
    scale = _scale(results, arm)
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
    sentence = _words(claim, change, verdict, _absolute(claim, ours, theirs))
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
    means = [_number(math.fsum(values) / len(values)) for values in (ours, theirs)]
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
        return f"{_label(claim)} was not measured in both arms with the same seed."
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
            verdict = _by_model(_meets(claim, change))
        sentence = _words(claim, change, verdict)
        return _Draft(claim, verdict, sentence, scale, change, basis=found.source)
    verdict = verdict_of_value(claim, found)
    amount = _amount(found.value, claim.unit)
    if found.low != found.high:
        amount += f" ({_number(found.low)} to {_number(found.high)})"
    text = f"{found.source.capitalize()}: {amount}; claimed {claim.claimed}."
    return _Draft(claim, verdict, text, scale, basis=found.source, answer=found)


def _by_model(met: bool) -> Verdict:
    return "consistent with the model" if met else "not consistent with the model"


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
        measured=None if change is None else _in_unit(claim, change.log),
        low=None if change is None or change.low is None else _in_unit(claim, change.low),
        high=None if change is None or change.high is None else _in_unit(claim, change.high),
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


def _in_unit(claim: Claim, log: float) -> float:
    """A log-ratio as the claim has it: 0.24 times, or -76 %. What no float holds is the largest one."""
    log = min(log, 700.0)
    return math.exp(log) if claim.show == "times" else 100 * math.expm1(log)


def _amount_of(claim: Claim, change: Change) -> str:
    """ "+8.4 % (+7.8 to +9.01, 3 seeds)", or without an interval where there is none."""

    def number(log: float) -> str:
        value = _in_unit(claim, log)
        if claim.show == "times":
            return f"{value:.3f}" if 0.1 < value < 10 else _number(value)
        return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.3g}"

    how = f", {change.n} seeds" if change.n > 1 else (", one seed" if change.n else "")
    amount = f"{number(change.log)} {'times' if claim.show == 'times' else '%'}"
    if change.low is None or change.high is None:
        return f"{amount}{how}: too few for an interval"
    if change.low != change.high:
        return f"{amount} ({number(change.low)} to {number(change.high)}{how})"
    return f"{amount} (exact{how})" if change.n else amount


def _words(claim: Claim, change: Change, verdict: Verdict, absolute: str = "") -> str:
    """The numbers as a sentence."""
    subject, amount = "Measured" if change.n else "Computed", _amount_of(claim, change)
    means = f", {absolute}" if absolute else ""
    if change.low is None or change.high is None:
        return f"{subject} in {_label(claim)}{means}: {amount}."
    sentence = f"{subject} {amount} in {_label(claim)}{means}; claimed {claim.claimed}."
    if verdict == "contradicted" and change.low <= 0 <= change.high and claim.direction != "none":
        sentence += " The interval holds no change at all, and not the claimed one."
    elif (
        verdict == "contradicted"
        and claim.size is not None
        and (change.low > 0) == (claim.direction == "higher")
    ):
        sentence += " That is less than a twentieth of the claimed effect."
    return sentence


def _label(claim: Claim) -> str:
    return BY_KEY[claim.quantity].label if claim.quantity in BY_KEY else claim.quantity.replace("_", " ")


def _amount(value: float, unit: str) -> str:
    return f"${_number(value)}" if unit == "$" else f"{_number(value)} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _scale(results: Results, arm: Arm) -> str:
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
