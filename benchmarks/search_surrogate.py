"""A model of the trials of a search, fitted to measured ones: what a trial with given settings would show.

`search_simulation.py` searches it. Points are positions of the parameters in their ranges, from 0 to 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from deskside.study.search.space import DEPTH, Dimension
from deskside.study.search.suggestions import RUNGS, Suggested

Array = NDArray[np.float64]
# Standard deviations of log(loss) at each rung, of trials of the same settings and seed in two searches, and of
# log(seconds besides training).
NOISE, SETUP_NOISE = (0.01, 0.002, 0.002, 0.001), 0.1
WAVES, CLIFF = 0.04, 0.5  # heights of `rough` in log(loss)
INTERIOR = 0.8  # position of the best depth of `interior`


class GaussianProcess:
    """Regression with a constant mean, a Matern-5/2 kernel with a scale for each input, and noise, in float64.

    x: (trials, dimensions) in 0 to 1; y: (trials). The scales maximize the likelihood times a wide prior.
    """

    def __init__(self, x: Array, y: Array):
        self._x, self._mean, self._deviation = x, float(y.mean()), float(y.std()) or 1.0
        self._y = (y - self._mean) / self._deviation
        # Logarithms of the scales, the variance and the variance of the noise
        start = np.array([0.0] * x.shape[1] + [0.0, -3.0])
        bounds = [(-2.5, 3.0)] * x.shape[1] + [(-3.0, 3.0), (-9.0, 0.0)]
        self._theta = minimize(self._cost, start, method="L-BFGS-B", bounds=bounds).x
        self._factor = cho_factor(self._covariance(self._theta), lower=True)
        self._weights = cho_solve(self._factor, self._y)

    def __call__(self, x: Array) -> float:
        """Return the mean at one point."""
        return self._mean + self._deviation * float(self._kernel(x[None], self._theta)[0] @ self._weights)

    def leave_one_out(self) -> Array:
        """Return the prediction of every y from the others, with the scales of all."""
        inverse = cho_solve(self._factor, np.eye(len(self._y)))
        return self._mean + self._deviation * (self._y - self._weights / np.diag(inverse))

    def _kernel(self, x: Array, theta: Array) -> Array:
        scaled = (x[:, None] - self._x[None]) / np.exp(theta[:-2])
        far = np.sqrt(5 * (scaled**2).sum(-1))
        return np.exp(theta[-2]) * (1 + far + far**2 / 3) * np.exp(-far)

    def _covariance(self, theta: Array) -> Array:
        return self._kernel(self._x, theta) + np.exp(theta[-1]) * np.eye(len(self._x))

    def _cost(self, theta: Array) -> float:
        factor, low = cho_factor(self._covariance(theta) + 1e-10 * np.eye(len(self._y)), lower=True)
        fit = 0.5 * self._y @ cho_solve((factor, low), self._y) + np.log(np.diag(factor)).sum()
        return float(fit + 0.5 * (((theta[:-2] - 0.5) / 1.5) ** 2).sum())


@dataclass(frozen=True)
class Surrogate:
    """What a trial at a point of the unit cube would show: log(loss) at each rung, log(seconds besides training)."""

    losses: Callable[[Array], Array]
    setup: Callable[[Array], float]

    def trial(self, point: Array, random: np.random.Generator) -> tuple[Array, float]:
        """Return the losses at the rungs and the seconds besides training, with noise."""
        losses = np.exp(self.losses(point) + np.array(NOISE) * random.standard_normal(RUNGS))
        return losses, math.exp(self.setup(point) + SETUP_NOISE * random.standard_normal())


def unit_point(space: Sequence[Dimension], parameters: Mapping[str, Any]) -> Array:
    """Return the positions of a trial's parameters in their ranges."""
    return np.array([one.position(parameters[one.name]) for one in space])


def fit(
    space: Sequence[Dimension], trials: Sequence[Suggested], seconds: Sequence[float], trial_seconds: float
) -> tuple[Surrogate, str]:
    """Return the surrogate of trials, and its errors of leave-one-out. seconds: of each.

    The last loss is a Gaussian process over all trials; that of a pruned one is estimated from the last rung that it
    reached, by a line through the trials that finished. The ratios of the earlier losses to the last one are Gaussian
    processes over the trials that finished.
    """
    x = np.array([unit_point(space, one.parameters) for one in trials])
    losses = np.full((len(trials), RUNGS), np.nan)
    for row, one in enumerate(trials):
        for rung, loss in (one.reports | ({RUNGS: one.value} if one.value is not None else {})).items():
            losses[row, rung - 1] = math.log(loss)
    reached, ended = (~np.isnan(losses)).sum(1), ~np.isnan(losses[:, -1])
    last = losses[:, -1].copy()
    for row in np.flatnonzero(~ended):
        rung = reached[row] - 1
        last[row] = np.polyval(np.polyfit(losses[ended, rung], losses[ended, -1], 1), losses[row, rung])
    final = GaussianProcess(x, last)
    earlier = [
        GaussianProcess(x[ended], (losses[ended, rung] - losses[ended, -1])) for rung in range(RUNGS - 1)
    ]
    setups = np.log(np.maximum(1.0, np.array(seconds) - trial_seconds * reached / RUNGS))
    setup = GaussianProcess(x, setups)

    def at(point: Array) -> Array:
        return final(point) + np.array([*(model(point) for model in earlier), 0.0])

    error, spread = (final.leave_one_out() - last)[ended], last[ended].std()
    better = last[ended] < np.median(last[ended])
    order = np.corrcoef(final.leave_one_out()[ended][better], last[ended][better])[0, 1]
    text = (
        f"{len(trials)} trials, {ended.sum()} finished. Leave-one-out errors of the loss: {_percent(error)} (spread "
        f"{100 * spread:.1f} %), in the better half {_percent(error[better])} (spread "
        f"{100 * last[ended][better].std():.1f} %, correlation {order:.2f}); of the seconds besides training: "
        f"{_percent(setup.leave_one_out() - setups)}"
    )
    return Surrogate(at, setup), text


def _percent(error: Array) -> str:
    return f"{100 * np.sqrt((error**2).mean()):.1f} %"


def interior(fitted: Surrogate, space: Sequence[Dimension]) -> Surrogate:
    """Return a surrogate whose depth is mirrored at INTERIOR: what was best at the low end is best there."""
    index = [one.key for one in space].index(DEPTH)

    def moved(point: Array) -> Array:
        other = point.copy()
        other[index] = abs(point[index] - INTERIOR) / INTERIOR
        return other

    return Surrogate(lambda point: fitted.losses(moved(point)), fitted.setup)


def bowl(seed: int, dimensions: int) -> Surrogate:
    """Return a made-up surrogate: quadratic, with a random optimum inside, and random importances and interactions.

    Its losses span about as much as the measured ones. At early rungs, other points are best than at the end.
    """
    random = np.random.default_rng([seed, 1])
    best, early = random.uniform(0.15, 0.85, (2, dimensions))
    weights = np.exp(random.normal(0.0, 1.0, dimensions))
    directions = np.linalg.qr(np.eye(dimensions) + 0.2 * random.standard_normal((dimensions, dimensions)))[0]

    def losses(point: Array) -> Array:
        late = weights @ (directions @ (point - best)) ** 2 / weights.sum()
        soon = weights @ (directions @ (point - early)) ** 2 / weights.sum()
        left = 1 - np.arange(1, RUNGS + 1) / RUNGS
        result: Array = math.log(1.3) + 2 * late + left * (0.3 + 0.5 * soon)
        return result

    return Surrogate(losses, lambda point: math.log(14))


def rough(seed: int, dimensions: int) -> Surrogate:
    """Return a bowl with waves, and a cliff in the first dimension: what no smooth process describes."""
    random, smooth = np.random.default_rng([seed, 2]), bowl(seed, dimensions)
    frequencies = random.normal(0.0, 12.0, (4, dimensions))
    phases, cliff = random.uniform(0, 2 * math.pi, 4), random.uniform(0.7, 0.9)

    def losses(point: Array) -> Array:
        waves = WAVES * np.sin(frequencies @ point + phases).mean()
        result: Array = smooth.losses(point) + waves + CLIFF * (point[0] > cliff)
        return result

    return Surrogate(losses, smooth.setup)
