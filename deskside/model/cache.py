"""The key-value cache: pages of a pool, and for each row a table of the pages that hold it.

Entry number p of a row lies in page table[row, p // S] at place p % S, where a page has S entries. A plain cache
(`KVCache.of`) gives every row one page as long as the row may become. The generation engine shares one pool of small
pages among rows that come and go (`rows`): paged attention, Kwon et al. 2023 (arXiv 2309.06180).

A row's entries beyond its length may hold anything: attention reads entries up to a query's own position only, and a
later token overwrites them. So prompts of unequal length may be padded on the right, and a row may be cut back by
lowering its length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.utils.errors import UsageError

SPARE = 0  # in a pool that the engine manages, the page that is nobody's: padding is written there


@dataclass(frozen=True)
class Places:
    """Where the tokens of one forward pass stand: position, page and place in the page, int64 (B, T) each."""

    position_BT: Tensor
    page_BT: Tensor
    place_BT: Tensor


class KVCache:
    """k, v: (layers, pages, K, S, C); table_BN: int64; lengths_B: int64, tokens that each row holds.

    `bound` is an upper bound of the lengths that is known without asking the device. In a `managed` cache the engine
    has seen to it that there is room: positions beyond `limit` or a row's count are padding, and are clamped.
    """

    def __init__(
        self, k: Tensor, v: Tensor, table_BN: Tensor, lengths_B: Tensor, limit: int, managed: bool = False
    ):
        self.k, self.v = k, v
        self.table_BN, self.lengths_B = table_BN, lengths_B
        self.limit = limit
        self.managed = managed
        self.bound = 0
        self.fresh = True  # whether the next tokens are the first of all rows

    @classmethod
    def of(
        cls, config: ModelConfig, batch: int, max_length: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        """An empty cache of `batch` rows, one page each."""
        k, v = pool(config, batch, max_length, dtype, device)
        table = torch.arange(batch, device=device)[:, None]
        return cls(k, v, table, torch.zeros(batch, dtype=torch.int64, device=device), max_length)

    def rows(self, table_BN: Tensor, lengths_B: Tensor, bound: int, fresh: bool = False) -> "KVCache":
        """Some rows over the same pool. `bound`: entries that attention may have to read, the new ones included."""
        view = KVCache(self.k, self.v, table_BN, lengths_B, self.limit, managed=True)
        view.bound, view.fresh = bound, fresh
        return view

    def reserve(self, tokens: int, counts_B: Tensor | None = None) -> Places:
        """Places of the next tokens, of which counts_B are real (None: all).

        Raises UsageError when they do not fit, unless the cache is managed.
        """
        count_T = torch.arange(tokens, device=self.lengths_B.device)
        position_BT = self.lengths_B[:, None] + count_T
        size = self.k.shape[3]
        if not self.managed:
            if self.bound + tokens > self.limit:
                raise UsageError(
                    f"the key-value cache holds {self.limit} tokens, and {self.bound} + {tokens} were asked for; "
                    "make it longer or the text shorter"
                )
            self.fresh = self.bound == 0
            self.bound += tokens
            page_BT = self.table_BN.gather(1, position_BT // size)
            return Places(position_BT, page_BT, position_BT % size)
        position_BT = position_BT.clamp(max=self.limit - 1)
        if counts_B is not None:  # padding gets the last token's position, so its softmax is not empty
            position_BT = torch.minimum(position_BT, (self.lengths_B + counts_B - 1)[:, None])
        page_BT = self.table_BN.gather(1, position_BT // size)
        if counts_B is not None:
            page_BT = torch.where(count_T < counts_B[:, None], page_BT, SPARE)
        return Places(position_BT, page_BT, position_BT % size)

    def write(self, layer: int, places: Places, k_BTKC: Tensor, v_BTKC: Tensor) -> None:
        """Store one layer's keys and values."""
        self.k[layer][places.page_BT, :, places.place_BT] = k_BTKC.to(self.k.dtype)
        self.v[layer][places.page_BT, :, places.place_BT] = v_BTKC.to(self.v.dtype)

    def cut(self, lengths_B: Tensor, bound: int) -> None:
        """Forget what lies beyond the given lengths, none of which is above `bound`."""
        self.lengths_B.copy_(lengths_B)
        self.bound = bound


def pool(
    config: ModelConfig, pages: int, size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Storage of keys and of values for pages of `size` tokens: (layers, pages, K, size, C) each, zeros."""
    shape = (config.num_hidden_layers, pages, config.num_key_value_heads, size, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
