"""Sentences that summarize a compared study for one goal, for the report, the dashboard and the terminal.

The sentences of a group are, in this order: the best arm, with the arms that do not differ significantly from it; for
each baseline, the arms that are better (with their differences in other metrics), not significantly different, and
worse; and the significant interactions. Comparisons are given with their intervals.
"""

from collections.abc import Iterable, Iterator

from deskside.run.record import machine_name
from deskside.study.metrics import BY_KEY, PRIMARY, SPEED_AND_POWER, Metric
from deskside.study.results import (
    EXACT,
    NO_DIFFERENCE,
    TOO_FEW,
    Arm,
    Comparison,
    Group,
    Results,
    best_first,
    differing_label_parts,
    status_text,
)
from deskside.study.stats.equal_tokens import KEY as EQUAL_TOKENS
from deskside.study.stats.statistics import log_ratio, paired_values
from deskside.utils.format import percent, percent_digits, percent_range

GOALS = {
    "quality": "val_bpb",
    "speed": "tokens_per_second",
    "memory": "peak_memory_gib",
    "energy": "joules_per_token",
}  # fmt: skip
SUPERLATIVES = {
    "quality": "lowest validation loss",
    "speed": "fastest",
    "memory": "least peak memory",
    "energy": "least energy per token",
}
# metric -> (words for a larger value, words for a smaller value); the default is "higher LABEL" and "lower LABEL".
DIRECTIONS = {
    "tokens_per_second": ("faster", "slower"),
    "peak_memory_gib": ("more peak memory", "less peak memory"),
    "peak_reserved_gib": ("more reserved memory", "less reserved memory"),
    "watts": ("more power", "less power"),
    "joules_per_token": ("more energy per token", "less energy per token"),
    "parameters": ("more parameters", "fewer parameters"),
    "parameters_quantized": (
        "more parameters in quantized products",
        "fewer parameters in quantized products",
    ),
    "tokens": ("more tokens trained on", "fewer tokens trained on"),
    "steps": ("more optimizer steps", "fewer optimizer steps"),
    "seconds": ("more training time", "less training time"),
    "total_seconds": ("more time for the whole trial", "less time for the whole trial"),
}
LOSS_METRICS = ("val_bpb", "val_loss", "perplexity", "train_loss")
EMULATED_SPEED = "; emulated here, so this is not the speed of hardware that has the format"
EMULATED_LOSS = (
    "; emulated here, so in the same time it saw fewer tokens than on hardware that has the format"
)
# For each baseline, how many of the better, of the same and of the worse arms get a sentence of their own.
MAX_ARMS = 3
MAX_NAMES = 4  # arms named in one sentence


def insights(results: Results, goal: str) -> list[str]:
    """Return the findings for "quality", "speed", "memory" or "energy", the most important first.

    If there are several groups, each finding begins with the heading of its group. The list is empty before the
    first trial has finished. Raises KeyError for an unknown goal.
    """
    several = len(results.groups) > 1
    lines = [
        f"{group.heading}: {line}" if several else line
        for group, group_lines in findings_by_group(results, goal)
        for line in group_lines
    ]
    return lines + unfinished(results) if lines else []


def findings_by_group(results: Results, goal: str) -> list[tuple[Group, list[str]]]:
    """Return (group, its findings) of each group, without group titles and without `unfinished`."""
    metric = BY_KEY[GOALS[goal]]
    if not any(arm.finished() for arm in results.arms):
        return []
    findings: list[tuple[Group, list[str]]] = []
    for group in results.groups:
        arms = [arm for arm in results.arms_in(group) if metric.key in arm.estimates]
        if not arms:
            why = "no trial has finished"
            if any(arm.finished() for arm in results.arms_in(group)):
                why = "a card reports its power, a CPU does not" if goal == "energy" else "not recorded"
            findings.append((group, [f"{metric.label} was not measured ({why})."]))
            continue
        lines = [_best(results, goal, metric, arms)]
        for baseline in dict.fromkeys(arm.baseline for arm in arms):
            family = [arm for arm in arms if arm.baseline == baseline]
            lines += _comparisons(results, group, metric, family)
        findings.append((group, [*lines, *_interactions(results, group, metric)]))
    return findings


def _best(results: Results, goal: str, metric: Metric, arms: list[Arm]) -> str:
    """Return the finding about the best arm of a group, and about the arms that may be as good."""
    best = best_first(arms, metric)[0]
    other_estimates = [
        estimate_text(best, other)
        for other in (BY_KEY[key] for key in GOALS.values())
        if other is not metric and other.key in best.estimates
    ]
    card = machine_name(results.machine, "this machine")
    line = f"On {card}, {SUPERLATIVES[goal]}: {best.label}, {estimate_text(best, metric, interval=True)}"
    line += f", at {listed(other_estimates)}" if other_estimates else ""
    line += f"{emulation_note(metric.key, best, results)}."
    if len(arms) == 1:
        return line
    if best.estimates[metric.key].n == 1:
        return f"{line} One seed has no interval: others may be as good."
    if undecided := undecided_arms(best, arms, metric.key):
        line += f" Not significantly different from it: {_quoted([arm.label for arm in undecided])}."
    return line


def undecided_arms(best: Arm, arms: Iterable[Arm], key: str) -> list[Arm]:
    """Return the other arms whose interval of the difference from the best arm, paired by seed, includes zero."""
    undecided = []
    for arm in arms:
        ours, theirs = paired_values(best, arm, key)
        paired = len(ours) > 1 and min(*ours, *theirs) > 0
        if arm is not best and not (paired and log_ratio(ours, theirs).excludes_zero()):
            undecided.append(arm)
    return undecided


def _comparisons(results: Results, group: Group, metric: Metric, family: list[Arm]) -> Iterator[str]:
    """Yield the findings about the arms of one baseline: better, not significantly different, worse."""
    comparisons = [(arm, c) for arm in family if (c := arm.comparison(metric.key)) is not None]
    if not comparisons:
        return
    kinds: dict[str, list[tuple[Arm, Comparison]]] = {"better": [], "same": [], "worse": []}
    for arm, c in sorted(comparisons, key=lambda item: -abs(item[1].relative)):
        if c.verdict == NO_DIFFERENCE or c.relative == 0:
            kind = "same"
        else:
            kind = "better" if (c.relative > 0) == (metric.better == "higher") else "worse"
        kinds[kind].append((arm, c))
    baseline_id = comparisons[0][1].baseline
    baseline = results.arm(baseline_id)
    name = baseline.label if baseline is not None else baseline_id
    if not kinds["better"] and any(c.n > 1 for _, c in comparisons):
        yield f"Nothing is shown to be better than {name} in {metric.label}."
    for kind, members in kinds.items():
        for arm, c in members[:MAX_ARMS]:
            others = _other_metrics(results, group, arm, metric) if kind == "better" else []
            yield f"{arm.label}: {'; '.join([describe(c, arm, results), *others])}."
        if len(members) > MAX_ARMS:
            yield f"{_rest(kind, members[MAX_ARMS:], name, metric)}."


def _rest(kind: str, members: list[tuple[Arm, Comparison]], baseline: str, metric: Metric) -> str:
    """Summarize the arms that have no separate sentence; those with one seed are listed separately."""
    if kind == "same":
        labels = [arm.label for arm, _ in members]
        return f"No difference shown in {metric.label} against {baseline}, either: {_quoted(labels)}"
    several_seeds = [arm.label for arm, c in members if c.verdict != TOO_FEW]
    one_seed = [arm.label for arm, c in members if c.verdict == TOO_FEW]
    parts = []
    if several_seeds:
        parts.append(f"{kind.capitalize()} than {baseline} in {metric.label}, too: {_quoted(several_seeds)}")
    if one_seed:
        labels_text = _quoted(one_seed)
        parts.append(
            f"With one seed, so not shown, {kind} than {baseline} in {metric.label}, too: {labels_text}"
        )
    return "; ".join(parts)


def _other_metrics(results: Results, group: Group, arm: Arm, metric: Metric) -> list[str]:
    """Return the arm's comparisons in other metrics; for the loss with a time budget, also at equal tokens."""
    keys = [key for key in PRIMARY if key != metric.key]
    keys += [EQUAL_TOKENS] if metric.key == "val_bpb" and has_time_budget(group) else []
    comparisons = [c for key in keys if (c := arm.comparison(key)) is not None]
    return [describe(c, arm, results, named=False) for c in comparisons]


def _interactions(results: Results, group: Group, metric: Metric) -> Iterator[str]:
    """Yield the significant interactions in one metric."""
    factors = {factor.name: factor.label for factor in group.factors}
    more, less = DIRECTIONS.get(metric.key, (f"higher {metric.label}", f"lower {metric.label}"))
    for interaction in results.interactions:
        if interaction.group != group.name or interaction.metric != metric.key or not interaction.is_shown:
            continue
        both = " and ".join(
            f"{factors.get(name, name)} {interaction.levels.get(name, '')}".strip()
            for name in (interaction.first, interaction.second)
        )
        low, high = interaction.low, interaction.high
        interval = "exactly"
        if interaction.verdict != EXACT and low is not None and high is not None:
            ends, decimals = sorted((abs(low), abs(high))), percent_digits(low, high)
            interval = f"{percent_range(ends[0], ends[1], decimals)}, {interaction.n} seeds"
        size = percent(abs(interaction.effect), percent_digits(interaction.effect))
        direction = more if interaction.effect > 0 else less
        yield f"{both} together: {size} {direction} than from both alone ({interval})."


def unfinished(results: Results) -> list[str]:
    """Return a sentence on the trials that have not finished, if there are any."""
    trials = [trial for arm in results.arms for trial in arm.trials]
    statuses = [status_text(trial.status) for trial in trials if trial.status != "finished"]
    if not statuses:
        return []
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    return [
        f"{len(statuses)} of {len(trials)} trials are not finished ({counts}); a seed that an arm lacks is left "
        f"out of its comparison."
    ]


def estimate_text(arm: Arm, metric: Metric, interval: bool = False) -> str:
    """Return an arm's estimate: "1.2506 bits per byte", or with interval also " (1.2288 to 1.2723, 3 seeds)"."""
    estimate = arm.estimates[metric.key]
    mean = f"{metric.text(estimate.mean)} {metric.unit}"
    if not interval:
        return mean
    if estimate.low is None or estimate.high is None:
        return f"{mean} (1 seed)"
    low, high = metric.text(estimate.low), metric.text(estimate.high)
    if low == high:
        return f"{mean} ({estimate.n} seeds)"
    return f"{mean} ({low} to {high}, {estimate.n} seeds)"


def listed(parts: list[str]) -> str:
    """Return "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _quoted(labels: list[str]) -> str:
    """Return the first labels in quotes and the number of the others: “a”, “b” and 3 more."""
    shown = [f"\u201c{label}\u201d" for label in labels[:MAX_NAMES]]
    rest = len(labels) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def describe(comparison: Comparison, arm: Arm, results: Results, named: bool = True) -> str:
    """Return a comparison in English: "12.3 % faster than MHA (11.9 to 12.7 %, 3 seeds)".

    It does not include the arm's name. named: include the name of the baseline.
    """
    note = emulation_note(comparison.metric, arm, results)
    return _describe_difference(comparison, arm, results, named) + note


def emulation_note(metric: str, arm: Arm, results: Results) -> str:
    """Return the note that a number needs if the arm or its baseline emulates its number format, or ""."""
    baseline = results.arm(arm.baseline)
    if not (arm.emulated or (baseline is not None and baseline.emulated)):
        return ""
    if metric in SPEED_AND_POWER:
        return EMULATED_SPEED
    timed = any(group.name == arm.group and has_time_budget(group) for group in results.groups)
    return EMULATED_LOSS if timed and metric in LOSS_METRICS else ""


def _describe_difference(comparison: Comparison, arm: Arm, results: Results, named: bool) -> str:
    """Return `describe` without the note about emulation."""
    metric, low, high = BY_KEY.get(comparison.metric), comparison.relative_low, comparison.relative_high
    label = metric.label if metric is not None else comparison.metric.replace("_", " ")
    size, n = comparison.relative, comparison.n
    more, less = DIRECTIONS.get(comparison.metric, (f"higher {label}", f"lower {label}"))
    direction = more if size > 0 else less
    baseline = baseline_name(arm, results.arm(comparison.baseline), comparison.baseline)
    than, as_, against = (f" {word} {baseline}" if named else "" for word in ("than", "as", "against"))
    seeds = f"{n} {'seed' if n == 1 else 'seeds'}"
    if comparison.verdict == EXACT:
        same = "1 seed" if n == 1 else "the same in both seeds" if n == 2 else f"the same in all {seeds}"
        if size == 0:
            return f"exactly the same {label}{as_} ({same})"
        return f"exactly {_short_percent(abs(size))} {direction}{than} ({same})"
    if low is None or high is None:
        if size == 0:
            return f"the same {label}{as_} ({seeds}, so no interval)"
        return f"{percent(abs(size), percent_digits(size))} {direction}{than} ({seeds}, so no interval)"
    if comparison.verdict in ("higher", "lower"):
        ends = (low, high) if size > 0 else (-high, -low)
        decimals = percent_digits(size, low, high)
        return f"{percent(abs(size), decimals)} {direction}{than} ({percent_range(*ends, decimals)}, {seeds})"
    notes = f"{percent_range(low, high, percent_digits(low, high), signed=True)}, {seeds}"
    if low > 0 or high < 0:
        notes += f"; not enough for a verdict among {family_size(comparison, arm, results)} comparisons"
    return f"no difference shown in {label}{against} ({notes})"


def baseline_name(arm: Arm, baseline: Arm | None, baseline_id: str) -> str:
    """Return a short name of an arm's baseline: the parts of its label that the arm's label does not have.

    Without such parts it is "the baseline", and without a `baseline` it is `baseline_id`.
    """
    if baseline is None:
        return baseline_id
    parts = differing_label_parts(baseline, arm)
    return "the baseline" if not parts or parts == ["baseline"] else ", ".join(parts)


def has_time_budget(group: Group) -> bool:
    """Return True if the budget of a group is a time, not a number of tokens or steps."""
    return group.budget.endswith("of training")  # `Budget.text`


def _short_percent(share: float) -> str:
    """Format an exact share without trailing zeros: 10 %, 12.5 %, 33.3 %."""
    text = percent(share, percent_digits(share)).removesuffix(" %")
    return (text.rstrip("0").rstrip(".") if "." in text else text) + " %"


def family_size(comparison: Comparison, arm: Arm, results: Results) -> int:
    """Return the number of comparisons that are corrected together with this one."""
    return sum(
        other.metric == comparison.metric and other.n > 1 and other.verdict != EXACT
        for member in results.arms
        if member.group == arm.group
        for other in member.comparisons
    )
