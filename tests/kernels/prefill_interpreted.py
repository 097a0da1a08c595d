"""The prefill kernel in Triton's interpreter compared with attention in
float64, and an engine that uses it for prompts.
"""

from unittest import mock

import torch

from deskside.engine import fused
from deskside.engine.engine import Draft, Engine
from deskside.engine.requests import Request
from deskside.kernels import decode_triton, prefill, prefill_triton
from deskside.kernels.attention import PLAIN, AttentionContext
from tests.engine.test_generate import make, plain
from tests.kernels.decode_interpreted import NEW_TOKENS, SMALL_MODEL, checked, error

# Cached and new tokens of each row: none of either, and ends of pages and tiles on both sides of a boundary.
ROWS = ((0, 70), (0, 0), (5, 1), (64, 64), (100, 40), (0, 1), (31, 33), (200, 2))


def attention(found: dict[str, float]) -> None:
    """Use pages in any order, NaN where nothing may be read, padding after the last row, and rows without tokens."""
    for H, K, C, size, options, padding in (
        (4, 2, 16, 16, PLAIN, 0),
        (6, 2, 24, 32, AttentionContext(softcap=1.5, scale=0.5), 13),
        (4, 1, 16, 32, AttentionContext(window=40, sinks_H=torch.randn(4)), 130),
        (2, 2, 8, 64, AttentionContext(window=300, softcap=0.7, sinks_H=torch.tensor([2.0, -1.0])), 1),
        (3, 1, 16, 16, AttentionContext(window=5), 0),
        (5, 1, 16, 16, PLAIN, 7),
    ):
        lengths, counts = torch.tensor(ROWS).unbind(1)  # strided, like the engine's
        cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        N, L, width = int(cu_seqlens[-1]) + padding, len(ROWS), -(-300 // size)
        table = torch.randperm(L * width + 3)[: L * width].view(L, width)
        k, v = (torch.randn(L * width + 3, K, size, C) for _ in range(2))
        for row in range(L):
            last = int(lengths[row] + counts[row])
            page, offset = table[row, last // size], last % size
            for pool in (k, v):
                pool[page, :, offset:] = float("nan")
                pool[table[row, last // size + 1 :]] = float("nan")
        q = torch.randn(N, H, C)
        ours = prefill_triton.attend_packed(q, k, v, table, lengths, cu_seqlens, options)
        truth = prefill.packed_attention(
            q.double(), k.double(), v.double(), table, lengths, cu_seqlens, options
        )
        found[f"attention {H} {K} {C} {size}"] = error(ours.double(), truth)
        if padding:
            found[f"padding {padding}"] = float(ours[-padding:].abs().max())


def engine(found: dict[str, float]) -> None:
    """Count tokens that differ from the uncached loop's, with and without drafts, as on a GPU with padded passes."""
    model = make(**SMALL_MODEL)
    prompts = [[5, 17, 3], [88, 4, 4, 61, 30, 2], list(range(20)), list(range(11))]
    with (
        mock.patch.object(prefill, "packed_kernel_supports", lambda heads, pool: True),
        mock.patch.object(fused, "qk_norm_rope_into_cache", decode_triton.qk_norm_rope_into_cache),
    ):
        for draft in (None, Draft(model, 2)):
            made = Engine(model, max_batch=3, max_tokens=256, page_size=16, draft=draft, prefill_tokens=16)
            made._run_ahead = True
            for forward in made._models:
                forward.blocks = fused.FusedBlocks(model)
            answers = made.run([Request(tuple(prompt), NEW_TOKENS) for prompt in prompts])
            found[f"engine, drafts {draft is not None}"] = float(
                sum(
                    answer.tokens != plain(model, prompt, NEW_TOKENS)
                    for prompt, (answer,) in zip(prompts, answers, strict=True)
                )
            )


def kernels() -> dict[str, float]:
    """Return the error of each case."""
    return checked(attention)


def engines() -> dict[str, float]:
    """Return the number of wrong tokens of each engine."""
    return checked(engine)
