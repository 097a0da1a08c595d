"""Sentences that summarize a compared study for one goal. The report and the dashboard show them.

For each group: the best arm, and the arms that do not differ significantly from it; then, for each baseline, the
arms that are significantly better (with their cost in the other metrics), not significantly different, and worse;
then significant interactions. Every sentence restates a comparison with its interval, and metrics that were not
measured are reported as such.
"""

from collections.abc import Iterator

from deskside.run.record import machine_name
from deskside.study.results import (
    EXACT,
    NO_DIFFERENCE,
    TOO_FEW,
    Arm,
    Comparison,
    Group,
    Results,
    differing_label_parts,
    status_text,
)
from deskside.study.stats.equal_tokens import KEY as EQUAL_TOKENS
from deskside.study.stats.metrics import BY_KEY, SPEED_AND_POWER, Metric
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
# metric -> words for more and for less of it; the default is "higher" and "lower".
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
LEARNED = ("val_bpb", "val_loss", "perplexity", "train_loss")
EMULATED_PACE = "; emulated here, so this is not the speed of hardware that has the format"
EMULATED_LOSS = (
    "; emulated here, so in the same time it saw fewer tokens than on hardware that has the format"
)
MAX_ARMS = 3  # named one by one in each direction, for each baseline
MAX_NAMES = 4  # in a list inside a sentence


def insights(results: Results, goal: str) -> list[str]:
    """Return the findings for "quality", "speed", "memory" or "energy", the most important first.

    If there are several groups, each sentence begins with the title of its group. The list is empty before the
    first trial has finished. Raises KeyError for an unknown goal.
    """
    several = len(results.groups) > 1
    said = [
        f"{group.heading}: {line}" if several else line
        for group, lines in by_group(results, goal)
        for line in lines
    ]
    return said + unfinished(results) if said else []


def by_group(results: Results, goal: str) -> list[tuple[Group, list[str]]]:
    """Return the findings of each group, without group titles and without `unfinished`."""
    metric = BY_KEY[GOALS[goal]]
    if not any(arm.finished() for arm in results.arms):
        return []
    told: list[tuple[Group, list[str]]] = []
    for group in results.groups:
        arms = [arm for arm in results.arms if arm.group == group.name]
        have = [arm for arm in arms if metric.key in arm.estimates]
        if not have:
            why = "a card reports its power, a CPU does not" if goal == "energy" else "no trial has finished"
            told.append((group, [f"{metric.label} was not measured ({why})."]))
            continue
        said = [_best(results, goal, metric, have)]
        for baseline in dict.fromkeys(arm.baseline for arm in have):
            family = [arm for arm in have if arm.baseline == baseline]
            said += _family(results, group, metric, family)
        told.append((group, [*said, *_crossed(results, group, metric)]))
    return told


def _best(results: Results, goal: str, metric: Metric, arms: list[Arm]) -> str:
    sign = 1 if metric.better == "higher" else -1
    best = max(arms, key=lambda arm: sign * arm.estimates[metric.key].mean)
    also = [
        value(best, other)
        for other in (BY_KEY[key] for key in GOALS.values())
        if other is not metric and other.key in best.estimates
    ]
    card = machine_name(results.machine, "this machine")
    line = f"On {card}, {SUPERLATIVES[goal]}: {best.label}, {value(best, metric, interval=True)}"
    line += f", at {_listed(also)}" if also else ""
    line += f"{emulation(metric.key, best, results)}."
    if len(arms) == 1:
        return line
    if best.estimates[metric.key].n == 1:
        return f"{line} One seed has no interval: others may be as good."
    undecided = []
    for arm in arms:
        ours, theirs = paired_values(best, arm, metric.key)
        paired = len(ours) > 1 and min(*ours, *theirs) > 0
        if arm is not best and not (paired and log_ratio(ours, theirs).excludes_zero()):
            undecided.append(arm.label)
    if undecided:
        line += f" Not significantly different from it: {_names(undecided)}."
    return line


def _family(results: Results, group: Group, metric: Metric, family: list[Arm]) -> Iterator[str]:
    """Yield the findings about the arms of one baseline: better, not significantly different, worse."""
    found = [(arm, c) for arm in family if (c := arm.comparison(metric.key)) is not None]
    if not found:
        return
    kinds: dict[str, list[tuple[Arm, Comparison]]] = {"better": [], "same": [], "worse": []}
    for arm, c in sorted(found, key=lambda item: -abs(item[1].relative)):
        kind = "better" if (c.relative > 0) == (metric.better == "higher") else "worse"
        kinds["same" if c.verdict == NO_DIFFERENCE or c.relative == 0 else kind].append((arm, c))
    baseline = results.arm(found[0][1].baseline)
    name = baseline.label if baseline is not None else found[0][1].baseline
    if not kinds["better"] and any(c.n > 1 for _, c in found):
        yield f"Nothing is shown to be better than {name} in {metric.label}."
    for kind, members in kinds.items():
        for arm, c in members[:MAX_ARMS]:
            also = _also(results, group, arm, metric) if kind == "better" else []
            yield f"{arm.label}: {'; '.join([sentence(c, arm, results), *also])}."
        if len(members) > MAX_ARMS:
            yield f"{_rest(kind, members[MAX_ARMS:], name, metric)}."


def _rest(kind: str, found: list[tuple[Arm, Comparison]], name: str, metric: Metric) -> str:
    """Summarize the arms that are not named one by one; those with one seed are listed apart."""
    if kind == "same":
        labels = [arm.label for arm, _ in found]
        return f"No difference shown in {metric.label} against {name}, either: {_names(labels)}"
    several = [arm.label for arm, c in found if c.verdict != TOO_FEW]
    single = [arm.label for arm, c in found if c.verdict == TOO_FEW]
    starts = ((f"{kind.capitalize()} than", several), (f"With one seed, so not shown, {kind} than", single))
    return "; ".join(
        f"{start} {name} in {metric.label}, too: {_names(labels)}" for start, labels in starts if labels
    )


def _also(results: Results, group: Group, arm: Arm, metric: Metric) -> list[str]:
    """Return phrases on the other metrics of the same arm, and for a time budget on its loss at equal tokens."""
    keys = [key for key in ("val_bpb", "tokens_per_second", "peak_memory_gib") if key != metric.key]
    keys += [EQUAL_TOKENS] if metric.key == "val_bpb" and in_time(group) else []
    found = [c for key in keys if (c := arm.comparison(key)) is not None]
    return [sentence(c, arm, results, named=False) for c in found]


def _crossed(results: Results, group: Group, metric: Metric) -> Iterator[str]:
    """Yield the significant interactions in one metric."""
    factors = {factor.name: factor.label for factor in group.factors}
    more, less = DIRECTIONS.get(metric.key, (f"higher {metric.label}", f"lower {metric.label}"))
    for found in results.interactions:
        if found.group != group.name or found.metric != metric.key or not found.is_shown:
            continue
        both = " and ".join(
            f"{factors.get(name, name)} {found.levels.get(name, '')}".strip()
            for name in (found.first, found.second)
        )
        low, high = found.low, found.high
        interval = "exactly"
        if found.verdict != EXACT and low is not None and high is not None:
            ends, decimals = sorted((abs(low), abs(high))), percent_digits(low, high)
            interval = f"{percent_range(ends[0], ends[1], decimals)}, {found.n} seeds"
        size = percent(abs(found.effect), percent_digits(found.effect))
        yield f"{both} together: {size} {more if found.effect > 0 else less} than from both alone ({interval})."


def unfinished(results: Results) -> list[str]:
    """Return a sentence on the trials that have not finished, if there are any."""
    trials = [trial for arm in results.arms for trial in arm.trials]
    states = [status_text(trial.status) for trial in trials if trial.status != "finished"]
    if not states:
        return []
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return [
        f"{len(states)} of {len(trials)} trials are not finished ({counts}); a seed that an arm lacks is left "
        f"out of its comparison."
    ]


def value(arm: Arm, metric: Metric, interval: bool = False) -> str:
    """Return an arm's estimate with its unit: "1.2506 bits per byte (1.2288 to 1.2723, 3 seeds)"."""
    found = arm.estimates[metric.key]
    mean, low, high = (
        None if number is None else metric.text(number) for number in (found.mean, found.low, found.high)
    )
    if not interval:
        return f"{mean} {metric.unit}"
    if low is None or high is None:
        return f"{mean} {metric.unit} (1 seed)"
    if low == high:
        return f"{mean} {metric.unit} ({found.n} seeds)"
    return f"{mean} {metric.unit} ({low} to {high}, {found.n} seeds)"


def _listed(parts: list[str]) -> str:
    """Return "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _names(labels: list[str]) -> str:
    shown = [f"\u201c{label}\u201d" for label in labels[:MAX_NAMES]]
    rest = len(labels) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def sentence(comparison: Comparison, arm: Arm, results: Results, named: bool = True) -> str:
    """Return a comparison in English, without the arm's name and the full stop: "12.3 % faster than MHA (11.9 to
    12.7 %, 3 seeds)".

    named: include the name of the baseline.
    """
    return phrase(comparison, arm, results, named) + emulation(comparison.metric, arm, results)


def emulation(metric: str, arm: Arm, results: Results) -> str:
    """Return the note that a number needs if the arm or its baseline emulates its number format, or ""."""
    baseline = results.arm(arm.baseline)
    if not (arm.emulated or (baseline is not None and baseline.emulated)):
        return ""
    if metric in SPEED_AND_POWER:
        return EMULATED_PACE
    timed = any(group.name == arm.group and in_time(group) for group in results.groups)
    return EMULATED_LOSS if timed and metric in LEARNED else ""


def phrase(comparison: Comparison, arm: Arm, results: Results, named: bool = True) -> str:
    """Return `sentence` without the note on emulation."""
    metric, low, high = BY_KEY.get(comparison.metric), comparison.relative_low, comparison.relative_high
    label = metric.label if metric is not None else comparison.metric.replace("_", " ")
    size, n = comparison.relative, comparison.n
    more, less = DIRECTIONS.get(comparison.metric, (f"higher {label}", f"lower {label}"))
    which = more if size > 0 else less
    other = other_name(arm, results.arm(comparison.baseline), comparison.baseline)
    than, as_, against = (f" {word} {other}" if named else "" for word in ("than", "as", "against"))
    seeds = f"{n} {'seed' if n == 1 else 'seeds'}"
    if comparison.verdict == "exact":
        same = "1 seed" if n == 1 else "the same in both seeds" if n == 2 else f"the same in all {seeds}"
        if size == 0:
            return f"exactly the same {label}{as_} ({same})"
        return f"exactly {_short(abs(size))} {which}{than} ({same})"
    if low is None or high is None:
        if size == 0:
            return f"the same {label}{as_} ({seeds}, so no interval)"
        return f"{percent(abs(size), percent_digits(size))} {which}{than} ({seeds}, so no interval)"
    if comparison.verdict in ("higher", "lower"):
        ends = (low, high) if size > 0 else (-high, -low)
        decimals = percent_digits(size, low, high)
        return f"{percent(abs(size), decimals)} {which}{than} ({percent_range(*ends, decimals)}, {seeds})"
    notes = f"{percent_range(low, high, percent_digits(low, high), signed=True)}, {seeds}"
    if low > 0 or high < 0:
        notes += f"; not enough for a verdict among {_together(comparison, arm, results)} comparisons"
    return f"no difference shown in {label}{against} ({notes})"


def other_name(arm: Arm, baseline: Arm | None, otherwise: str) -> str:
    """Return a short name of an arm's baseline: the parts of its label that the arm's label lacks."""
    if baseline is None:
        return otherwise
    parts = differing_label_parts(baseline, arm)
    return "the baseline" if not parts or parts == ["baseline"] else ", ".join(parts)


def in_time(group: Group) -> bool:
    """Return whether the arms of a group have equal time, not equal tokens or steps."""
    return group.budget.endswith("of training")


def _short(share: float) -> str:
    """Format an exact share without trailing zeros: 10 %, 12.5 %, 33.3 %."""
    text = percent(share, percent_digits(share)).removesuffix(" %")
    return (text.rstrip("0").rstrip(".") if "." in text else text) + " %"


def _together(comparison: Comparison, arm: Arm, results: Results) -> int:
    """Return the number of comparisons that are corrected together with this one."""
    return sum(
        other.metric == comparison.metric and other.n > 1 and other.verdict != "exact"
        for member in results.arms
        if member.group == arm.group
        for other in member.comparisons
    )
