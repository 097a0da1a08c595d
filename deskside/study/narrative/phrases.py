"""One comparison in plain English: "12.3 % faster than MHA (11.9 to 12.7 %, 3 seeds)"."""

from deskside.study.results import Arm, Comparison, Group, Results
from deskside.study.stats.metrics import BY_KEY
from deskside.utils.format import percent, percent_digits, percent_range

# metric -> how one says more of it and less of it; what is not here is "higher" or "lower".
DIRECTIONS = {
    "tokens_per_second": ("faster", "slower"),
    "peak_memory_gib": ("more peak memory", "less peak memory"),
    "peak_reserved_gib": ("more reserved memory", "less reserved memory"),
    "watts": ("more power", "less power"),
    "joules_per_token": ("more energy per token", "less energy per token"),
    "parameters": ("more parameters", "fewer parameters"),
    "parameters_quantized": (
        "more parameters in quantised products",
        "fewer parameters in quantised products",
    ),
    "tokens": ("more tokens trained on", "fewer tokens trained on"),
    "steps": ("more optimiser steps", "fewer optimiser steps"),
    "seconds": ("more training time", "less training time"),
    "total_seconds": ("more time for the whole trial", "less time for the whole trial"),
}
PACE = ("tokens_per_second", "mfu", "watts", "joules_per_token", "seconds", "total_seconds")
LEARNED = ("val_bpb", "val_loss", "perplexity", "train_loss")
EMULATED_PACE = "; emulated here, so this is not the speed of hardware that has the format"
EMULATED_LOSS = (
    "; emulated here, so in the same time it saw fewer tokens than on hardware that has the format"
)


def sentence(comparison: Comparison, arm: Arm, results: Results, named: bool = True) -> str:
    """What a comparison says of an arm, its interval and seeds included, without the arm's name and a full stop.

    named: say what it is compared with. False where the words before have said it.
    """
    return phrase(comparison, arm, results, named) + emulation(comparison.metric, arm, results)


def emulation(metric: str, arm: Arm, results: Results) -> str:
    """What has to be added to a number of an arm that emulates its number format, or whose baseline does."""
    baseline = results.arm(arm.baseline)
    if not (arm.emulated or (baseline is not None and baseline.emulated)):
        return ""
    if metric in PACE:
        return EMULATED_PACE
    timed = any(group.name == arm.group and in_time(group) for group in results.groups)
    return EMULATED_LOSS if timed and metric in LEARNED else ""


def phrase(comparison: Comparison, arm: Arm, results: Results, named: bool = True) -> str:
    """A sentence without a word on emulation."""
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
    """What an arm's baseline is called beside it: the parts of its label that the arm's does not have."""
    if baseline is None:
        return otherwise
    parts = own_parts(baseline, arm)
    return "the baseline" if not parts or parts == ["baseline"] else ", ".join(parts)


def own_parts(arm: Arm, other: Arm) -> list[str]:
    """The parts of an arm's label that another arm's does not have."""
    common = other.label.split(", ")
    return [part for part in arm.label.split(", ") if part not in common]


def in_time(group: Group) -> bool:
    """Whether its arms were given equal time, and not equal tokens or steps."""
    return group.budget.endswith("of training")


def _short(share: float) -> str:
    """An exact share: 10 %, 12.5 %, 33.3 %."""
    text = percent(share, percent_digits(share)).removesuffix(" %")
    return (text.rstrip("0").rstrip(".") if "." in text else text) + " %"


def _together(comparison: Comparison, arm: Arm, results: Results) -> int:
    """How many comparisons of this metric in the arm's group were judged together."""
    return sum(
        other.metric == comparison.metric and other.n > 1 and other.verdict != "exact"
        for member in results.arms
        if member.group == arm.group
        for other in member.comparisons
    )
