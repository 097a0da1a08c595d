"""Inference engine with continuous batching: rows join and leave the batch between steps (Orca, Yu et al. 2022, OSDI).

A row is one sample of a request. A step admits waiting rows, prefills at most `prefill_tokens` tokens of prompts, and
runs a decoding step for the rows whose prefill is done. A long prompt is prefilled in parts, so it does not hold up
the other rows (Sarathi-Serve, Agrawal et al. 2024, arXiv 2403.02310). The parts of several prompts are packed one after
the other.

Memory: keys and values are stored in pages (model/cache.py, pages.py). An admitted row gets all pages that it can ever
need, so a running row never runs out of memory. Rows wait in order until there is room. Full pages are shared: a prompt
with the same prefix as an earlier one continues from the cached pages, and the samples of one request wait for the
first of them to compute their common pages.

The output of a row depends on its prompt, settings and seed, but not on the other rows of its batch, except for
rounding: matrix products and attention may round differently for another batch size or another chunk of a prompt,
which can decide between two tokens of nearly equal probability.

On a GPU the host runs one step ahead: it queues a step before it has read the tokens of the previous one. If a step is
short, it generates several tokens for each row. A row may therefore be decoded beyond its end; that output is
dropped. While a row with a grammar runs, the host reads every token before it queues the next step, because the grammar
decides on the host which tokens may follow. An engine is not thread-safe.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deskside.engine import device, steps
from deskside.engine.grammar import MaskBuilder
from deskside.engine.graphs import Graphs, bucket, token_bucket
from deskside.engine.prompts import PackedPrompts, choose_parts, pack
from deskside.engine.requests import (
    Counts,
    EngineStepOptions,
    Event,
    PendingBatch,
    Request,
    RowState,
    SampleOutput,
    check_request,
    record_event,
)
from deskside.engine.rows import Rows, new_rows
from deskside.engine.scoring import HiddenRecorder, score_parts
from deskside.engine.speculate import speculate
from deskside.engine.steps import CachedModel, Slots
from deskside.model.transformer import Transformer
from deskside.precision.row_adapters import RowChoice
from deskside.utils.errors import RunError, UsageError, describe_error

PAGE_SIZE = 32  # tokens
PREFILL_BESIDE = (
    2048  # maximum tokens of prompts in a step that completes fewer prompts than it has rows to decode
)
# Tokens of each row in one CUDA graph of decoding, if a step takes at most MAX_STEP_SECONDS of the device's time.
# Longer steps hide the host's work anyway, and clients would wait for the tokens. While other rows wait for the graph,
# it may take MAX_WAIT_SECONDS: for a small model the host's work for a step takes longer than that.
TOKENS_PER_REPLAY = 4
MAX_STEP_SECONDS = 0.002
MAX_WAIT_SECONDS = 0.003


class Draft(NamedTuple):
    """A smaller model with the same tokenizer that proposes `tokens` tokens per step (see speculate.py)."""

    model: Transformer
    tokens: int = 4


class Engine:
    """Generates for many requests with one model. Raises UsageError for invalid sizes or an unsuitable draft model.

    Args:
        max_batch: Maximum number of running rows.
        max_tokens: Maximum size of the KV cache, in tokens of prompts and answers of all rows.
        tokenizer: Required for `Event.text` and for stop strings.
        draft: A draft model for speculative decoding.
        adapters: Of the model, if it has several; each request chooses one or none.
        page_size: Tokens per page of the KV cache.
        prefill_tokens: Maximum tokens of prompts in one step; None is `device.prefill_tokens`. A step takes at most
            PREFILL_BESIDE if it completes fewer prompts than it has rows to decode.
        graphs: Whether to capture steps in CUDA graphs. None does so on CUDA if the step can be captured.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_batch: int = 16,
        max_tokens: int = 32768,
        tokenizer: Tokenizer | None = None,
        draft: Draft | None = None,
        adapters: RowChoice | None = None,
        page_size: int = PAGE_SIZE,
        prefill_tokens: int | None = None,
        graphs: bool | None = None,
    ):
        self.num_drafts = draft.tokens if draft is not None else 0
        if prefill_tokens is None:
            prefill_tokens = device.prefill_tokens(model)
        sizes = {
            "max_batch": max_batch,
            "page_size": page_size,
            "prefill_tokens": prefill_tokens,
            "draft": 1 if draft is None else draft.tokens,
        }
        for name, value in sizes.items():
            if value < 1:
                raise UsageError(f"{name}: must be at least 1, not {value}")
        if max_tokens < page_size:
            raise UsageError(f"max_tokens: must be at least one page, {page_size} tokens, not {max_tokens}")
        self.max_length = model.config.max_position_embeddings
        if draft is not None:
            if draft.model.config.vocab_size != model.config.vocab_size:
                raise UsageError(
                    f"draft: its vocabulary has {draft.model.config.vocab_size} tokens, but the model's has "
                    f"{model.config.vocab_size}; use a draft model with the same tokenizer"
                )
            self.max_length = min(self.max_length, draft.model.config.max_position_embeddings)
        self.vocabulary = model.config.vocab_size
        self.device = model.embed.weight.device
        self.max_batch, self.page_size, self.prefill_tokens = max_batch, page_size, prefill_tokens
        self._tokenizer = tokenizer
        pages_per_context = -(-self.max_length // page_size)
        num_pages = min(max_tokens // page_size, max_batch * pages_per_context)
        self._pages_per_row = min(pages_per_context, num_pages)
        self._max_row_length = min(self.max_length, self._pages_per_row * page_size)  # in tokens
        self._rows = Rows(max_batch, num_pages, page_size)
        self._num_adapters = 0 if adapters is None else adapters.count
        sizes_of_cache = (num_pages, page_size, self._max_row_length)
        self._models: tuple[CachedModel, ...] = (CachedModel(model, *sizes_of_cache, adapters),)
        if draft is not None:
            self._models += (CachedModel(draft.model, *sizes_of_cache),)
        if graphs is None:
            lanes, drafts = bucket(max_batch), self.num_drafts
            graphs = self.device.type == "cuda" and all(
                m.can_capture_decode(lanes, 1 + drafts) for m in self._models
            )
        self._use_graphs = graphs
        self._run_ahead = self.device.type == "cuda"  # queue a step before the previous one's tokens are read
        self._step_seconds = math.inf  # device time of the last decoding step, per token
        self._slots, self._graphs = self._new_state()
        self._pending: deque[PendingBatch] = deque()
        self._new_events: list[Event] = []
        self._next_number = 0
        self._mask_builder = MaskBuilder(self.vocabulary)
        # The slots of the last decoding step, also as a tensor: consecutive steps often have the same ones.
        self._last_lanes: tuple[list[int], Tensor] = ([], self._slots.to_device([]))

    # Interface

    @property
    def nbytes(self) -> int:
        """Size of the KV cache in bytes."""
        return sum(model.nbytes for model in self._models)

    @property
    def free_tokens(self) -> int:
        """Tokens of prompt and answer that fit in the available pages now."""
        return self._rows.pages.available * self.page_size

    @property
    def counts(self) -> Counts:
        """Return the counts of the engine's work so far."""
        return self._rows.counts

    @property
    def num_running(self) -> int:
        """Number of rows that have a slot."""
        return len(self._rows.running)

    @property
    def num_waiting(self) -> int:
        """Number of rows that wait for a slot or for pages."""
        return len(self._rows.waiting)

    @property
    def evicted_pages(self) -> int:
        """Number of cached pages that gave way to new ones so far."""
        return self._rows.pages.evicted

    @property
    def idle(self) -> bool:
        """True if no request waits or runs and all events were delivered."""
        return not (self._rows.waiting or self._rows.running or self._pending or self._new_events)

    def submit(self, request: Request) -> int:
        """Queue a request and return its number, which its events carry.

        Raises UsageError for a prompt that is empty, too long or outside of the vocabulary, for a request that never
        fits the cache, and for stop strings without a tokenizer. Whatever this raises, no part of the request stays
        queued. All objects that depend on the request's values are created here, so that a bad request fails here and
        not in a step that it shares with others.
        """
        prompt = self._check(request)
        number = self._next_number
        rows = new_rows(number, request, prompt, self.max_length, self.page_size, self._tokenizer)
        self._next_number += 1
        self._rows.waiting.extend(rows)
        if not min(request.max_new_tokens, self.max_length - len(request.prompt)):
            self._new_events += [
                Event(number, sample, None, "length") for sample in range(len(rows), request.samples)
            ]
        return number

    def cancel(self, number: int) -> None:
        """End the unfinished samples of a request with the reason "cancelled"."""
        for row in [*self._rows.waiting, *self._rows.running]:
            if row.number == number:
                self._new_events.append(self._rows.end(row, "cancelled"))

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Compute one step and return the new events; an idle engine returns none.

        A failure of a single sample ends it with the reason "failed". After an exception from this method, call
        `abandon`, which returns the undelivered events, and then `restart`.
        """
        if any(row.matcher is not None for row in self._rows.running):
            self._collect_first(len(self._pending))
        num_earlier = len(self._pending)
        self._admit()
        to_prefill = [row for row in self._rows.running if not row.prefill_done]
        to_decode = [row for row in self._rows.running if row.prefill_done and row.needs_step]
        prefilled = self._prefill(to_prefill, len(to_decode)) if to_prefill else 0
        if to_decode:
            self._decode(to_decode, prefilled)
        self._rows.counts.steps += bool(to_prefill or to_decode)
        ahead = self._run_ahead and (to_prefill or to_decode)
        self._collect_first(num_earlier if ahead else len(self._pending))
        return self._take_events()

    def run(self, requests: Sequence[Request]) -> list[list[SampleOutput]]:
        """Return the outputs of each request, one per sample. The engine must be idle.

        Raises what `submit` raises, before anything is computed, and what `events` raises. The engine is idle then; if
        `step` itself raised, call `restart` before the engine is used again.
        """
        if not self.idle:
            raise UsageError("engine: run() would lose the events of other requests; use submit() and step()")
        for request in requests:
            self._check(request)
        try:
            numbers = [self.submit(request) for request in requests]
            outputs = {
                number: [SampleOutput(len(request.prompt)) for _ in range(request.samples)]
                for number, request in zip(numbers, requests, strict=True)
            }
            for event in self.events():
                outputs[event.request][event.sample].add(event)
        except BaseException:
            self.abandon("another request failed", waiting=True)
            raise
        return [outputs[number] for number in numbers]

    def events(self) -> Iterator[Event]:
        """Step until the engine is idle, and yield all events.

        Raises RunError when a sample fails, and UsageError if its request cannot be fulfilled.
        """
        while not self.idle:
            for event in self.step():
                if event.reason == "failed":
                    raise UsageError(event.error) if event.unfulfillable else RunError(event.error)
                yield event

    def abandon(self, why: str, waiting: bool = False) -> list[Event]:
        """End all running samples as "failed" after a step raised. Return all undelivered events.

        Waiting samples stay queued, unless `waiting` is true or no running sample can have caused the exception. This
        does not use the device, which may be in any state.

        Args:
            why: The error message of the failed samples.
            waiting: End the waiting samples too.
        """
        self._new_events += self._rows.abandon(why, waiting)
        self._pending.clear()
        return self._take_events()

    @torch.no_grad()
    def restart(self) -> None:
        """Recreate the state on the device after `abandon`. Raises torch's error if the device is unusable."""
        self._slots, self._graphs = self._new_state()
        self._last_lanes = ([], self._slots.to_device([]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def weights_changed(self) -> None:
        """Drop the cached prefixes, which are invalid for the new weights. Raises UsageError while rows run."""
        if self._rows.running or self._pending:
            raise UsageError(
                "engine: the weights changed while requests were running; wait until they end, or cancel them first"
            )
        self._rows.pages.forget_contents()

    # Parts of a step

    def _admit(self) -> None:
        """Start waiting rows in order, while there are slots and pages."""
        admitted = self._rows.admit()
        if not admitted:
            return
        self._slots.fill(admitted)
        for row in admitted:
            self._slots.start_adjustments(row.slot, row.request)

    def _prefill(self, unfinished: list[RowState], num_decoding: int) -> int:
        """Prefill the next parts of these rows' prompts. Return their number of tokens.

        num_decoding: rows that wait for it to decode a step.

        Prompts that are scored have separate passes; the oldest row decides which kind is next.
        """
        scored = unfinished[0].scores is not None
        unfinished = [row for row in unfinished if (row.scores is not None) == scored]
        recorder = HiddenRecorder(self._models[0].blocks) if scored else None
        parts = choose_parts(unfinished, self.prefill_tokens)
        if sum(count == row.prompt_left for row, count in parts) < num_decoding:
            # More rows wait for this pass than begin to decode after it.
            parts = choose_parts(unfinished, min(self.prefill_tokens, PREFILL_BESIDE))
        rows = [row for row, _ in parts]
        for row, count in parts:
            row.prefilled += count
        options = EngineStepOptions.of(rows, self.vocabulary)
        lanes, tokens = len(rows), sum(count for _, count in parts)
        graphs = None
        if self._run_ahead:
            # One number of lanes, so that graphs differ only in the number of tokens.
            lanes, tokens = bucket(self.max_batch), token_bucket(tokens)
            if not scored and all(m.can_capture_prefill(tokens) for m in self._models):
                graphs = self._graphs

        def step(packed: Tensor) -> Tensor:
            prompts = PackedPrompts.of(packed, lanes)
            return steps.prefill(self._models, self._slots, prompts, options, recorder).packed()

        self._constrain([row for row in rows if row.prefill_done])
        prompts = self._slots.copy(pack(parts, lanes, tokens, self._slots.dummy))
        packed = step(prompts) if graphs is None else graphs.run(("prefill", tokens, options), prompts, step)
        if recorder is not None:
            score_parts(self._models[0].model, recorder.hidden_ND, parts)
        complete = [row if row.prefill_done else None for row in rows]
        self._pending.append(PendingBatch.queue(complete, packed, options))
        return sum(count for _, count in parts)

    def _decode(self, rows: list[RowState], prefilled: int) -> None:
        """Decode one step of these rows. prefilled: tokens of prompts that this step computes before."""
        options = EngineStepOptions.of(rows, self.vocabulary)
        num_tokens = self._tokens_per_replay(rows, prefilled)
        self._constrain(rows)
        # An upper bound of the rows' lengths after this step. The host does not know the exact lengths: a step yields
        # up to 1 + num_drafts tokens.
        bound = max(
            len(row.request.prompt)
            + len(row.tokens)
            + (row.tokens_in_flight + num_tokens) * (1 + self.num_drafts)
            for row in rows
        )
        bound = min(self._max_row_length, bound)
        slots = [row.slot for row in rows]
        if self._run_ahead:
            slots += [self._slots.dummy] * (bucket(len(slots)) - len(slots))
        if slots != self._last_lanes[0]:
            self._last_lanes = (slots, self._slots.to_device(slots))
        lanes_B = self._last_lanes[1]
        if self.num_drafts and not options.constrained:
            target, draft = self._models
            decode = partial(speculate, target, draft, num_drafts=self.num_drafts)
        else:
            decode = partial(steps.decode, self._models, num_tokens=num_tokens)
        if self._graphs is not None:
            bound = self._max_row_length  # a graph is replayed for rows of any length

        def step(lanes_B: Tensor) -> Tensor:
            return decode(self._slots, lanes_B, bound=bound, options=options).packed()

        started = record_event(self.device)
        if self._graphs is not None:
            packed = self._graphs.run(("decode", len(slots), num_tokens, options), lanes_B, step)
        else:
            packed = step(lanes_B)
        self._pending.append(PendingBatch.queue(rows, packed, options, num_tokens, started))

    def _tokens_per_replay(self, rows: Sequence[RowState], prefilled: int) -> int:
        """Return how many tokens the next decoding step generates for each row. prefilled: see `_decode`.

        They are several, in one graph, if the host would otherwise take longer than the device: it then launches and
        reads one step instead of many. What is generated after the end of a row is wasted, so it is a single token if
        no row needs all of them, and if other rows would wait too long. It is one after a large prefill pass too: the
        device is busy with that, and the first tokens of its prompts are read after this step.
        """
        if self._graphs is None or self.num_drafts or self._step_seconds > MAX_STEP_SECONDS:
            return 1
        if prefilled > PREFILL_BESIDE:
            return 1
        if any(row.matcher is not None for row in rows):
            return 1  # the grammar needs each token before the next
        if max(row.tokens_left for row in rows) < TOKENS_PER_REPLAY:
            return 1
        others = bool(self._rows.waiting) or any(not row.prefill_done for row in self._rows.running)
        too_long = TOKENS_PER_REPLAY * self._step_seconds > MAX_WAIT_SECONDS
        return 1 if others and too_long else TOKENS_PER_REPLAY

    def _constrain(self, rows: Sequence[RowState]) -> None:
        """Tell the device which tokens the grammars of these rows allow next."""
        slots = [row.slot for row in rows if row.matcher is not None]
        matchers = [row.matcher for row in rows if row.matcher is not None]
        if matchers:
            self._slots.allow(slots, self._mask_builder.masks(matchers))

    def _collect_first(self, batches: int) -> None:
        """Read the output of the first queued steps."""
        for _ in range(batches):
            self._collect(self._pending.popleft())

    def _collect(self, batch: PendingBatch) -> None:
        """Wait for the output of a queued step and apply its tokens to the rows. Lanes beyond the rows are padding."""
        if batch.copied is not None:
            batch.copied.synchronize()
            if batch.started is not None:
                self._step_seconds = batch.started.elapsed_time(batch.copied) / 1e3 / batch.num_tokens
        for row, lane in zip(batch.rows, batch.packed.tolist(), strict=False):
            if row is None:
                continue
            row.tokens_in_flight -= batch.num_tokens
            for output in steps.unpack(lane, batch.options.logprobs, batch.options.top):
                if row.ended:
                    break
                try:
                    event = self._rows.append(row, output)
                except Exception as error:  # noqa: BLE001 - an error of the tokenizer must fail only this row
                    event = self._rows.fail(
                        row, f"the answer cannot be written as text: {describe_error(error)}"
                    )
                if row.scores is not None:
                    event, row.scores = replace(event, prompt=row.scores), None
                self._new_events.append(event)

    def _take_events(self) -> list[Event]:
        """Return the undelivered events and clear the list."""
        events, self._new_events = self._new_events, []
        return events

    def _new_state(self) -> tuple[Slots, Graphs | None]:
        """Return a new state of the rows on the device, and the CUDA graphs for it."""
        slots = Slots(self.max_batch, self._pages_per_row, self.vocabulary, self.device)
        return slots, Graphs() if self._use_graphs else None

    def _check(self, request: Request) -> "array[int]":
        """Return the tokens of the prompt. Raises UsageError for a request that this engine cannot fulfill."""
        cache_tokens = self._rows.pages.count * self.page_size
        tokens = check_request(request, self.vocabulary, self.max_length, cache_tokens, self.page_size)
        if not 0 <= request.adapter <= self._num_adapters:
            raise UsageError(f"adapter: must be between 0 and {self._num_adapters}, not {request.adapter}")
        if request.stop_strings and self._tokenizer is None:
            raise UsageError("stop: stop strings need a tokenizer; create the engine with one")
        return tokens
