"""Passkey retrieval: does a model find a number that is hidden in a long text? (Mohtashami and Jaggi, arXiv 2305.16300)

A prompt of L tokens announces a hidden number, repeats sentences that do not matter, states the number at depth d among
them (0: before the first, 1: after the last), and ends by asking for it. The answer is right if greedy decoding writes
all digits. A model that sees the whole prompt but does not look up numbers is wrong at all lengths; one whose attention
or rotary frequencies do not reach far is wrong at long lengths and small depths.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deskside.evaluate.likelihood import Encoder, likelihoods
from deskside.evaluate.scoring import wilson
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DIGITS = 5
GUESSING_NATS = DIGITS * math.log(10)  # -ln p of a number whose digits are all equally likely

_OPENING = (
    "A secret number is somewhere in the following text. Keep it in mind, because you will be asked for it.\n"
)
_FILLER = "The road goes past the old mill. Two boats lie on the shore. The wind is light. We walk on. "
_HIDDEN = "The secret number is {0}. Do not forget it: {0} is the secret number. "
_QUESTION = "\nWhat is the secret number? The secret number is"


@dataclass(frozen=True)
class PasskeyCell:
    """The result for one length (tokens) and depth. correct: right answers of n. nats: mean -ln p of the number."""

    length: int
    depth: float
    correct: int
    n: int
    nats: float

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON. low and high: 95 % confidence interval of the accuracy."""
        low, high = wilson(self.correct, self.n)
        return {
            "length": self.length,
            "depth": self.depth,
            "accuracy": self.correct / self.n,
            "low": low,
            "high": high,
            "n": self.n,
            "nats": self.nats,
        }


def passkey(
    model: Transformer,
    encoder: Encoder,
    lengths: Sequence[int],
    *,
    trials: int,
    seed: int,
    batch_tokens: int,
    tick: Callable[[int], object] | None = None,
) -> list[PasskeyCell]:
    """Return a result for each length and each of `DEPTHS`.

    Args:
        lengths: Tokens of the prompt with its answer; a prompt is at most one filler shorter.
        trials: How many numbers are hidden at each length and depth. They depend only on (seed, length, depth, trial).
        batch_tokens: As in `likelihoods`.
        tick: Called with the number of newly finished prompts.

    Raises UsageError for a length that the model or the text does not allow.
    """
    check_lengths(lengths, model.config.max_position_embeddings)
    cells = [(length, depth) for length in lengths for depth in DEPTHS]
    texts = []
    for length, depth in cells:
        rng = np.random.default_rng([seed, length, round(100 * depth)])
        for number in rng.integers(10 ** (DIGITS - 1), 10**DIGITS, size=trials).tolist():
            texts.append((_prompt(encoder, length, depth, number), f" {number}"))
    results = likelihoods(model, encoder.pairs(texts), batch_tokens=batch_tokens, tick=tick)
    found = []
    for place, (length, depth) in enumerate(cells):
        of_cell = results[place * trials : (place + 1) * trials]
        nats = -math.fsum(result.logprob for result in of_cell) / trials
        found.append(PasskeyCell(length, depth, sum(result.greedy for result in of_cell), trials, nats))
    return found


def check_lengths(lengths: Sequence[int], limit: int) -> None:
    """Raise UsageError for a length above `limit`, the most tokens that a model takes."""
    for length in lengths:
        if length > limit:
            raise UsageError(f"--passkey {length}: this model takes up to {limit} tokens")


def _prompt(encoder: Encoder, length: int, depth: float, number: int) -> str:
    """Return the longest prompt that has at most `length` tokens with its answer, filled with whole fillers."""

    def text(fillers: int) -> str:
        before = round(depth * fillers)
        hidden = _HIDDEN.format(number)
        return _OPENING + _FILLER * before + hidden + _FILLER * (fillers - before) + _QUESTION

    def tokens(fillers: int) -> int:
        (pair,) = encoder.pairs([(text(fillers), f" {number}")])
        return len(pair.context) + len(pair.continuation)

    shortest = tokens(0)
    if shortest > length:
        raise UsageError(
            f"--passkey {length}: the text without filler has {shortest} tokens; give a longer length"
        )
    # The first fillers may share tokens with the text around them, later ones all have the same number of tokens.
    per_filler = (tokens(20) - tokens(10)) / 10
    fillers = int((length - shortest) / per_filler) + 3
    while tokens(fillers) > length:
        fillers -= 1
    return text(fillers)
