"""A search's directory and its plan.

searches/NAME/search.json   the plan: what is searched, for how long, on which proxy
              optuna.db     Optuna's study (suggestions.py), which optuna-dashboard shows
              spent.json    seconds that the search has used, over all its processes
              trials/       a study of one arm per trial, run by `study.execute`
              confirm/      a study of two arms: the default and the winner, with fresh seeds
              result.json   the outcome (outcome.py), which the report shows
              winner.toml   the winner as a preset
"""

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deskside.config import merge
from deskside.config.base import first_problem
from deskside.config.duration import Duration
from deskside.config.run import RunConfig
from deskside.study.execute.study_folder import StudyFolder
from deskside.study.search.proxy import Proxy
from deskside.study.search.space import Dimension, settings_layer
from deskside.study.search.suggestions import RUNGS, Sampler
from deskside.study.spec.spec import Budget
from deskside.utils import strict_json
from deskside.utils.errors import RunError, UsageError, first_line
from deskside.utils.files import create_folder, write_atomically
from deskside.utils.format import duration
from deskside.utils.parsing import json_value

PLAN, SPENT, RESULT, WINNER = "search.json", "spent.json", "result.json", "winner.toml"
SCHEMA_VERSION = 1
SEED = 1  # of every trial; the confirmation has the seeds after it
SAVE_SECONDS = 5.0  # between two writes of spent.json
CONFIRM_MARGIN = 1.15  # trials of the confirmation may take longer than those of the search did


@dataclass(frozen=True)
class SearchPlan:
    """The plan of a search as search.json stores it.

    Attributes:
        base: Preset or .toml file of the default configuration; given: configuration from the command line.
        layers: The target's configuration layers: those of `base`, then `given`.
        target_seconds: Training time of the run that is searched for; trial_seconds: of a trial.
        hours: Of the whole search, on the clock; setup_seconds: expected of a trial apart from its training.
        confirm_at_target: True if the confirmation trains the target, and not the trials' proxy.
        seeds: Of the confirmation, for each of the two arms.
        max_trials: None for as many as the time allows.
    """

    name: str
    created: str
    command: str
    deskside: str
    base: str
    given: dict[str, Any]
    layers: list[dict[str, Any]]
    space: list[Dimension]
    proxy: Proxy
    target_seconds: float
    trial_seconds: float
    hours: float
    setup_seconds: float
    confirm_at_target: bool
    seeds: int
    sampler: Sampler
    prune: bool
    max_trials: int | None
    seed: int
    memory_fraction: float

    def target(self, parameters: dict[str, Any] | None = None, timed: bool = True) -> RunConfig:
        """Return the target's configuration, with a trial's parameters. timed: with the length of `target_seconds`."""
        base = merge.build(self.layers)
        settings = [] if parameters is None else settings_layer(self.space, parameters, base)
        length = [length_layer(self.target_seconds)] if timed else []
        return merge.build([*self.layers, *settings, *length])

    def trial(self, parameters: dict[str, Any] | None = None) -> RunConfig:
        """Return the configuration of a trial. Raises UsageError for parameters that do not go together."""
        layers = [*self.layers, self.proxy.layer, length_layer(self.trial_seconds)]
        settings = [] if parameters is None else settings_layer(self.space, parameters, merge.build(layers))
        return merge.build([*layers, *settings])

    def confirmed(self, parameters: dict[str, Any] | None = None) -> RunConfig:
        """Return the configuration of the confirmation's trials."""
        return self.target(parameters) if self.confirm_at_target else self.trial(parameters)

    @property
    def confirmed_on(self) -> str:
        """Name of what the confirmation trains: the target, the proxy, or shorter runs."""
        if self.confirm_at_target:
            return "the target"
        return "the trials' proxy" if self.proxy.layer else f"runs of {duration(self.trial_seconds)}"

    def confirm_seconds(self, devices: int, setup_seconds: float) -> float:
        """Return how long the confirmation takes on several devices."""
        training = self.target_seconds if self.confirm_at_target else self.trial_seconds
        return confirmation_rounds(self.seeds, devices) * (training + setup_seconds)

    def end_seconds(self, devices: int, setup_seconds: float) -> float:
        """Return the seconds of the search after which the confirmation must begin."""
        return 3600 * self.hours - CONFIRM_MARGIN * self.confirm_seconds(devices, setup_seconds)


def confirmation_rounds(seeds: int, devices: int) -> int:
    """Return how many trials of the confirmation run one after the other."""
    return -(-2 * seeds // devices)


def length_layer(seconds: float) -> dict[str, Any]:
    """Return the configuration layer of a run of `seconds` of training with `RUNGS` evaluations."""
    every = Duration(max(1e-3, round(seconds / RUNGS, 3)), "seconds")
    return {**Budget(Duration(round(seconds, 3), "seconds")).layer, "evaluate": {"every": str(every)}}


@cache
def _adapter() -> TypeAdapter[SearchPlan]:
    return TypeAdapter(SearchPlan)


class SearchFolder:
    """Paths and files of one search."""

    def __init__(self, path: Path):
        self.path = path
        self.trials, self.confirm = StudyFolder(path / "trials"), StudyFolder(path / "confirm")

    @property
    def begun(self) -> bool:
        """True if the folder contains a search."""
        return (self.path / PLAN).is_file()

    def create(self, plan: SearchPlan) -> None:
        """Begin a search. Raises UsageError if the folder is not empty or cannot be created, else RunError."""
        create_folder(self.path)
        try:
            names = [entry.name for entry in self.path.iterdir()]
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read: {error.strerror}") from None
        if names:
            raise UsageError(
                f"{self.path}: contains other files ({names[0]}); choose another directory with --out"
            )
        content = {"schema_version": SCHEMA_VERSION, **_adapter().dump_python(plan, mode="json")}
        write_atomically(self.path / PLAN, strict_json.dumps(content, indent=1) + "\n")

    def read(self) -> SearchPlan:
        """Read the plan. Raises RunError if it is damaged."""
        path = self.path / PLAN
        try:
            content = json_value(path.read_bytes())
            if content["schema_version"] != SCHEMA_VERSION:
                raise ValueError(
                    f"schema version {content['schema_version']}; this one reads {SCHEMA_VERSION}"
                )
            return _adapter().validate_python(content)
        except ValidationError as error:
            reason = first_problem(error)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = first_line(error)
        raise RunError(f"{path}: is damaged ({reason}); restore it, or begin another search") from None


class SpentTime:
    """Seconds that a search has used, without the time between a stop and the resume. A kill loses at most 5 s."""

    def __init__(self, folder: Path):
        self._path, self._started = folder / SPENT, time.monotonic()
        self._saved = 0.0
        try:
            self._before = float(json_value(self._path.read_bytes())["seconds"])
        except FileNotFoundError:
            self._before = 0.0
        except (ValueError, KeyError, TypeError):
            raise RunError(
                f'{self._path}: is damaged; write {{"seconds": SECONDS}} with the time used'
            ) from None

    def seconds(self) -> float:
        """Return the seconds so far."""
        now = time.monotonic() - self._started
        if now - self._saved >= SAVE_SECONDS:
            self.save()
        return self._before + now

    def save(self) -> None:
        """Write the file."""
        self._saved = time.monotonic() - self._started
        write_atomically(self._path, strict_json.dumps({"seconds": self._before + self._saved}) + "\n")
