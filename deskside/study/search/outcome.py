"""The outcome of a search: its trials, the best so far by time, the confirmed winner, the answer in one sentence."""

from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deskside.config.base import first_problem
from deskside.config.imported import toml_value
from deskside.run.record import number
from deskside.study.metrics import QUALITY
from deskside.study.results import NOT_ENDED, Comparison, Results, status_text
from deskside.study.search.edges import Edges
from deskside.study.search.search_folder import RESULT, SearchPlan
from deskside.study.search.suggestions import Suggested
from deskside.utils import strict_json
from deskside.utils.errors import RunError
from deskside.utils.files import write_atomically
from deskside.utils.format import plural, value_text
from deskside.utils.parsing import json_value, leaves

DEFAULT, WINNER = "default", "winner"  # arms of the confirmation
# Statuses of trials that never started, besides those of the runner.
REFUSED, REPEATED = "infeasible", "repeated"


def arm_id(trial: int) -> str:
    """Return the id of the arm of a trial."""
    return f"trial-{trial:04d}"


def settings_text(settings: dict[str, Any]) -> str:
    """Return settings as text: "optim.lr 0.02, model.depth 8"."""
    return ", ".join(f"{key} {value_text(value)}" for key, value in settings.items())


def trial_status_text(status: str) -> str:
    """Return a trial's status as tables show it."""
    return "refused by the planner" if status == REFUSED else status_text(status)


@dataclass(frozen=True)
class SearchTrial:
    """One trial. loss: bits per byte at its end; elapsed: seconds of the search until then; run: its directory."""

    number: int
    status: str
    settings: dict[str, Any]
    loss: float | None
    elapsed: float | None
    reason: str
    run: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of a search as result.json stores it.

    Attributes:
        importances: Parameter -> share of the spread of the losses.
        winner: Number of the best trial; None if none finished, 0 if it is the default.
        confirmed: Comparison of the winner with the default on fresh seeds in bits per byte; None without one.
        default_mean, winner_mean: Means over the fresh seeds.
        spent_seconds: On the clock, the confirmation included.
        edges: Where the best trial is at the edge of what was searched; None for a search that did not look.
        complete: False until the search has ended; then a trial may be "running", and `winner` is the best so far.
    """

    name: str
    sampler: str
    prune: bool
    hours: float
    devices: int
    proxy: str
    trials: list[SearchTrial]
    best_so_far: list[tuple[float, float]]
    importances: dict[str, float] = field(default_factory=dict)
    winner: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    confirmed: Comparison | None = None
    default_mean: float | None = None
    winner_mean: float | None = None
    confirmed_on: str = ""
    answer: str = ""
    spent_seconds: float = 0.0
    complete: bool = True
    edges: Edges | None = None

    @property
    def edge_text(self) -> str:
        """The report's sentences about ranges whose edge the best trial is at, or ""."""
        return "" if self.edges is None else self.edges.text()

    @property
    def further_command(self) -> str:
        """The command of a search beyond these edges, without the name of the program, or ""."""
        return "" if self.edges is None else self.edges.command

    def counts(self) -> dict[str, int]:
        """Return the number of trials by status."""
        statuses = [trial.status for trial in self.trials]
        return {status: statuses.count(status) for status in dict.fromkeys(statuses)}


def search_trials(suggested: list[Suggested]) -> list[SearchTrial]:
    """Return the trials of Optuna's study."""
    trials = []
    for one in suggested:
        if one.state == "waiting":  # the default, before the first trial
            continue
        status = one.attributes.get("status", one.state)
        ran = status not in (REFUSED, REPEATED)
        trials.append(
            SearchTrial(
                one.number,
                status,
                one.attributes.get("settings", {}),
                one.value,
                one.attributes.get("elapsed"),
                one.attributes.get("reason", ""),
                f"trials/runs/{arm_id(one.number)}-s1" if ran else "",
            )
        )
    return trials


def best_so_far(trials: list[SearchTrial]) -> list[tuple[float, float]]:
    """Return (seconds of the search, lowest loss until then) at every improvement."""
    best: list[tuple[float, float]] = []
    ended = [(t.elapsed, t.loss) for t in trials if t.elapsed is not None and t.loss is not None]
    for elapsed, loss in sorted(ended):
        if not best or loss < best[-1][1]:
            best.append((elapsed, loss))
    return best


def best_trial(trials: list[SearchTrial]) -> SearchTrial | None:
    """Return the finished trial with the lowest loss, the earliest of equals; None if none finished."""
    finished = [trial for trial in trials if trial.status == "finished" and trial.loss is not None]
    return min(finished, key=lambda trial: (trial.loss, trial.number), default=None)


def answer(plan: SearchPlan, best: SearchTrial | None, results: Results | None, complete: bool = True) -> str:
    """Return the answer in one sentence. results: of the confirmation, None without one."""
    if not complete:
        found = "no trial has finished" if best is None or best.loss is None else _best_text(best)
        return f"The search has not ended; so far, {found}."
    if best is None:
        return "No trial finished, so nothing was found."
    if best.number == 0:
        return "None of the trials was better than the default, so the default stays."
    what = f"The best settings found are {settings_text(best.settings)}"
    confirmed = comparison(results)
    if confirmed is None:
        return f"{what}; they were not compared with the default on fresh seeds, because {_why_not(results)}."
    where = "" if plan.confirm_at_target else f", measured on {plan.confirmed_on} and not on whole runs"
    difference = f"{confirmed.difference:+.4f} bits per byte against the default"
    if confirmed.low is None or confirmed.high is None:
        return (
            f"{what}: {difference} with one fresh seed{where}; not shown, because one seed has no interval."
        )
    verdict = {"lower": "shown to be better", "higher": "shown to be worse"}.get(
        confirmed.verdict, "not shown to differ"
    )
    interval = f"95 % interval {confirmed.low:+.4f} to {confirmed.high:+.4f}"
    return f"{what}: {difference} ({interval}) over {plural(confirmed.n, 'fresh seed')}{where}: {verdict}."


def _why_not(results: Results | None) -> str:
    """Return why the confirmation has no comparison."""
    for arm in results.arms if results is not None else ():
        failed = [trial for trial in arm.trials if trial.status not in ("finished", "pruned", *NOT_ENDED)]
        if failed and not arm.finished():
            status, reason = status_text(failed[0].status), failed[0].reason
            return f"no trial of the {arm.id} finished ({f'{status}: {reason}' if reason else status})"
    return "the time was over"


def _best_text(best: SearchTrial) -> str:
    settings = "the default" if best.number == 0 else settings_text(best.settings)
    return f"the best is trial {best.number} with {best.loss:.4f} bits per byte: {settings}"


def comparison(results: Results | None) -> Comparison | None:
    """Return the winner's comparison with the default in bits per byte, or None if no pair of trials finished."""
    if results is None:
        return None
    return next(arm for arm in results.arms if arm.id == WINNER).comparison(QUALITY)


def preset_text(plan: SearchPlan, layer: dict[str, Any], base: str, sentence: str) -> str:
    """Return the winner as a preset that `deskside train` reads. base: the preset it builds on; layer: its changes."""
    lines = [f"# Found by: {plan.command}", *(f"# {line}" for line in sentence.splitlines())]
    lines.append(f"base = {toml_value(base)}")
    tables = {key: value for key, value in layer.items() if isinstance(value, dict)}
    lines += [f"{key} = {_toml(value)}" for key, value in layer.items() if key not in tables]
    for part, values in tables.items():
        lines += ["", f"[{part}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Return a value in TOML's notation, tables in a line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml_value(key)} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return toml_value(value)


def write_outcome(outcome: Outcome, folder: Path) -> None:
    """Write result.json. Raises RunError if it cannot be written."""
    write_atomically(folder / RESULT, strict_json.dumps(asdict(outcome), indent=1) + "\n")


def read_outcome(folder: Path) -> Outcome:
    """Read result.json. Raises RunError if it is missing, unreadable or damaged."""
    path = folder / RESULT
    try:
        content = json_value(path.read_bytes(), finite=True)
        for leaf in leaves(content):
            if isinstance(leaf, float) and number(leaf) is None:  # it would overflow the arithmetic of a plot
                raise ValueError(f"it has the number {leaf}")
        return _adapter().validate_python(content)
    except FileNotFoundError:
        raise RunError(f"{folder}: this search has no result yet") from None
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise RunError(f"{path}: is damaged ({first_problem(error)})") from None
    except ValueError as error:
        raise RunError(f"{path}: is damaged ({error})") from None


@cache
def _adapter() -> TypeAdapter[Outcome]:
    return TypeAdapter(Outcome)
