"""What a plan says of lower precision: FP8 offered by name where it is faster here, and emulation called by its name.

BF16 stays what is planned when nobody chooses. FP8's loss is close to BF16's and not the same; how close was measured,
and docs/precision.md has it, so the choice is a person's.
"""

from dataclasses import replace
from typing import Any

from deskside.budget.formats import quantized
from deskside.budget.shape import num_params
from deskside.config import merge
from deskside.plan.candidates import Candidate
from deskside.plan.estimate import Estimate, estimate, fitted, in_precision, options
from deskside.plan.published import fp8_gain
from deskside.plan.request import Request
from deskside.utils.errors import UsageError

OFFERED = "fp8"
LOSS_SENTENCE = "how close its loss comes to BF16's is in docs/precision.md"
WORTH_OFFERING = 1.02  # times the speed


def offers(request: Request, chosen: Candidate) -> list[dict[str, Any]]:
    """FP8 for a run planned in BF16, where the card has it, the model's sizes divide and it is planned faster."""
    setting = chosen.setting
    if setting.precision != "bf16" or OFFERED not in request.card.native:
        return []
    layers = [*chosen.shape.layers, options(setting), {"precision": {"name": OFFERED}}]
    try:
        config = merge.build(layers)
    except UsageError:  # sizes that do not divide, a sharded run: FP8 is not to be had here
        return []
    faster = fitted(
        in_precision(setting, config, OFFERED, request.card.native),
        request.calibration,
        request.card.memory_bytes,
    )
    modelled = faster.tokens_per_second[1] / chosen.estimate.tokens_per_second[1]
    seen = request.measured_fp8
    speed, source = (modelled, "modelled") if seen is None else (seen.speed, seen.source)
    if speed < WORTH_OFFERING or faster.fits == "no":
        return []
    published = fp8_gain(request.card.gpu, num_params(setting.model)) if request.card.gpu else None
    beside = "" if published is None else f"; {published.source}: {published.speed:.2f} times"
    return [
        {
            "precision": OFFERED,
            "option": f"--precision {OFFERED}",
            "deskside_can": True,
            "tokens_per_second": chosen.estimate.tokens_per_second[1] * speed,
            "speed": speed,
            "modelled_speed": modelled,
            "source": source,
            "published": None
            if published is None
            else {"speed": published.speed, "source": published.source},
            "told": f"{speed:.2f} times the speed of BF16 ({source}{beside}); {LOSS_SENTENCE}",
        }
    ]


def told_of_precision(request: Request, shown: Estimate) -> list[str]:
    """A word on a run below 16 bits: whose loss is shown, and products that the tensor cores do not compute here, or
    that nobody has seen them compute for us."""
    setting = shown.setting
    if not quantized(setting.precision):
        return []
    loss = f"the expected loss is BF16's; how close {setting.precision} comes to it is in docs/precision.md"
    if setting.emulated:
        plain = estimate(
            replace(setting, precision="bf16", kept=(0.0, 0.0), fp8_head=False),
            request.calibration,
            request.card.memory_bytes,
        )
        share = shown.tokens_per_second[1] / plain.tokens_per_second[1]
        gpu = request.card.gpu
        never = request.given is not None and request.given.config.precision.native == "never"
        if "nvfp4" in setting.precision and gpu is not None and gpu.fp4_flops and not never:
            return [
                f"{setting.precision} is planned as emulated, at {share:.0%} of BF16's speed (modelled): "
                f"{request.card.name} has FP4 units, but deskside has not run them on one; deskside doctor tells "
                f"whether they work there",
                loss,
            ]
        return [
            f"{setting.precision} is emulated on {request.card.name}: its numbers are true, its products are computed "
            f"in BF16, at {share:.0%} of BF16's speed (modelled); it is for comparing, not for saving time",
            loss,
        ]
    if "nvfp4" in setting.precision:
        return [
            f"{setting.precision}: NVFP4 products are priced by {request.card.name}'s data sheet, and deskside has not "
            f"run them on such a card; deskside doctor tells whether they spec",
            loss,
        ]
    return [loss]
