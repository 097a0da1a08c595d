"""Synthetic directories for tests and benchmarks of the dashboard: studies, runs, broken and half-written ones."""

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from deskside.study.results import ClaimResult, Comparison, Factor, Results, Trial
from deskside.study.search.outcome import Outcome, SearchTrial, best_so_far, write_outcome
from deskside.study.stats.compare import compare
from tests.study import made


def study(folder: Path, name: str = "made", **changes: Any) -> Results:
    """Write a study with known effects, with its comparisons, as the runner does."""
    whole = compare(replace(made.results(), name=name))
    whole = replace(whole, **{"claims": [CLAIM], **changes})
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(whole.to_json()))
    (folder / "study.json").write_text("{}")
    return whole


def two_groups(
    folder: Path,
    factors: list[Factor] | None = None,
    levels: list[dict[str, str]] | None = None,
    finished: tuple[str, ...] = ("main", "second"),
) -> Results:
    """Write a study with two groups whose arms have the same labels, as when both have a "baseline".

    factors, levels: of the second group and its arms; finished: the groups whose trials have ended.
    """
    one = made.results()
    first = one.groups[0]
    second = replace(
        first, name="second", title="A second", budget="10 steps", factors=factors or first.factors
    )
    arms = [
        replace(
            arm,
            id=arm.id if group is first else f"second-{arm.id}",
            group=group.name,
            baseline=arm.baseline if group is first else f"second-{arm.baseline}",
            levels=levels[place] if levels and group is second else arm.levels,
            trials=arm.trials if group.name in finished else [Trial(1, "pending")],
        )
        for group in (first, second)
        for place, arm in enumerate(one.arms)
    ]
    groups = [replace(first, title="A matrix"), second]
    both = compare(replace(one, groups=groups, arms=arms))
    return study(folder, groups=groups, arms=both.arms, fronts=both.fronts, interactions=both.interactions)


def many_arms(folder: Path) -> Results:
    """A study of one group with 24 arms, which differ by a third factor too."""
    one = made.results()
    norm = Factor("norm", "norm", ["rms", "layer", "none"])
    arms = [
        replace(
            arm,
            id=f"{arm.id}-{level}",
            label=f"{arm.label}, {level} norm",
            baseline=f"{arm.baseline}-{level}",
            levels={**arm.levels, "norm": level},
            trials=[
                replace(trial, metrics={key: value * 1.004**place for key, value in trial.metrics.items()})
                for trial in arm.trials
            ],
        )
        for place, level in enumerate(norm.levels)
        for arm in one.arms
    ]
    groups = [replace(one.groups[0], factors=[*one.groups[0].factors, norm])]
    whole = compare(replace(one, groups=groups, arms=arms))
    return study(folder, groups=groups, arms=whole.arms, fronts=whole.fronts, interactions=whole.interactions)


def unfinished_study(folder: Path, run: str) -> None:
    """Write a study whose last trial is running, in this directory below it."""
    whole = made.results()
    last = whole.arms[-1]
    trials = [replace(last.trials[0], status="running", run=run, metrics={}, curve=[])]
    study(folder, arms=[*compare(whole).arms[:-1], replace(last, trials=trials)], complete=False)


CLAIM = ClaimResult(
    id="gqa-speed",
    text="GQA 4:1 trains 5 % faster",
    source="a guide",
    claimed="+5 %",
    measured=0.1,
    low=0.09,
    high=0.11,
    unit="",
    n=3,
    scale="25 M",
    verdict="holds in direction",
    explanation="",
)


def run(
    folder: Path, steps: int = 60, of: int = 60, seed: int = 1, finished: bool = True, **summary: Any
) -> None:
    """Write a run directory as training does. Unfinished ones have no summary."""
    folder.mkdir(parents=True)
    config = {"seed": seed, "optim": {"name": "muon"}, "precision": {"name": "bf16"}}
    run_json = {
        "schema_version": 1,
        "name": folder.name,
        "created": "2026-11-21T00:00:00+00:00",
        "config": config,
    }
    (folder / "run.json").write_text(json.dumps(run_json))
    machine = {"device": "cuda", "gpu": {"name": "a card that was made up", "memory_gib": 32.0}}
    (folder / "environment.json").write_text(json.dumps(machine))
    plan = {
        "initial": {"steps": of, "tokens": of * 65536, "seconds": of * 0.5, "memory_gib": 8.0},
        "precision": {"chosen": "bf16", "native": True},
        "revisions": [{"step": 0, "progress": 0.0, "remaining": of, "step_seconds": 0.5}],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    rows = [row(step) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if finished:
        outcome = {
            "schema_version": 1,
            "status": "finished",
            "val_bpb": 1.1 + 0.01 * seed,
            "val_loss": 3.4,
            "steps": steps,
            "tokens": steps * 65536,
            "seconds": steps * 0.5,
            "tokens_per_second": 131072.0,
            "mfu": 0.42,
            "peak_memory_gib": 8.4,
            "parameters": 124_000_000,
            "precision": "bf16",
            "emulated": False,
            "predicted": {"tokens_per_second": {"plan": [90000, 120000, 150000], "measured": 131072.0}},
            **summary,
        }
        (folder / "summary.json").write_text(json.dumps(outcome))


def add_experts(folder: Path, layers: int = 6, experts: int = 8) -> None:
    """Add experts to a run of `run`, with loads that differ by layer and by language."""
    path = folder / "run.json"
    run_json = json.loads(path.read_text())
    run_json["config"]["model"] = {"num_experts": experts}
    path.write_text(json.dumps(run_json))

    def load(shift: int) -> list[list[float]]:
        weights = [[1 + (layer * e + shift) % 5 for e in range(experts)] for layer in range(layers)]
        return [[weight / sum(layer) for weight in layer] for layer in weights]

    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row |= {"load_imbalance": 1.2 + 2 / row["step"], "router_entropy": 1.7}
        if row["step"] % 10 == 0:
            row["experts"] = {"load": load(0), "entropy": [1.7] * layers, "dropped_tokens": [0] * layers}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "summary.json"
    if path.exists():
        languages = {language: load(shift) for shift, language in enumerate(["bn", "en", "hi", "ta"])}
        path.write_text(json.dumps({**json.loads(path.read_text()), "val_expert_load": languages}))


def row(step: int) -> dict[str, Any]:
    """Return a step's row in metrics.jsonl."""
    return {
        "step": step,
        "tokens": step * 65536,
        "seconds": step * 0.5,
        "loss": 3.0 + 8.0 / (step + 1),
        "val_bpb": 1.0 + 1.0 / step if step % 20 == 0 else None,
        "tokens_per_second": 131072.0 + step % 7 * 300,
        "memory_gib": 8.4,
        "watts": 310.0,
        "celsius": 64.0,
    }


def broken(root: Path) -> None:
    """Write directories in every bad state that a kill, a full disk or a user can cause."""
    (root / "studies/broken").mkdir(parents=True)
    (root / "studies/broken/study.json").write_text("{}")
    (root / "studies/broken/results.json").write_text('{"schema_version": 1, "name": "brok')
    (root / "studies/odd").mkdir()
    (root / "studies/odd/results.json").write_text('{"schema_version": 1, "groups": 3}')
    (root / "studies/begun").mkdir()
    (root / "studies/begun/study.json").write_text("{}")
    (root / "elsewhere").mkdir()
    (root / "elsewhere/results.json").write_text('{"scores": [1, 2]}')
    run(root / "runs/half", steps=12, finished=False)
    with (root / "runs/half/metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "tok')
    old(root / "runs/half")
    run(root / "runs/garbage")
    (root / "runs/garbage/run.json").write_text("{not json")
    (root / "runs/garbage/summary.json").write_bytes(b"\xff\xfe[]")
    (root / "runs/garbage/plan.json").write_text("[1, 2]")
    old(root / "runs/garbage")
    (root / "runs/nothing").mkdir()


def old(folder: Path) -> None:
    """Make the files of a run years old."""
    for path in folder.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))


def running(folder: Path, steps: int = 40) -> IO[str]:
    """Write a run that is still training: its lock is held until the returned file is closed."""
    run(folder, steps=steps, of=200, finished=False)
    add_experts(folder)
    lock = (folder / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def search(folder: Path, complete: bool = True, running: str = "") -> Outcome:
    """Write a search with trials of every kind. running: the directory of a
    running trial, relative to the search's.
    """
    from tests.study.search import made_search

    _, plan = made_search.begin(
        folder, "optim.lr,batch.tokens,optim.normalize", created="2026-11-22T00:00:00+00:00"
    )
    default = {"optim.lr": 0.04, "batch.tokens": 16384, "optim.normalize": False}

    def trial(number: int, loss: float | None, status: str = "finished", **changes: Any) -> SearchTrial:
        reason = changes.pop("reason", "")
        settings = {**default, **{key.replace("__", "."): value for key, value in changes.items()}}
        ran = "" if status in ("infeasible", "repeated") else f"trials/runs/trial-{number:04d}-s1"
        return SearchTrial(number, status, settings, loss, 60.0 * (number + 1), reason, ran)

    trials = [
        trial(0, 1.52),
        trial(1, 1.61, optim__lr=0.16),
        trial(2, 1.47, optim__lr=0.02, optim__normalize=True),
    ]
    trials.append(trial(3, None, "pruned", optim__lr=0.3, reason="1.9 bits per byte after 25 % of the time"))
    trials.append(
        trial(
            4,
            None,
            "infeasible",
            batch__tokens=131072,
            reason="needs up to 9.1 GiB of 8.0 GiB",
        )
    )
    trials.append(trial(5, 1.44, optim__lr=0.012, batch__tokens=8192))
    trials += [
        trial(6, 1.45, optim__lr=0.01),
        trial(7, 1.44, "repeated", optim__lr=0.012, batch__tokens=8192),
    ]
    if running:
        trials.append(replace(trial(8, None, "running"), elapsed=None, run=running))
    outcome = Outcome(
        name=plan.name,
        sampler="tpe",
        prune=True,
        hours=1.0,
        devices=1,
        proxy="trials train the same model, 1.1M parameters, for 1 min instead of 10 min",
        trials=trials,
        best_so_far=best_so_far(trials),
        importances={"optim.lr": 0.7, "log2(batch.tokens / 16384)": 0.2, "optim.normalize": 0.1},
        winner=5,
        settings=trials[5].settings,
        answer="The best settings found are optim.lr 0.012.",
        spent_seconds=1800.0,
        complete=complete,
    )
    if complete:
        confirmed = Comparison(
            "val_bpb", "default", 3, -0.05, -0.08, -0.02, -0.03, -0.05, -0.01, "paired t", "lower"
        )
        outcome = replace(
            outcome, confirmed=confirmed, default_mean=1.5, winner_mean=1.45, confirmed_on="the target"
        )
        (folder / "winner.toml").write_text("[optim]\nlr = 0.012\n")
    write_outcome(outcome, folder)
    study(folder / "confirm", name="made-confirm")
    return outcome
