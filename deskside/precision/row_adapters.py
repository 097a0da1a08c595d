"""Several named LoRA adapters on one model: each row of a batch uses one of them, or none.

All adapters of a weight are stacked: A is (R, in) and B is (rows, R), and each of the R columns belongs to one adapter.
A pass computes

    y + ((x A^T) * mask) B^T        mask: (N, R), 1 if the column belongs to the adapter of the row

so rows with different adapters share a batch, at the cost of two small GEMMs for each weight, and a step can be
captured in a CUDA graph, because the mask is computed on the device. The products and the memory that they read grow
with the sum of all ranks: ten adapters of rank 16 have 160 columns, while a weight has thousands. With hundreds of
adapters, kernels that read only the matrices of each row's own adapter are better (Punica, Chen et al. 2023,
arXiv 2310.18547).

With DoRA, the rows of the output are scaled too, by numbers that do not change in generation (precision/dora.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Layout = tuple[int, ...]  # the number of the adapter of each column


class RowChoice:
    """Which adapter each row of the current pass uses: numbers from 1, or 0 for the model itself. count: of adapters.

    All `RowAdapters` of a model share one. A mask is computed once in a pass for all weights with the same layout.
    """

    def __init__(self, count: int):
        self.count = count
        self.adapter_N: Tensor | None = None
        self._masks: dict[Layout, Tensor] = {}
        self._owners: dict[Layout, Tensor] = {}

    def set(self, adapter_N: Tensor | None) -> None:
        """Choose for the next pass. adapter_N: int64, one for each token; None if no token has an adapter."""
        self.adapter_N = adapter_N
        self._masks.clear()

    def add_layout(self, layout: Layout, device: torch.device) -> None:
        """Copy a layout to the device, before passes use it."""
        if layout not in self._owners:
            self._owners[layout] = torch.tensor(layout, dtype=torch.int64, device=device)

    def mask(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """Return the mask (N, R) of the current pass."""
        assert self.adapter_N is not None
        if layout not in self._masks:
            self._masks[layout] = (self.adapter_N[:, None] == self._owners[layout]).to(dtype)
        return self._masks[layout]


class RowAdapters(nn.Module):
    """The adapters of one weight.

    Args:
        a_RI: (R, in); b_OR: (rows, R), with the scales. layout: the adapter of each column.
        gain_CO: (count + 1, rows): factors of the output by adapter, for DoRA; None if no adapter has any.
        choice: See `RowChoice`.
    """

    a_RI: Tensor
    b_OR: Tensor
    gain_CO: Tensor | None

    def __init__(self, a_RI: Tensor, b_OR: Tensor, layout: Layout, gain_CO: Tensor | None, choice: RowChoice):
        super().__init__()
        self.layout, self.choice = layout, choice
        self.register_buffer("a_RI", a_RI, persistent=False)
        self.register_buffer("b_OR", b_OR, persistent=False)
        self.register_buffer("gain_CO", gain_CO, persistent=False)
        choice.add_layout(layout, a_RI.device)

    def output(
        self, x: Tensor, y: Tensor, product: Callable[[Tensor], Tensor], bias: Tensor | None
    ) -> Tensor:
        """Return the output of an adapted layer, as `lora.Adapter.output` does. `product` is not needed."""
        adapter_N = self.choice.adapter_N
        if adapter_N is None:
            return y
        inner_NR = (x.flatten(0, -2) @ self.a_RI.T) * self.choice.mask(self.layout, x.dtype)
        y_NO = torch.addmm(y.flatten(0, -2), inner_NR, self.b_OR.T)
        if self.gain_CO is not None:
            gain_NO = self.gain_CO[adapter_N]
            plain_NO = 0.0 if bias is None else (1 - gain_NO) * bias.to(y.dtype)  # the bias is not scaled
            y_NO = y_NO * gain_NO + plain_NO
        return y_NO.view(y.shape)

    def extra_repr(self) -> str:
        return f"{len(set(self.layout))} adapters, {len(self.layout)} columns"
