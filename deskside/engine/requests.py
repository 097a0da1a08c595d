"""Requests, events and outputs of the engine, and its host-side state of rows and queued steps."""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deskside.engine.adjustments import check_adjustments
from deskside.engine.grammar import Grammar
from deskside.engine.pages import PageKeys
from deskside.engine.sampling import (
    GREEDY,
    GREEDY_ONLY,
    TOP_LOGPROBS,
    Sampling,
    SamplingValues,
    ranking_width,
)
from deskside.engine.text import TextStream
from deskside.utils.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Reason = Literal["eos", "stop", "length", "cancelled", "failed"]
TopTokens = tuple[tuple[int, float], ...]  # the most probable tokens with their log-probabilities, best first


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it. Raises UsageError for values out of range.

    Attributes:
        samples: Number of continuations. The full pages of the prompt are computed once for all of them.
        first_sample: Sample i draws from the random stream of (seed, first_sample + i).
        eos_tokens, stop_tokens: Tokens that end a sample and are not part of it.
        stop_strings: Strings that end a sample. Its text ends before the string, but its tokens include those of the
            string. The engine needs a tokenizer for them.
        min_tokens: Tokens before which no end-of-text token, stop token or stop string ends a sample.
        logprobs: Whether events carry log-probabilities.
        grammar: What the answer must match; None for any answer. A complete one ends with the reason "eos".
        skip_special_tokens: Whether special tokens of the answer have no text.
        continues_text: Whether the text of the answer follows that of the prompt, so that a space before its first
            word belongs to it. The answer of a chat is a text of its own.
        top_logprobs: How many of the most probable tokens events carry too; needs `logprobs`.
        prompt_logprobs: Whether the first event carries log-probabilities of the prompt (`PromptScores`), and with how
            many of the most probable tokens; None if not.
        embed: Whether the first event carries the sum of the prompt's hidden states.
        adapter: Number of the engine's adapter that the samples use; 0 for the model itself.
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
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    continues_text: bool = False
    min_tokens: int = 0
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    embed: bool = False
    adapter: int = 0

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """All tokens that end a sample."""
        return tuple(sorted(self.eos_tokens | self.stop_tokens))

    @property
    def adjusts(self) -> bool:
        """True if the logits of its samples have adjustments (adjustments.py)."""
        return self.sampling.adjusts or self.min_tokens > 0

    @property
    def scores_prompt(self) -> bool:
        """True if the first sample has `PromptScores`."""
        return self.embed or self.prompt_logprobs is not None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise UsageError(f"max_new_tokens: must be 0 or more, not {self.max_new_tokens}")
        if self.samples < 1:
            raise UsageError(f"samples: must be at least 1, not {self.samples}")
        if self.seed < 0 or self.first_sample < 0:
            raise UsageError(
                f"seed and first_sample: must be 0 or more, not {self.seed} and {self.first_sample}"
            )
        if "" in self.stop_strings:
            raise UsageError("stop: an empty string would end every answer at once; leave it out")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise UsageError(
                f"min_tokens: must be between 0 and the maximum of {self.max_new_tokens} tokens, not {self.min_tokens}"
            )
        for name, top in (
            ("top_logprobs", self.top_logprobs),
            ("prompt_logprobs", self.prompt_logprobs or 0),
        ):
            if not 0 <= top <= TOP_LOGPROBS:
                raise UsageError(f"{name}: must be between 0 and {TOP_LOGPROBS}, not {top}")


@dataclass
class PromptScores:
    """Log-probabilities and hidden states of a prompt, for a request that asks for them.

    Attributes:
        logprobs: Natural log-probability of each token but the first, under the model's distribution.
        tops: The most probable tokens at the same positions.
        hidden_sum: Sum of the final hidden states over the prompt, (D,) float64 on the host; None unless requested.
    """

    logprobs: list[float] = field(default_factory=list)
    tops: list[TopTokens] = field(default_factory=list)
    hidden_sum: Tensor | None = None


class TokenOutput(NamedTuple):
    """A token of one lane; see `DrawnTokens`."""

    token: int
    logprob: float | None = None
    sampled_logprob: float | None = None
    top: TopTokens = ()


@dataclass(frozen=True)
class Event:
    """A new token of a sample, its end, or both.

    Attributes:
        request: The number that `Engine.submit` returned.
        reason: Why the sample ended; None while it runs. "eos": an end-of-text token. "stop": a stop token or string.
            "length": max_new_tokens or the model's last position. "failed": see `error`.
        text: New text in whole characters; empty without a tokenizer.
        logprob, sampled_logprob: See `sampling.DrawnTokens`; None unless the request asks for them.
        cached_tokens: At the end of a sample: tokens of the prompt that were found in the cache.
        top: The most probable tokens in place of `token`.
        prompt: In the first event of the first sample of a request that asks for it.
        end_token: The end-of-text or stop token that ended the sample, if the request asks for log-probabilities.
        unfulfillable: True if the sample "failed" because of what its request asks for, not of the engine or model.
    """

    request: int
    sample: int
    token: int | None
    reason: Reason | None
    text: str = ""
    logprob: float | None = None
    sampled_logprob: float | None = None
    error: str = ""
    cached_tokens: int = 0
    top: TopTokens = ()
    prompt: PromptScores | None = None
    end_token: TokenOutput | None = None
    unfulfillable: bool = False


@dataclass
class Counts:
    """Counts of an engine's work since it was created.

    Attributes:
        prompt_tokens: Tokens of the prompts of all samples that were started.
        cached_tokens: Of these, tokens that were found in the cache, computed for an earlier sample.
        generated_tokens: Tokens of all answers.
        steps: Calls of `Engine.step` that computed something.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0


@dataclass
class SampleOutput:
    """The output of one sample. `tokens` excludes the prompt and the end-of-text or stop token, `end_token`.

    `logprobs`, `sampled_logprobs`, `tops` and `texts` have one entry per token if the request asks for logprobs, else
    none. An entry of `texts` is the part of `text` that came with the token.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    tops: list[TopTokens] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    prompt: PromptScores | None = None
    end_token: TokenOutput | None = None
    text: str = ""
    reason: Reason | None = None

    def add(self, event: Event) -> None:
        """Add an event of this sample."""
        if event.token is not None:
            self.tokens.append(event.token)
            if event.logprob is not None and event.sampled_logprob is not None:
                self.logprobs.append(event.logprob)
                self.sampled_logprobs.append(event.sampled_logprob)
                self.tops.append(event.top)
                self.texts.append(event.text)
        if event.prompt is not None:
            self.prompt = event.prompt
        self.end_token = event.end_token
        self.text += event.text
        self.reason = event.reason


@dataclass(eq=False)
class RowState:
    """One sample of a request, from its submission to its end."""

    number: int  # of the request
    sample: int
    request: Request
    max_length: int  # tokens of prompt and answer together
    prompt_tokens: "array[int]"  # the prompt, in 64-bit integers
    keys: PageKeys  # of the prompt's full pages
    stream: TextStream | None
    settings: SamplingValues
    matcher: "LLMatcher | None" = None  # of the request's grammar
    scores: PromptScores | None = None  # until its first event
    slot: int = -1  # -1 while it waits
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens of the prompt that were found in the cache
    prefilled: int = 0  # tokens of the prompt that are in the cache, or will be after the queued steps
    registered: int = 0  # leading pages that are registered for sharing
    tokens: list[int] = field(default_factory=list)  # new ones
    tokens_in_flight: int = 0  # of queued steps whose output the host has not read, at least
    ended: bool = False

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of the answer."""
        return self.max_length - len(self.request.prompt)

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt that no queued step computes."""
        return len(self.prompt_tokens) - self.prefilled

    @property
    def prefill_done(self) -> bool:
        """True if the whole prompt is in the cache, or will be after the queued steps."""
        return self.prompt_left == 0

    @property
    def needs_step(self) -> bool:
        """True unless the queued steps already fill the row."""
        return self.tokens_left > 0

    @property
    def tokens_left(self) -> int:
        """Tokens of the answer that no queued step generates, at most."""
        return self.max_tokens - len(self.tokens) - self.tokens_in_flight


@dataclass(frozen=True)
class EngineStepOptions:
    """Options of a step, which the host chooses. With the number of lanes or tokens, they identify a CUDA graph."""

    width: int  # see `sampling.ranking_width`
    adjusted: bool  # some row has adjustments (adjustments.py)
    logprobs: bool  # some row needs log-probabilities
    constrained: bool = False  # some row has a grammar
    top: int = 0  # most probable tokens with log-probabilities at each position
    adapted: bool = False  # some row has an adapter

    @property
    def only_argmax(self) -> bool:
        """True if a step needs nothing but the token of each row's largest logit."""
        return self.width == GREEDY_ONLY and not (
            self.adjusted or self.logprobs or self.constrained or self.top
        )

    @staticmethod
    def of(rows: Sequence[RowState], vocabulary: int) -> "EngineStepOptions":
        """Return the options of a step of these rows."""
        requests = [row.request for row in rows]
        # One number of top tokens, because each has its own CUDA graph.
        top = min(TOP_LOGPROBS, vocabulary) if any(request.top_logprobs for request in requests) else 0
        return EngineStepOptions(
            ranking_width([request.sampling for request in requests], vocabulary),
            any(request.adjusts for request in requests),
            any(request.logprobs for request in requests),
            any(row.matcher is not None for row in rows),
            top,
            any(request.adapter for request in requests),
        )


@dataclass
class PendingBatch:
    """A queued step whose output the host has not read yet."""

    rows: Sequence[RowState | None]  # by lane; None if the lane's output is to be ignored
    packed: Tensor  # `steps.StepOutput.packed`, on the host
    options: EngineStepOptions
    num_tokens: int  # minimum that each row gets
    started: torch.cuda.Event | None  # recorded before the step, and None on a CPU
    copied: torch.cuda.Event | None  # the same after the copy to the host

    @staticmethod
    def queue(
        rows: Sequence[RowState | None],
        packed: Tensor,
        options: EngineStepOptions,
        num_tokens: int = 1,
        started: torch.cuda.Event | None = None,
    ) -> "PendingBatch":
        """Start to copy a step's output to the host."""
        for row in rows:
            if row is not None:
                row.tokens_in_flight += num_tokens
        host = packed
        if packed.is_cuda:
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
        return PendingBatch(rows, host, options, num_tokens, started, record_event(packed.device))


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event of the work that is queued now; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def check_prompt(prompt: Sequence[int], vocabulary: int, limit: int, name: str = "prompt") -> "array[int]":
    """Return the tokens of a prompt as 64-bit integers.

    Raises UsageError for a prompt that is empty, longer than `limit`, or has tokens outside of the vocabulary.
    """
    if not prompt:
        raise UsageError(f"{name}: is empty; begin it with the end-of-text token")
    if len(prompt) > limit:
        raise UsageError(f"{name}: {len(prompt)} tokens do not fit the model's {limit} positions; shorten it")
    try:
        # In a third of the time of array("q", prompt).
        tokens = array("q", struct.pack(f"{len(prompt)}q", *prompt))
        # A negative token is a large unsigned number.
        valid = np.frombuffer(tokens, np.uint64).max() < vocabulary
    except struct.error:  # a number of more than 64 bits
        valid = False
    if not valid:
        invalid = next(token for token in prompt if not 0 <= token < vocabulary)
        raise UsageError(
            f"{name}: token {invalid} is outside of the model's vocabulary of {vocabulary}; "
            "use the tokenizer that the model was trained with"
        )
    return tokens


def check_request(
    request: Request, vocabulary: int, max_length: int, cache_tokens: int, page_size: int
) -> "array[int]":
    """Return the tokens of a request's prompt as 64-bit integers.

    max_length: of a prompt and its answer, in tokens. Raises UsageError for a request whose tokens are not in the
    vocabulary, or which never fits the cache.
    """
    tokens = check_prompt(request.prompt, vocabulary, max_length)
    check_adjustments(request.sampling, request.stop_tokens, vocabulary)
    length = len(request.prompt)
    max_length = min(max_length, length + request.max_new_tokens)
    if -(-max_length // page_size) * page_size > cache_tokens:
        raise UsageError(
            f"prompt: {length} tokens and {max_length - length} new ones do not fit the cache of "
            f"{cache_tokens} tokens; request fewer tokens, or give the engine more max_tokens"
        )
    return tokens
