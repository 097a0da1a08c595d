"""The part of docs/planner-accuracy.md on the hand-written step: every measured configuration beside the model.

python -m benchmarks.planner_new_step [--out docs/planner-accuracy.md]    print it, or put it in its place
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.planner_fit import errors, split
from benchmarks.planner_points import ROOT, Point, points
from benchmarks.planner_tables import HEADINGS, Errors, prose, summary, table
from deskside.budget.speed import Rates
from deskside.facts.gpus import find
from deskside.plan.calibrate import Calibration, calibrate
from deskside.plan.estimate import estimate

BEFORE = "2026-11-22-planner/before.json"  # predictions of the planner without a model of the host
TITLE = "## The step since 2026-11-21"
NEXT = "## The step before 2026-11-21"
ROOMY = 2**42  # bytes: how fast a step is does not depend on what fits
GROUPS: tuple[tuple[str, Callable[[Point], bool]], ...] = (
    ("single steps", lambda p: p.kind == "steps"),
    ("Muon, whole runs", lambda p: p.kind == "run"),
    ("the release study, all arms", lambda p: p.kind == "study"),
    ("Muon, study", lambda p: p.kind == "study" and p.setting.optimizer == "muon"),
    ("BF16", lambda p: p.setting.precision == "bf16"),
    ("FP8 delayed", lambda p: p.setting.precision == "fp8-delayed"),
    ("rowwise FP8", lambda p: p.setting.precision == "fp8-rowwise"),
    ("NVFP4, emulated", lambda p: "nvfp4" in p.setting.precision),
    ("small passes", lambda p: p.small_passes and p.setting.activation_checkpointing == "none"),
    ("sliding windows", lambda p: p.setting.model.sliding_window is not None),
    ("states on the host", lambda p: p.setting.offload_optimizer),
)


INTRODUCTION = """
{rows} configurations, all that were measured and kept, on H200 cards without a probe: single steps
(`benchmarks/step.py`, `benchmarks/memory.py`), whole runs (`benchmarks/parity.py`), and every arm of the release
study, by the median of its steps. Repetitions of one configuration are one row. In each family (kind of measurement,
small passes or not, recipe, optimizer) every second row is kept out of the fit (`python -m benchmarks.planner_fit`):
{calibrating} rows gave the constants, {kept_out} did not. The split was made, and the form of the model found, with all
rows in sight; families of one row, rowwise FP8 and each NVFP4 recipe among them, have nothing kept out and prove
nothing about themselves. *Before* is the planner of commit 4e15f5a, which knew no host (`docs/data/{before}`).
"""
LIMITS = """
Of peaks below 4 GiB some are more than 1.5 % off: fragments of fixed size decide there. Nothing of this was measured on
another card, with tensorwise FP8 (its host time is derived, its traffic counted), with one half alone recomputed, or
after a probe. Hosts were virtual Xeons with 64 cores, in the study three trials on one; where the probe has not timed a
machine's own host, the range of small passes is wider for it.
"""


def unprobed() -> Rates:
    """Return the rates of an H200 that was not probed."""
    return _calibration().rates


def _calibration() -> Calibration:
    return calibrate(find("h200"), [])


def groups() -> dict[str, list[Point]]:
    """Return the points by what is asked of them; a point is in every group that it belongs to."""
    return {name: [point for point in points() if belongs(point)] for name, belongs in GROUPS}


def _before() -> dict[tuple[str, str, int], float]:
    """Return the earlier predictions, by kind, name and tokens per pass."""
    found = json.loads((ROOT / BEFORE).read_text("utf-8"))["predictions"]
    return {(row["kind"], row["name"], row["micro_tokens"]): row["tokens_per_second"] for row in found}


def _key(point: Point) -> tuple[str, str, int]:
    return point.kind, point.name, point.setting.micro_tokens


def section() -> list[str]:
    """Return the lines of the section."""
    rates, found, before = unprobed(), points(), _before()
    calibrating, kept_out = split(found)
    memory = Errors((point.modelled_gib, point.gib) for point in found)
    by_group = []
    for name, rows in groups().items():
        old = Errors((before[_key(point)], point.speed) for point in rows)
        by_group += [summary(f"{name}, before", old), summary(f"{name}, now", errors(rows, rates))]
    return [
        TITLE,
        "",
        *prose(
            INTRODUCTION.strip().format(
                rows=len(found), calibrating=len(calibrating), kept_out=len(kept_out), before=BEFORE
            )
        ),
        "",
        *table(
            HEADINGS,
            [
                summary("Tokens/s, rows kept out", errors(kept_out, rates)),
                summary("Tokens/s, rows that calibrate", errors(calibrating, rates)),
                summary("Peak memory allocated (no constant fitted)", memory),
            ],
        ),
        "",
        *table(HEADINGS, by_group),
        "",
        *prose(LIMITS.strip()),
        "",
        *_rows(rates, set(map(_key, kept_out)), before),
        "",
    ]


def _rows(
    rates: Rates, kept_out: set[tuple[str, str, int]], before: dict[tuple[str, str, int], float]
) -> list[str]:
    headings = (
        "Step", "per pass", "tok/s measured", "before", "predicted", "error", "range", "GiB measured", "predicted",
        "error", "in the fit", "data",
    )  # fmt: skip
    numbers: dict[str, int] = {}
    lines = []
    for p in points():
        speed, gib, old = p.modelled_speed(rates), p.modelled_gib, before[_key(p)]
        spread = estimate(p.setting, _calibration(), ROOMY).speed_spread
        cited = [numbers.setdefault(source, len(numbers) + 1) for source in p.sources]
        lines.append(
            [
                f"{p.name} ({p.kind})",
                f"{p.setting.micro_tokens:,}",
                f"{p.speed:,.0f}",
                f"{old / p.speed - 1:+.1%}",
                f"{speed:,.0f}",
                f"{speed / p.speed - 1:+.1%}",
                f"±{spread:.0%}",
                f"{p.gib:.2f}",
                f"{gib:.2f}",
                f"{gib / p.gib - 1:+.1%}",
                "no" if _key(p) in kept_out else "yes",
                ", ".join(f"[{n}]" for n in cited),
            ]
        )
    sources = [f"- [{n}] `docs/data/{source}`" for source, n in numbers.items()]
    return [*table(headings, lines), "", *sources]


def replaced(text: str) -> str:
    """Return a report with this section in the place of the old one. Raises ValueError where it has none."""
    start, end = text.find(TITLE), text.find(NEXT)
    if not 0 <= start < end:
        raise ValueError(f"no section between '{TITLE}' and '{NEXT}'")
    return text[:start] + "\n".join(section()) + "\n" + text[end:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a report that has the section; it is put in its place")
    options = parser.parse_args()
    if options.out is None:
        print("\n".join(section()))
    else:
        options.out.write_text(replaced(options.out.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
