"""Choose between cuBLAS and quack-kernels for the BF16 products of a model, by a trial on this GPU at their shapes.

A kernel of the package is used where it gives the numbers of cuBLAS up to rounding, and is faster. Both products of a
gated MLP are chosen together, because they share the layout of the weight.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from deskside.kernels import fused
from deskside.kernels.device_time import device_seconds
from deskside.kernels.quack_matmul import (
    MatmulTile,
    deinterleave,
    gated_matmul,
    gated_matmul_gradient,
    interleave,
    load,
    matmul,
    tiles_of,
)
from deskside.utils.machine import package_version
from deskside.utils.trials import TrialCache

KIND = "matmul"
PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl")  # whose versions a kept trial depends on
TIE_MARGIN = 0.02  # relative difference in time that counts as a tie; cuBLAS is kept then
TOLERANCE = 2e-2  # relative error of a row or a column; rounding to BF16 twice in place of once causes 2e-3
SAVING = 0.05  # largest share of the products' time that the trial is expected to save
COMPILE_SECONDS = 15.0  # of all kernels, with the import of the package
START_SECONDS = 5.0  # to import the package and to load compiled kernels
ERROR_ROWS = 8192  # rows of a result that are compared at a time


@dataclass(frozen=True)
class MatmulShape:
    """The products of a block: tokens of a pass, and the weights (outputs, inputs) of its linear layers.

    gated: the weight of the second layer of an MLP with a SiLU gate; None if there is none.
    """

    tokens: int
    weights: tuple[tuple[int, int], ...]
    gated: tuple[int, int] | None


@dataclass(frozen=True)
class MatmulChoice:
    """The tiles that are used, by (kind of product, outputs, inputs), and those of the gated MLP's two products."""

    plain: Mapping[tuple[str, int, int], MatmulTile]
    gated: tuple[MatmulTile, MatmulTile] | None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "MatmulChoice":
        """Return the choice that the entries of plan.json name."""
        plain = {}
        for product in facts["plain"]:
            if product["tile"] is not None:
                key = product["kind"], product["outputs"], product["inputs"]
                plain[key] = MatmulTile(*product["tile"])
        gated = facts["gated"]
        used = gated is not None and gated["tiles"] is not None
        return cls(plain, (MatmulTile(*gated["tiles"][0]), MatmulTile(*gated["tiles"][1])) if used else None)


def choose_matmul(
    shape: MatmulShape, device: torch.device, passes: float, cache: TrialCache
) -> dict[str, Any] | None:
    """Return the results of the trial for plan.json (see `MatmulChoice.of`); None if all products stay torch's.

    This is the case without the package, in a run too short for it to pay off, and with too little memory for a trial.
    Raises RuntimeError if the package cannot be used.

    passes: of one block in the run; infinite if the trial has to be made, whatever it saves.
    """
    tiles = tiles_of(device)
    if not tiles:
        return None
    packages = {name: package_version(name) for name in PACKAGES}
    spec = {**asdict(shape), "candidates": [*map(repr, tiles)], "packages": packages}
    kept = cache.find(KIND, spec)
    if kept is not None:
        worth = math.isinf(passes) or passes * kept.result["saved_seconds"] > START_SECONDS
        return {**kept.result["facts"], "trial": "cached"} if worth else None
    began = time.perf_counter()
    try:
        trial = _Trial(shape, device, tiles)
        if passes * trial.seconds_of_cublas() * SAVING < COMPILE_SECONDS:
            return None
        load()
        plain = trial.choose_plain()
        facts = {"plain": plain, "gated": trial.choose_gated(plain)}
    except torch.OutOfMemoryError:  # beside a model that nearly fills the card
        return None
    result = {"name": summary(facts), "facts": facts, "saved_seconds": saved_seconds(facts)}
    cache.keep(KIND, spec, result, time.perf_counter() - began)
    return {**facts, "trial": "measured"}


@dataclass(frozen=True)
class _Problem:
    """A product, computed without the package and with one of its tiles.

    alternating: in the tile's first result, the columns of gate and up alternate; in that of cuBLAS, all gates come
    first.
    """

    cublas: Callable[[], tuple[Tensor, ...]]
    tiled: Callable[[MatmulTile], tuple[Tensor, ...]]
    alternating: bool = False

    def in_order(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return a tile's results, with columns in the order of cuBLAS."""
        return (deinterleave(results[0].T).T, *results[1:]) if self.alternating else results


_Key = tuple[str, int, int]  # kind of product, outputs and inputs of the layer


class _Trial:
    def __init__(self, shape: MatmulShape, device: torch.device, tiles: tuple[MatmulTile, ...]):
        self.device, self.tiles = device, tiles
        self._tokens, self._gated_shape = shape.tokens, shape.gated
        self._generator = torch.Generator(device).manual_seed(0)
        self.plain = dict(item for weight in shape.weights for item in self._plain_problems(*weight))
        self.gated = [] if shape.gated is None else self._gated_problems(*shape.gated)

    def seconds_of_cublas(self) -> float:
        """Return the seconds of all products without the package."""
        return sum(
            device_seconds(problem.cublas, self.device) for problem in [*self.plain.values(), *self.gated]
        )

    def choose_plain(self) -> list[dict[str, Any]]:
        """Return a result for each plain product."""
        results = []
        for (kind, outputs, inputs), problem in self.plain.items():
            times = self._times(problem)
            best = min(times, key=times.__getitem__)
            if times[best] > (1 - TIE_MARGIN) * times[None]:
                best = None
            results.append(
                {
                    "kind": kind,
                    "outputs": outputs,
                    "inputs": inputs,
                    "tile": None if best is None else list(astuple(best)),
                    "microseconds": _microseconds(times),
                }
            )
        return results

    def choose_gated(self, plain: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the result for the two products of a gated MLP, which are used if both together are faster.

        plain: results of `choose_plain`, because the package may also be faster at these products without the gate.
        """
        if not self.gated:
            return None
        times = [self._times(problem) for problem in self.gated]
        tiled = [{tile: value for tile, value in t.items() if tile is not None} for t in times]
        others = sum(t[None] for t in times) - sum(_saved(p) for p in plain if self._is_replaced(p))
        chosen = None
        if all(tiled):
            best = [min(t, key=t.__getitem__) for t in tiled]
            if sum(t[tile] for t, tile in zip(tiled, best, strict=True)) < (1 - TIE_MARGIN) * others:
                chosen = [list(astuple(tile)) for tile in best]
        return {
            "tiles": chosen,
            "microseconds": [*map(_microseconds, times)],
            "without_gate_microseconds": round(others * 1e6, 2),
        }

    def _is_replaced(self, product: Mapping[str, Any]) -> bool:
        """Return True if the products with the gate contain this plain one."""
        assert self._gated_shape is not None
        D, F = self._gated_shape
        key = product["kind"], product["outputs"], product["inputs"]
        return key in (("output", 2 * F, D), ("input_gradient", D, F))

    def _times(self, problem: _Problem) -> "_Times":
        """Return the seconds without the package (key None), and with each tile whose results are right."""
        times: _Times = {None: device_seconds(problem.cublas, self.device)}
        expected = problem.cublas()
        for tile in self.tiles:
            try:
                error = max(map(_error, problem.in_order(problem.tiled(tile)), expected))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # the package does not support this tile here
                continue
            if error <= TOLERANCE:
                times[tile] = device_seconds(partial(problem.tiled, tile), self.device)
        return times

    def _random(self, *size: int, std: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=self._generator, device=self.device).mul_(std).bfloat16()

    def _plain_problems(self, outputs: int, inputs: int) -> Iterator[tuple[_Key, _Problem]]:
        weight = self._random(outputs, inputs, std=0.02)
        for kind, width, right in (("output", inputs, weight.T), ("input_gradient", outputs, weight)):
            left = self._random(self._tokens, width)
            yield (
                (kind, outputs, inputs),
                _Problem(partial(_matmul_of, left, right), partial(_tiled_matmul, left, right)),
            )

    def _gated_problems(self, D: int, F: int) -> list[_Problem]:
        x, grad = self._random(self._tokens, D), self._random(self._tokens, D, std=1e-3)
        first, second = self._random(2 * F, D, std=1 / math.sqrt(D)), self._random(D, F, std=0.02)
        inner, alternating = x @ first.T, interleave(first)
        pairs = interleave(inner.T).T.contiguous()
        grad_weight = torch.zeros(2 * F, D, device=self.device)

        def forward() -> tuple[Tensor, ...]:
            output = x @ first.T
            return output, cast(Tensor, fused.gated(output, "silu", True))

        def backward() -> tuple[Tensor, ...]:
            return (cast(Tensor, fused.gated_backward(grad @ second, inner, "silu", True)),)

        def tiled_backward(tile: MatmulTile) -> tuple[Tensor, ...]:
            deinterleave(grad_weight)  # what the layout costs elsewhere
            return (gated_matmul_gradient(grad, second, pairs, tile),)

        return [
            _Problem(forward, lambda tile: gated_matmul(x, alternating, tile), alternating=True),
            _Problem(backward, tiled_backward, alternating=True),
        ]


_Times = dict[MatmulTile | None, float]


def _matmul_of(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return (a @ b,)


def _tiled_matmul(a: Tensor, b: Tensor, tile: MatmulTile) -> tuple[Tensor, ...]:
    return (matmul(a, b, tile),)


def _microseconds(times: _Times) -> dict[str, float]:
    names = {tile: "cuBLAS" if tile is None else " x ".join(map(str, astuple(tile))) for tile in times}
    return {names[tile]: round(value * 1e6, 2) for tile, value in times.items()}


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest relative error of a row or of a column, infinite if one is not a number."""
    rows, columns, sizes = [], [], []
    for a, b in zip(ours.split(ERROR_ROWS), theirs.split(ERROR_ROWS), strict=True):
        difference, size = (a.float() - b.float()).square(), b.float().square()
        rows.append((difference.sum(1) / size.sum(1)).max())
        columns.append(difference.sum(0))
        sizes.append(size.sum(0))
    column = (torch.stack(columns).sum(0) / torch.stack(sizes).sum(0)).max()
    error = float(torch.stack((*rows, column)).max().sqrt())
    return error if math.isfinite(error) else math.inf


def _saved(product: Mapping[str, Any]) -> float:
    """Return the seconds that the tile of a plain product saves."""
    times = product["microseconds"]
    return 0.0 if product["tile"] is None else 1e-6 * (times["cuBLAS"] - min(times.values()))


def saved_seconds(facts: Mapping[str, Any]) -> float:
    """Return about how many seconds a pass of one block saves."""
    saved = sum(map(_saved, facts["plain"]))
    gated = facts["gated"]
    if gated is not None and gated["tiles"] is not None:
        best = sum(min(v for k, v in t.items() if k != "cuBLAS") for t in gated["microseconds"])
        saved += 1e-6 * (gated["without_gate_microseconds"] - best)
    return saved


def summary(facts: Mapping[str, Any]) -> str:
    """Return in words what quack-kernels computes."""
    plain = sum(product["tile"] is not None for product in facts["plain"])
    gated = facts["gated"] is not None and facts["gated"]["tiles"] is not None
    if not plain and not gated:
        return "no product, as none is faster"
    return f"{plain} of {len(facts['plain'])} kinds of products{', and the gate of the MLP' if gated else ''}"
