"""Device-side state of the rows, and the steps that update it.

Each slot of the state holds one running row. The last slot is a dummy, which lanes without a row point to. A step takes
lanes (slots), updates the state in place and returns its `Output`. It never synchronizes with the device, so the next
step can be queued before the host has seen the tokens of this one, and a step can be captured in a CUDA graph.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.engine.fused import FusedBlocks
from deskside.engine.sampling import GREEDY, Drawn, Settings, draw
from deskside.kernels.decode import KERNEL_DTYPES
from deskside.model.block import DEFAULT_BLOCKS, CachedBlocks
from deskside.model.cache import KVCache, allocate_pool
from deskside.model.transformer import Transformer

WARM_UP = 2  # steps of a kind that are not captured
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class Forward:
    """A model with its part of the pool: pages + 1 pages of `page_size` tokens, of which page 0 takes the padding."""

    def __init__(self, model: Transformer, pages: int, page_size: int, limit: int):
        self.model = model
        device = model.embed.weight.device
        k, v = allocate_pool(model.config, pages + 1, page_size, model.activation_dtype, device)
        none = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self.cache = KVCache(k, v, none, none[:, 0], limit, managed=True)
        # On a CPU the fused blocks are plain torch, and no faster.
        fused = device.type == "cuda" and model.activation_dtype in KERNEL_DTYPES
        self._blocks: CachedBlocks = FusedBlocks(model) if fused else DEFAULT_BLOCKS

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values."""
        return self.cache.k.nbytes + self.cache.v.nbytes

    def prefill(
        self,
        tokens_BT: Tensor,
        counts_B: Tensor,
        table_BN: Tensor,
        lengths_B: Tensor,
        bound: int,
        fresh: bool,
    ) -> Tensor:
        """Prompts, or further parts of them; logits (B, V) of each row's last token."""
        view = self.cache.view_rows(table_BN, lengths_B.clone(), bound, fresh)
        return self.model.forward_cached(tokens_BT, view, counts_B, "last", self._blocks)[:, 0]

    def decode(self, tokens_BT: Tensor, table_BN: Tensor, lengths_B: Tensor, bound: int) -> Tensor:
        """The next tokens; logits (B, T, V)."""
        view = self.cache.view_rows(table_BN, lengths_B.clone(), bound)
        return self.model.forward_cached(tokens_BT, view, blocks=self._blocks)


@dataclass(frozen=True)
class How:
    """The host's decisions about a step. width: see `sampling.width_of`; penalised: whether some row has a
    repetition penalty; logprobs: whether some row wants them."""

    width: int
    penalised: bool
    logprobs: bool


@dataclass(frozen=True)
class Output:
    """Output of a step for each lane: up to W tokens, of which the first count_B are valid (None: one token), and two
    logprobs per token if requested."""

    token_BW: Tensor
    count_B: Tensor | None = None
    logprob_BW: Tensor | None = None
    sampled_logprob_BW: Tensor | None = None

    @staticmethod
    def of(drawn: Drawn) -> "Output":
        """One token for each lane."""
        if drawn.logprob_B is None or drawn.sampled_logprob_B is None:
            return Output(drawn.token_B[:, None])
        return Output(
            drawn.token_B[:, None], None, drawn.logprob_B[:, None], drawn.sampled_logprob_B[:, None]
        )

    def packed(self) -> Tensor:
        """(B, 2 or more): counts, tokens, logprobs, so that one copy brings all to the host. int64 without logprobs,
        else float64, which holds every token exactly."""
        count_B1 = torch.ones_like(self.token_BW[:, :1]) if self.count_B is None else self.count_B[:, None]
        parts = [count_B1, self.token_BW, self.logprob_BW, self.sampled_logprob_BW]
        given = [part for part in parts if part is not None]
        return torch.cat(given if len(given) == 2 else [part.double() for part in given], dim=1)


Values = tuple[int, float | None, float | None]


def unpacked(packed: list[float], logprobs: bool) -> list[Values]:
    """A lane of `Output.packed`: each real token with its logprobs."""
    count, *values = packed
    if not logprobs:
        return [(int(token), None, None) for token in values[: int(count)]]
    W = len(values) // 3
    return [(int(values[i]), values[W + i], values[2 * W + i]) for i in range(int(count))]


class Slots:
    """The rows' state on the device.

    state: (slots + 1, 3) int64, of each row the newest token, which is not in the cache yet, how many tokens are, and
    how many new ones it has got. seen: tokens that prompt and answer hold, kept from the first request on that has a
    repetition penalty.
    """

    def __init__(self, slots: int, pages_per_row: int, vocabulary: int, device: torch.device):
        self.nobody = slots
        self.vocabulary = vocabulary
        self.device = device
        self.state_S3 = torch.zeros(slots + 1, 3, dtype=torch.int64, device=device)
        self.table_SN = torch.zeros(slots + 1, pages_per_row, dtype=torch.int64, device=device)
        self.settings = Settings.of([GREEDY] * (slots + 1), [0] * (slots + 1), device)
        self.seen_SV: Tensor | None = None

    def to_device(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """int64. Does not wait for the device: small copies of ordinary host memory are taken over by the driver
        before the call returns."""
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

    def fill(self, slots: list[int], tables: list[list[int]], lengths: list[int], settings: Settings) -> None:
        """New rows: their pages, how many tokens these hold already, and how to draw."""
        N = self.table_SN.shape[1]
        rows = self.to_device(slots)
        self.table_SN[rows] = self.to_device([pages + [0] * (N - len(pages)) for pages in tables])
        self.state_S3[rows] = self.to_device([[0, length, 0] for length in lengths])
        self.settings.put(rows, settings)

    def see(self, slot: int, prompt: tuple[int, ...]) -> None:
        """The tokens of a new row with a repetition penalty."""
        if self.seen_SV is None:
            shape = (self.nobody + 1, self.vocabulary)
            self.seen_SV = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.seen_SV[slot] = False
        self.seen_SV[slot, self.to_device(prompt)] = True

    def saw(self, lanes: Tensor, tokens: Tensor) -> None:
        """New tokens of these lanes, which broadcast with them. Also while a graph is captured, where `= True` may not
        be written: torch would fetch that constant from the host."""
        assert self.seen_SV is not None
        self.seen_SV[lanes, tokens] = torch.ones_like(tokens, dtype=torch.bool)

    def seen_by(self, lanes_B: Tensor, how: How) -> Tensor | None:
        """(B, V) where a row of the step has a penalty."""
        return self.seen_SV[lanes_B] if how.penalised and self.seen_SV is not None else None

    def take(self, lanes_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Newest tokens, lengths and counts."""
        token_B, length_B, count_B = self.state_S3[lanes_B].unbind(1)
        return token_B, length_B, count_B

    def put(self, lanes_B: Tensor, token_B: Tensor, length_B: Tensor, count_B: Tensor) -> None:
        """Write the current values back. The dummy slot keeps its initial values."""
        self.state_S3[lanes_B] = torch.stack((token_B, length_B, count_B), dim=1)
        self.state_S3[self.nobody].zero_()


@dataclass(frozen=True)
class PromptParts:
    """Parts of the prompts of some lanes: tokens_BT padded, counts_B real ones, complete_B (int64) 1 where it is the
    last part. bound: tokens of the longest row with its part. fresh: nothing of these rows is in the cache."""

    lanes_B: Tensor
    tokens_BT: Tensor
    counts_B: Tensor
    complete_B: Tensor
    bound: int
    fresh: bool


def prefill(forwards: tuple[Forward, ...], slots: Slots, parts: PromptParts, how: How) -> Output:
    """Compute parts of prompts. Rows with a complete prompt get their first token; the others' output means nothing.

    forwards: the model, and the one that drafts for it, whose logits are not used.
    """
    lanes_B, counts_B = parts.lanes_B, parts.counts_B
    _, length_B, drawn_B = slots.take(lanes_B)
    table_BN = slots.table_SN[lanes_B]
    logits_BV, *_ = [
        forward.prefill(parts.tokens_BT, counts_B, table_BN, length_B, parts.bound, parts.fresh)
        for forward in forwards
    ]
    drawn = _draw(slots, lanes_B, logits_BV, drawn_B, how)
    slots.put(lanes_B, drawn.safe_token_B, length_B + counts_B, drawn_B + parts.complete_B)
    if how.penalised:
        assert slots.seen_SV is not None
        slots.seen_SV[lanes_B, drawn.safe_token_B] |= parts.complete_B.bool()
    return Output.of(drawn)


def decode(forward: Forward, slots: Slots, lanes_B: Tensor, bound: int, how: How) -> Output:
    """One more token for each lane."""
    token_B, length_B, count_B = slots.take(lanes_B)
    logits_BTV = forward.decode(token_B[:, None], slots.table_SN[lanes_B], length_B, bound)
    drawn = _draw(slots, lanes_B, logits_BTV[:, 0], count_B, how)
    slots.put(lanes_B, drawn.safe_token_B, length_B + 1, count_B + 1)
    if how.penalised:
        slots.saw(lanes_B, drawn.safe_token_B)
    return Output.of(drawn)


def _draw(slots: Slots, lanes_B: Tensor, logits_BV: Tensor, count_B: Tensor, how: How) -> Drawn:
    settings = slots.settings[lanes_B]
    return draw(logits_BV, settings, how.width, count_B, slots.seen_by(lanes_B, how), how.logprobs)


# CUDA graphs


def bucket(lanes: int) -> int:
    """Return the number of lanes that a step with this many rows runs for."""
    return next((size for size in BUCKETS if lanes <= size), -(-lanes // 32) * 32)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    lanes_B: Tensor
    output: Tensor


class Graphs:
    """CUDA graphs of steps: the host queues one graph instead of a few hundred kernels.

    A graph is captured for each number of lanes, rounded up to a bucket, and each way to draw. The first steps of a
    kind run as they are written: that compiles the kernels, which a capture may not do. Graphs share one pool of
    memory, because they run one after the other and what comes out of one is copied to the host before the next
    begins. Captured memory lives as long as this object.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, _Captured] = {}
        self._runs: dict[Hashable, int] = {}

    def run(self, kind: Hashable, lanes_B: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        """Return step(lanes): packed output, from its graph if there is one.

        `step` must do the same for every call of this kind.
        """
        captured = self._captured.get(kind)
        if captured is None:
            runs = self._runs[kind] = self._runs.get(kind, 0) + 1
            if runs <= WARM_UP:
                return step(lanes_B)
            captured = self._captured[kind] = self._capture(lanes_B, step)
        captured.lanes_B.copy_(lanes_B)
        captured.graph.replay()
        return captured.output

    def _capture(self, lanes_B: Tensor, step: Callable[[Tensor], Tensor]) -> _Captured:
        mine_B = lanes_B.clone()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as a server's do.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step(mine_B)
        return _Captured(graph, mine_B, output)
