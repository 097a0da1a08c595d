"""Self-checks whose success is kept in the cache of trials, so that later runs on the same card skip them.

A check that fails is not kept, and neither is one that only emulated products pass: every run repeats them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from deskside.model.transformer import Transformer
from deskside.precision.selfcheck import CheckResult
from deskside.train.prepare.check_step import check_block
from deskside.utils.trials import TrialCache

KIND = "self-check"


def kept_check(
    cache: TrialCache, problem: Mapping[str, Any], check: Callable[[], CheckResult]
) -> CheckResult:
    """Return the kept result of a check that passed for this problem, or run the check."""
    # Deterministic mode uses other kernels, and some operations have none.
    problem = {**problem, "deterministic": torch.are_deterministic_algorithms_enabled()}
    kept = cache.find(KIND, problem)
    if kept is not None:
        return CheckResult(**kept.result)
    began = time.perf_counter()
    result = check()
    if result.ok and not result.reason:
        cache.keep(KIND, problem, asdict(result), time.perf_counter() - began)
    return result


def check_block_once(model: Transformer, device: torch.device, cache: TrialCache) -> None:
    """Run `check_block`, unless such a block has passed it on this GPU. Raises UsageError if the check fails."""
    problem = {
        "block": model.config.model_dump(mode="json"),
        "weights": sorted({str(weight.dtype) for weight in model.layers[0].parameters()}),
        "activations": str(model.activation_dtype),
        # The cache knows the GPU of rank 0, and every rank checks its own.
        "card": torch.cuda.get_device_name(device),
    }
    kept_check(cache, problem, lambda: check_block(model))
