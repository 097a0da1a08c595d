"""Seconds of the parts of a run's start until its first step, and the number of Triton kernels compiled in it."""

import time
from typing import Any

from deskside.kernels.compile_ahead import Compilations


class Startup:
    """The seconds of each part of a start, in order. The first part begins at `began`, a value of time.perf_counter().

    compilations: counts of the kernels since the start; None without a GPU.
    """

    def __init__(self, began: float, compilations: Compilations | None = None):
        self.seconds: dict[str, float] = {}
        self.compilations = compilations
        self._last = began

    def done(self, part: str, now: float | None = None) -> None:
        """End a part, by default now; the next one begins. The times of a part that ends repeatedly are summed."""
        now = time.perf_counter() if now is None else now
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def to_json(self) -> dict[str, Any]:
        """Return the entry of plan.json."""
        kernels = {} if self.compilations is None else self.compilations.to_json()
        seconds = {part: round(seconds, 3) for part, seconds in self.seconds.items()}
        return {"provenance": "measured", "seconds": seconds, **kernels}

    def describe(self) -> str:
        """Return a sentence for the events file."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.seconds.items())
        line = f"{sum(self.seconds.values()):.2f} s to the end of the first step: {parts}"
        if self.compilations is not None:
            counts = self.compilations
            line += f"; {counts.compiled} Triton kernels compiled, {counts.loaded} loaded from Triton's cache"
        return line
