"""Does a precision recipe train right here: the layers and kernels that training uses, forward and both gradients.

The judge is `deskside.precision.check`, which a run asks too before it begins: what works here is what that run will
do, on this card and with this code. Raw products of torch are another question (`doctor_gemm`): a card may have them
while a recipe's kernels fail, and a recipe may be emulated on a card that has none.
"""

import torch

from deskside.config.recipes import recipe_named
from deskside.doctor.check_tools import Result
from deskside.precision import CheckResult, check
from deskside.precision.selfcheck import HEAD_TOLERANCE, check_head

CANNOT = "cannot run here: "


def recipe(name: str, device: str) -> Result:
    """One recipe's own linear layer. details: {"native": on tensor cores of its format, "emulated_because": words}."""
    return judged(check(name, torch.device(device)), recipe_named(name).tolerance)


def head(device: str) -> Result:
    """The output head in FP8, `precision.head`: loss and both gradients. details: as of a recipe."""
    return judged(check_head(torch.device(device)), HEAD_TOLERANCE)


def judged(found: CheckResult, tolerance: float) -> Result:
    """The result as the doctor reports it. An error that is not finite becomes None, as JSON has it."""
    errors = {
        what: float(f"{error:.3e}") if error == error and error != float("inf") else None
        for what, error in found.errors.items()
    }
    if found.ok:
        verdict, reason = "works", ""
    elif found.reason.startswith(CANNOT):
        verdict, reason = "unsupported", found.reason.removeprefix(CANNOT)
    else:
        verdict, reason = "wrong numbers", found.reason
    why = found.reason if found.ok and not found.native else ""
    return {
        "verdict": verdict,
        "reason": reason,
        "errors": errors,
        "tolerance": tolerance,
        "details": {"native": found.native, "emulated_because": why.removeprefix("emulated: ")},
    }
