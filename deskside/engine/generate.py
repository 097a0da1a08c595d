"""Generation in one call: prompts of unequal length together, at once or as a stream.

Each call makes an engine (engine.py) as large as it needs. Keep an `Engine` to generate again and again.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.requests import Event, Request, SampleOutput, check_prompt
from deskside.engine.sampling import GREEDY, Sampling
from deskside.model.transformer import Transformer

MAX_BATCH = 64  # rows at once; further prompts wait for a row to end


def generate(model: Transformer, prompts: Sequence[Sequence[int]], **options: Any) -> list[SampleOutput]:
    """Continue every prompt, in batches. options: those of `events`."""
    results = [SampleOutput(len(prompt)) for prompt in prompts]
    for event in events(model, prompts, **options):
        results[event.request].add(event)
    return results


def events(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_tokens: Collection[int] = (),
    stop_tokens: Collection[int] = (),
    seed: int = 0,
) -> Iterator[Event]:
    """Continue prompts, one event per new token; `Event.request` is the prompt's number.

    Prompt i's random numbers depend only on (seed, i). Generation stops when the caller stops iterating. Raises
    UsageError for an empty or too long prompt, or a token outside of the vocabulary, before anything is generated.
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
    needs = sorted(-(-min(limit, len(prompt) + max_new_tokens) // PAGE_SIZE) for prompt in prompts)
    engine = Engine(model, max_batch=batch, max_tokens=sum(needs[-batch:]) * PAGE_SIZE)
    for request in requests:
        engine.submit(request)
    yield from engine.events()
