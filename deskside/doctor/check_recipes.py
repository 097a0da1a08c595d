"""Check the layers and kernels of the precision recipes: the forward pass and both gradients.

The check is `deskside.precision.check`, which a run also makes before it starts, so the result holds for training on
this GPU with this code. torch's own matmuls are checked separately (`check_gemm`): a GPU may support them while a
recipe's kernels fail, and a recipe may be emulated on a GPU without them.
"""

import torch

from deskside.config.recipes import recipe_named
from deskside.doctor.check_tools import Result
from deskside.precision import CheckResult, check
from deskside.precision.selfcheck import HEAD_TOLERANCE, check_head

CANNOT = "cannot run here: "


def recipe(name: str, device: str) -> Result:
    """Check a recipe's linear layer. details: {"native": on tensor cores of its format, "emulated_because": reason}."""
    return judged(check(name, torch.device(device)), recipe_named(name).tolerance)


def head(device: str) -> Result:
    """Check the output head in FP8 (`precision.head`): the loss and both gradients."""
    return judged(check_head(torch.device(device)), HEAD_TOLERANCE)


def judged(found: CheckResult, tolerance: float) -> Result:
    """Return the result as the doctor reports it. An error that is not finite becomes None for JSON."""
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
