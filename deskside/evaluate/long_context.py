"""Long-context tasks: generated texts of a given length with a question whose answers are known. Nothing is downloaded.

`passkey` is that of Mohtashami and Jaggi (arXiv 2305.16300); the others are of the kinds of RULER (Hsieh et al., arXiv
2404.06654), one of each: retrieval with several keys, multi-hop tracing and aggregation. A model that does not look
things up in the text is wrong at all lengths; one whose attention or rotary frequencies do not reach far is wrong at
long lengths and small depths.

An answer is scored by recall, as in RULER: the share of the expected words that it contains, in any order.
"""

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deskside.engine.requests import Request
from deskside.evaluate.generated import generate_texts
from deskside.evaluate.likelihood import ContextEncoder, Likelihood, Pair, likelihoods
from deskside.evaluate.run_task import EvaluatedModel
from deskside.evaluate.scoring import wilson
from deskside.utils.errors import UsageError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DIGITS = 5
KEYS = 4  # named numbers in `multikey`
CHAINS, HOPS = 2, 4  # of `variable_tracking`; a chain has one variable more than hops
ZIPF_EXPONENT, MOST_FREQUENT = 2.0, 3  # of `frequent_words`
CODED_WORDS = 500  # the last one occurs only in texts of more than 200,000 words

_FILLER = "The road goes past the old mill. Two boats lie on the shore. The wind is light. We walk on. "


@dataclass(frozen=True)
class LongText:
    """A text of any length and its question.

    Attributes:
        text: Returns the text with a number of units, which are irrelevant sentences, or words.
        shortest: The smallest number of units.
        answers: The expected words. The reference answer is a space and these, separated by commas.
    """

    text: Callable[[int], str]
    shortest: int
    question: str
    answers: tuple[str, ...]

    @property
    def reference(self) -> str:
        return " " + ", ".join(self.answers)


@dataclass(frozen=True)
class LongTask:
    """A kind of text and question.

    Attributes:
        make: Returns a random text, with what is asked for at a depth (0: at the beginning, 1: at the end).
        at_depths: Whether there is such a depth; else what is asked for is all over the text, and the depth is ignored.
    """

    make: Callable[[np.random.Generator, float], LongText]
    at_depths: bool

    @property
    def depths(self) -> tuple[float | None, ...]:
        return DEPTHS if self.at_depths else (None,)

    def prompts(self, trials: int) -> int:
        """Return the number of prompts of a length and depth, which is larger for a task without depths."""
        return trials if self.at_depths else trials * len(DEPTHS)


def _passkey(rng: np.random.Generator, depth: float) -> LongText:
    (number,) = _numbers(rng, 1)
    hidden = f"The secret number is {number}. Do not forget it: {number} is the secret number. "
    opening = "A secret number is somewhere in the following text. Keep it in mind, because you will be asked for it.\n"
    question = "\nWhat is the secret number? The secret number is"
    return LongText(_with_filler(opening, [(depth, hidden)]), 0, question, (number,))


def _multikey(rng: np.random.Generator, depth: float) -> LongText:
    """Several named numbers, one of which is requested; the others are at random depths."""
    names, numbers = _words(rng, KEYS), _numbers(rng, KEYS)
    depths = [depth, *rng.random(KEYS - 1).tolist()]
    hidden = [
        (place, f"The number of {name} is {number}. ")
        for place, name, number in zip(depths, names, numbers, strict=True)
    ]
    opening = "Numbers that belong to names are in the following text. Keep them in mind, because you will be asked.\n"
    question = f"\nWhat is the number of {names[0]}? The number of {names[0]} is"
    return LongText(_with_filler(opening, hidden), 0, question, (numbers[0],))


def _variable_tracking(rng: np.random.Generator, _: float) -> LongText:
    """Chains of assignments, each in order at random depths; the variables of one chain are asked for."""
    names = [name.upper() for name in _words(rng, CHAINS * (HOPS + 1))]
    values = _numbers(rng, CHAINS)
    hidden = []
    for chain, value in enumerate(values):
        variables = names[chain::CHAINS]
        sources = [value, *variables[:-1]]
        depths = sorted(rng.random(len(variables)).tolist())
        hidden += [
            (depth, f"VAR {name} = {source}. ")
            for depth, name, source in zip(depths, variables, sources, strict=True)
        ]
    opening = (
        "Assignments of variables are in the following text. Keep track of the value of each variable.\n"
    )
    question = (
        f"\nWhich variables have the value {values[0]}, directly or through other variables? "
        f"These {HOPS + 1} variables have the value {values[0]}:"
    )
    return LongText(_with_filler(opening, hidden), 0, question, tuple(names[::CHAINS]))


def _frequent_words(rng: np.random.Generator, _: float) -> LongText:
    """Random words whose frequencies follow Zipf's law; the most frequent ones are asked for."""
    words = np.array(_words(rng, CODED_WORDS))
    seed = int(rng.integers(2**32))
    weights = np.arange(1, CODED_WORDS + 1) ** -ZIPF_EXPONENT
    opening = "Some words in the following list are more frequent than others. Count each word.\n"

    def text(count: int) -> str:
        listed = words.repeat(np.rint(count * weights / weights.sum()).astype(int))
        np.random.default_rng(seed).shuffle(listed)
        return opening + " ".join(listed)

    question = f"\nWhich words are the most frequent ones? The {MOST_FREQUENT} most frequent words are:"
    # From 50 words on, each of the first words is more frequent than the next one.
    return LongText(text, 50, question, tuple(words[:MOST_FREQUENT].tolist()))


TASKS = {
    "passkey": LongTask(_passkey, at_depths=True),
    "multikey": LongTask(_multikey, at_depths=True),
    "variable_tracking": LongTask(_variable_tracking, at_depths=False),
    "frequent_words": LongTask(_frequent_words, at_depths=False),
}


@dataclass(frozen=True)
class LongContextCell:
    """The result of a task for one length (tokens) and depth.

    Attributes:
        depth: None for a task without depths.
        recall: Sum of the shares of expected words that `n` answers contain.
        nats: Mean -ln p of the reference answer.
    """

    task: str
    length: int
    depth: float | None
    recall: float
    n: int
    nats: float

    @property
    def accuracy(self) -> float:
        return self.recall / self.n

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON. low and high: 95 % confidence interval of the accuracy.

        It is Wilson's for answers that are right or wrong. Shares between vary less, so for them it is too wide.
        """
        low, high = wilson(self.recall, self.n)
        return {
            "task": self.task,
            "length": self.length,
            "depth": self.depth,
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "n": self.n,
            "nats": self.nats,
        }


def long_context(
    subject: EvaluatedModel,
    names: Sequence[str],
    lengths: Sequence[int],
    *,
    trials: int,
    seed: int,
    tick: Callable[[int], object] | None = None,
) -> list[LongContextCell]:
    """Return a result for each task, each length and each of its depths.

    Args:
        names: Keys of `TASKS`.
        lengths: Tokens of the prompt with its answer; a prompt is at most about one unit of filler shorter.
        trials: As in `LongTask.prompts`. A text depends only on (seed, task, length, depth, trial).
        tick: Called with the number of newly finished steps, of `count_steps`.

    Raises UsageError for a length that the model or the text does not allow.
    """
    check_lengths(lengths, subject.model.config.max_position_embeddings)
    cells = [(name, length, depth) for name in names for length in lengths for depth in TASKS[name].depths]
    prompts = [
        _prompt(subject.encoder, cell, [seed, trial])
        for cell in cells
        for trial in range(TASKS[cell[0]].prompts(trials))
    ]
    pairs = [prompt.pair for prompt in prompts]
    results = likelihoods(subject.model, pairs, batch_tokens=subject.batch_tokens, tick=tick)
    recalls = _recalls(subject, prompts, results, tick)
    found = []
    start = 0
    for name, length, depth in cells:
        end = start + TASKS[name].prompts(trials)
        nats = -math.fsum(result.logprob for result in results[start:end]) / (end - start)
        found.append(LongContextCell(name, length, depth, math.fsum(recalls[start:end]), end - start, nats))
        start = end
    return found


def count_steps(names: Sequence[str], lengths: Sequence[int], trials: int) -> int:
    """Return the number of steps that `long_context` reports: likelihoods, and answers that are generated."""
    tasks = [TASKS[name] for name in names]
    return len(lengths) * sum(
        len(task.depths) * task.prompts(trials) * (1 if task.at_depths else 2) for task in tasks
    )


def check_lengths(lengths: Sequence[int], limit: int) -> None:
    """Raise UsageError for a length above `limit`, the most tokens that a model takes."""
    for length in lengths:
        if length > limit:
            raise UsageError(f"--long-context {length}: this model takes up to {limit} tokens")


def recall(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected words that an answer contains, ignoring case."""
    return sum(word.lower() in answer.lower() for word in expected) / len(expected)


@dataclass(frozen=True)
class _Prompt:
    """A prompt with its reference answer, and the most tokens that are generated for it."""

    pair: Pair
    room: int
    answers: tuple[str, ...]


def _recalls(
    subject: EvaluatedModel,
    prompts: Sequence[_Prompt],
    results: Sequence[Likelihood],
    tick: Callable[[int], object] | None,
) -> list[float]:
    """Return the recall of the greedy answer to each prompt.

    A single expected word is written if each of its tokens is the most probable one, which its likelihood tells.
    Several words may come in any order, so these answers are generated.
    """
    several = [prompt for prompt in prompts if len(prompt.answers) > 1]
    requests = [
        Request(prompt.pair.context, prompt.room, eos_tokens=frozenset(subject.eos_tokens))
        for prompt in several
    ]
    texts = iter(generate_texts(subject.model, subject.tokenizer, requests, tick) if requests else [])
    return [
        recall(next(texts), prompt.answers) if len(prompt.answers) > 1 else float(result.greedy)
        for prompt, result in zip(prompts, results, strict=True)
    ]


def _prompt(encoder: ContextEncoder, cell: tuple[str, int, float | None], seeds: list[int]) -> _Prompt:
    """Return the longest prompt that has at most the cell's length in tokens with the room for its answer."""
    name, length, depth = cell
    place = depth or 0.0
    rng = np.random.default_rng([*seeds, list(TASKS).index(name), length, round(100 * place)])
    made = TASKS[name].make(rng, place)

    def prompt(units: int) -> _Prompt:
        (pair,) = encoder.pairs([(made.text(units) + made.question, made.reference)])
        answer = len(pair.continuation)
        # The room suffices for other separators or a short sentence, but not for a list of all words of the text.
        return _Prompt(pair, answer if len(made.answers) == 1 else answer + answer // 4, made.answers)

    def free(units: int) -> int:
        fitted = prompt(units)
        return length - len(fitted.pair.context) - fitted.room

    units = made.shortest
    unused = free(units)
    if unused < 0:
        raise UsageError(
            f"--long-context {length}: the shortest text of {name} has {length - unused} tokens; give a longer length"
        )
    per_unit = (unused - free(units + 10)) / 10
    # The tokens are almost proportional to the units, so a few of Newton's steps find the largest number that fits.
    for _ in range(4):
        step = math.floor(unused / per_unit)
        units = max(made.shortest, units + step)
        unused = free(units)
        if step == 0:
            break
    while unused < 0:
        units -= 1
        unused = free(units)
    return prompt(units)


def _with_filler(opening: str, hidden: Sequence[tuple[float, str]]) -> Callable[[int], str]:
    """Return a function that returns a text with a number of fillers, with the hidden sentences at their depths."""
    ordered = sorted(hidden, key=lambda one: one[0])

    def text(fillers: int) -> str:
        parts = [opening]
        before = 0
        for depth, sentence in ordered:
            place = round(depth * fillers)
            parts += [_FILLER * (place - before), sentence]
            before = place
        return "".join([*parts, _FILLER * (fillers - before)])

    return text


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    """Return different numbers of `DIGITS` digits."""
    return [str(10 ** (DIGITS - 1) + n) for n in rng.choice(9 * 10 ** (DIGITS - 1), count, replace=False)]


def _words(rng: np.random.Generator, count: int) -> list[str]:
    """Return different words of six random letters."""
    letters = string.ascii_lowercase
    return [
        "".join(letters[number // 26**place % 26] for place in range(6))
        for number in rng.choice(26**6, count, replace=False).tolist()
    ]
