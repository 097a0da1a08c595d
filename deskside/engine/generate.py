"""Batched generation in one call, for prompts of different lengths.

Each call creates an engine (engine.py) that is just large enough. For repeated generation, keep an `Engine` instead.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.requests import Event, Request, SampleOutput, check_prompt
from deskside.engine.sampling import GREEDY, Sampling
from deskside.model.transformer import Transformer

MAX_BATCH = 64  # further prompts wait until a row is free


def generate(model: Transformer, prompts: Sequence[Sequence[int]], **options: Any) -> list[SampleOutput]:
    """Return the continuation of each prompt. `options` are those of `generate_events`."""
    results = [SampleOutput(len(prompt)) for prompt in prompts]
    for event in generate_events(model, prompts, **options):
        results[event.request].add(event)
    return results


def generate_events(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_tokens: Collection[int] = (),
    stop_tokens: Collection[int] = (),
    seed: int = 0,
) -> Iterator[Event]:
    """Yield the events of all prompts as they are generated; `Event.request` is the index of the prompt.

    The random numbers of prompt i depend only on (seed, i). Generation stops when the caller stops iterating. Raises
    UsageError for a prompt that is empty, too long or has a token outside of the vocabulary, before it generates.
    """
    limit = model.config.max_position_embeddings
    for number, prompt in enumerate(prompts):
        check_prompt(prompt, model.config.vocab_size, limit, f"prompt {number}")
    requests = [
        Request(
            tuple(prompt),
            max_new_tokens,
            sampling,
            seed,
            first_sample=number,
            eos_tokens=frozenset(eos_tokens),
            stop_tokens=frozenset(stop_tokens),
        )
        for number, prompt in enumerate(prompts)
    ]
    if not requests:
        return
    batch = min(len(prompts), MAX_BATCH)
    # Enough pages for the longest `batch` rows at full length.
    pages = sorted(-(-min(limit, len(prompt) + max_new_tokens) // PAGE_SIZE) for prompt in prompts)
    engine = Engine(model, max_batch=batch, max_tokens=sum(pages[-batch:]) * PAGE_SIZE)
    for request in requests:
        engine.submit(request)
    yield from engine.events()
