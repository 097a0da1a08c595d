"""Prediction of a run's final loss: a scaling law for planning, and the extrapolation of a pilot's own curve.

Everything is in bits per byte of text, so that tokenizers do not matter. The law is Chinchilla's form

    loss = E + offset + A / params'^alpha + B / tokens'^beta

- params: weights that a token is multiplied with, including the head, excluding the embedding and experts that are not
  chosen (`budget.shape.matmul_params`). tokens: of a 32K-entry English tokenizer, about 4.3 bytes each.
- alpha, beta: Besiroglu et al. 2024 (arXiv 2404.10102), who refitted Hoffmann et al. 2022.
- E, A, B: least squares on the four compute-optimal points that nanochat published on 2026-01-27 (1e18 to 1e19 FLOPs),
  with A / B such that these points are optimal. Each point is predicted by the other three within 0.3 %.
- params', tokens': repeated tokens, and parameters beyond the optimum for the unique tokens U, have diminishing
  returns, in the form of Muennighoff et al. 2023 (arXiv 2305.16264):
      tokens' = U   (1 + R_D (1 - exp(-(tokens / U   - 1) / R_D)))
      params' = U_N (1 + R_N (1 - exp(-(params / U_N - 1) / R_N)))     U_N: optimal for U, at most params
  They found R_D = 15.4 and R_N = 5.3. Our seven runs (43M and 99M params, 1.2 to 6.5 epochs of 70M tokens, Muon) do
  not agree: from 4.9 to 6.5 epochs the smaller model gained nothing. R_D = 1.3 and R_N = 40 predict all seven runs
  within 0.3 %; the published values are off by up to 4 % and favor models that are too small. The law uses our values,
  and its range includes the prediction of the published ones. Seven later runs (40M to 99M params, 1.3 to 2.4 epochs)
  are within 0.7 %. More than 6.5 epochs were not measured.
  Muennighoff et al. find that more than about 40 epochs are worth nothing (their figure 1; by their values, 40 are
  worth 92 % of infinitely many, by ours all of it). So a plan proposes at most `USEFUL_EPOCHS`.
- overfitting: with these terms alone, the loss never rises. Lovelace et al. 2026 (arXiv 2605.01640) add a penalty with
  one coefficient that grows with the repetitions and with the parameters per unique token; a strong weight decay
  lowered theirs by 70 %. Ours is overfit (tokens / U - 1) (params / U). Its coefficient stays 0 (no penalty) until it
  is fitted to runs that overfit: `python -m benchmarks.repetition_fit RUN...` fits `overfit`, R_D and R_N. The
  planner's search excludes models beyond `MAX_WEIGHTS_PER_TOKEN`, except the smallest.
- offset: depends on corpus and recipe. Our runs end 4 to 5 % above the law of nanochat's corpus; staged sequence
  lengths account for 0.01 bits of this. The default offset lies in between. Its range of 8 % is wide, because other
  corpora will differ more. `fit_offset` fits the offset to a pilot on the user's corpus.
- ceiling: the law has none. For few tokens, it exceeds the loss of an untrained model, so a forecast is the law bounded
  by baselines of the text (`bounded`). Seven runs of the shape of `demo` over 0.2 to 3 million unique tokens ended at
  0.59 to 0.80 of the unigram baseline, without overfitting; a model that overfits can end above it.

The law is for Muon with a decayed learning rate; AdamW ended 0.10 to 0.12 bits higher in our only comparison. Outside
the measured sizes (0.04 to 0.4 billion parameters, 0.08 to 4 billion tokens, 0.07 billion unique tokens or more) the
range widens with the distance.
tests/budget/test_loss.py contains the points and repeats the fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deskside.budget.terms import Term, exp, leaf, named
from deskside.utils.format import count, number

R_D, R_N = 1.3, 40.0  # fitted to our own runs
PUBLISHED_R_D, PUBLISHED_R_N = 15.387756, 5.309743  # of Muennighoff et al. 2023
# Up to four epochs, repeated text is almost as useful as new text (Muennighoff et al. 2023, arXiv 2305.16264).
MAX_EPOCHS = 4
USEFUL_EPOCHS = 40  # more are worth nothing (the same paper, figure 1)
MAX_WEIGHTS_PER_TOKEN = 2.0  # per unique token; the most measured with repeated text was 1.4
BESIROGLU = {"E": 1.8172, "A": 482.01, "alpha": 0.3478, "B": 2085.43, "beta": 0.3658}  # nats per token
PARAMS_MEASURED, TOKENS_MEASURED = (0.4e8, 4e8), (0.8e8, 4e9)
MIN_UNIQUE_MEASURED, MAX_EPOCHS_MEASURED = 0.69e8, 6.6  # of runs that read their text more than once
# Share of the loss by which the range widens per factor of ten below or above the measured sizes.
WIDER_BELOW, WIDER_ABOVE = 0.12, 0.05
RECENT_SHARE = 0.4  # the fit to a pilot uses this last share of its tokens
MIN_PILOT_STEPS = 8  # fewest logged steps in that share
PILOT_SPREAD = 0.02  # prior: a curve may deviate from the form of the law by this share of its loss
DATA_TERM_SPREAD = 0.5  # prior: standard deviation of b, as a share of the law's B
# Relative reduction of the loss by a learning rate that decays over the last 65 % of a run, compared to a constant one:
# 2.016 instead of 2.037 bits per byte after 3.07 million unique tokens (shape of `demo`, English text, CPU, one pair).
DECAY_DROP = 0.010
# Half-width of an extrapolated loss, as a share: at the pilot's end, and per factor of e in tokens beyond it.
RANGE_AT_END, RANGE_PER_E_FOLD = 0.01, 0.01
# Limits that the low end and the expected value of a forecast approach, as shares of the baselines of the text, and
# the share of a limit up to which the law holds unchanged.
LOW_SHARE, EXPECTED_SHARE, LAW_SHARE = 0.55, 0.75, 0.85
PILOT_RANGE = (0.96, 1.04)  # `low` and `high` of a law whose offset was fitted to a pilot


@dataclass(frozen=True)
class LossLaw:
    """The scaling law with its constants, in bits per byte. low, high: the range as multiples of the expected loss."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    offset: float
    low: float
    high: float
    source: str
    overfit: float = 0.0  # bits per byte per repetition and parameter per unique token

    def at(
        self,
        params: float,
        tokens: float,
        unique_tokens: float | None = None,
        r_d: float = R_D,
        r_n: float = R_N,
    ) -> float:
        """Return bits per byte after `tokens` tokens from a corpus of `unique_tokens` (None: of at least `tokens`)."""
        effective = named(
            "tokens', worth of repeated text", effective_tokens(tokens, unique_tokens, r_d), "tokens"
        )
        loss = self.floor(params, tokens, unique_tokens, r_n) + self.B / effective**self.beta
        return loss + self.overfitting(params, tokens, unique_tokens)

    def overfitting(self, params: float, tokens: float, unique_tokens: float | None = None) -> float:
        """Return the penalty for reading text more than once, in bits per byte; 0 for at most one epoch."""
        if not self.overfit or unique_tokens is None or tokens <= unique_tokens:
            return 0.0
        return self.overfit * (tokens / unique_tokens - 1) * (params / unique_tokens)

    def floor(
        self, params: float, tokens: float, unique_tokens: float | None = None, r_n: float = R_N
    ) -> float:
        """Return the loss without the term of B and without overfitting."""
        effective = self.effective_params(params, tokens, unique_tokens, r_n)
        effective = named("N', less what exceeds the optimum for this text", effective, "weights")
        return self.E + self.offset + self.A / effective**self.alpha

    def effective_params(
        self, params: float, tokens: float, unique_tokens: float | None = None, r_n: float = R_N
    ) -> float:
        """Return params': parameters beyond the optimum for the unique tokens have diminishing returns."""
        unique = tokens if unique_tokens is None else min(tokens, unique_tokens)
        return _saturating(params, min(params, self.best_params(unique)), r_n)

    def best_params(self, tokens: float) -> float:
        """Return the number of parameters for which `tokens` unique tokens are compute-optimal."""
        best = (self.alpha * self.A * tokens**self.beta / (self.beta * self.B)) ** (1 / self.alpha)
        return named("N that is optimal for this text", best, "weights")


@dataclass(frozen=True)
class TextBaselines:
    """Baselines of a validation text in bits per byte. gzip: None if it was not measured.

    untrained: an upper bound on the loss, used instead of `unigram` if given.
    """

    unigram: float
    gzip: float | None = None
    untrained: float | None = None

    @property
    def ceiling(self) -> float:
        """The loss that any trained model beats."""
        return self.unigram if self.untrained is None else self.untrained


@dataclass(frozen=True)
class Extrapolation:
    """Final loss extrapolated from a pilot, in bits per byte. undecayed: `expected` for a constant learning rate."""

    low: float
    expected: float
    high: float
    undecayed: float
    used: int  # number of logged steps in the fit
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


UNTRAINED_BPB = 3.4  # of a uniform distribution over 32,768 tokens of 4.4 bytes each
# Baselines of our English corpus (docs/log.md), for a text that is not known.
TYPICAL_TEXT = TextBaselines(unigram=2.521, gzip=2.975, untrained=UNTRAINED_BPB)


def effective_tokens(tokens: float, unique_tokens: float | None, r_d: float = R_D) -> float:
    """Return tokens': how many unique tokens are worth as much as `tokens` from a corpus of `unique_tokens`."""
    if unique_tokens is None or tokens <= unique_tokens:
        return tokens
    return _saturating(tokens, unique_tokens, r_d)


def expected_bpb(
    law: LossLaw, params: float, tokens: float, unique_tokens: float | None = None
) -> tuple[float, float, float]:
    """Return (low, expected, high) bits per byte at the end of a run whose learning rate decays.

    unique_tokens: tokens of the training data; None if the run reads none of them twice. Raises ValueError for numbers
    that are not positive and finite.
    """
    for name, value in (("params", params), ("tokens", tokens), ("unique_tokens", unique_tokens)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be above zero and finite, not {value}")
    expected = named("bits per byte", law.at(params, tokens, unique_tokens), "bits per byte")
    with_published = law.at(params, tokens, unique_tokens, PUBLISHED_R_D, PUBLISHED_R_N)
    with_published = named("with the published constants of repetition", with_published, "bits per byte")
    wider = _widening(params, PARAMS_MEASURED) + _widening(tokens, TOKENS_MEASURED)
    if unique_tokens is not None and unique_tokens < tokens:
        wider += WIDER_BELOW * max(0.0, math.log10(MIN_UNIQUE_MEASURED / unique_tokens))
    low = min(expected, with_published) * max(0.1, law.low - wider)
    return low, expected, expected * (law.high + wider)


def bounded(
    loss: tuple[float, float, float], text: TextBaselines = TYPICAL_TEXT
) -> tuple[float, float, float]:
    """Return the forecast of (low, expected, high) bits per byte by the law, bounded by the baselines of the text.

    Small values are unchanged. Large ones approach their limit, so that the order and the width of the range are kept,
    and a lower loss by the law is a lower forecast.
    """
    low, expected, high = loss
    lowest = text.unigram if text.gzip is None else min(text.unigram, text.gzip)
    return (
        _below(low, LOW_SHARE * lowest, "limit of the low end"),
        _below(expected, EXPECTED_SHARE * text.unigram, "limit of the expected loss"),
        _below(high, text.ceiling, "loss that any trained model beats"),
    )


def outside_measured(params: float, tokens: float, unique_tokens: float | None = None) -> list[str]:
    """Return texts that say where a run is outside the runs that the law was fitted to; empty if it is not."""
    found = [
        f"{count(value)} {what} (measured: {count(least)} to {count(most)})"
        for what, value, (least, most) in (
            ("weights", params, PARAMS_MEASURED),
            ("training tokens", tokens, TOKENS_MEASURED),
        )
        if not least <= value <= most
    ]
    if unique_tokens is None or tokens <= unique_tokens:
        return found
    if unique_tokens < MIN_UNIQUE_MEASURED:
        found.append(f"{count(unique_tokens)} unique tokens (measured: {count(MIN_UNIQUE_MEASURED)} or more)")
    if tokens > MAX_EPOCHS_MEASURED * unique_tokens:
        found.append(f"{number(tokens / unique_tokens)} epochs (measured: up to {MAX_EPOCHS_MEASURED:g})")
    return found


def fit_offset(
    law: LossLaw, params: float, tokens: float, unique_tokens: float | None, bpb: float
) -> LossLaw:
    """Return the law with its offset fitted to a measured or extrapolated loss `bpb`, and with PILOT_RANGE."""
    offset = law.offset + bpb - law.at(params, tokens, unique_tokens)
    low, high = PILOT_RANGE
    return replace(
        law, offset=offset, low=low, high=high, source=f"{law.source}; offset fitted on a run here"
    )


def _saturating(value: float, knee: float, rate: float) -> float:
    """Return `value` up to `knee`; beyond, diminishing returns that saturate at knee x (1 + rate)."""
    if value <= knee:
        return value
    return knee * (1 + rate * (1 - exp(-(value / knee - 1) / rate)))


def _below(loss: float, limit: float, what: str) -> float:
    """Return `loss` up to LAW_SHARE of `limit`; beyond, a value that grows with it and approaches `limit`."""
    start = LAW_SHARE * limit
    if loss <= start:
        return loss
    limit = leaf(what, limit) if isinstance(loss, Term) else limit
    return limit * (1 - (1 - LAW_SHARE) * exp(-(loss / limit - LAW_SHARE) / (1 - LAW_SHARE)))


def _widening(value: float, measured: tuple[float, float]) -> float:
    """Return the share of the loss by which the range widens for a size outside the measured ones."""
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

    tokens, bpb: of the logged steps, in order, after the warm-up and before the decay. The training loss of a step will
    do, because its batch is unseen text during the first epoch. decays: True if the learning rate decays at the end of
    the run, which lowers the loss by `DECAY_DROP`.

    The fitted curve is floor + b / tokens^beta, with the law's beta, over the last `RECENT_SHARE` of the tokens. The
    law's floor is a prior whose standard deviation is half the law's range; it limits the effect of noise in a short
    pilot.

    With the first 5 to 20 % of our five stored H200 runs (300 to 430 s, 2.3 to 6.5 epochs), the error was at most 2.5 %
    if the law's offset was fitted to these runs; with the offset of nanochat's corpus, the result was 2.5 to 5 % too
    low. For two runs of a million parameters on a CPU, the error was 8 to 20 %, within the wide range there.

    Raises ValueError for fewer than `MIN_PILOT_STEPS` steps in this part, or for tokens beyond the end.
    """
    import numpy as np  # here, because a plan does not need it, and the import takes a fifth of a plan's time

    t, y = np.asarray(tokens, dtype=float), np.asarray(bpb, dtype=float)
    valid = np.isfinite(t) & np.isfinite(y) & (t > 0)
    t, y = t[valid], y[valid]
    if len(t):
        recent = t >= (1 - RECENT_SHARE) * t[-1]
        t, y = t[recent], y[recent]
    if len(t) < MIN_PILOT_STEPS:
        raise ValueError(f"a pilot's curve needs {MIN_PILOT_STEPS} steps, not {len(t)}")
    if t[-1] > end_tokens:
        raise ValueError(f"end_tokens: {end_tokens:.0f} is before the pilot's end, {t[-1]:.0f}")
    low, _, high = expected_bpb(law, params, end_tokens, unique_tokens)
    # Differences of neighboring steps are noise. PILOT_SPREAD is an error of the form, which more steps do not reduce.
    noise = float(np.std(np.diff(y)) / math.sqrt(2 * len(t)))
    spread = math.hypot(noise, PILOT_SPREAD * float(y.mean())) * math.sqrt(len(t))
    floor = law.floor(params, end_tokens, unique_tokens)
    floor_spread = (high - low) / 2
    rows = np.stack([np.ones_like(t), t**-law.beta], 1) / spread
    rows = np.vstack([rows, [1 / floor_spread, 0], [0, 1 / (DATA_TERM_SPREAD * law.B)]])
    values = np.concatenate([y / spread, [floor / floor_spread, 1 / DATA_TERM_SPREAD]])
    solution, *_ = np.linalg.lstsq(rows, values, rcond=None)
    if solution[0] < 0:  # entropy is never negative; the model is memorizing a small text
        alone, *_ = np.linalg.lstsq(rows[:, 1:], values, rcond=None)
        solution = np.array([0.0, *alone])
    end = np.array([1.0, effective_tokens(end_tokens, unique_tokens) ** -law.beta])
    undecayed = float(end @ solution)
    e_folds = math.log(end_tokens / t[-1])
    drop = DECAY_DROP if decays else 0.0
    deviation = float(np.sqrt(end @ np.linalg.inv(rows.T @ rows) @ end)) / undecayed
    wider = _widening(params, PARAMS_MEASURED) + _widening(end_tokens, TOKENS_MEASURED)
    half_width = math.hypot(deviation, RANGE_AT_END + RANGE_PER_E_FOLD * e_folds + wider / 2)
    final = undecayed * (1 - drop)
    return Extrapolation(
        low=final * max(0.1, 1 - half_width),
        expected=final,
        high=final * (1 + half_width),
        undecayed=undecayed,
        used=len(t),
        source="modelled: from this run's first steps",
    )
