"""Sources of the runner's trials: a fixed list (`TrialList`), or a search that chooses them as it goes."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from deskside.study.execute.journal import TrialHistory
from deskside.study.execute.measure import Measured
from deskside.study.spec.expand import PlannedArm

ArmAndSeed = tuple[PlannedArm, int]  # arm, seed


class TrialQueue(Protocol):
    """The trials that are still to run. The runner calls it from one thread."""

    def take(self) -> ArmAndSeed | None:
        """Return the next trial, or None if there is none for now."""

    def put_back(self, trial: ArmAndSeed) -> None:
        """Take back a trial that was started and has to be continued later."""

    def waiting(self) -> list[ArmAndSeed]:
        """Return the trials that are known and not taken."""

    def is_over(self) -> bool:
        """Return True if `take` will return no trial any more, unless one is put back."""

    def reason_to_end(self, trial: ArmAndSeed, run: Path) -> str | None:
        """Return why a running trial should be ended now, or None. Called about ten times a second for each of them."""

    def ended(self, trial: ArmAndSeed, history: TrialHistory, measured: Measured | None) -> None:
        """Take note of a trial that has ended and will not be continued."""


class TrialList:
    """A fixed list of trials, in order."""

    def __init__(self, trials: Sequence[ArmAndSeed]):
        self._waiting = deque(trials)

    def take(self) -> ArmAndSeed | None:
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, trial: ArmAndSeed) -> None:
        self._waiting.appendleft(trial)

    def waiting(self) -> list[ArmAndSeed]:
        return list(self._waiting)

    def is_over(self) -> bool:
        return not self._waiting

    def reason_to_end(self, trial: ArmAndSeed, run: Path) -> str | None:
        return None

    def ended(self, trial: ArmAndSeed, history: TrialHistory, measured: Measured | None) -> None:
        pass
