"""Log-likelihoods of continuations. Each context is computed once for all of its continuations.

Texts are tokenized as in lm-eval (Gao et al., the Language Model Evaluation Harness), so that results agree: white
space at the end of the context moves to the continuation; both are encoded together, and the continuation's tokens are
those after the first len(encode(context)); sequences that exceed the context length are truncated from the left.

Pairs with the same context form a group. The context is computed once, up to the last whole page of the key-value
cache, and the rows of the group share these pages (model/cache.py). Each row consists of the remaining tokens of the
context and one continuation; continuations that differ only in their last token share one row. Logits are computed only
at positions that predict a token of a continuation. With a ten-example context, scoring four endings thus costs little
more than scoring one.

Groups are sorted by length, longest first. This keeps padding small, and running out of memory shows in the first
batch. The other rows of a batch change the results of a row only by rounding.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deskside.data.chat.messages import Conversation
from deskside.data.chat.renderer import Renderer
from deskside.engine.device import cache_tokens
from deskside.model.block import CachedBlocks
from deskside.model.cache import KVCache, allocate_pool
from deskside.model.transformer import Transformer
from deskside.ops.composite import AddNormLinear
from deskside.utils.errors import RunError, UsageError

PAGE_SIZE = 16  # tokens; the rest of a context beyond its last whole page is computed again in each row
MAX_CACHE_BYTES = 2 << 30
ENCODE_BATCH = 4096  # texts that are tokenized at once
MAX_LOGITS = 1 << 26  # float32 values that are computed at once: 256 MiB


@dataclass(frozen=True)
class Pair:
    """Token ids of a context and of its continuation; at least one each."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """The log-likelihood of a continuation.

    Attributes:
        logprob: Sum of the tokens' log-probabilities, in nats.
        greedy: True if greedy decoding produces the continuation.
        tokens: Number of tokens.
    """

    logprob: float
    greedy: bool
    tokens: int


class ContextEncoder:
    """Tokenizes text for an evaluation. Special tokens in a text are plain text.

    Args:
        start_token: Replaces an empty context.
        always_start: Begin every text with the start token.
        chat: Renders each context as a user message with the chat template.
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
        # If the template writes the start token, the tokenizer must not add it again.
        start_text = tokenizer.decode([start_token], skip_special_tokens=False)
        self._adds_special = chat is None or not self._render_user_message("a").startswith(start_text)
        # The special tokens that the tokenizer adds before and after a text.
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        with_special = self._tokenizer.encode("a").ids
        start = next(n for n in range(len(with_special)) if with_special[n : n + len(plain)] == plain)
        self._added = (with_special[:start], with_special[start + len(plain) :])

    def prompts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokenize prompts for generation. An empty one becomes the start token."""
        if self._chat is not None:
            texts = [self._render_user_message(text) for text in texts]
        return [ids or (self.start_token,) for ids in self._encode_all(texts)]

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Tokenize pairs of context and continuation. Raises UsageError if a continuation adds no token."""
        if self._chat is not None:
            rendered = {context: self._render_user_message(context) for context, _ in texts}
            texts = [(rendered[context], self._chat.escape(continuation)) for context, continuation in texts]
        contexts = list(dict.fromkeys(context for context, _ in texts))
        context_ids = dict(zip(contexts, self._encode_all([c.rstrip() for c in contexts]), strict=True))
        pairs = []
        both = self._encode_all([context + continuation for context, continuation in texts])
        for (context, continuation), ids in zip(texts, both, strict=True):
            if context:
                # A context that consists of white space has no tokens left.
                before = context_ids[context]
                pair = Pair(before or (self.start_token,), ids[len(before) :])
            else:
                after = self._tokenizer.encode(continuation, add_special_tokens=False).ids
                pair = Pair((self.start_token,), tuple(after))
            if not pair.continuation:
                raise UsageError(f"{continuation!r}: adds no token to predict after {context[-40:]!r}")
            pairs.append(pair)
        return pairs

    def _encode_all(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        encoded = []
        for start in range(0, len(texts), ENCODE_BATCH):
            for text_ids in self._encode_batch(list(texts[start : start + ENCODE_BATCH])):
                ids = tuple(text_ids)
                if self._always_start and ids[:1] != (self.start_token,):
                    ids = (self.start_token, *ids)
                encoded.append(ids)
        return encoded

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._chat is None:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._adds_special)
            return [encoding.ids for encoding in encodings]
        before, after = self._added if self._adds_special else ([], [])
        return [[*before, *self._chat.ids(text), *after] for text in texts]

    def _render_user_message(self, text: str) -> str:
        """Render the prompt of a chat with one user message."""
        assert self._chat is not None
        return self._chat.text(Conversation([{"role": "user", "content": text}]), add_generation_prompt=True)


@dataclass(frozen=True)
class _Row:
    """A row of a batch: the inputs that follow the shared pages, and the continuations that they predict."""

    inputs: tuple[int, ...]
    first: int  # index of the input that predicts the first token of every continuation
    continuations: tuple[tuple[int, tuple[int, ...]], ...]  # (index of the pair, tokens)


@dataclass(frozen=True)
class _Group:
    """The rows of one context."""

    shared: tuple[int, ...]  # the beginning of the context, in whole pages; may be empty
    rows: tuple[_Row, ...]

    @property
    def max_inputs(self) -> int:
        return max(len(row.inputs) for row in self.rows)

    @property
    def cost(self) -> int:
        """Size in the KV cache, in tokens."""
        return len(self.shared) + sum(-(-len(row.inputs) // PAGE_SIZE) * PAGE_SIZE for row in self.rows)


class _SelectHidden(CachedBlocks):
    """Unfused blocks that store the final hidden states at the positions index_N of the flattened batch."""

    def __init__(self, index_N: Tensor):
        self._index_N = index_N
        self.hidden_ND: Tensor

    def final(self, operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor) -> Tensor:
        """Return only one hidden state, (1, 1, D), for the model's logits. `_score_rows` computes the needed ones."""
        self.hidden_ND = super().final(operator, residual_BTD, delta_BTD).flatten(0, 1)[self._index_N]
        return self.hidden_ND[None, :1]


@torch.no_grad()
def likelihoods(
    model: Transformer,
    pairs: Sequence[Pair],
    *,
    batch_tokens: int,
    tick: Callable[[int], object] | None = None,
) -> list[Likelihood]:
    """Return the likelihood of each pair, in order.

    Args:
        batch_tokens: Approximate size of the KV cache in tokens; less if it would exceed 2 GiB or the free GPU memory.
        tick: Called with the number of pairs of each finished batch.

    Raises UsageError for a continuation that exceeds the model's context length, RunError for logits that are not
    finite.
    """
    results: list[Likelihood | None] = [None] * len(pairs)
    bytes_per_token = model.kv_bytes_per_token(model.activation_dtype)
    max_tokens = cache_tokens(model, min(batch_tokens, int(MAX_CACHE_BYTES / bytes_per_token)), PAGE_SIZE)
    for groups in _batches(_groups(pairs, model.config.max_position_embeddings), max_tokens):
        num_done = 0
        for number, likelihood in _score_batch(model, groups, max_tokens):
            results[number] = likelihood
            num_done += 1
        if tick is not None:
            tick(num_done)
    return [likelihood for likelihood in results if likelihood is not None]


def _groups(pairs: Sequence[Pair], limit: int) -> list[_Group]:
    """Group pairs by context, longest first. limit: the model's context length."""
    # context -> inputs after the context -> [(index of the pair, continuation)]
    by_context: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]] = {}
    for number, pair in enumerate(pairs):
        if len(pair.continuation) > limit:
            raise UsageError(
                f"an answer of {len(pair.continuation)} tokens does not fit the model's {limit} positions; "
                "leave this task out"
            )
        tokens = (pair.context + pair.continuation)[-(limit + 1) :]  # the last token is not an input
        context = tokens[: len(tokens) - len(pair.continuation)]
        rows = by_context.setdefault(context, {})
        rows.setdefault(pair.continuation[:-1], []).append((number, pair.continuation))
    groups = []
    for context, rows in by_context.items():
        # Each row computes at least the last token of the context, which predicts the first token of the continuation.
        shared = (len(context) - 1) // PAGE_SIZE * PAGE_SIZE
        tail = context[shared:]
        group_rows = [
            _Row(tail + after, len(tail) - 1, tuple(continuations)) for after, continuations in rows.items()
        ]
        groups.append(_Group(context[:shared], tuple(group_rows)))
    return sorted(groups, key=lambda group: (len(group.shared), group.max_inputs), reverse=True)


def _batches(groups: Sequence[_Group], max_tokens: int) -> Iterator[list[_Group]]:
    """Batch neighboring groups, as many as fit in the cache, including the padding of the shared parts."""
    batch: list[_Group] = []
    cost = longest = 0
    for group in groups:
        padding = max(longest, len(group.shared)) * (len(batch) + 1)
        if batch and max(cost + group.cost, padding) > max_tokens:
            yield batch
            batch, cost, longest = [], 0, 0
        batch.append(group)
        cost, longest = cost + group.cost, max(longest, len(group.shared))
    if batch:
        yield batch


def _score_batch(
    model: Transformer, groups: Sequence[_Group], max_tokens: int
) -> Iterator[tuple[int, Likelihood]]:
    """Yield (index of the pair, likelihood) of all continuations in a batch of groups.

    The shared parts of all groups are computed at once, then chunks of rows that use up to `max_tokens` of the cache.
    """
    device = model.embed.weight.device
    limit = model.config.max_position_embeddings
    shared_pages = [len(group.shared) // PAGE_SIZE for group in groups]
    max_shared = max(shared_pages)
    pages_per_row = -(-max(group.max_inputs for group in groups) // PAGE_SIZE)
    rows = [(number, row) for number, group in enumerate(groups) for row in group.rows]
    chunk = max(1, min(len(rows), max_tokens // ((max_shared + pages_per_row) * PAGE_SIZE)))
    # Page 0 receives the padding. Then come the shared pages, and the rows' pages, which every chunk uses again.
    first_row_page = 1 + sum(shared_pages)
    num_pages = first_row_page + chunk * pages_per_row
    k, v = allocate_pool(model.config, num_pages, PAGE_SIZE, model.activation_dtype, device)
    all_pages = KVCache(k, v, _padded([], 1, device), _padded([], 1, device), limit, managed=True)
    first_pages = [1 + sum(shared_pages[:number]) for number in range(len(groups))]
    tables = [list(range(first, first + n)) for first, n in zip(first_pages, shared_pages, strict=True)]
    sharing = [number for number, n in enumerate(shared_pages) if n]
    if sharing:
        table_BN = _padded([tables[number] for number in sharing], max_shared, device)
        tokens_BT = _padded([groups[number].shared for number in sharing], max_shared * PAGE_SIZE, device)
        counts_B = torch.tensor([len(groups[number].shared) for number in sharing], device=device)
        cache = all_pages.view_rows(table_BN, torch.zeros_like(counts_B), max_shared * PAGE_SIZE, fresh=True)
        # Only the cache is needed, so a single hidden state is selected.
        model.forward_cached(tokens_BT, cache, counts_B, blocks=_SelectHidden(counts_B[:1] * 0))
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        pages = []
        for place, (number, _) in enumerate(part):
            first = first_row_page + place * pages_per_row
            pages.append(tables[number] + list(range(first, first + pages_per_row)))
        lengths = [len(groups[number].shared) for number, _ in part]
        longest = max(len(row.inputs) for _, row in part)
        bound = min(limit, max(lengths) + longest)
        table_BN = _padded(pages, max_shared + pages_per_row, device)
        cache = all_pages.view_rows(table_BN, torch.tensor(lengths, device=device), bound)
        counts_B = torch.tensor([len(row.inputs) for _, row in part], device=device)
        tokens_BT = _padded([row.inputs for _, row in part], longest, device)
        yield from _score_rows(model, cache, tokens_BT, counts_B, [row for _, row in part])


def _score_rows(
    model: Transformer, cache: KVCache, tokens_BT: Tensor, counts_B: Tensor, rows: Sequence[_Row]
) -> Iterator[tuple[int, Likelihood]]:
    """Yield (index of the pair, likelihood) of the rows' continuations.

    The N inputs that predict a token are selected first. The continuations of a row share them, so there may be more
    than N targets.
    """
    width = tokens_BT.shape[1]
    index: list[int] = []  # of the N inputs, in the flattened batch
    predictors: list[int] = []  # by target, which of the N inputs predicts it
    all_targets: list[int] = []
    for number, row in enumerate(rows):
        for _, targets in row.continuations:
            predictors += range(len(index), len(index) + len(targets))
            all_targets += targets
        index += range(number * width + row.first, number * width + len(row.inputs))
    selected = _SelectHidden(torch.tensor(index, device=tokens_BT.device))
    model.forward_cached(tokens_BT, cache, counts_B, blocks=selected)
    size = max(1, MAX_LOGITS // model.config.vocab_size)
    logprobs: list[float] = []
    greedy: list[bool] = []
    for start in range(0, len(all_targets), size):
        predictor_M = torch.tensor(predictors[start : start + size], device=tokens_BT.device)
        target_M = torch.tensor(all_targets[start : start + size], device=tokens_BT.device)
        logits_MV = model.logits(selected.hidden_ND[predictor_M]).float()
        logprobs += torch.log_softmax(logits_MV, dim=-1).gather(1, target_M[:, None])[:, 0].tolist()
        greedy += (logits_MV.argmax(-1) == target_M).tolist()
    start = 0
    for row in rows:
        for number, targets in row.continuations:
            end = start + len(targets)
            total = math.fsum(logprobs[start:end])
            if not math.isfinite(total):
                raise RunError(
                    f"the model's log-likelihood is {total}: its weights or its activations are not finite"
                )
            yield number, Likelihood(total, all(greedy[start:end]), len(targets))
            start = end


def _padded(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Return the rows, padded with zeros: int64 (rows, width)."""
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
