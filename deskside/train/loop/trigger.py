"""When something is due that happens every so often, counted in steps, tokens or seconds."""

from dataclasses import dataclass

from deskside.config.duration import Duration


@dataclass(frozen=True)
class Position:
    """Where a run is."""

    step: int
    tokens: int
    seconds: float


class Every:
    """Due each time another `every` has passed. In steps and tokens the moments are the same for a resumed run."""

    def __init__(self, every: Duration | None, start: Position):
        self.every = every
        self._last = start

    def due(self, now: Position) -> bool:
        """Whether a boundary was crossed since the last time this said yes."""
        if self.every is None:
            return False
        amount = {"steps": now.step, "tokens": now.tokens, "seconds": now.seconds}[self.every.unit]
        before = {"steps": self._last.step, "tokens": self._last.tokens, "seconds": self._last.seconds}[
            self.every.unit
        ]
        if self.every.unit == "seconds":
            reached = amount - before >= self.every.value
        else:
            reached = amount // self.every.value > before // self.every.value
        if reached:
            self._last = now
        return reached
