"""`deskside study`: run a matrix of configurations and compare them with error bars."""

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import deskside
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import MINUTES, JsonOption
from deskside.study.execute.devices import choose
from deskside.study.execute.journal import FILE as JOURNAL
from deskside.study.execute.journal import FINAL, TrialHistory, replay_file
from deskside.study.execute.study_folder import StudyFolder, StudyPlan
from deskside.study.forecast import LocalMachine, forecast, local_machine
from deskside.study.results import Results
from deskside.study.spec import parse_spec
from deskside.study.spec.expand import Expansion, expand
from deskside.study.spec.parse_spec import check_seeds
from deskside.study.spec.spec import StudySpec
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.signals import exit_code

STUDIES = Path("studies")
DEFINITION = ("minutes_per_arm", "tokens_per_arm", "steps_per_arm", "only")


@dataclass(kw_only=True)
class StudyOptions(JsonOption):
    """Run a matrix of configurations fairly, and compare them with error bars.

    STUDY is a preset, a .toml file, or, with --resume, the directory of a study.

    Each trial (an arm with one seed) is an ordinary run in its own process.

    A trial that runs out of memory, diverges or is killed is a result, too.

    Configuration options (--part.key) apply to every arm.

    A trial's checkpoints are deleted when it ends, and its model without --keep-models.

    Examples:
      deskside study matrix16-quick
      deskside study architecture --data.path data/english --seeds 3 --dry-run
      deskside study my.toml --out studies/mine --only size=small
      deskside study studies/mine --resume
      deskside study studies/mine --resume --again oom,failed --seeds 5
    """

    study: str | None = option(
        "a preset, a .toml file, or a directory", None, metavar="STUDY", positional=True
    )
    out: str | None = option("the study's directory; default: studies/NAME", None, metavar="DIR")
    minutes_per_arm: Annotated[float | None, MINUTES] = option(
        "training time of every trial without compilation: minutes, or 90m, 2h", None, metavar="M"
    )
    tokens_per_arm: str | None = option("tokens of every trial, such as 100M", None, metavar="N")
    steps_per_arm: int | None = option("optimizer steps of every trial", None, metavar="N")
    seeds: int | None = option("seeds of every arm", None, metavar="K")
    only: tuple[str, ...] = option(
        "keep these: factor=level[,level], the name of an arm (with * and ?), a group", (), metavar="X"
    )
    devices: str | None = option(
        "GPUs to spread the trials over; default: all visible ones", None, metavar="0,1"
    )
    resume: bool = option("continue a study; finished trials are skipped", False)
    again: str | None = option(
        "with --resume: repeat trials with this status, such as oom,failed", None, metavar="STATUS"
    )
    keep_models: bool = option("keep the model of every finished trial", False)
    dry_run: bool = option("show what would run, and stop", False)


COMMAND = Command("study", StudyOptions, configuration=True, common=("data.path",))


def run(argv: Sequence[str]) -> int:
    """Run `deskside study` and return the exit code. Raises UsageError and RunError."""
    options, given = COMMAND.parse_config(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("deskside study spreads its trials over GPUs itself: start it without torchrun")
    again = _statuses(options)
    wanted, folder = _wanted(options, given, argv)
    begins = not folder.begun
    if begins:
        assert wanted is not None  # else _wanted has raised
        plan = wanted.plan
    else:
        if not options.resume and not options.dry_run:
            raise UsageError(
                f"{folder.path}: already holds a study; continue it with: deskside study {folder.path} --resume, "
                f"or give another directory with --out"
            )
        plan = _recorded(folder, wanted, options)
    goes_on = wanted is None or (options.resume and not begins)
    if wanted is not None and (begins or (options.dry_run and not goes_on)):
        wanted.show(options)
    if options.dry_run:
        if goes_on:
            _show_left(folder, plan, options, again)
        return 0
    return _run(folder, plan, options, again, wanted.study.text if wanted is not None and begins else None)


class _Wanted:
    """A study given by its definition, expanded into arms, with a forecast of each."""

    def __init__(self, options: StudyOptions, given: dict[str, Any], argv: Sequence[str]):
        assert options.study is not None
        self.study: StudySpec = parse_spec.with_overrides(parse_spec.load(options.study), given)
        budget = parse_spec.budget_from_options(
            options.minutes_per_arm, options.tokens_per_arm, options.steps_per_arm
        )
        self.expansion: Expansion = expand(self.study, seeds=options.seeds, budget=budget, only=options.only)
        self.devices = choose(options.devices, {arm.config.compute.device for arm in self.expansion.arms})
        self.machine: LocalMachine = local_machine()
        self.forecasts = {
            arm.id: forecast(arm, self.machine, self.study.memory_fraction) for arm in self.expansion.arms
        }
        self.plan = StudyPlan(
            **vars(self.expansion),
            name=self.study.name,
            question=self.study.question,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(["deskside", "study", *argv]),
            deskside=deskside.__version__,
            memory_fraction=self.study.memory_fraction,
            claims=self.study.claims,
            forecasts={name: found.seconds_total for name, found in self.forecasts.items()},
        )

    def show(self, options: StudyOptions) -> None:
        """Print the plan: on standard output for a dry run, else on standard error."""
        from rich.console import Console

        from deskside.study.narrative import dry_run

        parts = self.study, self.expansion, self.forecasts, self.machine, len(self.devices)
        if options.dry_run and options.json:
            print_json(dry_run.plan_json(*parts), indent=1)
        else:
            dry_run.plan_table(*parts, console=Console(highlight=False, stderr=not options.dry_run))


def _wanted(
    options: StudyOptions, given: dict[str, Any], argv: Sequence[str]
) -> tuple[_Wanted | None, StudyFolder]:
    """Return the requested study, None if a directory is resumed as it is; and the study's directory."""
    name, named = options.study, options.out
    if name is not None and name not in parse_spec.preset_names() and Path(name).is_dir():
        if named is not None:
            raise UsageError(
                f"{name} and --out {named}: both name the directory of the study; give one of them"
            )
        name, named = None, name
    if name is None:
        if named is None:
            raise UsageError(
                f"which study? one of {', '.join(parse_spec.preset_names())}, a .toml file, or the directory of one"
            )
        folder = StudyFolder(Path(named))
        if not folder.begun:
            raise UsageError(
                f"{named}: is not a study (no study.json); start one with: deskside study STUDY --out DIR"
            )
        odd = [f"--{key.replace('_', '-')}" for key in DEFINITION if getattr(options, key)]
        odd += [f"--{part}" for part in given]
        if odd and options.resume:
            raise UsageError(
                f"{odd[0]}: a resumed study keeps its definition; leave it out, or start another study with --out"
            )
        return None, folder
    wanted = _Wanted(options, given, argv)
    return wanted, StudyFolder(Path(named) if named is not None else STUDIES / wanted.study.name)


def _recorded(folder: StudyFolder, wanted: _Wanted | None, options: StudyOptions) -> StudyPlan:
    """Return the recorded plan of a study, with more seeds if they are requested."""
    plan = folder.read()
    if wanted is not None and options.resume and (why := plan.difference(wanted.plan)) is not None:
        raise UsageError(
            f"{folder.path}: was started with other arms ({why}); continue it as it is: deskside study {folder.path} "
            f"--resume, or start another with --out"
        )
    if wanted is not None and options.resume:
        return plan.with_seeds(wanted.plan.seeds)
    if options.seeds is None:
        return plan
    return plan.with_seeds(dict.fromkeys(plan.seeds, check_seeds(options.seeds, "--seeds")))


def _show_left(folder: StudyFolder, plan: StudyPlan, options: StudyOptions, again: list[str]) -> None:
    """Print the trials that --resume would run. Only reads the journal: another process may be writing it."""
    past = replay_file(folder.path / JOURNAL)
    states = [(arm, seed, past.get((arm.id, seed), TrialHistory())) for arm, seed in plan.trials()]
    left = [(arm, seed, one) for arm, seed, one in states if one.status not in FINAL or one.status in again]
    if options.json:
        trials = [
            {"arm": arm.id, "seed": seed, "status": one.status, "reason": one.reason}
            for arm, seed, one in states
        ]
        print_json({"study": plan.name, "trials": trials, "left": len(left)}, indent=1)
        return
    print(f"study {plan.name}: {len(states) - len(left)} of {len(states)} trials are done")
    for arm, seed, one in left:
        print(f"  {arm.label}, seed {seed}: {one.status}{f': {one.reason}' if one.reason else ''}")


def _statuses(options: StudyOptions) -> list[str]:
    if options.again is None:
        return []
    if not options.resume:
        raise UsageError("--again has no effect without --resume; add it")
    statuses = [status.strip() for status in options.again.split(",")]
    for status in statuses:
        if status not in FINAL:
            raise UsageError(
                f"--again {status}: is not a status of a finished trial; give some of {','.join(FINAL)}"
            )
    return statuses


def _run(
    folder: StudyFolder, plan: StudyPlan, options: StudyOptions, again: list[str], text: str | None
) -> int:
    """Run the remaining trials, write the report and print the outcome. `text` is the definition of a new study."""
    from deskside.study.execute.runner import Runner, prepare_all

    devices = choose(options.devices, {arm.config.compute.device for arm in plan.arms})
    if text is not None:
        prepare_all(plan.arms, say)
        folder.create(plan, text)
    with folder.lock(say) as lock:
        if text is None:
            folder.write(plan)
        runner = Runner(folder, plan, devices, keep_models=options.keep_models, lock=lock)
        todo = runner.remaining(again)
        if text is None:
            prepare_all([arm for arm, _ in todo], say)
            say(
                f"study {plan.name}: {len(plan.trials()) - len(todo)} of {len(plan.trials())} trials are done"
            )
        try:
            stopped = runner.run(todo)
        except KeyboardInterrupt:
            say(f"stopped; continue with: deskside study {folder.path} --resume")
            raise
        except RunError as error:
            raise RunError(f"{error}; then continue with: deskside study {folder.path} --resume") from None
        results = runner.publish()
    page = None
    if stopped is None:
        from deskside.report.write import write_report

        page = write_report(folder.path)
    if options.json:
        print_json(
            {
                "status": "complete" if stopped is None else "stopped",
                "signal": stopped,
                "study": results.name,
                "out": str(folder.path),
                "results": str(folder.path / "results.json"),  # holds the numbers
                "report": None if page is None else str(page),
                "trials": _counts(results),
                "arms": [
                    {"id": arm.id, "label": arm.label, "group": arm.group, "status": arm.status}
                    for arm in results.arms
                ],
            }
        )
    elif page is not None:
        _print(folder, results, page)
    if stopped is not None:
        say(f"{stopped}: stopped; continue with: deskside study {folder.path} --resume")
        return exit_code(stopped)
    if not any(arm.finished() for arm in results.arms):
        reason = next((trial.reason for arm in results.arms for trial in arm.trials if trial.reason), "")
        raise RunError(f"{folder.path}: no trial finished; the first one: {reason}")
    return 0


def _counts(results: Results) -> dict[str, int]:
    """Return the number of trials by status."""
    return dict(Counter(trial.status for arm in results.arms for trial in arm.trials))


def _print(folder: StudyFolder, results: Results, page: Path) -> None:
    from deskside.study.narrative.outcome_table import print_outcome

    print_outcome(results)
    counts = ", ".join(f"{number} {status}" for status, number in _counts(results).items())
    print(f"\ntrials   {counts}")
    for arm in results.arms:
        for trial in arm.trials:
            if trial.status != "finished":
                print(f"         {arm.label}, seed {trial.seed}: {trial.status}: {trial.reason}")
    print(f"results  {folder.path / 'results.json'}")
    print(f"report   {page}")
