"""Requests to the engine, its events and results, and the host-side state of rows and of queued steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from deskside.engine.pages import Key
from deskside.engine.sampling import GREEDY, Sampling, Settings
from deskside.engine.text import TextStream
from deskside.utils.errors import UsageError

Reason = Literal["eos", "stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    samples: continuations of the same prompt, which share its computation. Sample i of a request draws from the stream
    of (seed, first_sample + i). eos_tokens and stop_tokens end a sample and are not part of it. stop_strings end it at
    the token that completes one of them; that token is counted, but the text ends before the string. They need an
    engine that has a tokenizer. logprobs: events carry them. Raises UsageError for values out of range.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int = 0
    samples: int = 1
    first_sample: int = 0
    eos_tokens: frozenset[int] = frozenset()
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise UsageError(f"max_new_tokens: {self.max_new_tokens} must be 0 or more")
        if self.samples < 1:
            raise UsageError(f"samples: {self.samples} must be at least 1")
        if self.seed < 0 or self.first_sample < 0:
            raise UsageError(f"seed: {self.seed}, {self.first_sample} must be 0 or more")
        if "" in self.stop_strings:
            raise UsageError("stop: an empty string would end every answer at once; leave it out")


@dataclass(frozen=True)
class Event:
    """A sample has a new token, or has ended for a reason, or both.

    reason: "eos", an end-of-text token; "stop", another token or a string that was asked to stop at; "length",
    max_new_tokens or the model's last position; "cancelled"; "failed", for the reason that `error` gives.
    text: what became complete with this event, in whole characters; empty without a tokenizer.
    logprob, sampled_logprob: of the token, see `sampling.Drawn`; None where the request does not want them.
    """

    request: int
    sample: int
    token: int | None
    reason: Reason | None
    text: str = ""
    logprob: float | None = None
    sampled_logprob: float | None = None
    error: str = ""


@dataclass
class SampleOutput:
    """A complete sample. `tokens` are the new ones, without the token that ended them; `logprobs` and
    `sampled_logprobs` have one entry per token if the request asks for them."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    text: str = ""
    reason: Reason | None = None

    def add(self, event: Event) -> None:
        """Add the token and text of an event."""
        if event.token is not None:
            self.tokens.append(event.token)
            if event.logprob is not None and event.sampled_logprob is not None:
                self.logprobs.append(event.logprob)
                self.sampled_logprobs.append(event.sampled_logprob)
        self.text += event.text
        self.reason = event.reason


@dataclass(eq=False)
class RowState:
    """One sample of a request, from its submission to its end."""

    number: int  # of the request
    sample: int
    request: Request
    end: int  # tokens that it may have in all
    keys: list[Key]  # of the prompt's full pages
    stream: TextStream | None
    settings: Settings  # one row, on the host
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    done: int = 0  # tokens of the prompt that are in the cache, or queued to be
    learned: int = 0  # pages whose content is known to others
    tokens: list[int] = field(default_factory=list)
    flying: int = 0  # steps that are queued, and whose tokens the host has not seen
    ended: bool = False

    @property
    def prompted(self) -> bool:
        """True if the whole prompt is in the cache."""
        return self.done == len(self.request.prompt)

    @property
    def wants_more(self) -> bool:
        """True if another token is allowed even if every queued step yields as many as it can."""
        return len(self.request.prompt) + len(self.tokens) + self.flying < self.end


@dataclass
class PendingBatch:
    """A queued step: the rows whose tokens it brings, None for a lane that brings nothing, and where they arrive."""

    rows: Sequence[RowState | None]
    packed: Tensor  # see `steps.Output.packed`, on the host
    logprobs: bool
    arrived: torch.cuda.Event | None


def check_prompt(prompt: Sequence[int], vocabulary: int, limit: int, name: str = "prompt") -> None:
    """Raises UsageError for a prompt that is empty, longer than `limit`, or has tokens that the model has not."""
    if not prompt:
        raise UsageError(f"{name}: is empty; begin it with the end-of-text token")
    if len(prompt) > limit:
        raise UsageError(f"{name}: {len(prompt)} tokens do not fit the model's {limit} positions; shorten it")
    wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise UsageError(
            f"{name}: token {wrong} is outside of the model's vocabulary of {vocabulary}; "
            "use the tokenizer that the model was trained with"
        )
