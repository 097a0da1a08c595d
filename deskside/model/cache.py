"""The key-value cache: allocated once for a number of rows and positions, written in place.

A row's entries beyond its length may hold anything: attention reads entries up to a query's own position only, and a
later token overwrites them. So prompts of unequal length may be padded on the right, and a row may be cut back by
lowering its length.
"""

import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.errors import UsageError

READ_STEP = 64  # attention reads a multiple of this many entries, so that its shapes rarely change


class KVCache:
    """k, v: (layers, B, max_length, K, C); lengths_B: int64, tokens that each row holds.

    `bound` is an upper bound of the lengths that is known without asking the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        shape = (
            config.num_hidden_layers,
            batch,
            max_length,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.max_length = max_length
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.lengths_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.bound = 0

    def reserve(self, tokens: int) -> Tensor:
        """(B, tokens): the positions of the next tokens. Raises UsageError when they do not fit."""
        if self.bound + tokens > self.max_length:
            raise UsageError(
                f"the key-value cache holds {self.max_length} tokens, and {self.bound} + {tokens} were asked for; "
                "make it longer or the text shorter"
            )
        self.bound += tokens
        return self.lengths_B[:, None] + torch.arange(tokens, device=self.lengths_B.device)

    def write(
        self, layer: int, positions_BT: Tensor, k_BTKC: Tensor, v_BTKC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values; returns all that the layer may read, (B, L, K, C) each."""
        rows = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        self.k[layer][rows, positions_BT] = k_BTKC.to(self.k.dtype)
        self.v[layer][rows, positions_BT] = v_BTKC.to(self.v.dtype)
        last = min(self.max_length, -(-self.bound // READ_STEP) * READ_STEP)
        return self.k[layer][:, :last], self.v[layer][:, :last]

    def cut(self, lengths_B: Tensor, bound: int) -> None:
        """Forget what lies beyond the given lengths, none of which is above `bound`."""
        self.lengths_B.copy_(lengths_B)
        self.bound = bound
