"""The output head and its loss as one operator, which never makes the logits of a whole batch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from deskside.kernels.cross_entropy import CHUNK_TOKENS, ReplacedRows, linear_cross_entropy


class HeadLoss(nn.Module):
    """Summed cross-entropy of a linear head. `execution` is set by a precision recipe; None is hidden's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_override: Callable[..., Tensor] | None = None

    def forward(
        self,
        hidden_ND: Tensor,
        weight_VD: nn.Parameter,
        targets_N: Tensor,
        softcap: float | None = None,
        z_loss: float = 0.0,
        chunk_tokens: int = CHUNK_TOKENS,
        rows: ReplacedRows | None = None,
    ) -> Tensor:
        """See `linear_cross_entropy`. Raises TypeError for rows where a recipe computes the head."""
        function = self.forward_override or linear_cross_entropy
        options: dict[str, Any] = {} if rows is None else {"rows": rows}
        return function(
            hidden_ND,
            weight_VD,
            targets_N,
            softcap=softcap,
            z_loss=z_loss,
            chunk_tokens=chunk_tokens,
            **options,
        )
