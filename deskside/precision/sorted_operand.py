"""Quantization of rows sorted by expert, and of the experts' weights, into operands of grouped products.

Each expert is quantized as if it were a separate tensor, so that an expert with small gradients loses nothing to one
with large gradients.

    FP8     rows form     (S, K) with a scale per row (S,); of weights (E, M, K), scales (E, M)
            columns form  (K, S) with a scale per expert (E,); of weights (E, K, M), scales per expert and column (E, K)
    NVFP4   code x block scale in bfloat16, in the layout of the source, with a global scale per expert (E,)

Suffixes: N tokens, S sorted rows, E experts, K columns, M rows of an expert's weight.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels import moe
from deskside.kernels.moe import Routing
from deskside.kernels.nvfp4.operand import Along, required_multiple
from deskside.precision import nvfp4
from deskside.precision.formats import DTYPE
from deskside.precision.quantized_operand import UNQUANTIZED, Draws, QuantizedOperand

# Rows that the quantizer on a GPU takes together, and a multiple of the size of every Hadamard transform.
NVFP4_ROWS = 128


@dataclass(frozen=True)
class SortedRows:
    """Rows in the order of `routing`, by expert.

    source: the tokens (N, K), which the kernels put in order, or, if `in_order`, the rows (S, K). None if the kernel
    that computed the rows has written only `cast`, the rows in FP8 with a scale per row. scale_S: the scales of an
    earlier cast of the tokens, if its result was not kept.
    """

    source: Tensor | None
    routing: Routing
    in_order: bool = False
    cast: QuantizedOperand | None = None
    scale_S: Tensor | None = None

    @cached_property
    def gathered(self) -> Tensor:
        """The rows (S, K). Casts to FP8 put tokens in order themselves and do not need this copy."""
        assert self.source is not None
        return self.source if self.in_order else moe.dispatch(self.source, self.routing.tokens_S)

    @property
    def in_fp8(self) -> QuantizedOperand:
        """The rows in FP8, with a scale per row."""
        if self.cast is not None:
            return self.cast
        assert self.source is not None
        if self.in_order:
            return QuantizedOperand(*moe.cast_rows(self.source))
        return QuantizedOperand(*moe.dispatch_fp8(self.source, self.routing.slots_Nk, self.routing.tokens_S))

    def columns_in_fp8(self) -> QuantizedOperand:
        """Return the rows in FP8, transposed, with a scale per expert."""
        ends_E = self.routing.ends_E
        if self.cast is None and self.scale_S is not None:
            assert self.source is not None and not self.in_order
            columns = moe.dispatch_columns(self.source, self.routing.tokens_S, self.scale_S, ends_E)
        else:
            cast = self.in_fp8
            assert cast.scale is not None
            columns = moe.transpose_rows(cast.values, cast.scale, ends_E)
        return QuantizedOperand(*columns, transposed=True)


def alignment(operand: Operand) -> int:
    """Return the number that each expert's rows must be a multiple of: 16 for FP8, a tile of rows for NVFP4."""
    if operand.format in UNQUANTIZED:
        return 1
    return NVFP4_ROWS if operand.format == "nvfp4" else required_multiple(operand)


def quantize_rows_of_experts(
    rows: SortedRows, operand: Operand, along: Along, draws: Draws, product: int
) -> QuantizedOperand:
    """Quantize sorted rows into an operand of a grouped product, as `quantize_operand` does with a matrix."""
    if operand.format in UNQUANTIZED:
        return QuantizedOperand(rows.gathered)
    if operand.format in DTYPE:
        return rows.in_fp8 if along == "columns" else rows.columns_in_fp8()
    x_SK = rows.gathered
    signs = draws.signs(product, operand.hadamard, x_SK.device) if operand.fresh_signs else None
    seed = draws.next() if operand.rounding != "nearest" else 0
    if x_SK.is_cuda:
        return _nvfp4_on_gpu(x_SK, operand, along, signs, seed, rows.routing.ends_E)
    lengths = torch.diff(rows.routing.ends_E, prepend=rows.routing.ends_E.new_zeros(1)).tolist()
    values, scale_E = _nvfp4(x_SK.split(lengths), operand, along, signs, seed)
    return QuantizedOperand(torch.cat(values), scale_E)


def quantize_expert_weights(
    weight_EMK: Tensor, operand: Operand, along: Along, draws: Draws, product: int
) -> QuantizedOperand:
    """Quantize the experts' weights for a product that sums over their "columns" (K) or their "rows" (M)."""
    if operand.format in DTYPE:
        if along == "rows":
            return QuantizedOperand(*moe.cast_weight_columns(weight_EMK), transposed=True)
        rows, inverse = moe.cast_rows(weight_EMK.flatten(0, 1))
        return QuantizedOperand(rows.view(weight_EMK.shape), inverse.view(weight_EMK.shape[:2]))
    signs = draws.signs(product, operand.hadamard, weight_EMK.device) if operand.fresh_signs else None
    seed = draws.next() if operand.rounding != "nearest" else 0
    E, M, K = weight_EMK.shape
    if weight_EMK.is_cuda and M % NVFP4_ROWS == 0:
        ends_E = torch.arange(M, E * M + 1, M, dtype=torch.int32, device=weight_EMK.device)
        whole = _nvfp4_on_gpu(weight_EMK.view(E * M, K), operand, along, signs, seed, ends_E)
        return QuantizedOperand(whole.values.view(E, M, K), whole.scale)
    values, scale_E = _nvfp4(weight_EMK, operand, along, signs, seed)
    return QuantizedOperand(torch.stack(values), scale_E)


def _nvfp4_on_gpu(
    x_SK: Tensor, operand: Operand, along: Along, signs: Tensor | None, seed: int, ends_E: Tensor
) -> QuantizedOperand:
    """Quantize sorted rows, whose number is a multiple of NVFP4_ROWS for each expert, in two kernels."""
    from deskside.kernels.nvfp4 import quantize as triton_nvfp4

    emulated = triton_nvfp4.quantize(x_SK, operand, along, signs=signs, seed=seed, ends_E=ends_E)
    return QuantizedOperand(emulated.values, emulated.global_scale)


def _nvfp4(
    experts: Iterable[Tensor], operand: Operand, along: Along, signs: Tensor | None, seed: int
) -> tuple[list[Tensor], Tensor]:
    """Quantize the matrix of each expert. Returns their emulated values, and their global scales (E,).

    It uses plain torch, for CPUs and for weights with a number of rows that the kernels do not support.
    """
    values, scales = [], []
    generator: torch.Generator | None = None
    for x in experts:
        generator = generator or torch.Generator(x.device).manual_seed(seed)
        quantized = nvfp4.quantize(x, operand, along, signs=signs, generator=generator)
        values.append(quantized.emulated)
        scales.append(quantized.global_scale)
    return values, torch.stack(scales)
