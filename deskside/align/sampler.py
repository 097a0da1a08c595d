"""Sampling from a model in training: a copy of its weights, and an engine that exists for the whole run.

Training and sampling alternate on one GPU. The engine's memory (the copy, the KV cache, the workspace of CUDA
graphs) stays allocated, so it is limited to what the largest training step leaves free. It is sized after that step
has run; then the largest possible sampling is rehearsed, and afterwards the memory of a training step must still be
available, because torch gives memory that training has released to any other user.

Training keeps float32 weights and casts each where it is used. A step of decoding would cast all of them for one token
of each row, which costs several times what the step does. So the copy has the dtype of the activations. Its tensors
stay where they are, because CUDA graphs hold their addresses.

The end token is part of an answer, because ending must be learned too. So the engine does not know the end tokens:
the sampler watches each answer, and cancels its request after one.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from deskside.budget.shape import Shape, kv_bytes_per_token
from deskside.engine.device import KV_CACHE_SHARE, allowed_bytes
from deskside.engine.engine import PAGE_SIZE, PREFILL_TOKENS, Engine
from deskside.engine.requests import Request
from deskside.engine.sampling import Sampling
from deskside.engine.steps import WARM_UP, bucket
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError, UsageError
from deskside.weights.merge_adapters import merge_into, merged

MOST_ROWS = 256
PACE_TOKENS = 4  # per answer, when the speed of sampling is measured
FEW_LANES = 0.5
# Bytes of a decoding step per row and vocabulary entry: the logits, and the workspace of sampling from them by
# `engine/sampling.py`. CUDA graphs keep it allocated.
DRAWN_BYTES = 19
ANY = Sampling(1.0)  # the temperature does not change the memory


@dataclass(frozen=True)
class Sampled:
    """One answer. tokens: including the end token. logprobs: at the sampling temperature. ended: not truncated."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True)
class Left:
    """Bytes of GPU memory after the largest training step. free: never used by a step. again: released by the step,
    and needed by the next one.
    """

    free: int
    again: int

    @classmethod
    def of(cls, device: torch.device) -> "Left | None":
        """Measure the device, before anything else is allocated in released memory. None on a CPU."""
        if device.type != "cuda":
            return None
        reserved = torch.cuda.memory_reserved(device)
        return cls(allowed_bytes(device) - reserved, reserved - torch.cuda.memory_allocated(device))

    def without(self, model: Transformer) -> "Left":
        """Return what is left after a model that was allocated since."""
        return replace(self, free=self.free - sum(p.nbytes for p in model.parameters()))

    def check(self, device: torch.device) -> None:
        """Raise RunError if the memory in use now does not leave `again`."""
        # CUDA graphs reserve memory that nothing else can use.
        graphs = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)]
        held = torch.cuda.memory_allocated(device)
        held += sum(s["total_size"] - s["allocated_size"] for s in graphs)
        short = held + self.again - allowed_bytes(device)
        if short > 0:
            raise RunError(
                f"out of memory: a training step lacks {short / 2**30:.2f} GiB beside sampling; give a "
                "smaller --batch.micro_tokens, or a shorter --batch.sequence_length"
            )
        torch.cuda.empty_cache()  # release sampling's memory, whose fragments may not fit training


def cached_tokens(row_tokens: int) -> int:
    """Return the KV-cache tokens of one answer with its question, in whole pages."""
    return -(-row_tokens // PAGE_SIZE) * PAGE_SIZE


def answers_bytes(shape: Shape, dtype: torch.dtype, rows: int, row_tokens: int) -> int:
    """Return the bytes of `rows` answers: keys, values, and the sampling workspace of a graph with as many lanes."""
    cached = cached_tokens(row_tokens) * kv_bytes_per_token(shape, dtype.itemsize)
    return int(rows * cached) + bucket(rows) * DRAWN_BYTES * shape.vocab_size


@dataclass(frozen=True)
class Pace:
    """The speed of sampling with `lanes` answers at once: seconds for their prompts, and per further token."""

    lanes: int
    prompt_seconds: float
    token_seconds: float

    def seconds(self, count: int, tokens: int, lanes: int) -> float:
        """Return the seconds for `count` answers of this length, `lanes` at once.

        A step with few lanes is assumed to take at least `FEW_LANES` of a full one, because of its fixed overhead.
        """
        waves = -(-count // lanes)
        share = max(FEW_LANES, min(1.0, count / self.lanes))
        return count / self.lanes * self.prompt_seconds + waves * share * tokens * self.token_seconds


class Sampler:
    """The sampler of a run. Create it inside `memory_for_sampling`.

    adapted: the model has adapters, which are merged into the copy. rows: answers to sample at once, each of up to
    `row_tokens` tokens with its question. left: memory left by training and other allocations, None for no limit.
    Raises RunError if less than one answer fits.
    """

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
            room = KV_CACHE_SHARE * left.without(self.copy).free
            needed = partial(answers_bytes, model.config, self.copy.activation_dtype, row_tokens=row_tokens)
            rows = next((n for n in range(rows, 0, -1) if needed(n) <= room), 0)
            if not rows:
                raise RunError(
                    f"out of memory: training leaves {max(0, room) / 2**20:,.0f} MiB for sampling, and one answer of "
                    f"{row_tokens} tokens needs {needed(1) / 2**20:,.0f}; give a smaller --batch.micro_tokens, "
                    "or a shorter --batch.sequence_length"
                )
        self.row_tokens = row_tokens
        self.engine = Engine(self.copy, max_batch=rows, max_tokens=rows * cached_tokens(row_tokens))

    def rehearse(self, vocabulary: int) -> None:
        """Run the largest possible sampling once: all rows at full length, with separate prompts and then with a
        shared one.

        Call it inside `memory_for_sampling`. Raises RunError if a training step no longer fits beside the engine.
        """
        rows, longest = self.engine.max_batch, self.row_tokens
        # Rows with a shared prompt recompute parts of its last page; a graph is captured after WARM_UP steps.
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
        """Time the prompts of `count` answers and a few tokens of each."""
        lanes = min(count, self.engine.max_batch)
        chosen = [prompts[n % len(prompts)] for n in range(lanes)]
        times = []
        for tokens in (1, 1 + PACE_TOKENS):
            began = time.perf_counter()
            self.sample(chosen, list(range(lanes)), 0, temperature, tokens)
            times.append(time.perf_counter() - began)
            self.engine.weights_changed()  # cached prompts would make the next measurement faster
        return Pace(lanes, times[0], max(0.0, times[1] - times[0]) / PACE_TOKENS)

    def renew(self) -> None:
        """Update the copy from the model in place, since a second copy may not fit."""
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
        """Sample an answer to each prompt. temperature 0 is greedy.

        streams: the random stream of each answer, so that it depends only on weights, prompt, seed and stream.
        """
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
    """Context manager that turns an out-of-memory error into a RunError with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of memory while sampling ({str(error).split('.')[0]}); give a smaller --batch.micro_tokens, or a "
            "shorter --batch.sequence_length"
        ) from None


def copy_of(model: Transformer, adapted: bool) -> Transformer:
    """Return a copy of the model in the dtype of the activations, adapters merged."""
    if not adapted:
        return inference_copy(model)
    dtype = model.activation_dtype
    return for_inference(merged(model, model.embed.weight.device, dtype), dtype)


@torch.no_grad()
def inference_copy(model: Transformer) -> Transformer:
    """Return a copy to sample from, with weights of two and more dimensions in the dtype of the activations."""
    copy = allocate(model.config, model.embed.weight.device, model.activation_dtype)
    refresh(copy, model)
    return for_inference(copy, model.activation_dtype)


def for_inference(copy: Transformer, dtype: torch.dtype) -> Transformer:
    """Prepare a model for inference, with activations in `dtype`."""
    copy.embed.output_dtype = dtype
    if copy.position is not None:
        copy.position.output_dtype = dtype
    return copy.requires_grad_(False).eval()


@torch.no_grad()
def refresh(copy: Transformer, model: Transformer) -> None:
    """Overwrite the copy's weights with the model's. An engine over it then has to forget: `Engine.weights_changed`.

    Raises UsageError when the two do not have the same parameters.
    """
    mine, theirs = dict(copy.named_parameters()), dict(model.named_parameters())
    if mine.keys() != theirs.keys():
        other = sorted(mine.keys() ^ theirs.keys())[0]
        raise UsageError(
            f"{other}: only one of the two models has this parameter; merge adapters before generating"
        )
    for name, parameter in mine.items():
        parameter.copy_(theirs[name])
