"""The mixture-of-experts kernels in Triton's interpreter, compared with their torch reference."""

import math
from dataclasses import fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.language import standard
from triton.runtime.interpreter import ReduceOps

from deskside.kernels.moe import fp8_launch, fp8_rows, grouped, reference
from deskside.kernels.moe import moe_launch as launch
from deskside.kernels.nvfp4.matmul import TileConfig

D, F = 80, 48
CPU = torch.device("cpu")


def error(ours: Tensor, truth: Tensor) -> float:
    if not truth.is_floating_point():
        return 0.0 if torch.equal(ours, truth) else 1.0
    value = float((ours - truth).norm() / truth.norm().clamp(min=1e-30))
    return value if math.isfinite(value) else math.inf


def grouped_products(found: dict[str, float]) -> None:
    """Use empty experts at the beginning, in the middle and at the end, groups smaller and larger than a tile, and
    sums that are and are not a multiple of a step. Rows of other experts and beyond the tensor must not be read.
    """
    small = TileConfig(32, 32, 16, warps=4, stages=2, descriptors=False, group=2)
    for ends in ((0, 33, 33, 70, 131, 131), (1, 2, 3, 3), (7,), (0, 0, 64)):
        for K, M in ((48, 80), (40, 33)):
            E, S = len(ends), ends[-1]
            ends_E = torch.tensor(ends, dtype=torch.int32)
            x, g, weight = torch.randn(S, K), torch.randn(S, M), torch.randn(E, M, K)
            choices = {"small": small}
            if K == 48:
                choices["of this size"] = grouped.grouped_tiles(CPU, torch.float32, S // E)
            for name, tiles in choices.items():
                how = f"{ends} {K} x {M}, tiles {name}"
                with (
                    mock.patch.object(grouped, "grouped_tiles", lambda *a, t=tiles: t),
                ):
                    outputs = {
                        "x W^T": (grouped.triton_matmul(x, weight, ends_E, True), x, weight, True),
                        "g W": (grouped.triton_matmul(g, weight, ends_E, False), g, weight, False),
                    }
                    gradient = grouped.triton_weight_gradient(g, x, ends_E, torch.float32)
                for product, (ours, a, w, transpose) in outputs.items():
                    truth = reference.grouped_matmul(a.double(), w.double(), ends_E, transpose)
                    found[f"{product} {how}"] = error(ours, truth)
                truth = reference.grouped_weight_gradient(g.double(), x.double(), ends_E, torch.float64)
                found[f"g^T x {how}"] = error(gradient, truth)


def gathered_gated(found: dict[str, float]) -> None:
    """Use the shapes of decoding steps: fewer tokens than experts, more tokens, and rows of padding."""
    for N, E, k, D, F, align in (
        (1, 8, 2, 128, 96, 1),
        (5, 3, 2, 100, 40, 1),
        (40, 4, 3, 64, 33, 1),
        (9, 2, 2, 48, 64, 16),
    ):
        routing = reference.route(torch.randn(N, E), k, True, align)
        for activation, gated in (("silu", True), ("gelu", False)):
            x, weight = torch.randn(N, D), torch.randn(E, 2 * F if gated else F, D)
            ours = grouped.triton_gathered_gated(x, weight, routing, activation, gated)
            truth = reference.gathered_gated(x.double(), weight.double(), routing, activation, gated)
            found[f"gathered_gated {N} {E} {k} {D} x {F} {activation} {align}"] = error(ours, truth)


def routing_of_nan(found: dict[str, float]) -> None:
    """Route a token whose logits are all NaN, and one with a single NaN. Choices of experts that do not exist would
    leave sorted rows unwritten, and the next kernels would read tokens that do not exist.

    Maxima are reduced by Triton's own function, as on a GPU. The interpreter would use numpy's, which finds NaN.
    """

    def reduced(self: Any, given: Any) -> Any:
        is_argmax = self.combine_fn is standard._argmax_combine_tie_break_left
        return self.generic_reduce(given) if is_argmax else apply_impl(self, given)

    apply_impl = ReduceOps.apply_impl
    logits = torch.tensor([[math.nan] * 3, [0.5, math.nan, 0.1]])
    with mock.patch.object(launch, "ROUTED", 8), mock.patch.object(ReduceOps, "apply_impl", reduced):
        routing = launch.route(logits, 2, normalise=False, sigmoid=True, bias_E=torch.zeros(3))
    expected = {"experts_Nk": [0, 1, 1, 0], "tokens_S": [0, 1, 0, 1], "ends_E": [2, 4, 4]}
    for name, values in expected.items():
        found[f"{name} of NaN"] = float(getattr(routing, name).flatten().tolist() != values)
    found["weights_S of NaN"] = float(routing.weights_S.isnan().tolist() != [True, False, True, True])


def main() -> dict[str, float]:
    """Return the error of each kernel."""
    torch.manual_seed(0)
    launch.ROUTED = 64  # several programs, the last one partly empty
    found: dict[str, float] = {}
    grouped_products(found)
    gathered_gated(found)
    routing_of_nan(found)
    for N, E, k, normalise, align in (
        (37, 5, 2, True, 1),
        (37, 5, 2, True, 16),
        (70, 8, 2, False, 1),
        (9, 1, 1, True, 128),
        (34, 16, 8, True, 2),
        (8, 40, 3, True, 2),
        (4, 5, 2, True, 1),  # in one kernel, like the next two
        (3, 8, 2, False, 16),
        (1, 16, 4, True, 1),
    ):
        logits = torch.randn(N, E)
        how = f"{N} tokens, {k} of {E}{'' if normalise else ', as they are'}, {align}"
        # Softmax is another constant of the same kernels.
        kinds: list[tuple[str, bool, Tensor | None]] = [("sigmoid", True, torch.randn(E))]
        if (N, align) in ((37, 16), (70, 1), (8, 2), (3, 16)):
            kinds.append(("softmax", False, None))
        for scores, sigmoid, bias in kinds:
            options = (k, normalise, align, sigmoid, bias)
            ours, truth = (module.route(logits, *options) for module in (launch, reference))
            for field in fields(ours):
                name = f"{field.name} {how}, {scores}"
                found[name] = error(getattr(ours, field.name), getattr(truth, field.name))
            S = len(truth.tokens_S)
            grad_weights, grad_statistics = torch.randn(S), torch.randn(2 * E + 2)
            for name, given in (("", grad_statistics), (", no statistics", None)):
                arguments = (grad_weights, given, logits, truth, normalise, sigmoid)
                grads = (module.route_backward(*arguments) for module in (launch, reference))
                found[f"route_backward {how}, {scores}{name}"] = error(*grads)
        x, y = torch.randn(N, D), torch.randn(S, D)
        found[f"dispatch {how}"] = error(*(m.dispatch(x, truth.tokens_S) for m in (launch, reference)))
        for addend in (None, x):
            sums = (m.combine(y, truth.slots_Nk, addend) for m in (launch, reference))
            found[f"combine {how} {addend is None}"] = error(*sums)
    S = 21
    for activation, gated in (("silu", True), ("gelu", False), ("relu2", True)):
        inner, weights, grad = torch.randn(S, 2 * F if gated else F), torch.rand(S), torch.randn(S, F)
        outputs = (m.weighted_gated(inner, weights, activation, gated) for m in (launch, reference))
        found[f"weighted_gated {activation}"] = error(*outputs)
        ours, truth = (
            m.weighted_gated_backward(grad, inner, weights, activation, gated) for m in (launch, reference)
        )
        for name, a, b in zip(("x", "weights", "output"), ours, truth, strict=True):
            found[f"weighted_gated_backward {activation} {name}"] = error(a, b)
    return found


def kind(result: Tensor) -> str:
    return "values" if result.dtype == torch.float8_e4m3fn else "others"


def fp8_of_gates() -> dict[str, float]:
    """Return the error of gates with results in E4M3, for rows of one piece, of
    two pieces, and shorter than a piece.
    """
    torch.manual_seed(0)
    fp8_launch.SMALLEST_BLOCK = 32
    found: dict[str, float] = {}
    for F in (24, 32, 80):
        S, weights = 21, torch.rand(21)
        for activation, gated in (("silu", True), ("gelu", False)):
            x = torch.randn(S, 2 * F if gated else F)
            grad = torch.randn(S, F) * torch.logspace(-6, 2, S)[:, None]
            x[3] = 0.0
            cases = {
                "weighted_gated_fp8": (x, weights, activation, gated),
                "weighted_gated_backward_fp8": (grad, x, weights, activation, gated),
            }
            for function, arguments in cases.items():
                results = (getattr(module, function)(*arguments) for module in (fp8_launch, fp8_rows))
                for number, (ours, truth) in enumerate(zip(*results, strict=True)):
                    name = f"{function} {kind(truth)} {number} {F} {activation}"
                    found[name] = error(ours.float(), truth.float())
    return found


def fp8() -> dict[str, float]:
    """Return the error of each cast to E4M3."""
    torch.manual_seed(0)
    fp8_launch.AMAX_TILE = fp8_launch.CAST_TILE = (32, 32, 4)  # several tiles, the last ones partly empty
    fp8_launch.TRANSPOSED_TILE, fp8_launch.SCALED_ROWS, fp8_launch.PADDED_ROWS = (32, 32, 4), 32, 8
    found: dict[str, float] = {}
    for N, E, k, K in ((37, 5, 2, 80), (150, 3, 1, 640), (9, 1, 1, 48)):
        routing = reference.route(torch.randn(N, E), k, True, 16)
        tokens, how = routing.tokens_S, f"{N} tokens, {k} of {E}, {K} columns"
        x = torch.randn(N, K) * torch.logspace(-6, 4, N)[:, None]
        x[0], x[:, 1] = 0.0, 448.0
        x[1] *= 1e-42  # below the smallest normal number
        if K == 640:  # every boundary between two scales
            x[2:] = torch.exp2(torch.arange(N - 2.0) - 70)[:, None] * (
                1.75 + (torch.arange(K) % 3 - 2) * 2**-23
            )
        choices = routing.slots_Nk, tokens
        cast = fp8_rows.dispatch_fp8(x, *choices)
        cases: dict[str, tuple[str, tuple[Tensor | None, ...]]] = {
            "rows": ("cast_rows", (x,)),
            "dispatched rows": ("dispatch_fp8", (x, *choices)),
            "transposed rows": ("transpose_rows", (*cast, routing.ends_E)),
            "dispatched columns": ("dispatch_columns", (x, tokens, cast[1], routing.ends_E)),
            "weight columns": ("cast_weight_columns", (torch.randn(E, 48, K) * torch.logspace(-9, 9, K),)),
            "weight columns, words": ("cast_weight_columns", (x[: N // 4 * 4].view(1, -1, K),)),
        }
        for name, (function, arguments) in cases.items():
            results = (getattr(module, function)(*arguments) for module in (fp8_launch, fp8_rows))
            for number, (ours, truth) in enumerate(zip(*results, strict=True)):
                found[f"{name} {kind(truth)} {number} {how}"] = error(ours.float(), truth.float())
    return found
