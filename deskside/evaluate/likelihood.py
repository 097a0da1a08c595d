"""Log-likelihood of continuations, each context computed once for all continuations that follow it.

Texts are tokenized as in lm-eval (Gao et al., the Language Model Evaluation Harness), so that results agree: white
space at the end of the context moves to the continuation; both are encoded together, and the continuation's tokens are
those after the first len(encode(context)); sequences that exceed the context length are truncated from the left.

Requests with the same context form a group. The context is computed once, up to the last whole page of the key-value
cache, and the rows of the group share these pages (model/cache.py). Each row holds the remaining tokens of the context
and one continuation; all continuations of a single token share one row. Logits are computed only at positions that
predict a token of a continuation. With a ten-example context, scoring four endings thus costs little more than scoring
one.

Groups are sorted by length, longest first. This keeps padding small, and running out of memory shows in the first
batch. The other rows of a batch change the results of a row only by rounding.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deskside.data.chat.renderer import Renderer
from deskside.engine.device import cache_tokens
from deskside.model.block import CachedBlocks
from deskside.model.cache import KVCache, allocate_pool
from deskside.model.transformer import Transformer
from deskside.ops.composite import AddNormLinear
from deskside.utils.errors import RunError, UsageError

PAGE = 16  # tokens; what a context has beyond whole pages is computed again for each of its continuations
CACHE_BYTES = 2 << 30
ENCODED = 4096  # texts at once
LOGITS = 1 << 26  # values at once, in float32


@dataclass(frozen=True)
class Pair:
    """Token ids of a context, at least one, and of what follows it, at least one."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of a continuation in nats, and whether greedy decoding would produce it."""

    logprob: float
    greedy: bool
    tokens: int


class Encoder:
    """Tokenizes text for an evaluation.

    start_token: replaces an empty context. always_start: begin every text with it. chat: a context becomes a user's
    message in a chat. Special tokens that its template writes are then special; those that a text spells never are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        start_token: int,
        *,
        always_start: bool = False,
        chat: Renderer | None = None,
    ):
        self.start_token, self._always_start, self._chat = start_token, always_start, chat
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        # A template may write the start token itself, which the tokenizer must not do again.
        start_text = tokenizer.decode([start_token], skip_special_tokens=False)
        self._adds_special = chat is None or not self._question("a").startswith(start_text)
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a").ids
        at = next(n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        self._added = (whole[:at], whole[at + len(bare) :])  # what the tokenizer writes around a text

    def prompts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokenize prompts for generation; at least one token each."""
        if self._chat is not None:
            texts = [self._question(text) for text in texts]
        return [ids or (self.start_token,) for ids in self._all(texts)]

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Tokenize pairs of context and continuation. Raises UsageError if a continuation adds no token."""
        if self._chat is not None:
            rendered = {context: self._question(context) for context, _ in texts}
            texts = [(rendered[context], self._chat.escape(continuation)) for context, continuation in texts]
        contexts = list(dict.fromkeys(context for context, _ in texts))
        before = dict(zip(contexts, self._all([c.rstrip() for c in contexts]), strict=True))
        found = []
        whole = self._all([context + continuation for context, continuation in texts])
        for (context, continuation), ids in zip(texts, whole, strict=True):
            if context:
                # One of white space alone leaves nothing to predict from.
                pair = Pair(before[context] or (self.start_token,), ids[len(before[context]) :])
            else:
                after = self._tokenizer.encode(continuation, add_special_tokens=False).ids
                pair = Pair((self.start_token,), tuple(after))
            if not pair.continuation:
                raise UsageError(f"{continuation!r}: adds no token to predict after {context[-40:]!r}")
            found.append(pair)
        return found

    def _all(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokenize on several CPU cores."""
        found = []
        for start in range(0, len(texts), ENCODED):
            for coded in self._some(list(texts[start : start + ENCODED])):
                ids = tuple(coded)
                if self._always_start and ids[:1] != (self.start_token,):
                    ids = (self.start_token, *ids)
                found.append(ids)
        return found

    def _some(self, texts: list[str]) -> list[list[int]]:
        if self._chat is None:
            coded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._adds_special)
            return [each.ids for each in coded]
        before, after = self._added if self._adds_special else ([], [])
        return [[*before, *self._chat.ids(text), *after] for text in texts]

    def _question(self, text: str) -> str:
        """Render a user message with the chat template, escaped, up to the assistant's turn."""
        assert self._chat is not None
        return self._chat.text([{"role": "user", "content": text}], add_generation_prompt=True)


@dataclass(frozen=True)
class _Row:
    """Inputs that follow the shared pages; each target list begins at the same one of these inputs."""

    inputs: tuple[int, ...]
    first: int  # the input that predicts the first target
    wanted: tuple[tuple[int, tuple[int, ...]], ...]  # (request's number, targets)


@dataclass(frozen=True)
class _Group:
    shared: tuple[int, ...]  # whole pages, or nothing
    rows: tuple[_Row, ...]

    @property
    def widest(self) -> int:
        return max(len(row.inputs) for row in self.rows)

    @property
    def cost(self) -> int:
        """Approximate size in tokens of the cache."""
        return len(self.shared) + sum(-(-len(row.inputs) // PAGE) * PAGE for row in self.rows)


class _Wanted(CachedBlocks):
    """Blocks as they are written, of which only some last hidden states are kept, in `kept_ND`."""

    def __init__(self, index_N: Tensor):
        self._index_N = index_N
        self.kept_ND: Tensor

    def final(self, operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor) -> Tensor:
        """(1, 1, D): the model makes logits of what it gets, and these are made in parts later on."""
        self.kept_ND = super().final(operator, residual_BTD, delta_BTD).flatten(0, 1)[self._index_N]
        return self.kept_ND[None, :1]


@torch.no_grad()
def likelihoods(
    model: Transformer,
    pairs: Sequence[Pair],
    *,
    batch_tokens: int,
    tick: Callable[[int], object] | None = None,
) -> list[Likelihood]:
    """Return one result per pair, in order.

    batch_tokens: tokens in the cache at once, about; less where they would need more than 2 GiB, or than a card has
    left. `tick` is called with the number of pairs that are done. Raises UsageError for a continuation that is longer
    than the model's positions, RunError for logits that are not finite.
    """
    found: list[Likelihood | None] = [None] * len(pairs)
    per_token = model.kv_bytes_per_token(model.activation_dtype)
    room = cache_tokens(model, min(batch_tokens, int(CACHE_BYTES / per_token)), PAGE)
    for groups in _batches(_groups(pairs, model.config.max_position_embeddings), room):
        done = 0
        for number, likelihood in _batch(model, groups, room):
            found[number] = likelihood
            done += 1
        if tick is not None:
            tick(done)
    return [likelihood for likelihood in found if likelihood is not None]


def _groups(pairs: Sequence[Pair], limit: int) -> list[_Group]:
    """Group requests by context, longest first."""
    by_context: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]] = {}
    for number, pair in enumerate(pairs):
        if len(pair.continuation) > limit:
            raise UsageError(
                f"an answer of {len(pair.continuation)} tokens does not fit the model's {limit} positions; "
                "leave this task out"
            )
        whole = (pair.context + pair.continuation)[-(limit + 1) :]
        context = whole[: len(whole) - len(pair.continuation)]
        rows = by_context.setdefault(context, {})
        rows.setdefault(pair.continuation[:-1], []).append((number, pair.continuation))
    groups = []
    for context, rows in by_context.items():
        # The last token of a context predicts, so at least that one is computed in each row.
        shared = (len(context) - 1) // PAGE * PAGE
        tail = context[shared:]
        groups.append(
            _Group(
                context[:shared],
                tuple(_Row(tail + after, len(tail) - 1, tuple(wanted)) for after, wanted in rows.items()),
            )
        )
    return sorted(groups, key=lambda group: (len(group.shared), group.widest), reverse=True)


def _batches(groups: Sequence[_Group], room: int) -> Iterator[list[_Group]]:
    """Batch neighboring groups, as many as the cache holds, including the padding of shared parts."""
    batch: list[_Group] = []
    cost = longest = 0
    for group in groups:
        padding = max(longest, len(group.shared)) * (len(batch) + 1)
        if batch and max(cost + group.cost, padding) > room:
            yield batch
            batch, cost, longest = [], 0, 0
        batch.append(group)
        cost, longest = cost + group.cost, max(longest, len(group.shared))
    if batch:
        yield batch


def _batch(model: Transformer, groups: Sequence[_Group], room: int) -> Iterator[tuple[int, Likelihood]]:
    """The shared parts at once, then their rows, as many at once as read `room` tokens of the cache."""
    device = model.embed.weight.device
    limit = model.config.max_position_embeddings
    shared_pages = [len(group.shared) // PAGE for group in groups]
    widest = max(group.widest for group in groups)
    per_row = -(-widest // PAGE)
    most = max(shared_pages)
    rows = [(number, row) for number, group in enumerate(groups) for row in group.rows]
    chunk = max(1, min(len(rows), room // ((most + per_row) * PAGE)))
    # Page 0 is nobody's: padding is written there. Pages of rows are used again by the next rows.
    count = 1 + sum(shared_pages) + chunk * per_row
    k, v = allocate_pool(model.config, count, PAGE, model.activation_dtype, device)
    whole = KVCache(k, v, _padded([], 1, device), _padded([], 1, device), limit, managed=True)
    summary = [1 + sum(shared_pages[:number]) for number in range(len(groups))]
    tables = [list(range(a, a + n)) for a, n in zip(summary, shared_pages, strict=True)]
    beginning = [number for number, n in enumerate(shared_pages) if n]
    if beginning:
        table_BN = _padded([tables[number] for number in beginning], most, device)
        tokens_BT = _padded([groups[number].shared for number in beginning], most * PAGE, device)
        counts_B = torch.tensor([len(groups[number].shared) for number in beginning], device=device)
        cache = whole.view_rows(table_BN, torch.zeros_like(counts_B), most * PAGE, fresh=True)
        model.forward_cached(tokens_BT, cache, counts_B, blocks=_Wanted(counts_B[:1] * 0))
    own = 1 + sum(shared_pages)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        longest = max(len(row.inputs) for _, row in part)
        pages = [
            tables[number] + list(range(own + place * per_row, own + (place + 1) * per_row))
            for place, (number, _) in enumerate(part)
        ]
        lengths = [len(groups[number].shared) for number, _ in part]
        bound = min(limit, max(lengths) + longest)
        cache = whole.view_rows(
            _padded(pages, most + per_row, device), torch.tensor(lengths, device=device), bound
        )
        counts_B = torch.tensor([len(row.inputs) for _, row in part], device=device)
        tokens_BT = _padded([row.inputs for _, row in part], longest, device)
        yield from _judged(model, cache, tokens_BT, counts_B, [row for _, row in part])


def _judged(
    model: Transformer, cache: KVCache, tokens_BT: Tensor, counts_B: Tensor, rows: Sequence[_Row]
) -> Iterator[tuple[int, Likelihood]]:
    """Return the results of the rows' continuations, from the logits at the tokens that predict them."""
    width = tokens_BT.shape[1]
    places: list[int] = []
    starts: list[int] = []
    for number, row in enumerate(rows):
        starts.append(len(places))
        places += range(number * width + row.first, number * width + len(row.inputs))
    index_N = torch.tensor(places, device=tokens_BT.device)
    hidden = _Wanted(index_N)
    model.forward_cached(tokens_BT, cache, counts_B, blocks=hidden)
    # Each target with the place among the wanted ones that predicts it.
    asked = [
        (start + i, target)
        for start, row in zip(starts, rows, strict=True)
        for _, targets in row.wanted
        for i, target in enumerate(targets)
    ]
    at_M = torch.tensor([place for place, _ in asked], device=tokens_BT.device)
    target_M = torch.tensor([target for _, target in asked], device=tokens_BT.device)
    size = max(1, LOGITS // model.config.vocab_size)
    logprobs: list[float] = []
    best: list[bool] = []
    for at, target in zip(at_M.split(size), target_M.split(size), strict=True):
        logits_MV = model.logits(hidden.kept_ND[at]).float()
        chosen_M = torch.log_softmax(logits_MV, dim=-1).gather(1, target[:, None])[:, 0]
        logprobs += chosen_M.tolist()
        best += (logits_MV.argmax(-1) == target).tolist()
    at_once = 0
    for row in rows:
        for number, targets in row.wanted:
            end = at_once + len(targets)
            total = math.fsum(logprobs[at_once:end])
            if not math.isfinite(total):
                raise RunError(
                    f"the model's log-likelihood is {total}: its weights or its activations are not finite"
                )
            yield number, Likelihood(total, all(best[at_once:end]), len(targets))
            at_once = end


def _padded(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Pad rows with zeros to int64 (rows, width)."""
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
