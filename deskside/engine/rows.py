"""The host-side state of an engine's rows: which wait and which run, their slots and pages, and how they end."""

from array import array
from collections import deque
from dataclasses import replace
from itertools import islice

from tokenizers import Tokenizer

from deskside.engine.counter_rng import stream_of
from deskside.engine.grammar import allowed_tokens, shown_error
from deskside.engine.pages import Key, PageKeys, Pages
from deskside.engine.requests import Counts, Event, PromptScores, Reason, Request, RowState, TokenOutput
from deskside.engine.sampling import SamplingValues
from deskside.engine.text import TextStream
from deskside.kernels.decode_step import NOT_FINITE


def new_rows(
    number: int,
    request: Request,
    prompt: "array[int]",
    max_length: int,
    page_size: int,
    tokenizer: Tokenizer | None,
) -> list[RowState]:
    """Return the rows of a request, one per sample.

    Without room for a new token, there are no rows, except the first one if the prompt is scored. prompt: the tokens
    that `check_request` returned. max_length: of any row, in tokens.
    """
    max_length = min(max_length, len(request.prompt) + request.max_new_tokens)
    samples = request.samples
    if len(request.prompt) == max_length:
        samples = int(request.scores_prompt)
    keys = PageKeys(prompt, page_size, request.adapter)
    rows = []
    for sample in range(samples):
        stream = None
        if tokenizer is not None:
            stops, skips = request.stop_strings, request.skip_special_tokens
            context = request.prompt if request.continues_text else ()
            stream = TextStream(tokenizer, stops, request.min_tokens, skips, context)
        random_stream = stream_of(request.seed, request.first_sample + sample)
        settings = SamplingValues.of(request.sampling, random_stream)
        matcher = None if request.grammar is None else request.grammar.matcher()
        scores = PromptScores() if request.scores_prompt and sample == 0 else None
        rows.append(
            RowState(number, sample, request, max_length, prompt, keys, stream, settings, matcher, scores)
        )
    return rows


class Rows:
    """Waiting and running rows, for `slots` running rows and `num_pages` pages of `page_size` tokens."""

    def __init__(self, slots: int, num_pages: int, page_size: int):
        self.waiting: deque[RowState] = deque()
        self.running: list[RowState] = []
        self.pages = Pages(num_pages)
        self.counts = Counts()
        self._num_slots, self._page_size = slots, page_size
        self._free_slots = list(range(slots - 1, -1, -1))

    def admit(self) -> list[RowState]:
        """Give slots and pages to waiting rows in order, while there are any. Return these rows."""
        if not (self.waiting and self._free_slots):
            return []
        unshared = [row for row in self.running if row.registered < len(row.keys)]
        # Keys of the pages that are being prefilled, by their place in the row.
        computing: dict[int, set[Key]] = {}
        admitted: list[RowState] = []
        for row in list(self.waiting):
            if not self._free_slots:
                break
            length = len(row.request.prompt)
            # The last token of the prompt is always computed, because its logits are needed.
            usable = (length - 1) // self._page_size if row.scores is None else 0
            cached = self.pages.num_cached(islice(row.keys, usable))
            if cached not in computing:
                computing[cached] = {key for other in unshared for key in _unregistered(other, cached)}
            if cached < usable and row.keys[cached] in computing[cached]:
                continue  # waits for the row that computes this page
            shared = [row.keys[index] for index in range(cached)]
            pages = self.pages.allocate(shared, -(-row.max_length // self._page_size) - cached)
            if pages is None:
                break
            self.waiting.remove(row)
            self.running.append(row)  # before anything below can raise, so that `abandon` ends it
            row.pages, row.slot = pages, self._free_slots.pop()
            row.cached = row.prefilled = cached * self._page_size
            row.registered = cached
            self.counts.prompt_tokens += length
            self.counts.cached_tokens += row.cached
            for place, keys in computing.items():
                keys.update(_unregistered(row, place))
            unshared.append(row)
            admitted.append(row)
        return admitted

    def append(self, row: RowState, output: TokenOutput) -> Event:
        """Append a row's next token and return its event."""
        token = output.token
        request = row.request
        matcher = row.matcher
        if token != NOT_FINITE and not row.tokens:
            # Not earlier: a NaN makes all tokens of its prompt's pass NaN, as NaN times a weight of zero is NaN.
            self.register_pages(row, row.keys, len(row.keys))
        if matcher is not None and token != NOT_FINITE:
            matcher.consume_token(token)
        if matcher is not None and matcher.is_error():
            error = shown_error(matcher.get_error())
            return self._refuse(row, f"grammar: the answer cannot follow it to the end: {error}; simplify it")
        if token == NOT_FINITE:
            if _must_end_too_early(row):
                return self._refuse(row, "min_tokens: the grammar ends the answer before; give fewer")
            return self.fail(row, "the model's output is not finite (NaN or infinite) after this prompt")
        if row.scores is not None and not row.max_tokens:  # only its prompt was wanted
            return self.end(row, "length")
        if output.top:  # a step computes the same number for all of its rows
            output = output._replace(top=output.top[: request.top_logprobs])
        if token in request.eos_tokens or token in request.stop_tokens:
            event = self.end(row, "eos" if token in request.eos_tokens else "stop")
            return replace(event, end_token=output) if request.logprobs else event
        row.tokens.append(token)
        self.counts.generated_tokens += 1
        text = row.stream.push(token) if row.stream is not None else ""
        reason: Reason | None = None
        if row.stream is not None and row.stream.stopped:
            reason = "stop"
        elif matcher is not None and matcher.is_accepting() and matcher.is_stopped():
            reason = "eos"  # only an end-of-text token may follow
        elif len(request.prompt) + len(row.tokens) == row.max_length:
            reason = "length"
        if reason is not None:
            text += self.end(row, reason).text
        logprobs = (output.logprob, output.sampled_logprob) if request.logprobs else (None, None)
        cached = 0 if reason is None else row.cached
        return Event(
            row.number, row.sample, token, reason, text, *logprobs, cached_tokens=cached, top=output.top
        )

    def end(self, row: RowState, reason: Reason) -> Event:
        """End a row and release its slot and pages."""
        # The held text of a cancelled answer is dropped: no client reads it.
        text = row.stream.finish() if row.stream is not None and reason != "cancelled" else ""
        row.ended = True
        if row.slot < 0:
            self.waiting.remove(row)
        else:
            if row.prefill_done and row.tokens:
                # Make the answer's pages available to later prompts. Its last token may not be in the cache.
                tokens = row.prompt_tokens + array("q", row.tokens[:-1])
                keys = PageKeys(tokens, self._page_size, row.request.adapter, [*row.keys])
                self.register_pages(row, keys, len(keys))
            self._release(row)
        return Event(row.number, row.sample, None, reason, text, cached_tokens=row.cached)

    def _refuse(self, row: RowState, why: str) -> Event:
        """End a row as "failed" because its request cannot be fulfilled. Cached prefixes are as good as before."""
        return replace(self.end(row, "failed"), text="", error=why, unfulfillable=True)

    def fail(self, row: RowState, why: str) -> Event:
        """End a running row as "failed". Cached prefixes are dropped: they may include its pages."""
        row.ended = True
        self._release(row)
        self.pages.forget_contents()
        return Event(row.number, row.sample, None, "failed", error=why)

    def register_pages(self, row: RowState, keys: PageKeys, count: int) -> None:
        """Register the row's pages that have become full. count: of all its full pages, which have these keys."""
        for index in range(row.registered, count):
            self.pages.register(row.pages[index], keys[index])
        row.registered = max(row.registered, count)

    def abandon(self, why: str, waiting: bool) -> list[Event]:
        """End all running rows as "failed", and the waiting ones if `waiting` or if none runs. Nothing stays cached."""
        rows = list(self.running)
        if waiting or not rows:
            rows += self.waiting
            self.waiting.clear()
        for row in rows:
            row.ended = True
        self.running.clear()
        self.pages = Pages(self.pages.count, self.pages.evicted)
        self._free_slots = list(range(self._num_slots - 1, -1, -1))
        return [Event(row.number, row.sample, None, "failed", error=why) for row in rows]

    def _release(self, row: RowState) -> None:
        self.pages.release(row.pages)
        self._free_slots.append(row.slot)
        self.running.remove(row)


def _unregistered(row: RowState, index: int) -> list[Key]:
    """Return the key of a page of the row's prompt in a list, which is empty if the page is registered or not full."""
    return [row.keys[index]] if row.registered <= index < len(row.keys) else []


def _must_end_too_early(row: RowState) -> bool:
    """Return True if a row that has too few tokens may continue only with tokens that end it."""
    if row.matcher is None or len(row.tokens) >= row.request.min_tokens:
        return False
    return allowed_tokens(row.matcher) <= set(row.request.end_tokens)
