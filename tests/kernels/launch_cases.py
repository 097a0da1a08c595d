"""Launches of all kernels except NVFP4's, recorded to be compiled for GPUs that
this machine lacks: see compile_cases.py.

Shapes are those of small and of large models. A row of 5120 channels is where shared memory would first run out.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from deskside.engine import counter_rng
from deskside.engine.sampling import WIDTHS
from deskside.kernels import (
    adamw_triton,
    cross_entropy_triton,
    decode_new_triton,
    decode_step_triton,
    decode_triton,
    draw_triton,
    dropout_triton,
    few_tokens_triton,
    momentum_8bit_triton,
    muon,
    muon_triton,
    newton_schulz_triton,
    prefill_triton,
    stored_weights_triton,
)
from deskside.kernels.adamw_state import (
    EXP_AVG,
    EXP_AVG_MAX,
    EXP_AVG_SQ,
    EXP_AVG_SQ_MAX,
    AdamWHyperparameters,
    num_blocks,
)
from deskside.kernels.attention import AttentionContext
from deskside.kernels.cross_entropy import FutureTargets, LossOptions
from deskside.kernels.few_tokens import AddNorm
from deskside.kernels.fused import launch, tiles
from deskside.kernels.fused.reference import Cast, QkvLayout
from deskside.kernels.moe import Routing, fp8_launch, grouped, moe_launch
from deskside.kernels.newton_schulz_triton import symmetric_product
from tests.kernels.compile_cases import CAPABILITIES, CompileCase, recorded

WITH_FP8 = tuple(c for c in CAPABILITIES if c >= 89)  # where the conversion is an instruction
N = 4096
F16 = torch.float16
DECODED = (  # query heads, key-value heads, channels, new tokens, window, dtype
    (12, 3, 64, 1, None, torch.bfloat16),
    (32, 8, 128, 1, None, torch.bfloat16),
    (32, 8, 128, 5, 512, torch.bfloat16),
    (16, 16, 256, 1, None, torch.bfloat16),
    (12, 3, 64, 1, None, torch.float32),
    (16, 1, 128, 4, None, torch.float32),
    (32, 1, 128, 1, None, torch.bfloat16),
)
ACTIVATIONS = (("silu", True), ("gelu", False), ("gelu_new", False), ("relu2", False))


def _new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _float(*shape: int) -> Tensor:
    return _new(*shape, dtype=torch.float32)


def _cast(dtype: torch.dtype) -> Cast:
    return Cast(dtype, _float(), _float())


E4M3, E5M2 = _cast(torch.float8_e4m3fn), _cast(torch.float8_e5m2)


def _norms() -> Iterator[CompileCase]:
    for D in (768, 5120):
        x, weight, rstd = _new(N, D), _float(D), _float(N)
        for delta in (x, None):
            how = f"{D}{'' if delta is None else ', with delta'}"
            yield recorded(f"add_norm {how}", CAPABILITIES, launch.add_norm, x, delta, weight, 1e-6, None)
            yield recorded(f"add_norm to FP8 {how}", WITH_FP8, launch.add_norm, x, delta, weight, 1e-6, E4M3)
            yield recorded(
                f"add_norm_backward {how}", CAPABILITIES, launch.add_norm_backward, x, x, rstd, weight, delta
            )
    for name, cast in (("E4M3", E4M3), ("E5M2", E5M2)):
        yield recorded(f"cast to {name}", WITH_FP8, launch.cast_fp8, _new(N, 768), cast)
    x, scales = _new(N, 768), (_float(N), _float(768))
    yield recorded("largest of rows and columns", CAPABILITIES, launch.row_col_amax, x)
    yield recorded("cast by row", WITH_FP8, launch.cast_both, x, torch.float8_e4m3fn, *scales)
    yield recorded("sums of a norm", CAPABILITIES, launch.column_sums, _float(2112, 1, 768), 1)
    yield recorded("sums of two norms", CAPABILITIES, launch.column_sums, _float(1024, 5, 64), 4)
    yield recorded(
        "transpose",
        CAPABILITIES,
        launch.transpose,
        _new(N, 768, dtype=E5M2.dtype),
        _new(768, 4 * N, dtype=E5M2.dtype)[:, :N],
    )


def _rope() -> Iterator[CompileCase]:
    for C, norm, rope in ((64, True, True), (128, True, True), (64, False, True), (64, True, False)):
        layout = QkvLayout(12, 3, C, 1e-6)
        qkv = _new(N, layout.width)
        weights = (_float(C), _float(C)) if norm else (None, None)
        angles = (_float(2048, C // 2), _float(2048, C // 2)) if rope else None
        grads = (_new(N, 12, C), _new(N, 3, C), _new(N, 3, C))
        how = f"{C}{', norm' if norm else ''}{', rope' if rope else ''}"
        yield recorded(
            f"qk_norm_rope {how}", CAPABILITIES, launch.qk_norm_rope, qkv, *weights, angles, layout
        )
        for name, cast, where in (("", None, CAPABILITIES), (" to FP8", E5M2, WITH_FP8)):
            yield recorded(
                f"qk_norm_rope_backward{name} {how}",
                where,
                launch.qk_norm_rope_backward,
                *(grads, qkv, *weights, angles, layout, cast),
            )


def _dropout() -> Iterator[CompileCase]:
    position = _new(4, dtype=torch.int64)
    for channels in (100, 768, 5120):
        yield recorded(
            f"dropout {channels}", CAPABILITIES, dropout_triton.dropout, _new(N, channels), position, 6554
        )


def _gated() -> Iterator[CompileCase]:
    for kind, two in ACTIVATIONS:
        x, grad = _new(N, 4096 if two else 2048), _new(N, 2048)
        for name, there, back, where in (
            ("", None, None, CAPABILITIES),
            (" to FP8", E4M3, E5M2, WITH_FP8),
        ):
            yield recorded(f"{kind}{name}", where, launch.gated, x, kind, two, there)
            yield recorded(f"{kind} backward{name}", where, launch.gated_backward, grad, x, kind, two, back)


def _tiles() -> Iterator[CompileCase]:
    """Return every tile that a trial may choose, except the first of each kernel."""
    x, grad = _new(N, 4096), _new(N, 2048)
    launches: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
        "gated": (launch.gated, (x, "silu", True)),
        "gated_backward": (launch.gated_backward, (grad, x, "silu", True)),
        "gated_fp8": (launch.gated, (x, "silu", True, E4M3)),
        "gated_backward_fp8": (launch.gated_backward, (grad, x, "silu", True, E5M2)),
        "cast_fp8": (launch.cast_fp8, (x, E4M3)),
        "cast_both": (launch.cast_both, (x, torch.float8_e4m3fn, _float(N), _float(4096))),
        "row_col_amax": (launch.row_col_amax, (x,)),
    }
    for kernel, (launched, arguments) in launches.items():
        where = WITH_FP8 if kernel.endswith("fp8") or kernel == "cast_both" else CAPABILITIES
        for tile in tiles.CANDIDATES[kernel][1:]:
            with tiles.temporarily(kernel, tile):
                name = f"{kernel} of {tile.rows} x {tile.columns}, {tile.num_warps} warps"
                yield recorded(name, where, launched, *arguments)


def _experts() -> Iterator[CompileCase]:
    """Return cases with eight experts of a model with 3 billion parameters, and
    with 128 of which each token chooses 8.
    """
    for E, k, D, F in ((8, 2, 2048, 2176), (128, 8, 768, 256)):
        logits, how = _new(N, E), f"{k} of {E}"
        experts, slots, tokens, ends = (
            _new(*shape, dtype=torch.int32) for shape in ((N, k), (N, k), (N * k,), (E,))
        )
        routing = Routing(experts, slots, tokens, _float(N * k), ends, _float(2 * E + 2))
        for number, kernel in enumerate(("choose", "offsets", "place")):
            yield recorded(f"{kernel} {how}", CAPABILITIES, moe_launch.route, logits, k, True, number=number)
        few = (_new(16, E), k, True)
        yield recorded(f"route at once {how}", CAPABILITIES, moe_launch.route, *few)
        padded = (logits, k, True, 16)
        yield recorded(f"offsets {how} padded", CAPABILITIES, moe_launch.route, *padded, number=1)
        biased = (logits, k, True, 1, True, _float(E))
        yield recorded(f"choose {how} sigmoid", CAPABILITIES, moe_launch.route, *biased, number=0)
        arguments = (_float(N * k), _float(2 * E + 2), logits, routing, True)
        for scores, sigmoid in (("", False), (" sigmoid", True)):
            yield recorded(
                f"route_backward {how}{scores}", CAPABILITIES, moe_launch.route_backward, *arguments, sigmoid
            )
        x, y = _new(N, D), _new(N * k, D)
        yield recorded(f"dispatch {D}", CAPABILITIES, moe_launch.dispatch, x, routing.tokens_S)
        yield recorded(f"combine {D}", CAPABILITIES, moe_launch.combine, y, routing.slots_Nk, x)
        for kind, two in ACTIVATIONS[:2]:
            inner, grad = _new(N * k, 2 * F if two else F), _new(N * k, F)
            arguments = (inner, routing.weights_S, kind, two)
            yield recorded(f"weighted {kind} {F}", CAPABILITIES, moe_launch.weighted_gated, *arguments)
            yield recorded(
                f"weighted {kind} backward {F}",
                CAPABILITIES,
                moe_launch.weighted_gated_backward,
                grad,
                *arguments,
            )


def _expert_casts() -> Iterator[CompileCase]:
    """Return casts to FP8 of tokens, sorted rows, gates and weights, for a model
    with 3 billion parameters and others.
    """
    for D, F in ((2048, 2176), (5120, 5120), (4096, 14336)):
        x, rows, tokens = _new(N, D), _new(2 * N, D), _new(2 * N, dtype=torch.int32)
        yield recorded(f"cast rows {D}", WITH_FP8, fp8_launch.cast_rows, rows)
        slots, inverse = _new(N, 2, dtype=torch.int32), _float(len(tokens))
        yield recorded(f"dispatch to FP8 {D}", WITH_FP8, fp8_launch.dispatch_fp8, x, slots, tokens)
        ends, cast = _new(8, dtype=torch.int32), (_new(2 * N, D, dtype=torch.float8_e4m3fn), inverse)
        for number, name in enumerate(("scales of experts", "transpose rows")):
            yield recorded(f"{name} {D}", WITH_FP8, fp8_launch.transpose_rows, *cast, ends, number=number)
        for number, name in enumerate(("scales of experts of tokens", "dispatch columns")):
            given = x, tokens, inverse, ends
            yield recorded(f"{name} {D}", WITH_FP8, fp8_launch.dispatch_columns, *given, number=number)
        for number, part in enumerate(("amax of", "cast")):
            weight = (fp8_launch.cast_weight_columns, _float(8, 256, D))
            yield recorded(f"{part} weight columns {D}", WITH_FP8, *weight, number=number)
        for kind, two in ACTIVATIONS:
            inner, grad, weights = _new(2 * N, 2 * F if two else F), _new(2 * N, F), _float(2 * N)
            there = (fp8_launch.weighted_gated_fp8, inner, weights, kind, two)
            yield recorded(f"gate to FP8, {kind} {F}", WITH_FP8, *there)
            back = (fp8_launch.weighted_gated_backward_fp8, grad, inner, weights, kind, two)
            yield recorded(f"gate backward to FP8, {kind} {F}", WITH_FP8, *back)


def _grouped_products() -> Iterator[CompileCase]:
    """Return cases with the tiles of each GPU: a training step, a short prompt, a decoding step, and thin matrices."""
    E, D, F = 8, 2048, 2176
    ends, weight = _new(E, dtype=torch.int32), _new(E, 2 * F, D)
    for target in CAPABILITIES:
        with mock.patch.object(grouped, "capability", lambda device, target=target: divmod(target, 10)):
            for S in (16, 512, 32768):
                x, g = _new(S, D), _new(S, 2 * F)
                arguments = (weight, ends, True)
                yield recorded(f"x W^T of {S} for {target}", (target,), grouped.triton_matmul, x, *arguments)
            arguments = (g, weight, ends, False)
            yield recorded(f"g W for {target}", (target,), grouped.triton_matmul, *arguments)
            for dtype in (torch.bfloat16, torch.float32):
                name = f"g^T x to {str(dtype).removeprefix('torch.')} for {target}"
                arguments = (g, x, ends, dtype)
                yield recorded(name, (target,), grouped.triton_weight_gradient, *arguments)
            for dtype, tokens in ((torch.bfloat16, 4), (torch.bfloat16, 128), (torch.float32, 4)):
                experts, slots, rows = (_new(tokens, 2, dtype=torch.int32) for _ in range(3))
                routing = Routing(experts, slots, rows.flatten(), _float(2 * tokens), ends, _float(2, E))
                arguments = (_new(tokens, D, dtype=dtype), weight.to(dtype), routing, "silu", True)
                name = f"gathered and gated {tokens} {str(dtype).removeprefix('torch.')} for {target}"
                yield recorded(name, (target,), grouped.triton_gathered_gated, *arguments)
            # A size of 1 is a constant of the kernel, as with one choice or adapters of rank 1.
            for choices, M, K in ((1, 128, D), (4096, 1, D), (4096, D, 1)):
                thin, ones = _new(E, M, K), (_new(choices, K), _new(choices, M))
                how = f"{choices} x {M} x {K} for {target}"
                yield recorded(
                    f"thin x W^T {how}", (target,), grouped.triton_matmul, ones[0], thin, ends, True
                )
                yield recorded(
                    f"thin g W {how}", (target,), grouped.triton_matmul, ones[1], thin, ends, False
                )
                arguments = (ones[1], ones[0], ends, torch.bfloat16)
                yield recorded(f"thin g^T x {how}", (target,), grouped.triton_weight_gradient, *arguments)
            half = (_new(S, D, dtype=torch.float16), _new(E, 100, D, dtype=torch.float16), ends, True)
            yield recorded(f"x W^T in FP16 for {target}", (target,), grouped.triton_matmul, *half)


def _losses() -> Iterator[CompileCase]:
    targets = _new(N, dtype=torch.int64)
    for V, cap, z_loss in ((32768, None, 0.0), (50257, 15.0, 1e-4), (151936, None, 1e-4)):
        arguments = (_new(N, V), targets, LossOptions(cap, z_loss))
        how = f"of {V}{'' if cap is None else ', capped'}"
        yield recorded(f"loss {how}", CAPABILITIES, cross_entropy_triton.chunk_loss, *arguments)
        yield recorded(
            f"loss and gradient {how}", CAPABILITIES, cross_entropy_triton.chunk_loss_and_grad, *arguments
        )
        yield recorded(
            f"loss and gradient to FP8 {how}",
            WITH_FP8,
            cross_entropy_triton.chunk_loss_and_fp8_grad,
            *(*arguments, 2.0**14),
        )
        future = FutureTargets(_new(N, 2, dtype=torch.int64), _float(2))
        yield recorded(
            f"loss and gradient of three tokens {how}",
            CAPABILITIES,
            cross_entropy_triton.chunk_loss_and_grad,
            *(*arguments, future),
        )
        yield recorded(
            f"loss and gradient of three tokens to FP8 {how}",
            WITH_FP8,
            cross_entropy_triton.chunk_loss_and_fp8_grad,
            *(*arguments, 2.0**14, future),
        )


def _embeddings() -> Iterator[CompileCase]:
    tokens = _new(N, dtype=torch.int64)
    for V, D in ((32768, 768), (151936, 5120)):
        yield recorded(
            f"embedding of {V}",
            CAPABILITIES,
            stored_weights_triton.embedding,
            tokens,
            _float(V, D),
            torch.bfloat16,
        )
        for number, name in enumerate(("embedding's gradient", "embedding's gradient, joined")):
            arguments = (_new(N, D), tokens, V)
            yield recorded(
                f"{name} of {V}",
                CAPABILITIES,
                stored_weights_triton.embedding_gradient,
                *arguments,
                number=number,
            )


def _optimizers() -> Iterator[CompileCase]:
    p, skip, rule = _float(2**20), _float(), AdamWHyperparameters(1e-3, (0.9, 0.95), 1e-8, 0.1)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        state = {key: _new(2**20, dtype=dtype) for key in (EXP_AVG, EXP_AVG_SQ)}
        if dtype == torch.uint8:
            state |= {key: _float(num_blocks(2**20)) for key in (EXP_AVG_MAX, EXP_AVG_SQ_MAX)}
        yield recorded(
            f"AdamW, {str(dtype).removeprefix('torch.')} states",
            CAPABILITIES,
            adamw_triton.launch,
            *(p, p, state, skip, skip, rule, skip),
        )
    state = {key: _new(2**19, dtype=torch.uint8) for key in (EXP_AVG, EXP_AVG_SQ)}
    state |= {key: _float(2**13) for key in (EXP_AVG_MAX, EXP_AVG_SQ_MAX)}
    arguments = (p, p, state, skip, skip, rule, skip)
    yield recorded("AdamW, 4-bit states", CAPABILITIES, adamw_triton.launch, *arguments)
    state, rule = dict.fromkeys((EXP_AVG, EXP_AVG_SQ), p), replace(rule, cautious=True)
    arguments = (p, p, state, skip, skip, rule, skip)
    yield recorded("AdamW, cautious decay", CAPABILITIES, adamw_triton.launch, *arguments)
    weight, residual = _new(2**20), _new(2**20, dtype=torch.int8)
    arguments = (weight, weight, state, skip, skip, rule, skip, 0, 0, residual)
    yield recorded("AdamW, weights in 24 bits", CAPABILITIES, adamw_triton.launch, *arguments)
    weights, direction, update = _float(12, 768, 2048), _new(12, 768, 2048), _new(12, 768, 2048, dtype=F16)
    for momentum in (weights, direction):
        name = f"Muon looks ahead, {str(momentum.dtype).removeprefix('torch.')} momentum"
        slices = [muon.Direction(weights, momentum, direction)]
        arguments = (slices, 0.95, True, skip, skip, muon.PointerTable())
        yield recorded(name, CAPABILITIES, muon_triton.look_ahead, *arguments)
    for dtype in (torch.float32, torch.bfloat16):
        gradient, codes = _new(2**20 + 3, dtype=dtype), _new(2**20 + 3, dtype=torch.int8)
        arguments = (gradient, codes, _float(4097), 0.95, True, skip, skip, 127)
        name = f"Muon looks ahead, 8-bit momentum, gradient in {str(dtype).removeprefix('torch.')}"
        yield recorded(name, CAPABILITIES, momentum_8bit_triton.launch, *arguments)
    residual = _new(12, 768, 2048, dtype=torch.int8)
    for name, p, own in (
        ("Muon's update", weights, None),
        ("Muon's update of bfloat16", direction, None),
        ("Muon's update of 24 bits", direction, residual),
    ):
        updates = [muon.Update(p, update, _float(12, 1, 1).expand_as(p), residual=own)]
        arguments = (updates, 0.02, 0.0, True, skip, 0, muon.PointerTable())
        yield recorded(name, CAPABILITIES, muon_triton.apply, *arguments)
        yield recorded(f"{name}, row sums", CAPABILITIES, muon_triton.row_sums, updates, muon.PointerTable())
        updates = [replace(updates[0], row_factors=_float(2, 12, 768))]
        arguments = (updates, 0.02, 0.0, True, skip, 0, muon.PointerTable())
        yield recorded(f"{name}, row factors", CAPABILITIES, muon_triton.apply, *arguments)
    for dtype, n in ((F16, 768), (F16, 304), (torch.float32, 256)):
        square = _new(4, n, n, dtype=dtype)
        name = f"symmetric product of {n}, {str(dtype).removeprefix('torch.')}"
        arguments = (square, square, square, 1.0, square, 0.5, 0.5)
        for target in CAPABILITIES:
            with mock.patch.object(
                newton_schulz_triton, "capability", lambda device, target=target: divmod(target, 10)
            ):
                yield recorded(f"{name} for {target}", (target,), symmetric_product, *arguments)


def _frozen() -> Iterator[CompileCase]:
    for rows, columns in ((1536, 8960), (300, 257)):
        for dtype in (torch.bfloat16, torch.float32):
            yield recorded(
                f"{rows} x {columns} from INT8 to {str(dtype).removeprefix('torch.')}",
                CAPABILITIES,
                stored_weights_triton.dequantize_rows,
                *(_new(rows, columns, dtype=torch.int8), _float(rows), dtype),
            )
    for codes, capabilities in ((torch.int8, CAPABILITIES), (torch.float8_e4m3fn, WITH_FP8)):
        for N, dtype in ((1, torch.bfloat16), (64, torch.bfloat16), (16, torch.float32)):
            kind = f"{str(codes).removeprefix('torch.')} by {N} rows of {str(dtype).removeprefix('torch.')}"
            yield recorded(
                f"product of {kind}",
                capabilities,
                stored_weights_triton.few_rows_product,
                *(_new(N, 2048, dtype=dtype), _new(8192, 2048, dtype=codes), _float(8192)),
            )
        if codes is torch.float8_e4m3fn:
            yield recorded(
                "1536 x 8960 from FP8 to bfloat16",
                capabilities,
                stored_weights_triton.dequantize_rows,
                *(_new(1536, 8960, dtype=codes), _float(1536), torch.bfloat16),
            )


def _decoding() -> Iterator[CompileCase]:
    for H, K, C, T, window, dtype in DECODED:
        how = f"{H} x {K} x {C}, {T} tokens, window {window}, {str(dtype).removeprefix('torch.')}"
        sinks = _new(H, dtype=torch.float32) if T == 1 else None
        options = AttentionContext(window=window, softcap=50.0 if T == 1 else None, sinks_H=sinks)
        q, pages = _new(16, T, H, C, dtype=dtype), _new(4096, K, 32, C, dtype=dtype)
        table, positions = _new(16, 64, dtype=torch.int64), _new(16, T, dtype=torch.int64)
        attention = (q, pages, pages, table, positions, options)
        for number, name in enumerate(("decode attention", "join of spans")):
            yield recorded(f"{name} {how}", CAPABILITIES, decode_triton.attend, *attention, number=number)
            yield _started_early(f"{name} {how}", decode_triton.attend, *attention, number=number)
        norms = (_new(C, dtype=torch.float32),) * 2 if T == 1 else None
        angles = (_new(2048, C // 2, dtype=torch.float32),) * 2 if window is None else None
        layout, N = QkvLayout(H, K, C, 1e-6), 16 * T
        places = (_new(N, dtype=torch.int64),) * 3
        cached = (_new(N, layout.width, dtype=dtype), norms, angles, layout, (pages, pages), places)
        into_cache = decode_triton.qk_norm_rope_into_cache
        yield recorded(f"into the cache {how}", CAPABILITIES, into_cache, *cached)
        yield _started_early(f"into the cache {how}", into_cache, *cached)
        if T == 1:
            many = (_new(8192, dtype=torch.int64),) * 3
            prompts = (_new(8192, layout.width, dtype=dtype), norms, angles, layout, (pages, pages), many)
            yield recorded(f"prompts into the cache {how}", CAPABILITIES, into_cache, *prompts)
        if T == 1:
            row = (cached[0], norms, angles, layout, (pages, pages), table, positions[:, 0], options)
            from_new = decode_new_triton.attend_from_new
            yield recorded(f"decode attention from new {how}", CAPABILITIES, from_new, *row)
            yield _started_early(f"decode attention from new {how}", from_new, *row)
        L = 16 if T > 1 else 1
        new, lengths, ends = _new(512, H, C, dtype=dtype), positions[:L, 0], _new(L + 1, dtype=torch.int64)
        yield recorded(
            f"prefill attention {how}",
            CAPABILITIES,
            prefill_triton.attend_packed,
            *(new, pages, pages, table[:L], lengths, ends, options),
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


def _few_tokens() -> Iterator[CompileCase]:
    for N, K, F, dtype in (
        (1, 768, 2048, torch.bfloat16),
        (1, 8960, 1536, torch.float16),
        (1, 100, 60, torch.float32),
        (4, 768, 2048, torch.bfloat16),
        (16, 1024, 3072, torch.bfloat16),
        (32, 5120, 768, torch.float16),
        (64, 768, 2048, torch.bfloat16),
        (64, 100, 60, torch.float32),
    ):
        x, gate_up = _new(N, K, dtype=dtype), _new(2 * F, K, dtype=dtype)
        norm = AddNorm(_new(N, K, dtype=dtype), _float(K), 1e-6)
        how = f"{N} tokens, {K} to {F}, {str(dtype).removeprefix('torch.')}"
        launch, one_by_one = few_tokens_triton.launch, few_tokens_triton.padded(N) == 1
        for name, arguments in (
            (f"gated product of {how}", (x, norm, gate_up, _new(2 * F, dtype=dtype), "silu", True)),
            (f"product of {how}", (x, norm if one_by_one else None, gate_up[:F])),
        ):
            number = 0 if one_by_one or arguments[1] is None else 1  # after the norm
            yield recorded(name, CAPABILITIES, launch, *arguments, number=number)
            yield _started_early(name, launch, *arguments, number=number)
        if not one_by_one:
            yield recorded(f"add_norm of {how}", CAPABILITIES, few_tokens_triton.add_norm, x, norm)
            yield _started_early(f"add_norm of {how}", few_tokens_triton.add_norm, x, norm)
    logits, state, row = _new(16, 151936), _new(65, 3, dtype=torch.int64), _new(16, dtype=torch.int64)
    for number, name in enumerate(("largest logit", "first of the largest logits")):
        yield recorded(name, CAPABILITIES, decode_step_triton.greedy_tokens, logits, number=number)
        yield _started_early(name, decode_step_triton.greedy_tokens, logits, number=number)
    settings = (_float(16, 6), _new(16, 2, dtype=torch.int64), row, counter_rng.DRAW)
    for number, name in enumerate(("most probable tokens", "draw from ranked tokens")):
        launch = draw_triton.draw_from_ranked
        yield recorded(name, CAPABILITIES, launch, logits, *settings, WIDTHS[0], number=number)
        yield _started_early(name, launch, logits, *settings, WIDTHS[0], number=number)
    launch = draw_triton.draw_from_pieces
    for dtype in (torch.bfloat16, torch.float32):
        rows, kind = (_new(16, 151936, dtype=dtype), *settings, True), str(dtype).removeprefix("torch.")
        for number, kernel in (
            (1, "threshold of the logits that are kept"),
            (2, "draw from a piece above it"),
        ):
            yield recorded(f"{kernel}, {kind}", CAPABILITIES, launch, *rows, number=number)
            yield _started_early(f"{kernel}, {kind}", launch, *rows, number=number)
    for number, kernel in ((1, "draw from a piece"), (2, "best draw")):
        yield recorded(kernel, CAPABILITIES, launch, logits, *settings, False, number=number)
        yield _started_early(kernel, launch, logits, *settings, False, number=number)
    yield recorded("state of rows", CAPABILITIES, decode_step_triton.write_state, state, row, row, row, row)
    yield _started_early("state of rows", decode_step_triton.write_state, state, row, row, row, row)


def _started_early(
    name: str, launch: Callable[..., object], *arguments: object, number: int = 0
) -> CompileCase:
    """Return a case with programmatic dependent launch, whose instructions exist from 9.0 on."""
    capabilities = tuple(c for c in CAPABILITIES if c >= 90)
    options = {"PDL": True, "launch_pdl": True}
    module = sys.modules[launch.__module__]
    with mock.patch.object(module, "launch_options", lambda device, blocks: options):
        return recorded(f"{name}, early start", capabilities, launch, *arguments, number=number)


COMPILE_CASES = (
    *_norms(),
    *_rope(),
    *_dropout(),
    *_gated(),
    *_tiles(),
    *_experts(),
    *_expert_casts(),
    *_grouped_products(),
    *_losses(),
    *_embeddings(),
    *_optimizers(),
    *_frozen(),
    *_decoding(),
    *_few_tokens(),
)
