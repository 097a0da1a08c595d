"""Answers of a model in training: a copy of its weights, and an engine over it that stays for the whole run.

Training and sampling take turns on one card. The engine's memory (the copy, the cache of keys and values, what CUDA
graphs work in) stays where it is, so what it may have is what training's largest step leaves free. That is settled
after that step has run, then tried with the most that the engine can be asked for, and then it is looked whether a step
of training still has its room: torch hands memory that training has given back to whoever asks first.

The token that ends an answer is part of it, because ending is learnt too. So the engine is not told which tokens end a
text: an answer is watched, and its request cancelled when such a token comes.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from deskside.budget.shape import Shape, kv_bytes_per_token
from deskside.engine.engine import PAGE_SIZE, PREFILL_TOKENS, Engine
from deskside.engine.graphs import WARM_UP, bucket
from deskside.engine.kv_budget import SHARE, allowed_bytes
from deskside.engine.requests import Request
from deskside.engine.sampling import Sampling
from deskside.engine.weights import for_inference, inference_copy, refresh
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError
from deskside.weights.merge import merge_into, merged

MOST_ROWS = 256
PACE_TOKENS = 4  # of each answer, when the speed of sampling is measured
FEW_LANES = 0.5
# Of a decoding step, for each row and entry of the vocabulary: its logits, and what drawing from them by
# `engine/sampling.py` has at once. Graphs hold on to it.
DRAWN_BYTES = 19
ANY = Sampling(1.0)  # as answers are drawn; the temperature changes nothing in what it takes


@dataclass(frozen=True)
class Sampled:
    """tokens with the one that ended it; logprobs: of each at the temperature of sampling. `ended`: by itself."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True)
class Left:
    """Of a card, in bytes, after training's largest step. free: that no step needs; again: that the step has given
    back and the next one takes again."""

    free: int
    again: int

    @classmethod
    def of(cls, device: torch.device) -> "Left | None":
        """None on a CPU. To be asked before anything is made beside training: that may lie in what was given back."""
        if device.type != "cuda":
            return None
        reserved = torch.cuda.memory_reserved(device)
        return cls(allowed_bytes(device) - reserved, reserved - torch.cuda.memory_allocated(device))

    def without(self, model: Transformer) -> "Left":
        """Beside a model that was made since and stays."""
        return replace(self, free=self.free - sum(p.nbytes for p in model.parameters()))

    def check(self, device: torch.device) -> None:
        """Raises RunError where what is held now does not leave `again`."""
        held = torch.cuda.memory_allocated(device) + _of_graphs()
        short = held + self.again - allowed_bytes(device)
        if short > 0:
            raise RunError(
                f"out of memory: beside what sampling holds a step of training lacks {short / 2**30:.2f} GiB; give a "
                "smaller --batch.micro_tokens, or a shorter --batch.sequence_length"
            )
        torch.cuda.empty_cache()  # what sampling gave back, in pieces that may not suit training


def _of_graphs() -> int:
    """Bytes that CUDA graphs keep for their next run, where nobody else may allocate."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] - s["allocated_size"] for s in segments if s["segment_pool_id"] != (0, 0))


def cached_tokens(row_tokens: int) -> int:
    """Of the cache, for one answer of so many tokens with its question: whole pages."""
    return -(-row_tokens // PAGE_SIZE) * PAGE_SIZE


def answers_bytes(shape: Shape, dtype: torch.dtype, rows: int, row_tokens: int) -> int:
    """Of the keys and values of `rows` answers, and of what they are drawn from in a graph of as many lanes."""
    cached = cached_tokens(row_tokens) * kv_bytes_per_token(shape, dtype.itemsize)
    return int(rows * cached) + bucket(rows) * DRAWN_BYTES * shape.vocab_size


@dataclass(frozen=True)
class Pace:
    """Speed of sampling with `lanes` answers at once: seconds to read their prompts, and for one more token."""

    lanes: int
    prompt_seconds: float
    token_seconds: float

    def seconds(self, count: int, tokens: int, lanes: int) -> float:
        """Return the seconds of `count` answers of so many tokens, `lanes` at once.

        A step of few lanes is taken to cost at least `FEW_LANES` of a full one, because its overhead stays.
        """
        waves = -(-count // lanes)
        share = max(FEW_LANES, min(1.0, count / self.lanes))
        return count / self.lanes * self.prompt_seconds + waves * share * tokens * self.token_seconds


class Sampler:
    """`adapted`: the model has adapters, which are merged into the copy. rows: answers wanted at once, of up to
    `row_tokens` tokens with their question. left: by training and by what else was made; None is without limit. Raises
    RunError where memory is left for less than one of them; make it inside of `memory_for_sampling`."""

    def __init__(
        self,
        model: Transformer,
        adapted: bool,
        rows: int,
        row_tokens: int,
        ends: frozenset[int],
        left: Left | None = None,
    ):
        self.model, self.adapted, self.ends, self.left = model, adapted, ends, left
        self.copy = copy_of(model, adapted)
        rows = min(rows, MOST_ROWS)
        if left is not None:
            room = SHARE * left.without(self.copy).free
            needed = partial(answers_bytes, model.config, self.copy.activation_dtype, row_tokens=row_tokens)
            rows = next((n for n in range(rows, 0, -1) if needed(n) <= room), 0)
            if not rows:
                raise RunError(
                    f"out of memory: training leaves {max(0, room) / 2**20:,.0f} MiB to answers, and one of "
                    f"{row_tokens} tokens needs {needed(1) / 2**20:,.0f}; give a smaller --batch.micro_tokens, "
                    "or a shorter --batch.sequence_length"
                )
        self.row_tokens = row_tokens
        self.engine = Engine(self.copy, max_batch=rows, max_tokens=rows * cached_tokens(row_tokens))

    def rehearse(self, vocabulary: int) -> None:
        """The most that sampling can need, once: all rows at their longest, first with prompts of their own, then with
        one that they share and go on from together. Call it inside of `memory_for_sampling`. Raises RunError where a
        step of training has no room any more beside what the engine has kept."""
        rows, longest = self.engine.max_batch, self.row_tokens
        # The rows that share a prompt compute its last page in some parts; a graph is captured after WARM_UP steps.
        together = -(-rows * PAGE_SIZE // PREFILL_TOKENS) + WARM_UP + 3
        new = min(together, longest - 1)
        prompt = tuple(n % vocabulary for n in range(longest - 2))
        alone = [Request((first % vocabulary, *prompt[1:]), 2, ANY, logprobs=True) for first in range(rows)]
        shared = [Request(prompt[: longest - new], new, ANY, samples=rows, logprobs=True)]
        for requests in (alone, shared):
            self.engine.run(requests)
        self.engine.weights_changed()
        if self.left is not None:
            self.left.check(self.model.embed.weight.device)

    def measure_pace(self, prompts: Sequence[tuple[int, ...]], count: int, temperature: float) -> "Pace":
        """Time the start of `count` answers to these prompts, and a few tokens of each."""
        lanes = min(count, self.engine.max_batch)
        chosen = [prompts[n % len(prompts)] for n in range(lanes)]
        times = []
        for tokens in (1, 1 + PACE_TOKENS):
            began = time.perf_counter()
            self.sample(chosen, list(range(lanes)), 0, temperature, tokens)
            times.append(time.perf_counter() - began)
            self.engine.weights_changed()  # what it cached of the prompts would make the next one faster
        return Pace(lanes, times[0], max(0.0, times[1] - times[0]) / PACE_TOKENS)

    def renew(self) -> None:
        """Bring the copy up to date with the model. The copy stays the only one: there may be no room for another."""
        if self.adapted:
            merge_into(self.copy, self.model)
        else:
            refresh(self.copy, self.model)
        self.engine.weights_changed()

    def sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        streams: Sequence[int],
        seed: int,
        temperature: float,
        tokens: int,
    ) -> list[Sampled]:
        """An answer to each prompt. streams: which random numbers each draws, so that an answer depends on nothing
        else than weights, prompt, seed and stream. temperature 0 is greedy."""
        sampling = Sampling(temperature=temperature)
        numbers = {
            self.engine.submit(
                Request(prompt, tokens, sampling, seed, first_sample=stream, logprobs=True)
            ): at
            for at, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
        }
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        ended = [False] * len(prompts)
        for event in self.engine.events():
            at = numbers[event.request]
            if event.token is None or ended[at]:
                continue
            found[at][0].append(event.token)
            found[at][1].append(float(event.logprob or 0.0))
            if event.token in self.ends:
                ended[at] = True
                if event.reason is None:
                    self.engine.cancel(event.request)
        return [
            Sampled(tuple(made), tuple(logprobs), end)
            for (made, logprobs), end in zip(found, ended, strict=True)
        ]


@contextlib.contextmanager
def memory_for_sampling() -> Iterator[None]:
    """Raises RunError, saying what to do, where what is done inside runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of memory while sampling ({str(error).split('.')[0]}); give a smaller --batch.micro_tokens, or a "
            "shorter --batch.sequence_length"
        ) from None


def copy_of(model: Transformer, adapted: bool) -> Transformer:
    """A copy of the model as it is now, in the dtype of the activations, adapters merged."""
    if not adapted:
        return inference_copy(model)
    dtype = model.activation_dtype
    return for_inference(merged(model, model.embed.weight.device, dtype), dtype)
