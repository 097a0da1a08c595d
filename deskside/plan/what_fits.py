"""Models of many sizes on a card, each trained for several numbers of hours: which of them fit.

Each cell is the candidate that `deskside plan --gpu CARD --hours H` weighs for that model, so both say the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deskside.budget.loss import LAW
from deskside.budget.shape import matmul_params, num_params
from deskside.plan.candidates import Candidate, best_candidate, model_fits, models
from deskside.plan.expected_loss import optimal_tokens
from deskside.plan.given_model import CandidateModel
from deskside.plan.request import PlanBudget, PlanRequest

HOURS = (1.0, 4.0, 8.0, 24.0, 72.0, 168.0)
SIZE_STEP = 1.25  # a model of the table has at least this many times the weights of the one before
MAX_TOO_LARGE = 2  # models that do not fit, at the end of the table
SMALLEST = 1 / 3  # of the weights of the smallest best model; smaller models are left out

# "finishes": the hours suffice for the model's compute-optimal tokens. "short": it fits, but sees fewer. "tight": it
# fits at its expected memory, but not at the high end of the range. "too short": nothing is learned. "no": it does not
# fit.
FitState = Literal["finishes", "short", "tight", "too short", "no"]


@dataclass(frozen=True)
class FitCell:
    """A model trained for some hours.

    candidate: None if the state is "too short" or "no". is_best: it has the lowest expected loss of these hours, among
    the models of the table that fit even at the high end of their memory range.
    """

    state: FitState
    candidate: Candidate | None = None
    is_best: bool = False


@dataclass(frozen=True)
class FitRow:
    """A model with a cell for each number of hours. params: all of its parameters."""

    preset: str
    params: int
    cells: tuple[FitCell, ...]


def what_fits(request: PlanRequest, hours: Sequence[float] = HOURS) -> list[FitRow]:
    """Return the table of the depth series, small to large. `hours` replace the budget of the request."""
    requests = [replace(request, budget=PlanBudget("hours", value)) for value in hours]
    table: list[tuple[CandidateModel, list[FitCell]]] = []
    too_large = 0
    for shape in _sizes(request):
        if model_fits(request, shape):
            table.append((shape, [_cell(hours_request, shape) for hours_request in requests]))
        elif too_large < MAX_TOO_LARGE:
            too_large += 1
            table.append((shape, [FitCell("no")] * len(requests)))
        else:
            break
    best = [_best([cells[column] for _, cells in table]) for column in range(len(requests))]
    weights = [matmul_params(shape.model) for shape, _ in table]
    least = SMALLEST * min((weights[row] for row in best if row is not None), default=0)
    return [
        FitRow(
            shape.preset,
            num_params(shape.model),
            tuple(replace(cell, is_best=best[column] == row) for column, cell in enumerate(cells)),
        )
        for row, (shape, cells) in enumerate(table)
        if weights[row] >= least
    ]


def _sizes(request: PlanRequest) -> Iterator[CandidateModel]:
    """Yield the models of the depth series that differ enough in size."""
    last = 0.0
    for shape in models(request):
        weights = matmul_params(shape.model)
        if shape.preset[1:].isdigit() and weights >= SIZE_STEP * last:
            last = weights
            yield shape


def _cell(request: PlanRequest, shape: CandidateModel) -> FitCell:
    candidate = best_candidate(request, shape)
    if candidate is None:
        return FitCell("too short")
    if candidate.estimate.fits != "fits":
        return FitCell("tight", candidate)
    enough = candidate.tokens[1] >= optimal_tokens(LAW, candidate.weights)
    return FitCell("finishes" if enough else "short", candidate)


def _best(column: Sequence[FitCell]) -> int | None:
    """Return the place of the lowest expected loss, None if nothing fits or is learned."""
    losses = {
        place: cell.candidate.loss[1]
        for place, cell in enumerate(column)
        if cell.candidate is not None and cell.state != "tight"
    }
    return min(losses, key=lambda place: losses[place], default=None)
