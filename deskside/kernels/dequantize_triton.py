"""`kernels/dequantize.py` in Triton: tiles of 8 rows of 512 codes, 32 codes a thread, read 16 bytes at a time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 8, 512


@triton.jit
def _dequantize_int8(  # type: ignore[no-untyped-def]
    codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    scale = tl.load(scale_ptr + row, row < rows, 0.0)
    weight = tl.load(codes_ptr + at, inside, 0).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + at, weight.to(out_ptr.dtype.element_ty), inside)


def dequantize_int8(codes_RC: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """See `kernels.dequantize.dequantize_int8`."""
    codes_RC, scale_R = codes_RC.contiguous(), scale_R.contiguous()
    rows, columns = codes_RC.shape
    out = torch.empty(rows, columns, dtype=dtype, device=codes_RC.device)
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    _dequantize_int8[grid](codes_RC, scale_R, out, rows, columns, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS)
    return out
