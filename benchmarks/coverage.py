"""Coverage and width of 95 % intervals that are computed from a few seeds.

    python -m benchmarks.coverage [--studies 4000] [--json FILE]

The benchmark simulates studies with a known effect and known noise: a baseline and three other arms, one number per arm
and seed, a shift that all arms of a seed share, and noise of these kinds:

    Gaussian            of the same size in every arm
    Student, 5 df       heavy tails
    skewed              exponential, in every arm
    one arm skewed      exponential and twice as large in one arm; the coverage is that of this arm
    one arm noisy       three times as large in one arm; the coverage is that of this arm
    baseline noisy      three times as large in the baseline

For every method, the tables show the share of studies whose interval covers the true effect, and the median width. The
last table counts false discoveries.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

from deskside.study.stats.statistics import CONFIDENCE, log_ratio, significant

SEEDS = (2, 3, 5, 10, 20)
ARMS = 4  # with the baseline
SPREAD = 0.004  # standard deviation of the noise in the logarithm of a loss
EFFECT = 0.01  # true effect, in the logarithm of a loss
RESAMPLES = 999
CHUNK = 250  # studies whose resamples are in memory at the same time

Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Ends = tuple[np.ndarray, np.ndarray]


def gaussian(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.standard_normal(shape)


def heavy(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.standard_t(5, shape) / math.sqrt(5 / 3)


def skewed(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.exponential(1.0, shape) - 1.0


def one_arm(noise: Noise, size: float, arm: int = 1) -> Noise:
    """Noise noise that is Gaussian in all arms but one. The shape is (studies, arms, seeds)."""

    def drawn(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = draw.standard_normal(shape)
        values[:, arm] = size * noise(draw, (shape[0], shape[2]))
        return values

    return drawn


NOISES: dict[str, Noise] = {
    "Gaussian": gaussian,
    "Student, 5 df": heavy,
    "skewed": skewed,
    "one arm skewed": one_arm(skewed, 2.0),
    "one arm noisy": one_arm(gaussian, 3.0),
    "baseline noisy": one_arm(gaussian, 3.0, arm=0),
}


def losses(noise: Noise, studies: int, seeds: int, draw: np.random.Generator) -> np.ndarray:
    """Return losses (studies, arms, seeds). Arm 0 is the baseline; the log loss of the other arms is EFFECT higher."""
    arm_noise = SPREAD * noise(draw, (studies, ARMS, seeds))
    seed_shift = 2 * SPREAD * draw.standard_normal((studies, 1, seeds))
    effect = np.array([0.0] + [EFFECT] * (ARMS - 1))[None, :, None]
    return 1.3 * np.exp(arm_noise + seed_shift + effect)


def student(values: np.ndarray) -> Ends:
    """Return the paired Student intervals that a study uses."""
    intervals = [log_ratio(study[1].tolist(), study[0].tolist()) for study in values]
    return np.array([i.low for i in intervals]), np.array([i.high for i in intervals])


def pooled(values: np.ndarray) -> Ends:
    """Return Student's interval with one spread for all arms, from the residuals of arms + seeds (two-way ANOVA)."""
    logs = np.log(values)
    _, arms, seeds = logs.shape
    residuals = (
        logs - logs.mean(2, keepdims=True) - logs.mean(1, keepdims=True) + logs.mean((1, 2), keepdims=True)
    )
    freedom = (arms - 1) * (seeds - 1)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(
        2 * (residuals**2).sum((1, 2)) / freedom / seeds
    )
    mean = (logs[:, 1] - logs[:, 0]).mean(1)
    return mean - half, mean + half


def moderated(values: np.ndarray) -> Ends:
    """Return moderated t intervals: spreads shrunk towards the pooled one (Smyth 2004, 4 prior degrees of freedom)."""
    logs = np.log(values)
    differences = logs[:, 1:] - logs[:, :1]
    seeds, prior = logs.shape[2], 4
    spreads = differences.var(2, ddof=1)
    shrunk = (prior * spreads.mean(1) + (seeds - 1) * spreads[:, 0]) / (prior + seeds - 1)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, prior + seeds - 1) * np.sqrt(shrunk / seeds)
    mean = differences[:, 0].mean(1)
    return mean - half, mean + half


def resampled(method: str) -> Callable[[np.ndarray], Ends]:
    """Return scipy's bootstrap intervals of the mean paired difference: "percentile", "basic" or "BCa"."""

    def ends(values: np.ndarray) -> Ends:
        intervals = []
        for start in range(0, len(values), CHUNK):
            part = values[start : start + CHUNK]
            logs = np.log(part[:, 1]) - np.log(part[:, 0])
            with warnings.catch_warnings():
                # BCa warns that it cannot be computed from two or three numbers.
                warnings.simplefilter("ignore")
                result = stats.bootstrap(
                    (logs,), np.mean, axis=-1, vectorized=True, n_resamples=RESAMPLES, confidence_level=CONFIDENCE,
                    method=method, rng=np.random.default_rng(start),
                )  # fmt: skip
            intervals.append((result.confidence_interval.low, result.confidence_interval.high))
        return np.concatenate([low for low, _ in intervals]), np.concatenate([high for _, high in intervals])

    return ends


def studentised(values: np.ndarray) -> Ends:
    """Return bootstrap-t intervals (Efron 1979), without the resamples whose values are all equal."""
    logs = np.log(values[:, 1]) - np.log(values[:, 0])
    seeds = logs.shape[1]
    draw, low, high = np.random.default_rng(0), [], []
    for sample in logs:
        resamples = sample[draw.integers(0, seeds, (RESAMPLES, seeds))]
        resamples = resamples[(resamples != resamples[:, :1]).any(1)]
        t = (resamples.mean(1) - sample.mean()) / (resamples.std(1, ddof=1) / math.sqrt(seeds))
        error = sample.std(ddof=1) / math.sqrt(seeds)
        first, last = np.quantile(t, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        low.append(sample.mean() - last * error)
        high.append(sample.mean() - first * error)
    return np.array(low), np.array(high)


METHODS: dict[str, Callable[[np.ndarray], Ends]] = {
    "Student, paired (used)": student,
    "percentile bootstrap": resampled("percentile"),
    "basic bootstrap": resampled("basic"),
    "BCa bootstrap": resampled("BCa"),
    "studentised bootstrap": studentised,
    "pooled over arms": pooled,
    "moderated": moderated,
}


def coverage(method: str, noise: str, seeds: int, studies: int) -> tuple[float, float]:
    """Return (coverage, median width). An interval that could not be computed counts as not covering."""
    values = losses(NOISES[noise], studies, seeds, np.random.default_rng(seeds))
    low, high = METHODS[method](values)
    covers = (low <= EFFECT) & (high >= EFFECT)
    return float(covers.mean()), float(np.nanmedian(high - low)) if not np.isnan(low).all() else math.nan


def false_calls(arms: int, real: int, seeds: int, studies: int) -> dict[str, float]:
    """Simulate studies with `arms` arms besides the baseline, `real` of which differ by 5 spreads; count false calls.

    any: share of studies with a false call; share: mean share of the calls that are false; power: share of the real
    differences that are called. Each is given for intervals that exclude zero and for the procedure of a study.
    """
    draw = np.random.default_rng(arms + seeds)
    counts = {f"{what}, {how}": 0.0 for how in ("each alone", "used") for what in ("any", "share", "power")}
    for _ in range(studies):
        logs = SPREAD * draw.standard_normal((arms + 1, seeds))
        logs[1 : real + 1] += 5 * SPREAD
        p = [log_ratio(np.exp(row).tolist(), np.exp(logs[0]).tolist()).p or 0.0 for row in logs[1:]]
        for how, called in (
            ("each alone", [value < 1 - CONFIDENCE for value in p]),
            ("used", significant(p)),
        ):
            wrong = sum(called[real:])
            counts[f"any, {how}"] += bool(wrong) / studies
            counts[f"share, {how}"] += wrong / max(1, sum(called)) / studies
            counts[f"power, {how}"] += sum(called[:real]) / max(1, real) / studies
    return counts


def main() -> None:
    """Print both tables in Markdown."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--studies", type=int, default=4000, help="simulated studies per number")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    print(
        f"Coverage of intervals of 95 %, in %, at {', '.join(map(str, SEEDS))} seeds ({options.studies} studies each)\n"
    )
    print(f"| method | {' | '.join(NOISES)} |\n|---|{'---|' * len(NOISES)}")
    for method in METHODS:
        found[method] = {
            noise: [coverage(method, noise, n, options.studies) for n in SEEDS] for noise in NOISES
        }
        cells = [" ".join(f"{100 * share:.0f}" for share, _ in numbers) for numbers in found[method].values()]
        print(f"| {method} | {' | '.join(cells)} |", flush=True)
    print(
        "\nMedian width, Gaussian noise, in spreads (standard deviations) of one arm\n\n"
        f"| method | {' | '.join(f'{n} seeds' for n in SEEDS)} |"
    )
    print(f"|---|{'--:|' * len(SEEDS)}")
    for method, by_noise in found.items():
        print(f"| {method} | {' | '.join(f'{width / SPREAD:.1f}' for _, width in by_noise['Gaussian'])} |")
    print("\nReported differences, in %\n")
    print("| arms | real | seeds | any false: each alone | used | false among reported: each alone | used "
          "| real and reported: each alone | used |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|")  # fmt: skip
    for arms, real, seeds in ((20, 0, 3), (20, 0, 5), (20, 10, 3), (20, 10, 5), (3, 1, 3), (3, 1, 5)):
        row = false_calls(arms, real, seeds, max(1, options.studies // 4))
        cells = [
            f"{100 * row[f'{what}, {how}']:.0f}"
            for what in ("any", "share")
            for how in ("each alone", "used")
        ]
        cells += [f"{100 * row[f'power, {how}']:.0f}" if real else "" for how in ("each alone", "used")]
        print(f"| {arms} | {real} | {seeds} | {' | '.join(cells)} |", flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"seeds": SEEDS, "studies": options.studies, "methods": found}, indent=1), "utf-8"
        )


if __name__ == "__main__":
    main()
