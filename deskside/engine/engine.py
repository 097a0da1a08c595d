"""Generation for many requests at once: rows join and leave between steps (Orca, Yu et al. 2022, OSDI).

A step lets waiting requests in, computes a bounded part of the prompts that are not in the cache yet, then one new
token for every row whose prompt is. A long prompt is therefore computed in parts, between which the other rows go on.

Memory: keys and values lie in pages (model/cache.py, pages.py). A row gets all pages that it can need when it is let
in, so that nothing that runs ever has to stop for want of memory. Requests wait in their order until there is room.
Full pages are shared: a prompt that begins like one that was computed before goes on from there, and the samples of one
request wait for the first of them to compute the pages that they have in common.

What a row gets depends on its prompt, settings and seed, and not on its neighbours, as far as arithmetic allows: matrix
products may round differently for another number of rows or another cut of the prompt, and where two tokens are nearly
equal, that can decide between them. Random numbers, filters and the spans of attention are the row's own.

On a GPU the host is one step ahead: it queues a step before it has read the tokens of the one before. A row that ended
there has then computed one token in vain, which is dropped. An engine belongs to one thread.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deskside.engine import steps
from deskside.engine.counter_rng import stream_of
from deskside.engine.pages import Key, Pages, keys_of
from deskside.engine.requests import (
    Event,
    PendingBatch,
    Reason,
    Request,
    RowState,
    SampleOutput,
    check_prompt,
)
from deskside.engine.sampling import NOT_FINITE, Settings, width_of
from deskside.engine.speculate import speculate
from deskside.engine.steps import Forward, Graphs, PromptParts, Slots, bucket
from deskside.engine.text import TextStream
from deskside.kernels.decode import kernel_supports
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError, UsageError, describe_error

PAGE_SIZE = 32  # tokens
PREFILL_TOKENS = 4096  # of prompts in one step, padding included
PAD_TO = 16  # prompts in one step are padded to a multiple of this


class Draft(NamedTuple):
    """A smaller model with the same tokenizer, which proposes `tokens` tokens a step (speculate.py)."""

    model: Transformer
    tokens: int = 4


class Engine:
    """Continuous batching over one model.

    max_batch: rows that run at once. max_tokens: tokens of prompts and answers that the cache holds for all of them.
    tokenizer: makes text of tokens (Event.text), and is needed for stop strings. graphs: None captures CUDA graphs
    where the step allows it: on CUDA, without experts (whose products may need the host), attention in the kernel.
    Raises UsageError for sizes that cannot be.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_batch: int = 16,
        max_tokens: int = 32768,
        tokenizer: Tokenizer | None = None,
        draft: Draft | None = None,
        page_size: int = PAGE_SIZE,
        prefill_tokens: int = PREFILL_TOKENS,
        graphs: bool | None = None,
    ):
        self.drafts = draft.tokens if draft is not None else 0
        sizes = {
            "max_batch": max_batch,
            "page_size": page_size,
            "draft": 1 if draft is None else draft.tokens,
        }
        for name, value in sizes.items():
            if value < 1:
                raise UsageError(f"{name}: {value} must be at least 1")
        if max_tokens < page_size or prefill_tokens < 1:
            raise UsageError(
                f"max_tokens: {max_tokens}, in {prefill_tokens} at once: must hold a page of {page_size} tokens"
            )
        self.limit = model.config.max_position_embeddings
        if draft is not None:
            if draft.model.config.vocab_size != model.config.vocab_size:
                raise UsageError(
                    f"draft: its vocabulary has {draft.model.config.vocab_size} tokens and the model's "
                    f"{model.config.vocab_size}; take a model with the same tokenizer"
                )
            self.limit = min(self.limit, draft.model.config.max_position_embeddings)
        self.vocabulary = model.config.vocab_size
        self.device = model.embed.weight.device
        self.max_batch, self.page_size, self.prefill_tokens = max_batch, page_size, prefill_tokens
        self._tokenizer = tokenizer
        most = -(-self.limit // page_size)
        count = min(max_tokens // page_size, max_batch * most)
        self._per_row = min(most, count)  # pages
        self._longest = min(self.limit, self._per_row * page_size)  # that a row can become here
        self._pages = Pages(count)
        models = [model] if draft is None else [model, draft.model]
        self._forwards = tuple(Forward(each, count, page_size, self._longest) for each in models)
        if graphs is None:
            graphs = self.device.type == "cuda" and all(self._capturable(f) for f in self._forwards)
        self._captures = graphs
        self._ahead = self.device.type == "cuda"  # queue a step before the last one's tokens are read
        self._slots, self._graphs = self._new_state()
        self._free = list(range(max_batch - 1, -1, -1))
        self._waiting: deque[RowState] = deque()
        self._running: list[RowState] = []
        self._pending: deque[PendingBatch] = deque()
        self._news: list[Event] = []
        self._next = 0
        self._lanes: tuple[list[int], Tensor] = ([], self._slots.to_device([]))

    # What a caller does

    @property
    def nbytes(self) -> int:
        """Memory of the key-value cache, in bytes; models and workspace apart."""
        return sum(forward.nbytes for forward in self._forwards)

    @property
    def free_tokens(self) -> int:
        """Tokens that a new request could have now, if no other waited."""
        return self._pages.available * self.page_size

    @property
    def idle(self) -> bool:
        """True if no request waits or runs and all events were delivered."""
        return not (self._waiting or self._running or self._pending or self._news)

    def submit(self, request: Request) -> int:
        """Take a request in; returns its number, which its events carry.

        Raises UsageError for a prompt that is empty, too long or no text of this model, for a request that would never
        fit, and for stop strings without a tokenizer. Everything that depends on the request's own values is made here,
        so that none of them can make a step fail; whatever is raised, nothing of the request stays behind.
        """
        self._check(request)
        number = self._next
        length = len(request.prompt)
        end = min(self.limit, length + request.max_new_tokens)
        keys = keys_of(request.prompt, self.page_size)
        rows: list[RowState] = []
        for sample in range(request.samples if length < end else 0):
            stream = None
            if self._tokenizer is not None:
                stream = TextStream(self._tokenizer, request.stop_strings)
            draws = stream_of(request.seed, request.first_sample + sample)
            settings = Settings.of([request.sampling], [draws], "cpu")
            rows.append(RowState(number, sample, request, end, keys, stream, settings))
        self._next += 1
        self._waiting.extend(rows)
        if not rows:
            self._news += [Event(number, sample, None, "length") for sample in range(request.samples)]
        return number

    def cancel(self, number: int) -> None:
        """End what is left of a request; its samples end with the reason "cancelled". An ended one is left alone."""
        for row in [*self._waiting, *self._running]:
            if row.number == number:
                self._news.append(self._close(row, "cancelled"))

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Compute, and tell what is new. Nothing left to do gives nothing.

        A sample that fails by itself ends with the reason "failed". Where the step itself raises, nothing can be
        computed any more until `abandon` and `restart` were called; the events so far are not lost.
        """
        before = len(self._pending)
        self._admit()
        starting = [row for row in self._running if not row.prompted]
        going = [row for row in self._running if row.prompted and row.wants_more]
        if starting:
            self._prefill(starting)
        if going:
            self._decode(going)
        ahead = self._ahead and (starting or going)
        for _ in range(before if ahead else len(self._pending)):
            self._land(self._pending.popleft())
        news, self._news = self._news, []
        return news

    def run(self, requests: Sequence[Request]) -> list[list[SampleOutput]]:
        """Answers to all of them, one for each sample. Only for an engine that has nothing else to do.

        Raises as `submit`, before anything is computed, and as `events`.
        """
        if not self.idle:
            raise UsageError("engine: run() would lose the events of other requests; use submit() and step()")
        for request in requests:
            self._check(request)
        numbers = [self.submit(request) for request in requests]
        answers = {
            number: [SampleOutput(len(request.prompt)) for _ in range(request.samples)]
            for number, request in zip(numbers, requests, strict=True)
        }
        for event in self.events():
            answers[event.request][event.sample].add(event)
        return [answers[number] for number in numbers]

    def events(self) -> Iterator[Event]:
        """Steps until nothing is left. Raises RunError when a sample fails."""
        while not self.idle:
            for event in self.step():
                if event.reason == "failed":
                    raise RunError(event.error)
                yield event

    def abandon(self, why: str, waiting: bool = False) -> list[Event]:
        """Fail all running samples after a step raised. Return all events that were not delivered yet.

        They end with the reason "failed" and the error `why`. Those that wait go on waiting, unless `waiting`, or
        nothing ran that can have been the cause. Touches only the host, so it works whatever the device does.
        """
        rows = list(self._running)
        if waiting or not rows:
            rows += self._waiting
            self._waiting.clear()
        for row in rows:
            row.ended = True
            self._news.append(Event(row.number, row.sample, None, "failed", error=why))
        self._running.clear()
        self._pending.clear()
        self._pages = Pages(self._pages.count)
        self._free = list(range(self.max_batch - 1, -1, -1))
        news, self._news = self._news, []
        return news

    @torch.no_grad()
    def restart(self) -> None:
        """Make the device's state anew after `abandon`. Raises what the device raises where it is beyond repair."""
        self._slots, self._graphs = self._new_state()
        self._lanes = ([], self._slots.to_device([]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def weights_changed(self) -> None:
        """Forget what was computed with other weights. Raises UsageError while something runs."""
        if self._running or self._pending:
            raise UsageError(
                "engine: weights changed while answers are being written; let them end, or cancel"
            )
        self._pages.forget()

    # What a step does

    def _admit(self) -> None:
        """Let rows in, in their order, while there are slots and pages."""
        if not (self._waiting and self._free):
            return
        computing = {key for row in self._running if not row.prompted for key in row.keys[row.learned :]}
        admitted: list[RowState] = []
        for row in list(self._waiting):
            if not self._free:
                break
            length = len(row.request.prompt)
            # The last token is computed in any case: its logits are wanted.
            usable = row.keys[: (length - 1) // self.page_size]
            known = self._pages.known(usable)
            if known < len(usable) and usable[known] in computing:
                continue  # until the row that computes this page is done with it
            taken = self._pages.take(usable[:known], -(-row.end // self.page_size) - known)
            if taken is None:
                break
            self._waiting.remove(row)
            self._running.append(row)  # now, so that no failure below can lose it
            row.pages, row.slot = taken, self._free.pop()
            row.done, row.learned = known * self.page_size, known
            computing.update(row.keys[known:])
            admitted.append(row)
        if not admitted:
            return
        settings = Settings.stacked([row.settings for row in admitted], self.device)
        self._slots.fill(
            [row.slot for row in admitted],
            [row.pages for row in admitted],
            [row.done for row in admitted],
            settings,
        )
        for row in admitted:
            if row.request.sampling.repetition_penalty != 1:
                self._slots.see(row.slot, row.request.prompt)

    def _prefill(self, starting: list[RowState]) -> None:
        """A part of the prompts, in the order of the rows, within the bound on padded tokens.

        Rows of which nothing is in the cache go together: they attend among themselves, which is faster.
        """
        rows: list[RowState] = []
        longest, fresh = 0, starting[0].done == 0
        for row in starting:
            if (row.done == 0) != fresh:
                continue
            length = min(len(row.request.prompt) - row.done, self.prefill_tokens)
            padded = max(longest, -(-length // PAD_TO) * PAD_TO)
            if rows and (len(rows) + 1) * padded > self.prefill_tokens:
                break
            rows.append(row)
            longest = padded
        parts = [row.request.prompt[row.done : row.done + longest][: self.prefill_tokens] for row in rows]
        tokens = [list(part) + [0] * (longest - len(part)) for part in parts]
        how = self._how(rows)
        for row, part in zip(rows, parts, strict=True):
            row.done += len(part)
        prompts = PromptParts(
            self._slots.to_device([row.slot for row in rows]),
            self._slots.to_device(tokens),
            self._slots.to_device([len(part) for part in parts]),
            self._slots.to_device([int(row.prompted) for row in rows]),
            max(row.done for row in rows),
            fresh,
        )
        output = steps.prefill(self._forwards, self._slots, prompts, how)
        for row in rows:
            self._learn(row, row.keys[: row.done // self.page_size])
        self._launch([row if row.prompted else None for row in rows], output.packed(), how.logprobs)

    def _decode(self, going: list[RowState]) -> None:
        """One step of all rows whose prompt is in the cache."""
        how = self._how(going)
        most = 1 + self.drafts
        reach = max(len(r.request.prompt) + len(r.tokens) + (r.flying + 1) * most for r in going)
        bound = min(self._longest, reach)
        slots = [row.slot for row in going]
        if self._ahead:
            slots += [self._slots.nobody] * (bucket(len(slots)) - len(slots))
        if slots != self._lanes[0]:
            self._lanes = (slots, self._slots.to_device(slots))
        lanes_B = self._lanes[1]
        if self.drafts:
            target, draft = self._forwards
            whole = partial(speculate, target, draft, drafts=self.drafts)
        else:
            whole = partial(steps.decode, self._forwards[0])

        def once(lanes_B: Tensor) -> Tensor:
            read = self._longest if self._graphs is not None else bound
            return whole(self._slots, lanes_B, bound=read, how=how).packed()

        if self._graphs is not None:
            packed = self._graphs.run((len(slots), how), lanes_B, once)
        else:
            packed = once(lanes_B)
        self._launch(going, packed, how.logprobs)

    def _launch(self, rows: Sequence[RowState | None], packed: Tensor, logprobs: bool) -> None:
        """Let what came out travel to the host."""
        for row in rows:
            if row is not None:
                row.flying += 1
        arrived = None
        if packed.is_cuda:
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            packed = host
        self._pending.append(PendingBatch(rows, packed, logprobs, arrived))

    def _land(self, batch: PendingBatch) -> None:
        """Apply the tokens of a finished step to its rows. Lanes beyond the rows are padding."""
        if batch.arrived is not None:
            batch.arrived.synchronize()
        for row, lane in zip(batch.rows, batch.packed.tolist(), strict=False):
            if row is None:
                continue
            row.flying -= 1
            for token, logprob, sampled_logprob in steps.unpacked(lane, batch.logprobs):
                if row.ended:
                    break
                try:
                    event = self._take(row, token, logprob, sampled_logprob)
                except Exception as error:  # noqa: BLE001 - whatever the tokenizer raises is this row's alone
                    event = self._fail(row, f"the answer cannot be written as text: {describe_error(error)}")
                self._news.append(event)

    def _take(self, row: RowState, token: int, logprob: float | None, sampled_logprob: float | None) -> Event:
        """A row's next token."""
        request = row.request
        if token == NOT_FINITE:
            return self._fail(row, "the model's output is not finite (NaN or infinite) after this prompt")
        if token in request.eos_tokens:
            return self._close(row, "eos")
        if token in request.stop_tokens:
            return self._close(row, "stop")
        row.tokens.append(token)
        text = row.stream.push(token) if row.stream is not None else ""
        reason: Reason | None = None
        if row.stream is not None and row.stream.stopped:
            reason = "stop"
        elif len(request.prompt) + len(row.tokens) == row.end:
            reason = "length"
        if reason is not None:
            text += self._close(row, reason).text
        if not request.logprobs:
            logprob = sampled_logprob = None
        return Event(row.number, row.sample, token, reason, text, logprob, sampled_logprob)

    def _close(self, row: RowState, reason: Reason) -> Event:
        """End a row, and give back what it held."""
        # Nobody reads the end of a cancelled answer.
        text = row.stream.finish() if row.stream is not None and reason != "cancelled" else ""
        row.ended = True
        if row.slot < 0:
            self._waiting.remove(row)
        else:
            if row.prompted and row.tokens:
                # The newest token is not in the cache.
                self._learn(row, keys_of([*row.request.prompt, *row.tokens[:-1]], self.page_size))
            self._release(row)
        return Event(row.number, row.sample, None, reason, text)

    def _fail(self, row: RowState, why: str) -> Event:
        """End a running row that cannot go on. No later prompt goes on from what it computed."""
        row.ended = True
        self._release(row)
        self._pages.forget()
        return Event(row.number, row.sample, None, "failed", error=why)

    def _release(self, row: RowState) -> None:
        self._pages.release(row.pages)
        self._free.append(row.slot)
        self._running.remove(row)

    # Small things

    def _learn(self, row: RowState, keys: list[Key]) -> None:
        """Pages of this row that are full now."""
        for index in range(row.learned, len(keys)):
            self._pages.learn(row.pages[index], keys[index])
        row.learned = max(row.learned, len(keys))

    def _how(self, rows: list[RowState]) -> steps.How:
        samplings = [row.request.sampling for row in rows]
        return steps.How(
            width_of(samplings, self.vocabulary),
            any(sampling.repetition_penalty != 1 for sampling in samplings),
            any(row.request.logprobs for row in rows),
        )

    def _new_state(self) -> tuple[Slots, Graphs | None]:
        """The rows' state on the device, and graphs that were captured with it."""
        slots = Slots(self.max_batch, self._per_row, self.vocabulary, self.device)
        return slots, Graphs() if self._captures else None

    def _capturable(self, forward: Forward) -> bool:
        config = forward.model.config
        queries = (1 + self.drafts) * (config.num_attention_heads // config.num_key_value_heads)
        return not config.num_experts and kernel_supports(queries, forward.cache.k[0])

    def _check(self, request: Request) -> None:
        check_prompt(request.prompt, self.vocabulary, self.limit)
        length = len(request.prompt)
        end = min(self.limit, length + request.max_new_tokens)
        if -(-end // self.page_size) > self._pages.count:
            raise UsageError(
                f"prompt: {length} tokens and {end - length} new ones never fit the cache of "
                f"{self._pages.count * self.page_size}; ask for fewer, or give the engine more max_tokens"
            )
        if request.stop_strings and self._tokenizer is None:
            raise UsageError("stop: stop strings need an engine that has a tokenizer; give it one")
