"""Small studies with given numbers, for tests of the statistics."""

from collections.abc import Mapping, Sequence
from itertools import product

from deskside.study.results import Arm, Factor, Group, Results, Trial

Numbers = Sequence[float | None]  # one per seed, from seed 1; None: that trial failed


def arm(name: str, numbers: Numbers, metric: str = "val_bpb", baseline: str = "base", **more: object) -> Arm:
    """Return an arm with one metric."""
    trials = [
        Trial(seed, "failed", "made to fail")
        if number is None
        else Trial(seed, "finished", metrics={metric: number})
        for seed, number in enumerate(numbers, 1)
    ]
    return Arm(id=name, label=name, group="main", levels={}, baseline=baseline, trials=trials, **more)  # type: ignore[arg-type]


def study(
    arms: Sequence[Arm], factors: Sequence[Factor] = (), within: Sequence[str] = (), **more: object
) -> Results:
    """Return a study with one group."""
    group = Group("main", "", "124m", "full", "100M tokens", list(factors), list(within))
    whole = {
        "name": "small", "question": "", "created": "", "updated": "", "seeds": [1], "memory_fraction": 0.85,
        "machine": {}, "groups": [group], "arms": list(arms),
    }  # fmt: skip
    return Results(**{**whole, **more})  # type: ignore[arg-type]


def crossed(
    numbers: Mapping[tuple[str, ...], Numbers], names: Sequence[str], metric: str = "val_bpb"
) -> Results:
    """Return arms of a full design, whose first levels are "off": (level, level, ...) -> numbers."""
    levels = [list(dict.fromkeys(key[place] for key in numbers)) for place in range(len(names))]
    factors = [Factor(name, name, found) for name, found in zip(names, levels, strict=True)]
    arms = []
    for key in product(*levels):
        if key in numbers:
            made = arm("-".join(key), numbers[key], metric, baseline="-".join("off" for _ in names))
            arms.append(Arm(**{**vars(made), "levels": dict(zip(names, key, strict=True))}))
    return study(arms, factors)
