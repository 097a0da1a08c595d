"""Fit the loss law's constants of repeated text to finished runs, and report how well they predict each run.

    python -m benchmarks.repetition_fit runs/a runs/b ...
    python -m benchmarks.repetition_fit studies/own-corpus --json fit.json

An argument is a run or a folder of runs, such as a study. Needed are runs with a decayed learning rate, in several
sizes, that read the same text from once to more often than one would. Fitted are R_D and R_N (arXiv 2305.16264), the
coefficient `overfit` of `budget/loss.py`, and one offset for the corpus and recipe. They minimize the sum of squares of
the relative errors, with weak priors: R_D and R_N are within a factor of e^2 of those of `budget/loss.py`, because runs
of one size say nothing about R_N. Constants whose standard error exceeds their value are not determined by the runs.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from deskside.budget.loss import LAW, R_D, R_N, LossLaw
from deskside.budget.shape import matmul_params
from deskside.data.reading.index import read_index
from deskside.data.reading.index_file import is_prepared
from deskside.run.directory import RunDirectory
from deskside.utils.errors import UsageError
from deskside.utils.format import count
from deskside.utils.printer import Printer

PRIOR = 2.0  # standard deviation of log R_D and log R_N
NOISE = 0.003  # relative spread of a run's loss over seeds: 0.1 to 0.3 % in docs/precision.md
MIN_RUNS = 4


@dataclass(frozen=True)
class RepetitionPoint:
    """A finished run: weights that a token is multiplied with, tokens read, tokens of the text, bits per byte."""

    name: str
    params: float
    tokens: float
    unique_tokens: float
    bpb: float


@dataclass(frozen=True)
class RepetitionFit:
    """Fitted constants with the standard errors of log R_D, log R_N, overfit and offset. errors: relative, by run."""

    r_d: float
    r_n: float
    overfit: float
    offset: float
    standard_errors: tuple[float, float, float, float]
    errors: tuple[float, ...]

    @property
    def rms(self) -> float:
        """Root mean square of the relative errors."""
        return math.sqrt(sum(error * error for error in self.errors) / len(self.errors))

    def at(self, point: RepetitionPoint, law: LossLaw = LAW) -> float:
        """Return the bits per byte of the fitted law."""
        fitted = replace(law, offset=self.offset, overfit=self.overfit)
        return fitted.at(point.params, point.tokens, point.unique_tokens, self.r_d, self.r_n)


def fit(points: Sequence[RepetitionPoint], law: LossLaw = LAW, overfitting: bool = True) -> RepetitionFit:
    """Fit R_D, R_N, the offset and, if `overfitting`, the coefficient of overfitting. Raises UsageError."""
    if len(points) < MIN_RUNS:
        raise UsageError(f"a fit needs {MIN_RUNS} finished runs or more, not {len(points)}")
    prior = np.array([math.log(R_D), math.log(R_N)])
    measured = np.array([point.bpb for point in points])

    def predicted(x: np.ndarray) -> np.ndarray:
        changed = replace(law, offset=float(x[2]), overfit=float(x[3]) if overfitting else 0.0)
        r_d, r_n = np.exp(x[:2])
        return np.array([changed.at(p.params, p.tokens, p.unique_tokens, r_d, r_n) for p in points])

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.concatenate([(predicted(x) / measured - 1) / NOISE, (x[:2] - prior) / PRIOR])

    # A fit of a saturating curve and a rising one can have two minima: start with and without overfitting.
    starts = [[*prior, law.offset, 1e-6], [math.log(15.4), math.log(5.3), law.offset, 1e-2]]
    limits = ([-8.0, -8.0, -np.inf, 0.0], [12.0, 12.0, np.inf, np.inf])
    found = min(
        (least_squares(residuals, start, bounds=limits, x_scale=[1, 1, 0.1, 0.01]) for start in starts),
        key=lambda result: float(result.cost),
    )
    columns = found.jac if overfitting else found.jac[:, :3]
    spread = np.sqrt(np.diag(np.linalg.pinv(columns.T @ columns)))
    spread = spread if overfitting else np.append(spread, 0.0)
    r_d, r_n = (float(value) for value in np.exp(found.x[:2]))
    return RepetitionFit(
        r_d=r_d,
        r_n=r_n,
        overfit=float(found.x[3]) if overfitting else 0.0,
        offset=float(found.x[2]),
        standard_errors=(float(spread[0]), float(spread[1]), float(spread[3]), float(spread[2])),
        errors=tuple(float(error) for error in predicted(found.x) / measured - 1),
    )


def read_point(folder: Path) -> RepetitionPoint:
    """Return the point of a finished run. Raises UsageError for one that the law does not describe, with the reason."""
    run = RunDirectory.open(folder)
    if not (folder / "summary.json").is_file():
        raise UsageError(f"{folder}: is not finished")
    config, summary, plan = run.config(), run.read_json("summary.json"), run.read_json("plan.json")
    if config.align is not None or config.adapter is not None or run.read_json("run.json").get("init"):
        raise UsageError(f"{folder}: was not trained from scratch")
    if config.schedule.name == "constant" or summary.get("mixture_epochs"):
        raise UsageError(
            f"{folder}: has a constant learning rate or a mixture, which the law does not describe"
        )
    if "best_step" in summary:
        raise UsageError(f"{folder}: ended with the weights of an earlier step (checkpoint.keep_best)")
    unique = plan.get("train_tokens")
    if unique is None:  # a run of before 2026-11-24
        data = Path(config.data.path or "")
        if not is_prepared(data):
            raise UsageError(f"{folder}: does not say how much text it has, and {data} is not here")
        unique = read_index(data).splits["train"].tokens
    return RepetitionPoint(
        folder.name, matmul_params(config.model), summary["tokens"], unique, summary["val_bpb"]
    )


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the runs among `paths` and in them, in order."""
    found = []
    for path in paths:
        inside = [path / "run.json"] if (path / "run.json").is_file() else sorted(path.rglob("run.json"))
        found += [file.parent for file in inside]
    return found


def show(points: Sequence[RepetitionPoint], fits: dict[str, RepetitionFit]) -> None:
    """Print each run with its errors, and the constants of each fit."""
    rows = [
        [
            point.name,
            count(point.params),
            f"{point.tokens / point.unique_tokens:.2f}",
            f"{point.params / point.unique_tokens:.2f}",
            f"{point.bpb:.4f}",
            *(f"{fitted.errors[number]:+.2%}" for fitted in fits.values()),
        ]
        for number, point in enumerate(points)
    ]
    printer = Printer()
    heads = [
        "run",
        "weights",
        "epochs",
        "weights / token",
        "bits per byte",
        *(f"error, {name}" for name in fits),
    ]
    printer.table(heads, rows, "l" + "r" * (len(heads) - 1))
    for name, fitted in fits.items():
        r_d, r_n, overfit, offset = fitted.standard_errors
        printer.text(
            f"{name}: R_D = {fitted.r_d:.3g} (x/ {math.exp(r_d):.2f}), "
            f"R_N = {fitted.r_n:.3g} (x/ {math.exp(r_n):.2f}), "
            f"overfit = {fitted.overfit:.3g} +- {overfit:.2g}, offset = {fitted.offset:.4f} +- {offset:.2g}; "
            f"error {fitted.rms:.2%} (root mean square), largest {max(map(abs, fitted.errors)):.2%}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or 2 if there are too few runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs, or folders of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write points and constants here")
    options = parser.parse_args(argv)
    points = []
    for folder in run_folders(options.runs):
        try:
            points.append(read_point(folder))
        except UsageError as error:
            Printer().text(f"left out: {error}")
    try:
        fits = {"with overfitting": fit(points), "without": fit(points, overfitting=False)}
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    show(points, fits)
    if options.json is not None:
        result: dict[str, Any] = {"points": [asdict(point) for point in points]}
        result["fits"] = {name: asdict(fitted) for name, fitted in fits.items()}
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
