"""The key-value cache: a pool of pages, and for each row a table of its pages.

Entry p of a row is in page table[row, p // S] at offset p % S, where a page has S entries. In a plain cache
(`KVCache.allocate`) every row has one page of the maximum length. Generation and evaluation share one pool of small
pages among changing rows (`view_rows`, `view_packed`): paged attention, Kwon et al. 2023 (arXiv 2309.06180).

Entries of a row beyond its length may have any value: attention reads entries only up to the position of the query, and
later tokens overwrite the others. So prompts of unequal length may be padded on the right, and a row is truncated by
lowering its length.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.utils.errors import UsageError

PADDING_PAGE = 0  # of a managed pool: belongs to no row, and padding is written to it


class CacheSlots:
    """Places where the tokens of one forward pass are stored: position in the row, page, and offset in the page, int64.

    pages: returns page_BT. Pages and offsets are computed when they are first read: the kernel of a decoding step finds
    them itself. single: every row has one token (padding of the batch has a row of its own).
    """

    def __init__(
        self, position_BT: Tensor, page_size: int, pages: Callable[[], Tensor], single: bool = False
    ):
        self.position_BT = position_BT
        self.single = single
        self._page_size, self._pages = page_size, pages

    @cached_property
    def page_BT(self) -> Tensor:
        """The page of each token."""
        return self._pages()

    @cached_property
    def offset_BT(self) -> Tensor:
        """The place of each token in its page."""
        return self.position_BT % self._page_size


class KVCache:
    """The key-value cache of a batch of rows.

    k, v: (layers, pages, K, S, C).
    table_BN: the pages of each row, int64. lengths_B: number of tokens in each row, int64.
    limit: largest length. bound: an upper bound of the lengths that is known without synchronizing with the device.
    managed: the caller has made sure that the tokens fit, so positions beyond `limit` or a row's count are padding and
        are clamped.
    fresh: True if the tokens of the current forward pass are the first of all rows.
    cu_seqlens: the tokens of the next forward pass are packed, (1, N): row b has those from cu_seqlens[b] on, and what
        follows the last row is padding. int64 (B + 1,); None: the tokens are (B, T).
    """

    def __init__(
        self, k: Tensor, v: Tensor, table_BN: Tensor, lengths_B: Tensor, limit: int, managed: bool = False
    ):
        self.k, self.v = k, v
        self.table_BN, self.lengths_B = table_BN, lengths_B
        self.limit = limit
        self.managed = managed
        self.bound = 0
        self.fresh = True
        self.cu_seqlens: Tensor | None = None

    @classmethod
    def allocate(
        cls, config: ModelConfig, batch: int, max_length: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        """Return an empty cache of `batch` rows, with one page each."""
        k, v = allocate_pool(config, batch, max_length, dtype, device)
        table = torch.arange(batch, device=device)[:, None]
        return cls(k, v, table, torch.zeros(batch, dtype=torch.int64, device=device), max_length)

    def view_rows(self, table_BN: Tensor, lengths_B: Tensor, bound: int, fresh: bool = False) -> "KVCache":
        """Return a managed cache of some rows over the same pool. bound: that of the lengths after the next tokens."""
        view = KVCache(self.k, self.v, table_BN, lengths_B, self.limit, managed=True)
        view.bound, view.fresh = bound, fresh
        return view

    def view_packed(self, table_BN: Tensor, lengths_B: Tensor, cu_seqlens: Tensor) -> "KVCache":
        """Return a managed cache of some rows over the same pool, for packed tokens (see `cu_seqlens`)."""
        view = KVCache(self.k, self.v, table_BN, lengths_B, self.limit, managed=True)
        view.fresh, view.cu_seqlens = False, cu_seqlens
        return view

    def reserve(self, tokens: int, counts_B: Tensor | None = None) -> CacheSlots:
        """Return the slots of the next tokens; in each row, those after the first counts_B are padding (None: none).

        Packed tokens: the slots are (1, N), and counts_B is not used.

        Raises UsageError if they do not fit, unless the cache is managed.
        """
        page_size = self.k.shape[3]
        if self.managed and tokens == 1 and counts_B is None and self.cu_seqlens is None:
            position_B1 = self.lengths_B[:, None].clamp(max=self.limit - 1)
            return CacheSlots(
                position_B1, page_size, lambda: self.table_BN.gather(1, position_B1 // page_size), single=True
            )
        index_T = torch.arange(tokens, device=self.lengths_B.device)
        if self.cu_seqlens is not None:
            row_T = torch.searchsorted(self.cu_seqlens, index_T, right=True) - 1
            padding_T = row_T == len(self.lengths_B)
            row_T = row_T.clamp(max=len(self.lengths_B) - 1)
            position_T = (self.lengths_B[row_T] + index_T - self.cu_seqlens[row_T]).clamp(max=self.limit - 1)
            page_T = torch.where(padding_T, PADDING_PAGE, self.table_BN[row_T, position_T // page_size])
            return CacheSlots(position_T[None], page_size, lambda: page_T[None])
        position_BT = self.lengths_B[:, None] + index_T
        if not self.managed:
            if self.bound + tokens > self.limit:
                raise UsageError(
                    f"the key-value cache has room for {self.limit} tokens, but needs {self.bound + tokens}; "
                    "use a longer cache or a shorter text"
                )
            self.fresh = self.bound == 0
            self.bound += tokens
            page_BT = self.table_BN.gather(1, position_BT // page_size)
            return CacheSlots(position_BT, page_size, lambda: page_BT)
        position_BT = position_BT.clamp(max=self.limit - 1)
        if counts_B is not None:  # padding gets the last token's position, so its softmax is not empty
            position_BT = torch.minimum(position_BT, (self.lengths_B + counts_B - 1)[:, None])
        page_BT = self.table_BN.gather(1, position_BT // page_size)
        if counts_B is not None:
            page_BT = torch.where(index_T < counts_B[:, None], page_BT, PADDING_PAGE)
        return CacheSlots(position_BT, page_size, lambda: page_BT)

    def advance(self, tokens: int, counts_B: Tensor | None = None) -> None:
        """Add the tokens of a forward pass to the lengths."""
        if self.cu_seqlens is not None:
            self.lengths_B = self.lengths_B + self.cu_seqlens.diff()
        else:
            self.lengths_B = self.lengths_B + (tokens if counts_B is None else counts_B)

    def last_tokens(self, x_BTD: Tensor, counts_B: Tensor | None = None) -> Tensor:
        """Return the values of each row's last token in a forward pass: (B, 1, D), also of packed tokens (1, N, D).

        Those of a row without tokens are those of some other token.
        """
        if self.cu_seqlens is not None:
            return x_BTD[0, (self.cu_seqlens[1:] - 1).clamp(min=0)][:, None]
        if counts_B is None:
            return x_BTD[:, -1:]
        return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), counts_B - 1][:, None]

    def write(self, layer: int, slots: CacheSlots, k_BTKC: Tensor, v_BTKC: Tensor) -> None:
        """Store one layer's keys and values."""
        self.k[layer][slots.page_BT, :, slots.offset_BT] = k_BTKC.to(self.k.dtype)
        self.v[layer][slots.page_BT, :, slots.offset_BT] = v_BTKC.to(self.v.dtype)


def allocate_pool(
    config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return keys and values of empty pages of `page_size` tokens: (layers, pages, K, page_size, C) each, zeros."""
    shape = (config.num_hidden_layers, pages, config.num_key_value_heads, page_size, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
