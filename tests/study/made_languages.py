"""A synthetic study of languages with its run directories: a dense model and a mixture of experts."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from deskside.study.results import Arm, Results, Trial
from deskside.study.stats.compare import compare
from tests.study.small import study

LANGUAGES = ("bn", "en", "gu", "hi", "ta", "te")
# Of the experts, in logs.
EFFECTS = dict(zip(LANGUAGES, (-0.04, -0.03, -0.02, -0.004, 0.001, 0.03), strict=True))
LOAD = [[0.25, 0.25, 0.25, 0.25], [0.5, 0.125, 0.25, 0.125]]
SHARES = (0.2, 0.4, 0.6, 0.8)  # of the training, at the evaluations
FALLING = (1.5, 1.3, 1.2, 1.1)
RISING = (1.5, 1.2, 1.25, 1.3)
TOKENS = 1000.0


def bits_per_byte(seeds: int = 3) -> dict[tuple[str, int], dict[str, float]]:
    """Return {(arm, seed): {language: bits per byte}} with the known effects and noise."""
    draw = random.Random(5)
    found: dict[tuple[str, int], dict[str, float]] = {}
    for seed in range(1, seeds + 1):
        base = {language: 1.2 + draw.gauss(0, 0.05) for language in LANGUAGES}
        found["dense", seed] = base
        found["moe", seed] = {
            name: base[name] * (1 + EFFECTS[name] + draw.gauss(0, 0.006)) for name in LANGUAGES
        }
    return found


def curve(
    losses: tuple[float, ...], training: tuple[float, float] = (4.0, 1.0)
) -> list[dict[str, float | None]]:
    """Return a curve of 50 steps with these evaluations and a training loss between two values."""
    start, stop = training
    evaluated = {round(50 * share): loss for share, loss in zip(SHARES, losses, strict=True)}
    return [
        {
            "tokens": TOKENS * step / 50,
            "seconds": float(step),
            "loss": start + (stop - start) * step / 50,
            "val_bpb": evaluated.get(step),
        }
        for step in range(1, 51)
    ]


def write(
    folder: Path,
    values: dict[tuple[str, int], dict[str, float]],
    whole: tuple[float, ...] = FALLING,
    by_language: dict[str, tuple[float, ...]] | None = None,
    **summary: Any,
) -> Results:
    """Write the runs of a study in `folder` and return its results.

    whole: losses at the evaluations; by_language: those of each language; summary: more content of summary.json.
    """
    evaluations = by_language or dict.fromkeys(LANGUAGES, FALLING)
    trials: dict[str, list[Trial]] = {}
    for (arm, seed), languages in values.items():
        run = folder / "runs" / f"{arm}-s{seed}"
        run.mkdir(parents=True)
        content: dict[str, Any] = {
            "status": "finished",
            "val_languages": {name: {"bpb": bpb, "bytes": 9} for name, bpb in languages.items()},
            "val_expert_load": {"bn": LOAD, "en": LOAD[::-1]} if arm == "moe" else {},
            "samples": [
                {"prompt": f"<b>{name}</b> ", "text": f"{arm} {seed} <script>", "language": name}
                for name in languages
            ],
            **summary,
        }
        rows = [
            {"step": place, "tokens": TOKENS * share}
            | {f"val_bpb/{name}": losses[place] for name, losses in evaluations.items()}
            for place, share in enumerate(SHARES)
        ]
        config = {"seed": seed, "data": {"language_temperature": 3.33}}
        (run / "run.json").write_text(json.dumps({"config": config}))
        (run / "summary.json").write_text(json.dumps(content))
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics = {"val_bpb": sum(languages.values()) / (len(languages) or 1) or 1.0, "tokens": TOKENS}
        trial = Trial(seed, "finished", run=f"runs/{run.name}", metrics=metrics, curve=curve(whole))
        trials.setdefault(arm, []).append(trial)
    arms = [Arm(arm, arm, "main", {}, "dense", trials=found) for arm, found in trials.items()]
    results = study(arms)
    return compare(replace(results, groups=[replace(results.groups[0], budget="4 minutes of training")]))
