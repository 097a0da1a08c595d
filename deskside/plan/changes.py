"""Every combination of the options of `deskside train` that save memory, from the least change to the greatest.

Options that cost speed alone (recomputation, loss chunks, rows per pass, cached weights, sharding) are the ladder of
`candidates.fastest`, which every combination goes through. What is combined here changes more than that: the number
format, the optimizer, the format of its states and where they are, and the length of the rows. A verdict of "no" means
that none of these fits, so what one of them makes possible is always offered.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from deskside.budget.formats import LowKind, Precision, quantized
from deskside.budget.step_spec import StateFormat
from deskside.config import merge
from deskside.plan.candidates import LADDER, fastest
from deskside.plan.estimate import Estimate, Setting, StageSetting, fitted, in_precision, pass_sizes
from deskside.plan.request import Given, Request
from deskside.utils.errors import UsageError

SHORTEST = 512  # tokens; rows are not cut shorter than this to make something fit
MOST_CUTS = 3  # times half the length
# What a change costs beside speed, as an order: a halving of the rows more than all that leaves the model's context.
OTHER_OPTIMIZER, SMALL_STATES, ON_HOST, OTHER_FORMAT, HALF_ROWS = 1, 2, 3, 7, 8


def combinations(request: Request, start: Setting) -> Iterator[Setting]:
    """Yield the setting with every combination of changes, the least first; the first is the setting itself."""
    found: list[tuple[int, Setting]] = []
    formats = [(0, start)]
    if request.given is not None:
        for other in _formats(start, request.given, request.card.native):
            formats.append((OTHER_FORMAT, other))
    for (cost, base), cuts in itertools.product(formats, _cuts(start)):
        rows = _with_rows(base, cuts)
        for more, way in _optimizers(rows):
            found.append((cost + HALF_ROWS * cuts + more, way))
    found.sort(key=lambda pair: pair[0])
    yield from (setting for _, setting in found)


def first_that_fits(request: Request, start: Setting) -> Estimate | None:
    """Return the least change that surely fits; None when nothing does."""
    for setting in combinations(request, start):
        if least(request, setting).fits == "fits":
            found = fastest(request, setting)
            if found.fits == "fits":
                return found
    return None


def least(request: Request, setting: Setting) -> Estimate:
    """Return what needs least memory of all that `fastest` may choose for this setting."""
    rung, chunk = LADDER[-1]
    lean = replace(
        setting,
        micro_tokens=min(setting.micro_tokens, pass_sizes(setting)[-1]),
        activation_checkpointing=rung,
        loss_chunk_tokens=min(chunk, setting.loss_chunk_tokens),
        sharded=setting.sharded or (setting.gpus > 1 and setting.shardable),
    )
    if lean.has_optional_cache:
        lean = replace(lean, copies="use")
    return fitted(lean, request.calibration, request.card.memory_bytes)


def leanest(request: Request, start: Setting, same_task: bool = False) -> Estimate:
    """Return what needs least memory of all combinations. same_task: rows and number format stay what they are."""
    settings = [
        setting
        for setting in combinations(request, start)
        if not same_task
        or (setting.sequence_length, setting.precision) == (start.sequence_length, start.precision)
    ]
    return min((least(request, setting) for setting in settings), key=lambda found: found.memory_bytes[1])


def lighter(setting: Setting) -> Iterator[Setting]:
    """Yield the setting with smaller optimizer states, then with states on the host, where training takes that."""
    yield from (way for cost, way in _optimizers(setting, (setting.optimizer,)) if cost)


def shorter(setting: Setting) -> Iterator[Setting]:
    """Yield the setting with rows of a half, a quarter, ... of its longest, as far as they divide."""
    for cuts in _cuts(setting):
        if cuts:
            yield _with_rows(setting, cuts)


def _formats(start: Setting, given: Given, native: frozenset[LowKind]) -> Iterator[Setting]:
    """Yield the setting in another number format: FP8 for BF16 where the card has it, BF16 for lower ones.

    Only where training takes the model in it: a mixture of experts has no FP8 products.
    """
    other: Precision | None = None
    if quantized(start.precision):
        other = "bf16"
    elif start.precision == "bf16" and "fp8" in native:
        other = "fp8-delayed"
    if other is None:
        return
    try:
        config = merge.build([*given.layers, {"precision": {"name": other}}])
    except UsageError:
        return  # this model or these options exclude it
    yield in_precision(start, config, other, native)


def _optimizers(
    setting: Setting, names: tuple[str, ...] = ("as asked", "muon")
) -> Iterator[tuple[int, Setting]]:
    """Yield (cost, setting) with every optimizer, format of its states and place for them that training takes."""
    for name in dict.fromkeys(setting.optimizer if name == "as asked" else name for name in names):
        base = setting if name == setting.optimizer else replace(setting, optimizer="muon")
        first = OTHER_OPTIMIZER if name != setting.optimizer else 0
        small: StateFormat = "bfloat16" if base.sharded else "8bit"
        for states in dict.fromkeys((base.states, small)):
            for offload in dict.fromkeys(
                (base.offload_optimizer, not base.sharded or base.offload_optimizer)
            ):
                cost = first
                cost += SMALL_STATES if states != base.states else 0
                cost += ON_HOST if offload != base.offload_optimizer else 0
                yield cost, replace(base, states=states, offload_optimizer=offload)


def _cuts(setting: Setting) -> list[int]:
    """Return how often the rows can be halved: 0, 1, ..."""
    length, found = setting.sequence_length, [0]
    while len(found) <= MOST_CUTS and length % 2 == 0 and length // 2 >= SHORTEST:
        length //= 2
        found.append(len(found))
    return found


def _with_rows(setting: Setting, cuts: int) -> Setting:
    if not cuts:
        return setting
    length = setting.sequence_length // 2**cuts
    stages = tuple(
        StageSetting(s.share, min(s.sequence_length, length), s.tokens, s.window) for s in setting.stages
    )
    return replace(setting, stages=stages, micro_tokens=max(length, setting.micro_tokens))
