"""Generation with a key-value cache: prompts of unequal length together, or one sequence as a stream.

Prompts are padded on the right for one prefill; from then on each step feeds every row its own newest token at its own
position. A row that has ended stays in the batch, because shapes that change cost more than rows that idle, but its
length is set back to zero, so that only rows that still run decide how much of the cache attention reads.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from deskside.engine.sampling import GREEDY, Sampling, Uniforms, choose
from deskside.errors import UsageError
from deskside.model.transformer import Transformer

Reason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Result:
    """What one prompt gave. `tokens` are the new ones, without the token that ended them.

    reason: "eos", an end-of-text token; "stop", another token that was asked to stop at; "length", max_new_tokens or
    the model's last position.
    """

    tokens: list[int]
    reason: Reason
    prompt_tokens: int


@dataclass(frozen=True)
class Event:
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
    """Continue every prompt, all in one batch. Row i's random numbers depend only on (seed, i).

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
) -> Iterator[Event]:
    """The same, step by step: each new token as it comes, and one event with a reason for every row's end.

    With one prompt this is the stream of that sequence. Stopping to read it stops the work. Raises as `generate`,
    at the first step.
    """
    limit = model.config.max_position_embeddings
    _check(prompts, model.config.vocab_size, limit, max_new_tokens)
    if not prompts:
        return
    device = model.embed.weight.device
    uniforms = Uniforms(seed, len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    ends = [min(limit, length + max_new_tokens) for length in lengths]  # tokens a row may have in all
    running = [row for row in range(len(prompts)) if lengths[row] < ends[row]]
    for row in range(len(prompts)):
        if lengths[row] >= ends[row]:
            yield Event(row, None, "length")
    if not running:
        return

    cache = model.new_cache(len(prompts), max(*ends, *lengths))
    padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
    tokens_BT = torch.tensor(padded, dtype=torch.int64, device=device)
    counts_B = torch.tensor(lengths, dtype=torch.int64, device=device)
    logits_BV = model.forward_cached(tokens_BT, cache, counts_B, logits_of="last")[:, -1]
    while True:
        drawn = uniforms.draw(running).to(device)
        new = choose(logits_BV[running], sampling, drawn).tolist()
        newest = [0] * len(prompts)
        still = []
        for row, token in zip(running, new, strict=True):
            if token in eos_tokens or token in stop_tokens:
                yield Event(row, None, "eos" if token in eos_tokens else "stop")
                continue
            lengths[row] += 1
            newest[row] = token
            yield Event(row, token, "length" if lengths[row] == ends[row] else None)
            if lengths[row] < ends[row]:
                still.append(row)
        running = still
        if not running:
            return
        # The newest token is not in the cache yet; a row that has ended starts again at position 0, unread.
        held = [lengths[row] - 1 if row in running else 0 for row in range(len(prompts))]
        cache.cut(torch.tensor(held, device=device), max(held))
        step_B1 = torch.tensor(newest, dtype=torch.int64, device=device)[:, None]
        logits_BV = model.forward_cached(step_B1, cache, logits_of="last")[:, -1]


def _check(prompts: Sequence[Sequence[int]], vocabulary: int, limit: int, max_new_tokens: int) -> None:
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens: {max_new_tokens} must be 0 or more")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {number}: is empty; begin it with the end-of-text token")
        if len(prompt) > limit:
            raise UsageError(
                f"prompt {number}: {len(prompt)} tokens do not fit the model's {limit} positions; shorten it"
            )
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise UsageError(
                f"prompt {number}: token {wrong} is outside of the model's vocabulary of {vocabulary}; "
                "use the tokenizer that the model was trained with"
            )
