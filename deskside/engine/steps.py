"""What the device does: the rows' state there, and the steps over it.

Every slot of the state is a row that may be running; the last slot is nobody's, and lanes of a step that have no row
point to it. A step takes lanes (slots), reads and writes the state in place, and returns what came out (`Output`). It
asks the device nothing, so the next step can be queued before the host has seen the tokens of this one, and the whole
step can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.engine.fused import FusedBlocks
from deskside.engine.sampling import GREEDY, Drawn, Settings, draw
from deskside.model.block import Block
from deskside.model.cache import KVCache, pool
from deskside.model.transformer import Transformer


class Forward:
    """A model with its part of the pool: pages + 1 pages of `page_size` tokens, of which page 0 takes the padding."""

    def __init__(self, model: Transformer, pages: int, page_size: int, limit: int):
        self.model = model
        device = model.embed.weight.device
        k, v = pool(model.config, pages + 1, page_size, model.activation_dtype, device)
        none = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self.cache = KVCache(k, v, none, none[:, 0], limit, managed=True)
        # On a CPU the fused blocks are plain torch, and no faster.
        self._block = FusedBlocks(model) if device.type == "cuda" else Block.forward_cached

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
        view = self.cache.rows(table_BN, lengths_B.clone(), bound, fresh)
        return self.model.forward_cached(tokens_BT, view, counts_B, logits_of="last")[:, 0]

    def decode(self, tokens_BT: Tensor, table_BN: Tensor, lengths_B: Tensor, bound: int) -> Tensor:
        """The next tokens; logits (B, T, V)."""
        view = self.cache.rows(table_BN, lengths_B.clone(), bound)
        return self.model.forward_cached(tokens_BT, view, block=self._block)


@dataclass(frozen=True)
class Output:
    """What a step gave each lane: W tokens at most, of which the first count_B are real, with their logprobs."""

    token_BW: Tensor
    logprob_BW: Tensor
    sampled_logprob_BW: Tensor
    count_B: Tensor

    @staticmethod
    def of(drawn: Drawn) -> "Output":
        """One token for each lane."""
        return Output(
            drawn.token_B[:, None],
            drawn.logprob_B[:, None],
            drawn.sampled_logprob_B[:, None],
            torch.ones_like(drawn.token_B),
        )

    def packed(self) -> Tensor:
        """(B, 1 + 3 W) float64, which holds every token exactly: one tensor is one copy to the host."""
        parts = (self.count_B[:, None], self.token_BW, self.logprob_BW, self.sampled_logprob_BW)
        return torch.cat([part.double() for part in parts], dim=1)


class Slots:
    """The rows' state on the device.

    token: the newest one, not in the cache yet. lengths: tokens in the cache. count: new tokens so far. seen: tokens
    that prompt and answer hold, kept from the first request on that has a repetition penalty.
    """

    def __init__(self, slots: int, pages_per_row: int, vocabulary: int, device: torch.device):
        self.nobody = slots
        self.vocabulary = vocabulary
        self.device = device
        self.token_S, self.lengths_S, self.count_S = (
            torch.zeros(slots + 1, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.table_SN = torch.zeros(slots + 1, pages_per_row, dtype=torch.int64, device=device)
        self.settings = Settings.of([GREEDY] * (slots + 1), [0] * (slots + 1), device)
        self.seen_SV: Tensor | None = None

    def lanes(self, slots: list[int]) -> Tensor:
        """Slots as a tensor on the device. From here on nothing waits for the device: small copies of ordinary host
        memory are taken over by the driver before the call returns."""
        return torch.tensor(slots, dtype=torch.int64).to(self.device, non_blocking=True)

    def fill(self, slots: list[int], tables: list[list[int]], lengths: list[int], settings: Settings) -> None:
        """New rows: their pages, how many tokens these hold already, and how to draw."""
        N = self.table_SN.shape[1]
        rows = self.lanes(slots)
        table = [pages + [0] * (N - len(pages)) for pages in tables]
        self.table_SN[rows] = torch.tensor(table, dtype=torch.int64).to(self.device, non_blocking=True)
        self.lengths_S[rows] = torch.tensor(lengths, dtype=torch.int64).to(self.device, non_blocking=True)
        self.count_S[rows] = 0
        self.settings.put(rows, settings)

    def see(self, slot: int, prompt: tuple[int, ...]) -> None:
        """The tokens of a new row with a repetition penalty."""
        if self.seen_SV is None:
            shape = (self.nobody + 1, self.vocabulary)
            self.seen_SV = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.seen_SV[slot] = False
        self.seen_SV[slot, self.lanes(list(prompt))] = True

    def advance(self, lanes_B: Tensor, token_B: Tensor, new_B: Tensor) -> None:
        """Lanes have `new` more tokens in the cache and drawn, the newest is `token`."""
        self.token_S[lanes_B] = token_B
        self.lengths_S[lanes_B] += new_B
        self.count_S[lanes_B] += new_B
        self.lengths_S[self.nobody] = 0


def prefill(
    forwards: tuple[Forward, ...],
    slots: Slots,
    lanes_B: Tensor,
    tokens_BT: Tensor,
    counts_B: Tensor,
    complete_B: Tensor,
    bound: int,
    fresh: bool,
    width: int,
    penalised: bool,
) -> Output:
    """Parts of prompts. Rows whose prompt is complete with it get their first token; the others' output means nothing.

    forwards: the model, and the one that drafts for it, whose logits are not used.
    """
    table_BN, lengths_B = slots.table_SN[lanes_B], slots.lengths_S[lanes_B]
    logits_BV, *_ = [
        forward.prefill(tokens_BT, counts_B, table_BN, lengths_B, bound, fresh) for forward in forwards
    ]
    slots.lengths_S[lanes_B] += counts_B
    drawn = _draw(slots, lanes_B, logits_BV, width, penalised)
    slots.token_S[lanes_B] = drawn.token_B
    slots.count_S[lanes_B] += complete_B
    if penalised:
        assert slots.seen_SV is not None
        slots.seen_SV[lanes_B, drawn.token_B] |= complete_B.bool()
    return Output.of(drawn)


def decode(
    forward: Forward, slots: Slots, lanes_B: Tensor, bound: int, width: int, penalised: bool
) -> Output:
    """One more token for each lane."""
    logits_BTV = forward.decode(
        slots.token_S[lanes_B][:, None], slots.table_SN[lanes_B], slots.lengths_S[lanes_B], bound
    )
    drawn = _draw(slots, lanes_B, logits_BTV[:, 0], width, penalised)
    slots.advance(lanes_B, drawn.token_B, torch.ones_like(drawn.token_B))
    if penalised:
        assert slots.seen_SV is not None
        slots.seen_SV[lanes_B, drawn.token_B] = True
    return Output.of(drawn)


def _draw(slots: Slots, lanes_B: Tensor, logits_BV: Tensor, width: int, penalised: bool) -> Drawn:
    seen_BV = slots.seen_SV[lanes_B] if penalised and slots.seen_SV is not None else None
    return draw(logits_BV, slots.settings[lanes_B], width, slots.count_S[lanes_B], seen_BV)
