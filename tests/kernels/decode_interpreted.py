"""The decoding kernels in Triton's interpreter, compared with their torch forms."""

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from deskside.engine import fused, steps
from deskside.engine.counter_rng import PROPOSE, exponentials, stream_of
from deskside.engine.engine import Draft, Engine
from deskside.engine.requests import Request
from deskside.kernels import (
    decode,
    decode_new_triton,
    decode_step_triton,
    decode_triton,
    few_tokens,
    few_tokens_triton,
)
from deskside.kernels.attention import PLAIN, AttentionContext
from deskside.kernels.fused.reference import QkvLayout
from deskside.kernels.moe import grouped, moe_launch
from tests.engine.test_generate import VARIANTS, make, plain

# The interpreter needs milliseconds for each program, that is, for each head of each token.
SMALL_MODEL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 5,
    "window_pattern": "SL",
}
NEW_TOKENS = 3


def error(ours: Tensor, truth: Tensor) -> float:
    """Return the relative error; infinity if a value is NaN."""
    return float(((ours - truth).norm() / truth.norm()).nan_to_num(float("inf")))


def attention(found: dict[str, float]) -> None:
    """Use lengths on both sides of a page, a tile and a span, pages in any order,
    and NaN where nothing may be read.
    """
    for H, K, C, T, size, options in (
        (4, 2, 16, 1, 16, PLAIN),
        (6, 2, 24, 3, 32, AttentionContext(softcap=1.5, scale=0.5)),
        (4, 1, 16, 1, 32, AttentionContext(window=40, sinks_H=torch.randn(4))),
        (2, 2, 8, 4, 64, AttentionContext(window=300, softcap=0.7, sinks_H=torch.tensor([2.0, -1.0]))),
        (3, 1, 16, 2, 16, AttentionContext(window=5)),
    ):
        last = torch.tensor([T - 1, size - 1, 64, 255, 256, 300, 575])
        B, width = len(last), -(-600 // size)
        table = torch.randperm(B * width + 3)[: B * width].view(B, width)
        k, v = (torch.randn(B * width + 3, K, size, C) for _ in range(2))
        positions = last[:, None] - T + 1 + torch.arange(T)
        for row in range(B):
            used = int(last[row]) // size
            k[table[row, used + 1 :]] = float("nan")
            v[table[row, used + 1 :]] = float("nan")
        q = torch.randn(B, T, H, C)
        ours = decode_triton.attend(q, k, v, table, positions, options)
        clean_k, clean_v = k.nan_to_num(7.0), v.nan_to_num(7.0)
        truth = decode.paged_attention(q, clean_k, clean_v, table, positions, 600, options)
        found[f"attention {H} {K} {C} {T} {size}"] = error(ours, truth)


def long_rows(found: dict[str, float]) -> None:
    """Use so many tokens that spans are doubled. Only the first pages of a row exist."""
    assert decode_triton.span_size(16384) == 256 and decode_triton.span_size(16385) == 512
    k, v, q = torch.randn(60, 1, 16, 16), torch.randn(60, 1, 16, 16), torch.randn(2, 1, 2, 16)
    table = torch.zeros(2, 1100, dtype=torch.int64)
    table[:, :60] = torch.stack((torch.randperm(60), torch.randperm(60)))
    positions = torch.tensor([[520], [959]])
    for window in (None, 300):
        options = AttentionContext(window=window, scale=0.25)
        ours = decode_triton.attend(q, k, v, table, positions, options)
        truth = decode.paged_attention(q, k, v, table, positions, 960, options)
        found[f"long rows, window {window}"] = error(ours, truth)


def qk_norm_rope_into_cache(found: dict[str, float]) -> None:
    layout = QkvLayout(3, 1, 24, 1e-6)
    N, pages = 70, 6  # two blocks of tokens
    qkv = torch.randn(N, layout.width)
    norms, angles = (torch.rand(24), torch.rand(24)), (torch.randn(50, 12), torch.randn(50, 12))
    position = torch.randint(0, 50, (N,))
    place = torch.randperm(pages * 16)[:N]
    for norm in (norms, None):
        for angle in (angles, None):
            alone = None
            # The largest grid, and the tokens: with a program for each head, for all heads and for three.
            for blocks, count in ((2048, 9), (1, N), (4, N)):
                got, expected = (tuple(torch.zeros(pages, 1, 16, 24) for _ in range(2)) for _ in range(2))
                where = (position[:count], place[:count] // 16, place[:count] % 16)
                with mock.patch.object(decode_triton, "MAX_BLOCKS", blocks):
                    q = decode_triton.qk_norm_rope_into_cache(qkv[:count], norm, angle, layout, got, where)
                truth = decode.qk_norm_rope_into_cache(qkv[:count], norm, angle, layout, expected, where)
                name = f"into cache, norm {norm is not None}, rope {angle is not None}, {blocks} blocks"
                found[name] = max(error(a, b) for a, b in zip((q, *got), (truth, *expected), strict=True))
                alone = q if alone is None else alone
                assert torch.equal(q[: len(alone)], alone)


def attention_from_new(found: dict[str, float]) -> None:
    """Compare with the two steps in torch: outputs, and what is in the pages, of which some entries are NaN."""
    sinks = AttentionContext(window=40, sinks_H=torch.randn(4))
    for H, K, C, size, options, norm, rope in (
        (4, 2, 16, 16, PLAIN, True, True),
        (6, 2, 24, 32, AttentionContext(softcap=1.5, scale=0.5), True, False),
        (4, 1, 16, 32, sinks, False, True),
        (3, 3, 32, 16, AttentionContext(window=5), True, True),
    ):
        last = torch.tensor([0, size - 1, 63, 64, 255, 256, 300, 575])
        B, width = len(last), -(-600 // size)
        table = torch.randperm(B * width + 3)[: B * width].view(B, width)
        pools = tuple(torch.randn(B * width + 3, K, size, C) for _ in range(2))
        for row in range(B):  # the new token's entry and those after it
            page, offset = int(last[row]) // size, int(last[row]) % size
            for pool in pools:
                pool[table[row, page], :, offset:] = float("nan")
                pool[table[row, page + 1 :]] = float("nan")
        layout = QkvLayout(H, K, C, 1e-6)
        qkv, angle = torch.randn(B, layout.width), torch.randn(600, C // 2)
        norms = (torch.rand(C) + 0.5, torch.rand(C) + 0.5) if norm else None
        angles = (angle.cos(), angle.sin()) if rope else None
        expected = tuple(pool.clone() for pool in pools)
        truth = decode.attend_from_new(qkv, norms, angles, layout, expected, table, last, 600, options)
        for span in (64, 256):  # one tile, and several
            written = tuple(pool.clone() for pool in pools)
            with mock.patch.object(decode_new_triton, "span_size", lambda length, groups, span=span: span):
                ours = decode_new_triton.attend_from_new(
                    qkv, norms, angles, layout, written, table, last, options
                )
            pages = [
                error(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(written, expected, strict=True)
            ]
            found[f"attention from new {H} {K} {C} {size}, spans of {span}"] = max(error(ours, truth), *pages)


def noise(found: dict[str, float]) -> None:
    """Compare random numbers for tokens in any order and for a row that all
    share, with the smallest numbers among them.
    """
    stream = torch.stack((torch.arange(4), torch.tensor([stream_of(s) for s in (0, 1, 5, 2**80)])), dim=1)[
        :, 1
    ]
    count = torch.tensor([0, 7, 2**40, 3])
    for name, tokens in (
        ("some", torch.randint(0, 50_000, (4, 70))),
        ("all", torch.arange(40_000).expand(4, -1)),
    ):
        ours = decode_triton.exponentials(stream, count, PROPOSE, tokens)
        truth = exponentials(stream, count, PROPOSE, tokens)
        assert truth.min() < 1e-4 or name == "some"
        found[f"noise of {name}"] = float(((ours - truth).abs() / truth).max())


def engine(found: dict[str, float]) -> None:
    """Run an engine with grouped heads and a window that decodes with the kernels, with and without drafts. The
    result is the number of tokens that differ from the uncached loop's.
    """
    model = make(**SMALL_MODEL)
    prompts = [[5, 17, 3], [88, 4, 4, 61, 30, 2, 9, 11, 12, 13, 14, 15]]
    with (
        mock.patch.object(decode, "kernel_supports", lambda rows, pool: True),
        mock.patch.object(fused, "qk_norm_rope_into_cache", decode_triton.qk_norm_rope_into_cache),
        mock.patch.object(few_tokens, "supports", lambda x, weight: len(x) <= few_tokens.MAX_TOKENS),
        mock.patch.object(
            few_tokens, "_sum_and_output", lambda x, norm, *others: few_tokens_triton.launch(x, norm, *others)
        ),
        mock.patch.object(steps, "greedy_tokens", decode_step_triton.greedy_tokens),
        mock.patch.object(steps, "write_state", decode_step_triton.write_state),
    ):
        for draft in (None, Draft(model, 2)):
            made = Engine(model, max_batch=2, max_tokens=96, page_size=16, draft=draft)
            for forward in made._models:
                forward.blocks = fused.FusedBlocks(model)
            answers = made.run([Request(tuple(prompt), NEW_TOKENS) for prompt in prompts])
            wrong = sum(
                a != b
                for prompt, (answer,) in zip(prompts, answers, strict=True)
                for a, b in zip(answer.tokens, plain(model, prompt, NEW_TOKENS), strict=True)
            )
            found[f"engine, drafts {draft is not None}"] = float(wrong)


def experts(found: dict[str, float]) -> None:
    """Run an engine whose decoding steps compute experts with the kernels, for prompts of more and of fewer rows."""
    model = make(**VARIANTS["moe"] | {"num_hidden_layers": 1})
    kernels = SimpleNamespace(
        route=moe_launch.route,
        gathered_gated=grouped.gathered_gated,
        grouped_matmul=grouped.grouped_matmul,
        combine=moe_launch.combine,
    )
    prompts = [[5, 17, 3], [88, 4, 4, 61, 30, 2, 9, 11, 12, 13, 14, 15], list(range(40))]
    with mock.patch.object(fused, "moe", kernels):
        made = Engine(model, max_batch=3, max_tokens=192, page_size=16)
        for forward in made._models:
            forward.blocks = fused.FusedBlocks(model)
        answers = made.run([Request(tuple(prompt), NEW_TOKENS) for prompt in prompts])
    found["engine, experts"] = float(
        sum(
            answer.tokens != plain(model, prompt, NEW_TOKENS)
            for prompt, (answer,) in zip(prompts, answers, strict=True)
        )
    )


def kernels() -> dict[str, float]:
    """Return the error of each kernel."""
    return checked(attention, attention_from_new, long_rows, qk_norm_rope_into_cache, noise)


def engines() -> dict[str, float]:
    """Return the number of wrong tokens of each engine."""
    return checked(engine, experts)


def checked(*checks: Callable[[dict[str, float]], None]) -> dict[str, float]:
    """Return what these functions find."""
    torch.manual_seed(0)
    found: dict[str, float] = {}
    for check in checks:
        check(found)
    return found
