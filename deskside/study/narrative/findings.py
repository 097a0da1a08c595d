"""What a study says for a goal, in sentences that carry their intervals. The report and the dashboard show them.

For each group: the best arm and whether the others are told apart from it; then, for every baseline, what is shown to
be better (with what it costs), what is not shown to differ, and what is shown to be worse; then where two factors do
not act independently. Nothing is said that the comparisons do not say, and what was not measured is said to be so.
"""

from collections.abc import Iterator

from deskside.study.narrative.phrases import (
    DIRECTIONS,
    emulation,
    in_time,
    sentence,
)
from deskside.study.results import Arm, Comparison, Group, Interaction, Results
from deskside.study.stats.equal_tokens import KEY as EQUAL_TOKENS
from deskside.study.stats.metrics import BY_KEY, Metric
from deskside.study.stats.statistics import log_ratio, pairs
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
MOST = 3  # arms that are named one by one in each direction, for each baseline
MOST_NAMES = 4  # in a list inside a sentence

__all__ = ["GOALS", "insights", "sentence"]


def insights(results: Results, goal: str) -> list[str]:
    """What a compared study says for "quality", "speed", "memory" or "energy", the most important first.

    Of several groups, each sentence begins with its group's title. Empty when no trial has come to its end. Raises
    KeyError for another goal.
    """
    several = len(results.groups) > 1
    said = [
        f"{group.title or group.name}: {line}" if several else line
        for group, lines in by_group(results, goal)
        for line in lines
    ]
    return said + unfinished(results) if said else []


def by_group(results: Results, goal: str) -> list[tuple[Group, list[str]]]:
    """The same group by group, without their titles and without `unfinished`."""
    metric = BY_KEY[GOALS[goal]]
    if not any(arm.finished() for arm in results.arms):
        return []
    told: list[tuple[Group, list[str]]] = []
    for group in results.groups:
        arms = [arm for arm in results.arms if arm.group == group.name]
        have = [arm for arm in arms if metric.key in arm.estimates]
        if not have:
            why = (
                "a card reports its power, a CPU does not"
                if goal == "energy"
                else "no trial has come to its end"
            )
            told.append((group, [f"{metric.label} was not measured ({why})."]))
            continue
        said = [_best(results, goal, metric, have)]
        for baseline in dict.fromkeys(arm.baseline for arm in have):
            family = [arm for arm in have if arm.baseline == baseline]
            said += _family(results, group, metric, family)
        told.append((group, [*said, *_crossed(results, group, metric)]))
    return told


def machine_name(results: Results) -> str:
    """The card that was measured on, or its CPU."""
    gpu = results.machine.get("gpu")
    name = gpu.get("name") if isinstance(gpu, dict) else results.machine.get("cpu")
    return str(name) if name else "this machine"


def _best(results: Results, goal: str, metric: Metric, arms: list[Arm]) -> str:
    sign = 1 if metric.better == "higher" else -1
    best = max(arms, key=lambda arm: sign * arm.estimates[metric.key].mean)
    also = [
        value(best, other)
        for other in (BY_KEY[key] for key in GOALS.values())
        if other is not metric and other.key in best.estimates
    ]
    line = f"On {machine_name(results)}, {SUPERLATIVES[goal]}: {best.label}, {value(best, metric, interval=True)}"
    line += f", at {_listed(also)}" if also else ""
    line += f"{emulation(metric.key, best, results)}."
    if len(arms) == 1:
        return line
    if best.estimates[metric.key].n == 1:
        return f"{line} One seed has no interval: others may be as good."
    open_ = [arm for arm in arms if arm is not best and not _told_apart(best, arm, metric)]
    if open_:
        line += f" Not told apart from it over the seeds: {_names([arm.label for arm in open_])}."
    return line


def _told_apart(best: Arm, other: Arm, metric: Metric) -> bool:
    ours, theirs = pairs(best, other, metric.key)
    if len(ours) < 2 or min(*ours, *theirs) <= 0:
        return False
    return log_ratio(ours, theirs).excludes_zero()


def _family(results: Results, group: Group, metric: Metric, family: list[Arm]) -> Iterator[str]:
    """Of the arms with one baseline: better, not shown, worse, and what one seed cannot tell."""
    found = [(arm, c) for arm in family if (c := _comparison(arm, metric.key)) is not None]
    if not found:
        return
    better: list[tuple[Arm, Comparison]] = []
    worse: list[tuple[Arm, Comparison]] = []
    same: list[tuple[Arm, Comparison]] = []
    for arm, c in sorted(found, key=lambda item: -abs(item[1].relative)):
        if c.verdict == "no difference shown" or c.relative == 0:
            same.append((arm, c))
        else:
            better_here = (c.relative > 0) == (metric.better == "higher")
            (better if better_here else worse).append((arm, c))
    baseline = results.arm(found[0][1].baseline)
    name = baseline.label if baseline is not None else found[0][1].baseline
    if not better and any(c.n > 1 for _, c in found):
        yield f"Nothing is shown to be better than {name} in {metric.label}."
    for arm, c in better[:MOST]:
        yield f"{arm.label}: {'; '.join([sentence(c, arm, results), *_also(results, group, arm, metric)])}."
    if len(better) > MOST:
        yield f"{_rest('better', better[MOST:], name, metric)}."
    for arm, c in same[:MOST]:
        yield f"{arm.label}: {sentence(c, arm, results)}."
    if len(same) > MOST:
        rest = _names([arm.label for arm, _ in same[MOST:]])
        yield f"No difference shown in {metric.label} against {name}, either: {rest}."
    for arm, c in worse[:MOST]:
        yield f"{arm.label}: {sentence(c, arm, results)}."
    if len(worse) > MOST:
        yield f"{_rest('worse', worse[MOST:], name, metric)}."


def _rest(word: str, found: list[tuple[Arm, Comparison]], name: str, metric: Metric) -> str:
    """The arms that are not named one by one. Those of one seed are not mixed with what was shown."""
    kinds = (
        (f"{word.capitalize()} than", [arm.label for arm, c in found if c.verdict != "too few seeds"]),
        (
            f"With one seed, so not shown, {word} than",
            [a.label for a, c in found if c.verdict == "too few seeds"],
        ),
    )
    return "; ".join(
        f"{how} {name} in {metric.label}, too: {_names(labels)}" for how, labels in kinds if labels
    )


def _also(results: Results, group: Group, arm: Arm, metric: Metric) -> list[str]:
    """What the same arm does in the other goals, and to the loss at equal tokens where time was equal."""
    keys = [key for key in ("val_bpb", "tokens_per_second", "peak_memory_gib") if key != metric.key]
    keys += [EQUAL_TOKENS] if metric.key == "val_bpb" and in_time(group) else []
    found = [c for key in keys if (c := _comparison(arm, key)) is not None]
    return [sentence(c, arm, results, named=False) for c in found]


def _crossed(results: Results, group: Group, metric: Metric) -> Iterator[str]:
    labels = {factor.name: factor.label for factor in group.factors}
    for found in results.interactions:
        shown = found.verdict in ("lower", "higher") or (found.verdict == "exact" and found.effect != 0)
        if found.group == group.name and found.metric == metric.key and shown:
            yield _interaction(found, labels, metric)


def _interaction(found: Interaction, labels: dict[str, str], metric: Metric) -> str:
    both = " and ".join(
        f"{labels.get(name, name)} {found.levels.get(name, '')}".strip()
        for name in (found.first, found.second)
    )
    more, less = DIRECTIONS.get(metric.key, (f"higher {metric.label}", f"lower {metric.label}"))
    low, high = found.low, found.high
    interval = "exactly"
    if found.verdict != "exact" and low is not None and high is not None:
        ends, decimals = sorted((abs(low), abs(high))), percent_digits(low, high)
        interval = f"{percent_range(ends[0], ends[1], decimals)}, {found.n} seeds"
    size = percent(abs(found.effect), percent_digits(found.effect))
    return f"{both} together: {size} {more if found.effect > 0 else less} than from both alone ({interval})."


def unfinished(results: Results) -> list[str]:
    """What has no finished trial, and that pairs were left out."""
    trials = [trial for arm in results.arms for trial in arm.trials]
    words = {"oom": "out of memory", "running": "still running", "pending": "not run yet"}
    states = [words.get(trial.status, trial.status) for trial in trials if trial.status != "finished"]
    if not states:
        return []
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return [
        f"{len(states)} of {len(trials)} trials are not finished ({counts}); a seed that an arm lacks is left "
        f"out of its comparison."
    ]


def value(arm: Arm, metric: Metric, interval: bool = False) -> str:
    """An arm's estimate with its unit: "1.2506 bits per byte (1.2288 to 1.2723, 3 seeds)"."""
    found = arm.estimates[metric.key]
    mean, low, high = (
        None if number is None else f"{number * metric.scale:,.{metric.digits}f}"
        for number in (found.mean, found.low, found.high)
    )
    if not interval:
        return f"{mean} {metric.unit}"
    if low is None or high is None:
        return f"{mean} {metric.unit} (1 seed)"
    if low == high:
        return f"{mean} {metric.unit} ({found.n} seeds)"
    return f"{mean} {metric.unit} ({low} to {high}, {found.n} seeds)"


def _comparison(arm: Arm, key: str) -> Comparison | None:
    return next((c for c in arm.comparisons if c.metric == key), None)


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _names(labels: list[str]) -> str:
    shown = [f"\u201c{label}\u201d" for label in labels[:MOST_NAMES]]
    rest = len(labels) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
