"""The fused kernels, the loss, embeddings and the dequantizer in Triton's
interpreter, compared with the torch reference.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deskside.kernels import cross_entropy, cross_entropy_triton, stored_weights_triton
from deskside.kernels.cross_entropy import FutureTargets, LossOptions
from deskside.kernels.fused import launch, reference, tiles
from deskside.kernels.fused.reference import Cast, Fp8, QkvLayout
from deskside.kernels.stored_weights import dequantize_rows
from tests.kernels.test_dequantize import SHAPES, codes_and_scales

N, D, F = 136, 80, 48
FEW = 21  # rows for which a program processes one to four of them instead of 64
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def cast(dtype: torch.dtype) -> Cast:
    return Cast(dtype, torch.tensor(20.0), torch.zeros(()))


def flat(outputs: object) -> Iterator[Tensor]:
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        if isinstance(output, Fp8):
            yield output.rows.float() / 20
            # Exactly the transpose, however the interpreter rounds to FP8.
            assert torch.equal(output.columns.view(torch.uint8), output.rows.view(torch.uint8).T)
        elif output is not None:
            assert isinstance(output, Tensor)
            yield output


def error(ours: object, truth: object) -> float:
    pairs = list(zip(flat(ours), flat(truth), strict=True))
    errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return max(e if math.isfinite(e) else math.inf for e in errors)  # a maximum would ignore NaN


def main() -> dict[str, float]:
    """Return the error of each kernel."""
    torch.manual_seed(0)
    found: dict[str, float] = {}
    residual, delta, grad, above = (torch.randn(N, D) for _ in range(4))
    weight = torch.rand(D) + 0.5
    for given in (delta, None):
        for fp8 in (False, True):
            a, b = (cast(E4), cast(E4)) if fp8 else (None, None)
            name = f"add_norm {'with' if given is not None else 'without'} delta{' fp8' if fp8 else ''}"
            found[name] = error(
                launch.add_norm(residual, given, weight, 1e-6, a),
                reference.add_norm(residual, given, weight, 1e-6, b),
            )
            if a is not None and b is not None:
                found[f"{name}: amax"] = float((a.amax - b.amax).abs())
    out, _, rstd = reference.add_norm(residual, delta, weight, 1e-6, None)
    for upstream in (above, None):
        found[f"add_norm_backward {upstream is None}"] = error(
            launch.add_norm_backward(grad, out, rstd, weight, upstream),
            reference.add_norm_backward(grad, out, rstd, weight, upstream),
        )
    x = residual.clone()
    x[3, 5] = float("nan")
    a = cast(E4)
    launch.cast_fp8(x, a)
    found["a NaN is noted"] = 0.0 if a.amax.isinf() else 1.0
    found["cast fp8"] = error(launch.cast_fp8(residual, cast(E5)), reference.cast_fp8(residual, cast(E5)))
    scales = (torch.rand(N) + 10, torch.rand(D) + 10)
    found["row_col_amax"] = error(launch.row_col_amax(residual), reference.row_col_amax(residual))
    ours, truth = (module.cast_both(residual, E4, *scales) for module in (launch, reference))
    for part in ("rows", "columns"):
        found[f"cast_both fp8 {part}"] = error(getattr(ours, part).float(), getattr(truth, part).float())
    wide = torch.zeros(D, N + 24, dtype=torch.uint8).view(E5)
    truth = torch.nn.functional.pad(ours.rows.view(torch.uint8).T, (8, 16))
    launch.transpose(ours.rows.view(E5), wide[:, 8:-16])
    found["transpose"] = float((wide.view(torch.uint8) != truth).sum())
    sums(found)
    rope(found)
    gated(found)
    every_tile(found)
    losses(found)
    embeddings(found)
    return found


def sums(found: dict[str, float]) -> None:
    """Use more rows than a program loads at once, and numbers of columns that no power of two divides."""
    for rows, pieces, columns, first in ((2112, 1, 20, 1), (1030, 5, 8, 4), (3, 2, 16, 1)):
        x = torch.randn(rows, pieces, columns)
        truth = [x[:, part].double().sum((0, 1)) for part in (slice(first), slice(first, None))]
        ours = launch.column_sums(x, first)
        assert len(ours) == (1 if first == pieces else 2)
        found[f"sums of {rows} x {pieces} x {columns}"] = error(tuple(ours), tuple(truth[: len(ours)]))


def rope(found: dict[str, float]) -> None:
    layout = QkvLayout(4, 2, 16, 1e-6)
    N = 80  # more than a tile of 64
    qkv = torch.randn(N, layout.width)
    norms = (torch.rand(16) + 0.5, torch.rand(16) + 0.5)
    turn = (torch.randn(N // 2, 8).cos(), torch.randn(N // 2, 8).sin())
    grads = (torch.randn(N, 4, 16), torch.randn(N, 2, 16), torch.randn(2, N, 16).transpose(0, 1))
    for q_weight, k_weight in (norms, (None, None)):
        for angles in (turn, None):
            name = f"norm {q_weight is not None}, rope {angles is not None}"
            arguments = (qkv, q_weight, k_weight, angles, layout)
            found[f"qk_norm_rope {name}"] = error(
                launch.qk_norm_rope(*arguments), reference.qk_norm_rope(*arguments)
            )
            for a, b in ((None, None), (cast(E5), cast(E5))):
                found[f"qk_norm_rope_backward {name}{'' if a is None else ' fp8'}"] = error(
                    launch.qk_norm_rope_backward(grads, *arguments, a),
                    reference.qk_norm_rope_backward(grads, *arguments, b),
                )


def gated(found: dict[str, float]) -> None:
    for kind in launch.ACTIVATION_IDS:
        if kind == "gelu":  # the interpreter has no erf
            continue
        for two in (True, False):
            for rows, a, b in ((FEW, None, None), (N, cast(E5), cast(E5))):
                x, grad = torch.randn(rows, F * (2 if two else 1)), torch.randn(rows, F)
                name = f"{kind}{' gated' if two else ''}{'' if a is None else ' fp8'}"
                found[f"gated {name}"] = error(
                    launch.gated(x, kind, two, a), reference.gated(x, kind, two, b)
                )
                found[f"gated_backward {name}"] = error(
                    launch.gated_backward(grad, x, kind, two, a),
                    reference.gated_backward(grad, x, kind, two, b),
                )


def every_tile(found: dict[str, float]) -> None:
    """Return the number of bytes that differ from those with the first tile."""
    x_ND, x_NW, grad_NF = torch.randn(N, D), torch.randn(N, 2 * F), torch.randn(N, F)
    scales = (torch.rand(N) + 10, torch.rand(D) + 10)

    def with_amax(launched: Callable[[Cast], Fp8]) -> tuple[Tensor, ...]:
        made = cast(E4)
        fp8 = launched(made)
        return fp8.rows, fp8.columns, made.amax

    def rows_and_columns(fp8: Fp8) -> tuple[Tensor, ...]:
        return fp8.rows, fp8.columns

    runs: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "gated": lambda: (launch.gated(x_NW[:FEW], "silu", True),),
        "gated_backward": lambda: (launch.gated_backward(grad_NF[:FEW], x_NW[:FEW], "silu", True),),
        "gated_fp8": lambda: with_amax(lambda c: launch.gated(x_NW, "silu", True, c)),
        "gated_backward_fp8": lambda: with_amax(
            lambda c: launch.gated_backward(grad_NF, x_NW, "silu", True, c)
        ),
        "cast_fp8": lambda: with_amax(lambda c: launch.cast_fp8(x_ND, c)),
        "cast_both": lambda: rows_and_columns(launch.cast_both(x_ND, E4, *scales)),
        "row_col_amax": lambda: launch.row_col_amax(x_ND),
    }
    assert runs.keys() == tiles.CANDIDATES.keys()
    for kernel, run in runs.items():
        first = run()
        for tile in tiles.CANDIDATES[kernel][1:]:
            with tiles.temporarily(kernel, tile):
                pairs = zip(run(), first, strict=True)
            different = (a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8) for a, b in pairs)
            found[f"{kernel} {tile}: bytes"] = float(sum(int(bytes_.sum()) for bytes_ in different))


def losses(found: dict[str, float]) -> None:
    for entries in (100, 128, 40_000):
        for cap in (None, 5.0):
            logits, targets = torch.randn(6, entries) * 3, torch.randint(0, entries, (6,))
            targets[2] = -100
            arguments = (targets, LossOptions(cap, 1e-3))
            ours = cross_entropy_triton.chunk_loss_and_grad(logits.clone(), *arguments)
            truth = cross_entropy.chunk_loss_and_grad(logits.double(), *arguments)
            found[f"loss of {entries}, cap {cap}"] = error(ours, truth)
            later = torch.randint(0, entries, (6, 2))
            later[0] = targets[0]
            later[1, 1] = later[4] = -100
            future = FutureTargets(later, torch.tensor([0.5, 0.2]))
            ours = cross_entropy_triton.chunk_loss_and_grad(logits.clone(), *arguments, future)
            truth_later = cross_entropy.chunk_loss_and_grad(logits.double(), *arguments, future)
            found[f"loss of three tokens of {entries}, cap {cap}"] = error(ours, truth_later)
            only = cross_entropy_triton.chunk_loss(logits.clone(), *arguments)
            found[f"loss alone of {entries}, cap {cap}"] = error(only, truth[0])
    # Logits so far below zero that 1 + 2 z_loss lse, the factor of the probabilities, is zero or negative.
    for z_loss in (0.0, 0.5, 1.0):
        for cap in (None, 5.0):
            logits = torch.randn(9, 5) - torch.arange(9.0)[:, None]
            arguments = (torch.randint(0, 5, (9,)), LossOptions(cap, z_loss))
            ours = cross_entropy_triton.chunk_loss_and_grad(logits.clone(), *arguments)
            truth = cross_entropy.chunk_loss_and_grad(logits.double(), *arguments)
            found[f"loss far below zero, z {z_loss}, cap {cap}"] = error(ours, truth)


def embeddings(found: dict[str, float]) -> None:
    """Use runs of equal tokens within a piece, across its end and over many pieces, and one run per token."""
    piece = stored_weights_triton.PIECE
    for name, tokens in (
        ("uneven", (torch.rand(11 * piece - 4) ** 4 * 50).long()),
        ("few", torch.randint(3, (2 * piece + 1,))),
        ("one in many pieces", torch.full((66 * piece - 8,), 6)),
        ("one for each piece", torch.arange(2 * piece) // piece),
        ("different", torch.randperm(100)),
    ):
        weight, grad = torch.randn(100, 136), torch.randn(len(tokens), 136)
        found[f"embedding, {name}"] = error(
            stored_weights_triton.embedding(tokens, weight, torch.float32), weight[tokens]
        )
        ours = stored_weights_triton.embedding_gradient(grad, tokens, 100)
        truth = torch.zeros(100, 136, dtype=torch.float64).index_add_(0, tokens, grad.double())
        found[f"embedding's gradient, {name}"] = error(ours, truth)
    unknown = torch.tensor([3, -1, 100])
    rows = stored_weights_triton.embedding(unknown, weight, torch.float32)
    found["tokens that are no rows are NaN"] = float((rows.isnan().all(1) != (unknown != 3)).sum())


def dequantized() -> dict[str, float | None]:
    """Return the largest relative error of each shape and dtype, or None if a result is not finite."""
    found: dict[str, float | None] = {}
    for shape in SHAPES:
        codes, scale = codes_and_scales(*shape)
        for dtype in (torch.float32, torch.bfloat16):
            expected = dequantize_rows(codes, scale, dtype)
            got = stored_weights_triton.dequantize_rows(codes, scale, dtype)
            assert got.dtype == dtype and got.shape == expected.shape
            off = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1e-30)
            found[f"{shape} {dtype}"] = float(off.max()) if bool(got.isfinite().all()) else None
    return found


def of_codes() -> tuple[dict[str, float | None], dict[str, float]]:
    """Return both comparisons of codes, so that they run in one process."""
    return dequantized(), products_of_codes()


def products_of_codes() -> dict[str, float]:
    """Return relative errors, to float64, of products with few rows: whole and
    partial tiles, and both kinds of codes.
    """
    torch.manual_seed(0)
    found = {}
    for rows, columns in ((16, 256), (37, 300), (1, 5)):
        codes, scale = codes_and_scales(rows, columns)
        for stored in (codes, (codes / 3).to(torch.float8_e4m3fn)):
            weight = stored.double() * scale.double()[:, None]
            for N in (1, 17, 64):
                x = torch.randn(N, columns)
                truth = x.double() @ weight.T
                got = stored_weights_triton.few_rows_product(x, stored, scale)
                found[f"{rows} {columns} {stored.dtype} {N}"] = float((got - truth).norm() / truth.norm())
    return found
