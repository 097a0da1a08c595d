"""Prediction of a run's final loss: a scaling law for planning, and the extrapolation of a pilot's own curve.

Everything is in bits per byte of validation text, so that tokenizers do not matter. The law is Chinchilla's form

    loss = E + offset + A / params'^alpha + B / tokens'^beta

- params: weights that a token is multiplied with, head included, embedding not (`budget.shape.matmul_params`; of a
  mixture of experts the chosen ones). tokens: of a 32K-entry English tokenizer, about 4.3 bytes each.
- alpha, beta: Besiroglu et al. 2024 (arXiv 2404.10102), who refitted Hoffmann et al. 2022.
- E, A, B: least squares on the four compute-optimal points that nanochat published on 2026-01-27 (1e18 to 1e19 FLOPs),
  with A / B such that those points are optimal. Each is predicted by the other three within 0.3 %.
- params', tokens': tokens count less the more often they repeat, and so do parameters beyond what is optimal for the
  unique tokens U, in the form of Muennighoff et al. 2023 (arXiv 2305.16264):
      tokens' = U   (1 + R_D (1 - exp(-(tokens / U   - 1) / R_D)))
      params' = U_N (1 + R_N (1 - exp(-(params / U_N - 1) / R_N)))     U_N: optimal for U, at most params
  They found R_D = 15.4 and R_N = 5.3. Our seven runs (43M and 99M params, 1.2 to 6.5 epochs of 70M tokens, Muon) do
  not agree: from 4.9 to 6.5 epochs the smaller model gained nothing. R_D = 1.3 and R_N = 40 meet all seven within
  0.3 %, where the published pair is off by up to 4 % and chooses too small a model. The law uses ours;
  its range reaches to what theirs would give. Neither knows overfitting: beyond `MOST_WEIGHTS_PER_TOKEN` and the
  epochs that were measured nothing is known, and the planner does not go there.
- offset: corpora and recipes differ. Our runs end 4 to 5 % above the law of nanochat's corpus; staged sequence lengths
  are worth 0.01 of that. The default offset is in the middle. Its range of 8 % is wide, because other corpora
  will differ more. A pilot fits the offset of the corpus at hand (`fitted`).

The law is for Muon with a decayed learning rate; AdamW ended 0.10 to 0.12 higher in the one comparison that we have.
Outside of what was measured (0.04 to 0.4 billion parameters, 0.08 to 4 billion tokens) the range widens with the
distance. tests/budget/test_loss.py has the points and fits them again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deskside.budget.terms import exp, named

REPEATS, EXCESS = 1.3, 40.0  # R_D and R_N, fitted to our own runs
PUBLISHED_REPEATS, PUBLISHED_EXCESS = 15.387756, 5.309743  # of Muennighoff et al. 2023
MOST_WEIGHTS_PER_TOKEN = 2.0  # unique tokens; 1.4 is the most that was measured with repeated text
BESIROGLU = {"E": 1.8172, "A": 482.01, "alpha": 0.3478, "B": 2085.43, "beta": 0.3658}  # nats per token
PARAMS_MEASURED, TOKENS_MEASURED = (0.4e8, 4e8), (0.8e8, 4e9)
WIDER_BELOW, WIDER_ABOVE = 0.12, 0.05  # share of the loss by which the range widens per factor of ten outside
RECENT, FEWEST = 0.4, 8  # share of the pilot's tokens that its fit looks at, and the fewest steps in it
PILOT_SPREAD, DATA_TERM_SPREAD = 0.02, 0.5
# What a learning rate that decays over the last 65 % gains against one that stays: 2.016 instead of 2.037 bits per byte
# after the same 3.07 million unique tokens (the demo's shape on our English corpus, CPU, one pair of runs).
DECAY_DROP = 0.010
RANGE_AT_END, RANGE_PER_E_FOLD = 0.01, 0.01
PILOT_RANGE = (0.96, 1.04)  # of a law whose offset a pilot has fitted, at the size that it was fitted at


@dataclass(frozen=True)
class LossLaw:
    """The law's constants, in bits per byte. `low`, `high`: the range as multiples of the expected loss."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    offset: float
    low: float
    high: float
    source: str

    def at(
        self,
        params: float,
        tokens: float,
        unique_tokens: float | None = None,
        repeats: float = REPEATS,
        excess: float = EXCESS,
    ) -> float:
        """Bits per byte after `tokens` tokens drawn from `unique_tokens` (None: from more than it reads)."""
        worth = named(
            "tokens', worth of repeated text", effective_tokens(tokens, unique_tokens, repeats), "tokens"
        )
        return self.floor(params, tokens, unique_tokens, excess) + self.B / worth**self.beta

    def floor(
        self, params: float, tokens: float, unique_tokens: float | None = None, excess: float = EXCESS
    ) -> float:
        """Return the part that more tokens of the same kind would not remove."""
        counted = self.effective_params(params, tokens, unique_tokens, excess)
        counted = named("N', less what exceeds the optimum for this text", counted, "weights")
        return self.E + self.offset + self.A / counted**self.alpha

    def effective_params(
        self, params: float, tokens: float, unique_tokens: float | None = None, excess: float = EXCESS
    ) -> float:
        """Return the effective parameters: those beyond the optimum for the unique text count less."""
        read = tokens if unique_tokens is None else min(tokens, unique_tokens)
        return _diminishing(params, min(params, self.best_params(read)), excess)

    def best_params(self, tokens: float) -> float:
        """Return parameters for which `tokens` unique tokens are compute-optimal."""
        best = (self.alpha * self.A * tokens**self.beta / (self.beta * self.B)) ** (1 / self.alpha)
        return named("N that is optimal for this text", best, "weights")


@dataclass(frozen=True)
class Extrapolation:
    """Extrapolation of a pilot's curve, in bits per byte. `undecayed`: the final loss at a constant learning rate."""

    low: float
    expected: float
    high: float
    undecayed: float
    used: int  # logged steps that the fit saw
    source: str


LAW = LossLaw(
    E=0.6148,
    A=91.48,
    alpha=BESIROGLU["alpha"],
    B=290.97,
    beta=BESIROGLU["beta"],
    offset=0.05,
    low=0.92,
    high=1.08,
    source="modelled: exponents of Besiroglu et al. 2024, constants from nanochat's four points of 2026-01, offset "
    "between its corpus and ours; repeated data in the form of Muennighoff et al. 2023, by our own runs",
)


def effective_tokens(tokens: float, unique_tokens: float | None, repeats: float = REPEATS) -> float:
    """Unique tokens that are worth as much as `tokens` tokens drawn from `unique_tokens`."""
    if unique_tokens is None or tokens <= unique_tokens:
        return tokens
    return _diminishing(tokens, unique_tokens, repeats)


def expected_bpb(
    law: LossLaw, params: float, tokens: float, unique_tokens: float | None = None
) -> tuple[float, float, float]:
    """Return (low, expected, high) bits per byte at the end of a run whose learning rate decays.

    unique_tokens: of the training data, None when there is more of it than the run reads. Raises ValueError for
    numbers that are not above zero.
    """
    for name, value in (("params", params), ("tokens", tokens), ("unique_tokens", unique_tokens)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be above zero, not {value}")
    expected = named("bits per byte", law.at(params, tokens, unique_tokens), "bits per byte")
    as_published = law.at(params, tokens, unique_tokens, PUBLISHED_REPEATS, PUBLISHED_EXCESS)
    as_published = named("with the published constants of repetition", as_published, "bits per byte")
    wider = _outside(params, PARAMS_MEASURED) + _outside(tokens, TOKENS_MEASURED)
    low = min(expected, as_published) * max(0.1, law.low - wider)
    return low, expected, expected * (law.high + wider)


def fitted(law: LossLaw, params: float, tokens: float, unique_tokens: float | None, bpb: float) -> LossLaw:
    """Return the law with the offset that makes it meet a measured or extrapolated loss, and the range of a pilot."""
    offset = law.offset + bpb - law.at(params, tokens, unique_tokens)
    low, high = PILOT_RANGE
    return replace(
        law, offset=offset, low=low, high=high, source=f"{law.source}; offset fitted on a run here"
    )


def _diminishing(value: float, enough: float, star: float) -> float:
    """Return `enough` plus a saturating share of the excess."""
    if value <= enough:
        return value
    return enough * (1 + star * (1 - exp(-(value / enough - 1) / star)))


def _outside(value: float, measured: tuple[float, float]) -> float:
    low, high = measured
    return WIDER_BELOW * max(0.0, math.log10(low / value)) + WIDER_ABOVE * max(0.0, math.log10(value / high))


def fit_curve(
    tokens: Sequence[float],
    bpb: Sequence[float],
    end_tokens: float,
    *,
    params: float,
    unique_tokens: float | None = None,
    law: LossLaw = LAW,
    decays: bool = True,
) -> Extrapolation:
    """Extrapolate a pilot's training loss to `end_tokens`.

    tokens, bpb: of the logged steps, in order, after the warm-up and before the decay (a step's own batch will do: it
    is unseen text during the first epoch). The curve is taken as floor + b / tokens^beta with the law's beta. The law's
    floor is a prior, as firm as the law is there, so that a short pilot is not led astray by its noise; the last
    `RECENT` of the tokens is looked at. A learning rate that `decays` ends lower by `DECAY_DROP`.

    On our five stored runs of an H200 (300 to 430 s, 2.3 to 6.5 epochs) this was off by at most 2.5 % from the first
    5 to 20 % of the run, by a law that these runs gave the offset to; with the offset of nanochat's corpus it was 2.5
    to 5 % too low. On two runs of a million parameters on a CPU it was off by 8 to 20 %, inside its wide range there.

    Raises ValueError for fewer than `FEWEST` steps or for tokens beyond the end.
    """
    import numpy as np  # a plan needs no pilot, and numpy takes a fifth of a plan's time to import

    t, y = np.asarray(tokens, dtype=float), np.asarray(bpb, dtype=float)
    good = np.isfinite(t) & np.isfinite(y) & (t > 0)
    t, y = t[good], y[good]
    recent = t >= (1 - RECENT) * t[-1] if len(t) else good[:0]
    t, y = t[recent], y[recent]
    if len(t) < FEWEST:
        raise ValueError(f"a pilot's curve needs {FEWEST} steps, not {len(t)}")
    if t[-1] > end_tokens:
        raise ValueError(f"end_tokens: {end_tokens:.0f} lies before the pilot's end, {t[-1]:.0f}")
    low, _, high = expected_bpb(law, params, end_tokens, unique_tokens)
    # Neighbouring steps say the same but for noise; what the curve itself may deviate from its form is PILOT_SPREAD.
    noise = float(np.std(np.diff(y)) / math.sqrt(2 * len(t)))
    spread = math.hypot(noise, PILOT_SPREAD * float(y.mean())) * math.sqrt(len(t))
    floor = law.floor(params, end_tokens, unique_tokens)
    firmness = (high - low) / 2
    rows = np.stack([np.ones_like(t), t**-law.beta], 1) / spread
    rows = np.vstack([rows, [1 / firmness, 0], [0, 1 / (DATA_TERM_SPREAD * law.B)]])
    values = np.concatenate([y / spread, [floor / firmness, 1 / DATA_TERM_SPREAD]])
    solution, *_ = np.linalg.lstsq(rows, values, rcond=None)
    end = np.array([1.0, effective_tokens(end_tokens, unique_tokens) ** -law.beta])
    undecayed = float(end @ solution)
    ahead = math.log(end_tokens / t[-1])
    share = DECAY_DROP if decays else 0.0
    deviation = float(np.sqrt(end @ np.linalg.inv(rows.T @ rows) @ end)) / undecayed
    outside = _outside(params, PARAMS_MEASURED) + _outside(end_tokens, TOKENS_MEASURED)
    half = math.hypot(deviation, RANGE_AT_END + RANGE_PER_E_FOLD * ahead + outside / 2)
    final = undecayed * (1 - share)
    return Extrapolation(
        final * max(0.1, 1 - half),
        final,
        final * (1 + half),
        undecayed,
        len(t),
        "modelled: from this run's first steps",
    )
