"""Generation in one call: prompts of unequal length together, or one sequence as a stream.

Each call has an engine of its own (engine.py), as large as it needs. Who generates again and again keeps one.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.requests import Reason, Request, check_prompt
from deskside.engine.sampling import GREEDY, Sampling
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError

MAX_BATCH = 64  # rows at once; further prompts wait for a row to end


@dataclass(frozen=True)
class Result:
    """Generated tokens of one prompt, without the token that ended them.

    reason: "eos", an end-of-text token; "stop", another token that was asked to stop at; "length", max_new_tokens or
    the model's last position.
    """

    tokens: list[int]
    reason: Reason
    prompt_tokens: int


@dataclass(frozen=True)
class TokenEvent:
    """A row has a new token, or has ended for a reason."""

    row: int
    token: int | None
    reason: Reason | None


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_tokens: Collection[int] = (),
    stop_tokens: Collection[int] = (),
    seed: int = 0,
) -> list[Result]:
    """Continue every prompt, in batches. Row i's random numbers depend only on (seed, i).

    Raises UsageError for an empty or too long prompt, or a token outside of the vocabulary.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    reasons: dict[int, Reason] = {}
    for event in events(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_tokens=eos_tokens,
        stop_tokens=stop_tokens,
        seed=seed,
    ):
        if event.token is not None:
            tokens[event.row].append(event.token)
        if event.reason is not None:
            reasons[event.row] = event.reason
    return [Result(tokens[row], reasons[row], len(prompt)) for row, prompt in enumerate(prompts)]


def events(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_tokens: Collection[int] = (),
    stop_tokens: Collection[int] = (),
    seed: int = 0,
) -> Iterator[TokenEvent]:
    """Like `generate`, as a stream: one event per new token, and one with a reason when a row ends.

    Generation stops when the caller stops iterating. Raises the errors of `generate` at the first step.
    """
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens: {max_new_tokens} must be 0 or more")
    limit = model.config.max_position_embeddings
    for number, prompt in enumerate(prompts):
        check_prompt(prompt, model.config.vocab_size, limit, f"prompt {number}")
    if not prompts:
        return
    batch = min(len(prompts), MAX_BATCH)
    needs = sorted(-(-min(limit, len(prompt) + max_new_tokens) // PAGE_SIZE) for prompt in prompts)
    engine = Engine(model, max_batch=batch, max_tokens=sum(needs[-batch:]) * PAGE_SIZE)
    for row, prompt in enumerate(prompts):
        engine.submit(
            Request(
                tuple(prompt),
                max_new_tokens,
                sampling,
                seed,
                first_sample=row,
                eos_tokens=frozenset(eos_tokens),
                stop_tokens=frozenset(stop_tokens),
            )
        )
    for event in engine.events():
        yield TokenEvent(event.request, event.token, event.reason)
