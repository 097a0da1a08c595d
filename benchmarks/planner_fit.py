"""Fit the constants of the hand-written step: efficiencies, and the host's times.

    python -m benchmarks.planner_fit          constants from the calibrating half, and errors of the held-out half

The rows come from `benchmarks/planner_points.py`. They are grouped into families (kind of measurement, size of the
pass, recipe, optimizer), and every second row of each family is held out, so that a family with two rows is never
judged by the rows that it was fitted to. A family of one row calibrates; such a row gives no evidence and is counted
accordingly.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.planner_points import Point, points
from benchmarks.planner_tables import HEADINGS, Errors, summary, table
from deskside.budget.speed import Rates
from deskside.facts.gpus import find
from deskside.plan.published import sheet_rates

# (value before the fit, how far it is believed to be off, as a factor's logarithm). Before: the kernels of
# one step (efficiencies, docs/log.md 2026-11-21), and for the host the order of magnitude of
# docs/performance.md, "Small passes".
EFFICIENCIES: dict[str, tuple[float, float]] = {
    "matmul": (0.892, 0.08),
    "head": (0.926, 0.08),
    "attention_64": (0.382, 0.08),
    "traffic": (0.749, 0.08),
    "weights": (0.729, 0.15),
    "loss_traffic": (0.609, 0.15),
    "optimizer_traffic": (0.680, 0.15),
    "optimizer_matmul": (0.9, 0.1),
    "muon_width": (500.0, 1.0),
    "low_precision": (0.9, 0.1),
    "layer_seconds": (100e-6, 1.0),
    "rowwise": (0.8, 0.3),
    "windowed": (
        0.457,
        0.1,
    ),  # flex with a window of 512 of 2,048 relative to cuDNN without one, timed by the run's backend trial
}
HOST: dict[str, tuple[float, float]] = {
    "bf16": (1.7e-3, 1.0),
    "delayed": (2.0e-3, 1.0),
    "rowwise": (4.5e-3, 1.0),
    "uncached": (0.2e-3, 0.5),
    "step": (8e-3, 1.0),
    "muon": (8e-3, 0.3),
    "overlap": (6.0, 0.5),
}
RATIO_128 = 0.468 / 0.382  # attention_128 against attention_64, of the compiled step
NOISE = 0.02  # per row; larger errors count less than in proportion to their square


def split(found: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Return (calibrating rows, held-out rows)."""
    families: dict[tuple[object, ...], int] = {}
    parts: tuple[list[Point], list[Point]] = ([], [])
    for point in found:
        setting = point.setting
        # A single small pass shows the time of a step outside its passes, which does not depend on the recipe.
        alone = point.small_passes and setting.tokens_per_step == setting.micro_tokens
        recipe = "any" if alone else setting.precision
        family = (point.kind, point.small_passes, recipe, setting.optimizer)
        place = families.get(family, 0)
        families[family] = place + 1
        parts[place % 2].append(point)
    return parts


def rates_of(logarithms: np.ndarray) -> Rates:
    """Return an H200's rates with these logarithms of the constants, in the order of EFFICIENCIES and HOST."""
    values = np.exp(logarithms)
    own = dict(zip(EFFICIENCIES, values, strict=False))
    own["attention_128"] = own["attention_64"] * RATIO_128
    host = dict(zip(HOST, values[len(EFFICIENCIES) :], strict=True))
    start = sheet_rates(find("h200"))
    return replace(start, fused=replace(start.fused, **own), host=replace(start.host, **host))


def fit(rows: Sequence[Point]) -> Rates:
    """Return the rates that predict these rows best, regularized towards the prior values."""
    believed = [*EFFICIENCIES.values(), *HOST.values()]
    start = np.log([value for value, _ in believed])
    width = np.array([spread for _, spread in believed])

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        rates = rates_of(logarithms)
        off = np.array([math.log(p.modelled_speed(rates) / p.speed) for p in rows]) / NOISE
        robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([robust, (logarithms - start) / width])

    return rates_of(least_squares(residuals, start, x_scale=0.05, max_nfev=15).x)


def errors(rows: Sequence[Point], rates: Rates) -> Errors:
    return Errors((p.modelled_speed(rates), p.speed) for p in rows)


def main() -> None:
    calibrating, kept_out = split(points())
    rates = fit(calibrating)
    print(
        "fused: " + ", ".join(f"{n}={getattr(rates.fused, n):.4g}" for n in (*EFFICIENCIES, "attention_128"))
    )
    print("host: " + ", ".join(f"{name}={getattr(rates.host, name):.4g}" for name in HOST))
    shipped = sheet_rates(find("h200"))
    lines = [
        summary("calibrating, fitted now", errors(calibrating, rates)),
        summary("kept out, fitted now", errors(kept_out, rates)),
        summary("kept out, shipped constants", errors(kept_out, shipped)),
    ]
    print("\n".join(table(HEADINGS, lines)))
    for name, rows in (("calibrates", calibrating), ("kept out", kept_out)):
        for p in rows:
            print(f"{name:10} {p.kind:5} {p.name:42} {p.modelled_speed(rates) / p.speed - 1:+.1%}")


if __name__ == "__main__":
    main()
