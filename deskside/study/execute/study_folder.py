"""A study's directory: the resolved plan, and the locks that keep its processes apart.

    studies/NAME/study.toml       the text of the study's file
                 study.json       resolved: every arm with its whole configuration, the order of the trials
                 journal.jsonl    the history of each trial (journal.py)
                 runs/ARM-sSEED/  an ordinary run directory for each trial
                 results.json     the outcome, and results.parquet (results_io.py)

A resume reads study.json only, so changing a preset does not change a study that has begun.
"""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deskside.config.base import first_problem
from deskside.run.directory import RunDirectory
from deskside.study.spec.expand import Expansion, PlannedArm, ordered_trials
from deskside.utils import strict_json
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically
from deskside.utils.parsing import json_value

SCHEMA_VERSION = 1
LOCK, TRIALS_LOCK = ".lock", ".trials.lock"
ORPHANS_SECONDS = 660.0  # for orphaned trials to save; a little more than they allow themselves


@dataclass(frozen=True)
class StudyPlan(Expansion):
    """The resolved plan of a study.

    forecasts: seconds of a trial by arm, None if unknown. command: the command line.
    """

    name: str
    question: str
    created: str
    command: str
    deskside: str
    memory_fraction: float
    claims: tuple[str, ...]
    forecasts: dict[str, float | None]

    def trials(self) -> list[tuple[PlannedArm, int]]:
        """Return all trials in the order in which they run."""
        return ordered_trials(self.arms, self.seeds, self.name)

    def with_seeds(self, seeds: Mapping[str, int]) -> "StudyPlan":
        """Return the plan with more seeds. Raises UsageError for fewer."""
        for group, before in self.seeds.items():
            if seeds[group] < before:
                raise UsageError(
                    f"seeds: the study was begun with {before}, not {seeds[group]}; give as many or more"
                )
        return replace(self, seeds=dict(seeds))

    def difference(self, other: "StudyPlan") -> str | None:
        """Return the first difference between the arms of two plans, or None."""
        mine, others = {arm.id: arm for arm in self.arms}, {arm.id: arm for arm in other.arms}
        for name in [*mine, *others]:
            if name not in mine or name not in others:
                return f"arm {name} is in one of them only"
            if mine[name].config != others[name].config:
                return f"arm {name} has another configuration"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the content of study.json."""
        order = [[arm.id, seed] for arm, seed in self.trials()]
        return {
            "schema_version": SCHEMA_VERSION,
            **_adapter().dump_python(self, mode="json"),
            "order": order,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "StudyPlan":
        """Parse study.json. Raises KeyError, TypeError or ValueError if it is invalid."""
        if plain["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"schema version {plain['schema_version']}; this deskside reads {SCHEMA_VERSION}"
            )
        return _adapter().validate_python(plain)


@cache
def _adapter() -> TypeAdapter[StudyPlan]:
    return TypeAdapter(StudyPlan)


class StudyFolder:
    """Paths, files and locks of one study."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def begun(self) -> bool:
        """Return whether the folder holds a study."""
        return (self.path / "study.json").is_file()

    def create(self, plan: StudyPlan, text: str) -> None:
        """Create a study. Raises UsageError if the folder holds other files, RunError if it cannot be written."""
        left_over = {"study.toml", LOCK, TRIALS_LOCK}  # of a study that was killed before its start
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            odd = next((entry.name for entry in self.path.iterdir() if entry.name not in left_over), None)
        except OSError as error:
            raise RunError(f"{error.filename or self.path}: cannot be created: {error.strerror}") from None
        if odd is not None:
            raise UsageError(
                f"{self.path}: contains other files ({odd}); choose another directory with --out"
            )
        write_atomically(self.path / "study.toml", text)
        self.write(plan)

    def write(self, plan: StudyPlan) -> None:
        """Write study.json. Raises RunError if it cannot be written."""
        write_atomically(self.path / "study.json", strict_json.dumps(plan.to_json(), indent=1) + "\n")

    def read(self) -> StudyPlan:
        """Read study.json. Raises UsageError if it is missing, RunError if it is damaged."""
        path = self.path / "study.json"
        try:
            return StudyPlan.from_json(json_value(path.read_bytes()))
        except FileNotFoundError:
            raise UsageError(
                f"{self.path}: is not a study (no study.json); begin one with: deskside study STUDY --out DIR"
            ) from None
        except ValidationError as error:
            raise RunError(
                f"{path}: is damaged ({first_problem(error)}); restore it, or begin another study"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RunError(f"{path}: is damaged ({reason}); restore it, or begin another study") from None

    def run(self, arm: str, seed: int) -> Path:
        """Return the run directory of a trial."""
        return self.path / "runs" / f"{arm}-s{seed}"

    @contextlib.contextmanager
    def lock(self, say: Callable[[str], None]) -> Iterator[int]:
        """Lock the study for this process. Yields a descriptor that its trials inherit.

        Raises UsageError if another process runs the study. Trials that outlive a killed study are still saving,
        and two processes must not train one run, so they are waited for; RunError if they do not end in time.
        """
        with (
            RunDirectory(self.path).lock(LOCK, "runs this study"),
            (self.path / TRIALS_LOCK).open("w") as file,
        ):
            waited_since = time.monotonic()
            told = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() - waited_since > ORPHANS_SECONDS:
                        raise RunError(
                            f"{self.path}: a trial of an earlier process is still running; end it first"
                        ) from None
                if not told:
                    say("trials of the process that ran this study before are still saving: waiting for them")
                    told = True
                time.sleep(0.1)
            yield file.fileno()
