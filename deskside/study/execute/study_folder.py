"""A study's directory: its files, and the locks that prevent two processes from running it at once.

    studies/NAME/study.toml       the text of the study's file
                 study.json       the plan: every arm with its complete configuration, the order of the trials
                 journal.jsonl    the history of each trial (journal.py)
                 runs/ARM-sSEED/  an ordinary run directory for each trial
                 results.json     the outcome, and results.parquet (results_io.py)

A resume reads the plan from study.json, so changing a preset does not change a study that has begun.
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
from deskside.study.results import PLAN
from deskside.study.spec.expand import Expansion, PlannedArm, ordered_trials
from deskside.utils import strict_json
from deskside.utils.errors import RunError, UsageError, first_line
from deskside.utils.files import create_folder, write_atomically
from deskside.utils.parsing import json_value

SCHEMA_VERSION = 1
LOCK, TRIALS_LOCK = ".lock", ".trials.lock"
# Longest wait for trials that outlived a killed study to save; a little more than their own SAVE_TIMEOUT.
ORPHANS_SECONDS = 660.0


@dataclass(frozen=True)
class StudyPlan(Expansion):
    """The plan of a study as study.json stores it.

    Attributes:
        created: Time in ISO format.
        command: Command line that created the study.
        deskside: Version of deskside.
        claims: Ids in facts/claims.toml, with * and ?, that the study judges.
        forecasts: Arm -> seconds of a trial, None if unknown.
        first_seed: The smallest seed.
    """

    name: str
    question: str
    created: str
    command: str
    deskside: str
    memory_fraction: float
    claims: tuple[str, ...]
    forecasts: dict[str, float | None]
    first_seed: int = 1

    def trials(self) -> list[tuple[PlannedArm, int]]:
        """Return all trials in the order in which they run."""
        ordered = ordered_trials(self.arms, self.seeds, self.name)
        return [(arm, seed + self.first_seed - 1) for arm, seed in ordered]

    def with_seeds(self, seeds: Mapping[str, int]) -> "StudyPlan":
        """Return the plan with other numbers of seeds by group. Raises UsageError if one is smaller than before."""
        for group, old_count in self.seeds.items():
            if seeds[group] < old_count:
                raise UsageError(
                    f"seeds: the study was begun with {old_count}, not {seeds[group]}; give as many or more"
                )
        return replace(self, seeds=dict(seeds))

    def difference(self, other: "StudyPlan") -> str | None:
        """Describe the first difference between the arms of two plans. Returns None if there is none."""
        arms, other_arms = {arm.id: arm for arm in self.arms}, {arm.id: arm for arm in other.arms}
        for arm_id in [*arms, *other_arms]:
            if arm_id not in arms or arm_id not in other_arms:
                return f"arm {arm_id} is in only one of them"
            if arms[arm_id].config != other_arms[arm_id].config:
                return f"arm {arm_id} has a different configuration"
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
    def from_json(cls, content: Mapping[str, Any]) -> "StudyPlan":
        """Parse the content of study.json. Raises KeyError, TypeError or ValueError if it is invalid."""
        version = content["schema_version"]
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema version {version}; this version of deskside reads {SCHEMA_VERSION}")
        return _adapter().validate_python(content)


@cache
def _adapter() -> TypeAdapter[StudyPlan]:
    return TypeAdapter(StudyPlan)


class StudyFolder:
    """Paths, files and locks of one study."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def begun(self) -> bool:
        """True if the folder contains a study."""
        return (self.path / PLAN).is_file()

    def create(self, plan: StudyPlan, text: str) -> None:
        """Create a study. Raises UsageError if the folder contains other files or cannot be created, else RunError.

        Args:
            text: Content of study.toml.
        """
        left_over = {"study.toml", LOCK, TRIALS_LOCK}  # by a study that was killed while it was created
        create_folder(self.path)
        try:
            names = [entry.name for entry in self.path.iterdir() if entry.name not in left_over]
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read: {error.strerror}") from None
        if names:
            raise UsageError(
                f"{self.path}: contains other files ({names[0]}); choose another directory with --out"
            )
        write_atomically(self.path / "study.toml", text)
        self.write(plan)

    def write(self, plan: StudyPlan) -> None:
        """Write study.json. Raises RunError if it cannot be written."""
        write_atomically(self.path / PLAN, strict_json.dumps(plan.to_json(), indent=1) + "\n")

    def read(self) -> StudyPlan:
        """Read study.json. Raises UsageError if it is missing, RunError if it is damaged."""
        path = self.path / PLAN
        try:
            return StudyPlan.from_json(json_value(path.read_bytes()))
        except FileNotFoundError:
            raise UsageError(
                f"{self.path}: is not a study (no {PLAN}); begin one with: deskside study STUDY --out DIR"
            ) from None
        except ValidationError as error:
            raise RunError(
                f"{path}: is damaged ({first_problem(error)}); restore it, or begin another study"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = first_line(error)
            raise RunError(f"{path}: is damaged ({reason}); restore it, or begin another study") from None

    def run(self, arm: str, seed: int) -> Path:
        """Return the run directory of a trial."""
        return self.path / "runs" / f"{arm}-s{seed}"

    @contextlib.contextmanager
    def lock(self, say: Callable[[str], None]) -> Iterator[int]:
        """Lock the study for this process. Yields the descriptor of a second lock, which its trials inherit and hold.

        Raises UsageError if another process runs the study. If the study was killed before, its trials may still be
        saving. Two processes must not train the same run, so this waits for the second lock, and raises RunError if
        the trials do not end in time.
        """
        with (
            RunDirectory(self.path).lock(LOCK, "runs this study"),
            (self.path / TRIALS_LOCK).open("w") as file,
        ):
            waiting_since = time.monotonic()
            announced = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() - waiting_since > ORPHANS_SECONDS:
                        raise RunError(
                            f"{self.path}: a trial of an earlier process is still running; end it first"
                        ) from None
                if not announced:
                    say("trials of the process that ran this study before are still saving: waiting for them")
                    announced = True
                time.sleep(0.1)
            yield file.fileno()
