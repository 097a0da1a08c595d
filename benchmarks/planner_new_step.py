"""The part of docs/planner-accuracy.md on the hand-written step of 2026-11-21: its few points beside the model."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_tables import prose, table
from benchmarks.step_config import configuration
from deskside.budget.formats import LowKind, quantized
from deskside.budget.memory import training_memory
from deskside.budget.speed import Rates, tokens_per_second
from deskside.budget.work import Work
from deskside.config.model import ModelConfig
from deskside.config.work import format_options, recipe_of, step_options
from deskside.facts.gpus import find
from deskside.plan.calibrate import calibrate

DATA = Path(__file__).parents[1] / "docs/data/2026-11-21-step"
FILES = ("step", "355m", "774m", "1.5b")
TEACHER = "124m"  # its kernels gave the efficiencies


@dataclass(frozen=True)
class Point:
    """One arm that ran. speed: tokens per second; gib: peak that torch allocated."""

    name: str
    preset: str
    shape: ModelConfig
    work: Work
    speed: float
    gib: float

    @property
    def modelled_gib(self) -> float:
        return training_memory(self.shape, self.work).allocated / 2**30

    def modelled_speed(self, rates: Rates) -> float:
        return tokens_per_second(self.shape, self.work, rates)


def unprobed() -> Rates:
    """Of an H200 that was not probed."""
    return calibrate(find("h200"), []).rates


def points() -> Iterator[Point]:
    """Single steps: `benchmarks/step.py` and one arm of `benchmarks/memory.py`."""
    for file in FILES:
        for row in json.loads((DATA / f"{file}.json").read_text("utf-8"))["results"]:
            yield _point(row["value"], row["arm"])
    (row,) = json.loads((DATA / "memory_1.5b.json").read_text("utf-8"))["arms"]
    yield _point(row["result"], "bf16", "block")


def runs() -> Iterator[Point]:
    """Whole runs with Muon on real text, evaluation between them, eight at a time on one host."""
    for line in (DATA / "parity/parity.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        name = row["arm"].partition(":")[0]
        result = {
            "preset": row["setting"]["preset"], "precision": name, "optimizer": "muon", "tokens": 65536,
            "micro_tokens": 65536, "sequence_length": 2048, "compile": row["compile"], "native": True,
            "phases": {"short": {"tokens_per_second": row["tokens_per_second"]}},
            "peak_allocated_gib": row["peak_memory_gib"],
        }  # fmt: skip
        yield _point(result, row["arm"])


def _point(result: dict[str, Any], arm: str, rung: str = "none") -> Point:
    name, head = result["precision"], "fp8" if arm.endswith("head=fp8") else "bf16"
    taken = ("preset", "optimizer", "tokens", "sequence_length")
    keys = {
        "precision": {"name": name} | ({"head": head} if head == "fp8" else {}),
        "compute": {"activation_checkpointing": rung},
    }
    config = configuration({**{key: result[key] for key in taken}, "config": keys})
    layers = config.model.num_hidden_layers
    kept = recipe_of(config, name).kept_blocks(layers) if quantized(name) else (0, 0)
    native: tuple[LowKind, ...] = ("fp8",) if result["native"] else ()
    options = format_options(config, name, native, result["compile"] == "fused")
    work = Work(
        result["sequence_length"],
        result["tokens"],
        result["micro_tokens"],
        kept_blocks=sum(kept),
        **step_options(config),
        **options,
    )
    told = f"{result['preset']}, {arm}, {result['optimizer']}" + (
        f", {rung} recomputed" if rung != "none" else ""
    )
    speed = result["phases"]["short"]["tokens_per_second"]
    return Point(told, result["preset"], config.model, work, speed, result["peak_allocated_gib"])


def rows(found: list[Point], rates: Rates) -> list[list[str]]:
    result = []
    for p in found:
        speed, gib = p.modelled_speed(rates), p.modelled_gib
        speeds = [f"{p.speed:,.0f}", f"{speed:,.0f}", f"{speed / p.speed - 1:+.1%}"]
        peaks = [f"{p.gib:.2f}", f"{gib:.2f}", f"{gib / p.gib - 1:+.1%}"]
        result.append([p.name, str(p.work.micro_tokens), *speeds, *peaks])
    return result


HEADINGS = ("Step", "micro", "tok/s measured", "predicted", "error", "GiB measured", "predicted", "error")


def notice() -> list[str]:
    """What the reader of the older measurements must know first."""
    rates, found = unprobed(), list(points())
    kept_out = [p for p in found if p.preset != TEACHER]
    speed = max(abs(p.modelled_speed(rates) / p.speed - 1) for p in kept_out)
    gib = max(abs(p.modelled_gib / p.gib - 1) for p in found)
    return [
        *prose(
            "**Everything below the next table was measured on the step before 2026-11-21**: blocks compiled by",
            "torch. Training on a GPU has hand-written halves since, FP8, and other kernels for attention and loss;",
            f"the planner has efficiencies of their own for it, by arithmetic from the kernels of one model, {TEACHER}",
            f"(Newton-Schulz: from Muon's update at 1.5b). Of that step there are {len(found)} points and no draw:",
            f"peak memory is predicted within {gib:.1%} (counted, with these points in sight; no constant is fitted),",
            f"the speed of the {len(kept_out)} points of other models within {speed:.1%}, all on one H200 without a",
            "probe. Nothing of it was measured on another card, with one half alone recomputed, or after a probe.",
        ),
        "",
        *table(HEADINGS, rows(found, rates)),
    ]


def main() -> None:
    rates = unprobed()
    print("\n".join(table(HEADINGS, rows([*points(), *runs()], rates))))


if __name__ == "__main__":
    main()
