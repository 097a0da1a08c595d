"""Sampling from a model in training: a copy of its weights, and an inference engine that lives as long as the run.

Training and sampling alternate on one GPU. The engine's memory (the copy, the KV cache, the workspace of CUDA graphs)
stays allocated, so it is limited to what the largest training step leaves free, and sized after that step has run. Then
the largest possible sampling is rehearsed. Afterwards the memory of a training step must still be available, because
torch's allocator lets sampling use the memory that training has released.

Training keeps float32 weights and casts each where it is used. Decoding would cast all of them in every step, which
takes several times as long as the step itself. So the copy has the dtype of the activations. It is updated in place,
because CUDA graphs hold the addresses of its tensors.

The end token is part of an answer, because the model must learn when to stop. So the engine is not given end tokens:
the sampler watches each answer, and cancels its request after the end token.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from deskside.budget.shape import Shape, kv_bytes_per_token
from deskside.engine.device import KV_CACHE_SHARE, PREFILL_TOKENS, allowed_bytes, prefill_bytes
from deskside.engine.engine import PAGE_SIZE, PREFILL_BESIDE, TOKENS_PER_REPLAY, Engine
from deskside.engine.graphs import WARM_UP, bucket, token_bucket
from deskside.engine.requests import Request
from deskside.engine.sampling import Sampling
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError, UsageError
from deskside.weights.merge_adapters import merge_into, merged

MAX_ROWS = 256
PACE_TOKENS = 4  # per answer, when the speed of sampling is measured
MIN_STEP_SHARE = 0.5  # time of a decoding step with few lanes, as a share of a full one
# Bytes of a decoding step per row and vocabulary entry: the logits, and the workspace of `engine/sampling.py`. CUDA
# graphs keep them allocated.
SAMPLING_BYTES = 19
ANY_TEMPERATURE = Sampling(1.0)  # for rehearsals: memory does not depend on the temperature


@dataclass(frozen=True)
class SampledAnswer:
    """One answer.

    tokens: with the end token, and with the results of tools in between. logprobs: at the sampling temperature, or 1 if
    greedy; 0 for tokens of results. ended: False if truncated. own: True for the tokens that the model sampled, False
    for those of results; None if there are no results. tool_calls, tool_failures: numbers of calls and of failed ones.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool
    own: tuple[bool, ...] | None = None
    tool_calls: int = 0
    tool_failures: int = 0

    @property
    def is_own(self) -> tuple[bool, ...]:
        """Return `own` with a value for each token."""
        return (True,) * len(self.tokens) if self.own is None else self.own

    @property
    def num_sampled(self) -> int:
        return sum(self.is_own)

    @property
    def without_end(self) -> tuple[int, ...]:
        """Return the tokens without the end token."""
        return self.tokens[:-1] if self.ended else self.tokens

    @property
    def last_turn(self) -> tuple[int, ...]:
        """Return the tokens after the last result, without the end token."""
        own = self.is_own
        start = len(own) - next((n for n, is_own in enumerate(reversed(own)) if not is_own), len(own))
        return self.without_end[start:]


@dataclass(frozen=True)
class MemoryHeadroom:
    """Bytes of GPU memory that are not in use between training steps.

    free: not used by the largest step either. step: used during the step, and free again until the next one.
    """

    free: int
    step: int

    @classmethod
    def measure(cls, device: torch.device) -> "MemoryHeadroom | None":
        """Measure the device after the largest step, before anything else is allocated. Return None on a CPU."""
        if device.type != "cuda":
            return None
        reserved = torch.cuda.memory_reserved(device)
        return cls(allowed_bytes(device) - reserved, reserved - torch.cuda.memory_allocated(device))

    def after_allocating(self, model: Transformer) -> "MemoryHeadroom":
        """Return the headroom that is left after a model that was allocated since the measurement."""
        return replace(self, free=self.free - sum(p.nbytes for p in model.parameters()))

    def check(self, device: torch.device) -> None:
        """Raise RunError if a training step no longer fits into the memory that is not in use now."""
        # Segments of CUDA graphs' private pools cannot be used by anything else.
        graphs = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)]
        in_use = torch.cuda.memory_allocated(device)
        in_use += sum(s["total_size"] - s["allocated_size"] for s in graphs)
        missing = in_use + self.step - allowed_bytes(device)
        if missing > 0:
            raise RunError(
                f"out of memory: sampling leaves a training step {missing / 2**30:.2f} GiB too little; give a "
                "smaller --batch.micro_tokens, or a shorter --batch.sequence_length"
            )
        torch.cuda.empty_cache()  # cached blocks of sampling may have the wrong sizes for training


def cached_tokens(row_tokens: int) -> int:
    """Return the tokens in the KV cache of one answer with its question, rounded up to whole pages."""
    return -(-row_tokens // PAGE_SIZE) * PAGE_SIZE


def answers_bytes(shape: Shape, dtype: torch.dtype, rows: int, row_tokens: int) -> int:
    """Return the bytes for sampling `rows` answers at once: their KV cache, and the workspace of CUDA graphs."""
    cache_bytes = cached_tokens(row_tokens) * kv_bytes_per_token(shape, dtype.itemsize)
    prompts = prefill_bytes(shape, dtype.itemsize, token_bucket(min(PREFILL_TOKENS, rows * row_tokens)))
    return int(rows * cache_bytes) + bucket(rows) * SAMPLING_BYTES * shape.vocab_size + prompts


@dataclass(frozen=True)
class Pace:
    """Measured speed of sampling `lanes` answers at once: seconds for all prompts, and per decoding step."""

    lanes: int
    prompt_seconds: float
    token_seconds: float

    def seconds(self, count: int, tokens: int, lanes: int) -> float:
        """Return the predicted seconds of `count` answers of `tokens` tokens, up to `lanes` at once.

        A step with few lanes is assumed to take at least `MIN_STEP_SHARE` of a full one, because of its fixed overhead.
        """
        waves = -(-count // lanes)
        share = max(MIN_STEP_SHARE, min(1.0, count / self.lanes))
        return count / self.lanes * self.prompt_seconds + waves * share * tokens * self.token_seconds


class Sampler:
    """Samples answers from a model in training. Create it inside `memory_for_sampling`.

    Args:
        adapted: True if the model has adapters, which are merged into the copy.
        rows: Answers to sample at once, if memory and MAX_ROWS allow.
        row_tokens: Maximum tokens of an answer with its question.
        ends: The end tokens.
        headroom: GPU memory that training leaves, None for no limit.

    Raises RunError if not even one answer fits into memory.
    """

    def __init__(
        self,
        model: Transformer,
        adapted: bool,
        rows: int,
        row_tokens: int,
        ends: frozenset[int],
        headroom: MemoryHeadroom | None = None,
    ):
        self.model, self.adapted, self.ends, self.headroom = model, adapted, ends, headroom
        self.copy = sampling_copy(model, adapted)
        rows = min(rows, MAX_ROWS)
        if headroom is not None:
            room = KV_CACHE_SHARE * headroom.after_allocating(self.copy).free
            needed = partial(answers_bytes, model.config, self.copy.activation_dtype, row_tokens=row_tokens)
            rows = next((n for n in range(rows, 0, -1) if needed(n) <= room), 0)
            if not rows:
                raise RunError(
                    f"out of memory: training leaves {max(0, room) / 2**20:,.0f} MiB for sampling, and one answer of "
                    f"{row_tokens} tokens needs {needed(1) / 2**20:,.0f}; give a smaller --batch.micro_tokens, "
                    "or a shorter --batch.sequence_length"
                )
        self.row_tokens = row_tokens
        self.engine = Engine(
            self.copy,
            max_batch=rows,
            max_tokens=rows * cached_tokens(row_tokens),
            prefill_tokens=PREFILL_TOKENS,
        )

    def rehearse(self, vocab_size: int) -> None:
        """Sample the largest possible batches: all rows at full length, first with separate prompts, then a shared one.

        Call it inside `memory_for_sampling`. Raises RunError if a training step no longer fits beside the engine.
        """
        rows, longest = self.engine.max_batch, self.row_tokens
        # Each row of a shared prompt computes up to a page of it again, so not all rows start in the same step. Then
        # all of them must decode together for more than WARM_UP steps, after which a CUDA graph is captured.
        steps = -(-rows * PAGE_SIZE // PREFILL_BESIDE) + WARM_UP + 3
        max_new_tokens = min(steps * TOKENS_PER_REPLAY, longest - 1)
        prompt = tuple(n % vocab_size for n in range(longest - 2))
        separate = [
            Request((first % vocab_size, *prompt[1:]), 2, ANY_TEMPERATURE, logprobs=True)
            for first in range(rows)
        ]
        # Until the pass with most tokens is captured in a CUDA graph.
        passes = max(1, rows * (longest - 2) // PREFILL_TOKENS)
        for _ in range(-(-(WARM_UP + 1) // passes)):
            self.engine.run(separate)
            self.engine.weights_changed()
        shared = prompt[: longest - max_new_tokens]
        self.engine.run([Request(shared, max_new_tokens, ANY_TEMPERATURE, samples=rows, logprobs=True)])
        self.engine.weights_changed()
        if self.headroom is not None:
            self.headroom.check(self.model.embed.weight.device)

    def measure_pace(self, prompts: Sequence[tuple[int, ...]], count: int, temperature: float) -> "Pace":
        """Time the prompts and a few more tokens, for as many of the `count` answers as fit at once."""
        lanes = min(count, self.engine.max_batch)
        chosen = [prompts[i % len(prompts)] for i in range(lanes)]
        times = []
        for tokens in (1, 1 + PACE_TOKENS):
            began = time.perf_counter()
            self.sample(chosen, list(range(lanes)), 0, temperature, tokens)
            times.append(time.perf_counter() - began)
            self.engine.weights_changed()  # cached prompts would make the next measurement faster
        return Pace(lanes, times[0], max(0.0, times[1] - times[0]) / PACE_TOKENS)

    def update_weights(self) -> None:
        """Update the copy from the model, in place."""
        if self.adapted:
            merge_into(self.copy, self.model)
        else:
            copy_weights(self.copy, self.model)
        self.engine.weights_changed()

    def sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        streams: Sequence[int],
        seed: int,
        temperature: float,
        tokens: int | Sequence[int],
    ) -> list[SampledAnswer]:
        """Sample an answer of at most `tokens` tokens to each prompt. Temperature 0 is greedy.

        tokens: for all answers, or for each. streams: a random stream per answer. At a given temperature, an answer
        depends only on the weights, its prompt, the seed and its stream.
        """
        sampling = Sampling(temperature=temperature)
        index_of: dict[int, int] = {}  # request number -> index of its prompt
        limits = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        for index, (prompt, stream, limit) in enumerate(zip(prompts, streams, limits, strict=True)):
            request = Request(prompt, limit, sampling, seed, first_sample=stream, logprobs=True)
            index_of[self.engine.submit(request)] = index
        generated: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        for event in self.engine.events():
            index = index_of[event.request]
            if event.token is None or ended[index]:
                continue
            generated[index].append(event.token)
            logprobs[index].append(float(event.logprob or 0.0))
            if event.token in self.ends:
                ended[index] = True
                if event.reason is None:
                    self.engine.cancel(event.request)
        return [SampledAnswer(tuple(generated[i]), tuple(logprobs[i]), ended[i]) for i in range(len(prompts))]


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


def sampling_copy(model: Transformer, adapted: bool) -> Transformer:
    """Return a copy of the model to sample from, in the dtype of the activations, with adapters merged."""
    if not adapted:
        return inference_copy(model)
    dtype = model.activation_dtype
    return for_inference(merged(model, model.embed.weight.device, dtype), dtype)


@torch.no_grad()
def inference_copy(model: Transformer) -> Transformer:
    """Return a copy of a model without adapters. Weights of two or more dimensions have the activations' dtype."""
    copy = allocate(model.config, model.embed.weight.device, model.activation_dtype)
    copy_weights(copy, model)
    return for_inference(copy, model.activation_dtype)


def for_inference(copy: Transformer, dtype: torch.dtype) -> Transformer:
    """Set the dtype of the activations, freeze the weights, and set evaluation mode. Returns the same model."""
    copy.embed.output_dtype = dtype
    if copy.position is not None:
        copy.position.output_dtype = dtype
    return copy.requires_grad_(False).eval()


@torch.no_grad()
def copy_weights(copy: Transformer, model: Transformer) -> None:
    """Overwrite the copy's weights with the model's. Then call `weights_changed` of an engine that uses the copy.

    Raises UsageError if the two do not have the same parameters.
    """
    targets, sources = dict(copy.named_parameters()), dict(model.named_parameters())
    if targets.keys() != sources.keys():
        other = sorted(targets.keys() ^ sources.keys())[0]
        raise UsageError(
            f"{other}: only one of the two models has this parameter; merge adapters before generating"
        )
    for name, parameter in targets.items():
        parameter.copy_(sources[name])
