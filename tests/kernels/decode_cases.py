"""Launches of the decoding kernels, recorded to be compiled for cards that are not here: see compile_cases.py."""

from collections.abc import Iterator

import torch
from torch import Tensor

from deskside.kernels import decode_triton
from deskside.kernels.fused.reference import QkvLayout
from tests.kernels.compile_cases import CAPABILITIES, CompileCase, recorded

SHAPES = (  # query heads, key-value heads, channels, new tokens, window, dtype
    (12, 3, 64, 1, None, torch.bfloat16),
    (32, 8, 128, 1, None, torch.bfloat16),
    (32, 8, 128, 5, 512, torch.bfloat16),
    (16, 16, 256, 1, None, torch.bfloat16),
    (12, 3, 64, 1, None, torch.float32),
    (16, 1, 128, 4, None, torch.float32),
)


def _new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cases() -> Iterator[CompileCase]:
    for H, K, C, T, window, dtype in SHAPES:
        how = f"{H} x {K} x {C}, {T} tokens, window {window}, {str(dtype).removeprefix('torch.')}"
        q, pages = _new(16, T, H, C, dtype=dtype), _new(4096, K, 32, C, dtype=dtype)
        table, positions = _new(16, 64, dtype=torch.int64), _new(16, T, dtype=torch.int64)
        attention = (q, pages, pages, table, positions, window, C**-0.5)
        for number, name in enumerate(("decode attention", "join of spans")):
            yield recorded(f"{name} {how}", CAPABILITIES, decode_triton.attend, *attention, number=number)
        norms = (_new(C, dtype=torch.float32),) * 2 if T == 1 else None
        angles = (_new(2048, C // 2, dtype=torch.float32),) * 2 if window is None else None
        layout, N = QkvLayout(H, K, C, 1e-6), 16 * T
        places = (_new(N, dtype=torch.int64),) * 3
        yield recorded(
            f"into the cache {how}",
            CAPABILITIES,
            decode_triton.into_cache,
            *(_new(N, layout.width, dtype=dtype), norms, angles, layout, (pages, pages), places),
        )
    row, strided = _new(16, dtype=torch.int64), _new(16, 2, dtype=torch.int64)[:, 1]
    for W in (64, 151936):
        tokens = _new(W, dtype=torch.int64).expand(16, W) if W > 64 else _new(16, W, dtype=torch.int64)
        yield recorded(
            f"exponentials of {W}",
            CAPABILITIES,
            decode_triton.exponentials,
            *(strided, row, 1, tokens),
        )


COMPILE_CASES = tuple(_cases())
