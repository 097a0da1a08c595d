"""The choice of an attention backend, kept in the cache of trials for later runs on the same card.

The key of a kept choice contains the problem, the candidates and the versions of their libraries, in addition to the
machine (`utils/trials.py`). A candidate that was not worth trying in an earlier, shorter run, or that ran out of memory
there, is tried by the next run that is long enough.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from deskside.kernels.attention.choose import BackendChoice, Use, choose, considered_backends
from deskside.kernels.attention.context import Requirements, backend_named
from deskside.utils.machine import package_version
from deskside.utils.trials import TrialCache

KIND = "attention"


def choose_cached(
    need: Requirements, cache: TrialCache, candidates: Sequence[str] | None = None, use: Use | None = None
) -> tuple[BackendChoice, Literal["measured", "cached"]]:
    """Return the choice as `choose` does, and whether it was measured now or is a kept one."""
    names = list(candidates or considered_backends(need))
    spec = _spec(need, names)
    kept = cache.find(KIND, spec)
    earlier = BackendChoice(**kept.result) if kept is not None else None
    if earlier is not None:
        names = [name for name in earlier.not_tried if _is_worth_trying(name, need, earlier, use)]
        if not names:
            return earlier, "cached"
    began = time.perf_counter()
    choice = choose(need, names, use=use, earlier=earlier)
    if earlier is not None:
        left_out = {name: reason for name, reason in earlier.not_tried.items() if name not in names}
        choice = replace(choice, not_tried=left_out | choice.not_tried)
    finite = {name: error for name, error in choice.errors.items() if math.isfinite(error)}
    cache.keep(KIND, spec, {**asdict(choice), "errors": finite}, time.perf_counter() - began)
    return choice, "measured"


def _is_worth_trying(name: str, need: Requirements, earlier: BackendChoice, use: Use | None) -> bool:
    best = min(earlier.seconds.values())
    return use is None or use.saved_seconds(need, best) >= backend_named(name).start_seconds


def _spec(need: Requirements, names: Sequence[str]) -> dict[str, Any]:
    packages = {backend_named(name).package for name in names}
    return {
        **asdict(need),
        "dtype": str(need.dtype).removeprefix("torch."),
        "device": need.device.type,
        "deterministic": torch.are_deterministic_algorithms_enabled(),  # some backends are slower then, or raise
        "cudnn": torch.backends.cudnn.version() if need.device.type == "cuda" else None,
        "candidates": list(names),
        "packages": {name: package_version(name) for name in sorted(filter(None, packages))},
    }
