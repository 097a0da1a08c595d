"""`deskside study`: run a matrix of configurations and compare them with error bars."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import deskside
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import MINUTES, JsonOption
from deskside.study.execute.check_arm import check_arm
from deskside.study.execute.devices import choose
from deskside.study.execute.executor import Executor, LocalExecutor
from deskside.study.execute.journal import FILE as JOURNAL
from deskside.study.execute.journal import FINAL, TrialHistory, replay_file
from deskside.study.execute.ray_executor import RayExecutor
from deskside.study.execute.study_folder import StudyFolder, StudyPlan
from deskside.study.forecast import forecast, local_machine
from deskside.study.liveness import held_locks, is_running
from deskside.study.results import INTERRUPTED, PLAN, RESULTS, Results
from deskside.study.spec import parse_spec
from deskside.study.spec.expand import Expansion, PlannedArm, expand
from deskside.study.spec.parse_spec import check_seeds
from deskside.study.spec.spec import StudySpec
from deskside.utils import signals
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import check_folder
from deskside.utils.format import plural
from deskside.utils.signals import exit_code

STUDIES = Path("studies")  # directory of all studies
ExecutorName = Literal["local", "ray"]
EXECUTOR_HELP = "where the trials run: on this machine, or on the nodes of a Ray cluster ($RAY_ADDRESS)"
DEVICES_HELP = "GPUs to spread the trials over; default: all visible ones"
DEFINING_OPTIONS = ("minutes_per_arm", "tokens_per_arm", "steps_per_arm", "only")


@dataclass(kw_only=True)
class StudyOptions(JsonOption):
    """Run a matrix of configurations with the same budget each, and compare them with error bars.

    STUDY is a preset, a .toml file, or the directory of a study.

    Each configuration is an arm. Each trial (an arm with one seed) is an ordinary run in its own process.

    A trial that runs out of memory, diverges or is killed is a result, too.

    Configuration options (--part.key) apply to every arm.

    When a trial ends, its checkpoints are deleted, and its model unless --keep-models is given.

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
        "training time of every trial, without compilation: minutes, or 90m, 2h", None, metavar="M"
    )
    tokens_per_arm: str | None = option("tokens of every trial, such as 100M", None, metavar="N")
    steps_per_arm: int | None = option("optimizer steps of every trial", None, metavar="N")
    seeds: int | None = option("seeds of every arm", None, metavar="K")
    only: tuple[str, ...] = option(
        "run only these arms: factor=level[,level], the name of an arm (with * and ?), or a group",
        (),
        metavar="X",
    )
    executor: ExecutorName = option(EXECUTOR_HELP, "local")
    devices: str | None = option(DEVICES_HELP, None, metavar="0,1")
    resume: bool = option("continue a study; trials that have ended are skipped", False)
    again: str | None = option(
        "with --resume: repeat the trials with these statuses, such as oom,failed", None, metavar="STATUS"
    )
    keep_models: bool = option("keep the model of every finished trial", False)
    dry_run: bool = option("print what would run, and run nothing", False)


COMMAND = Command("study", StudyOptions, configuration=True, common=("data.path",))


def run(argv: Sequence[str]) -> int:
    """Run `deskside study` and return the exit code. Raises UsageError and RunError."""
    options, given = COMMAND.parse_config(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "deskside study distributes its trials over the GPUs itself; start it without torchrun"
        )
    again = _statuses(options)
    requested, folder = _requested_study(options, given, argv)
    is_new = not folder.begun
    if is_new:
        assert requested is not None  # else _requested_study has raised
        plan = requested.plan
    else:
        if not options.resume and not options.dry_run:
            raise UsageError(
                f"{folder.path}: already holds a study; continue it with: deskside study {folder.path} --resume, "
                f"or give another directory with --out"
            )
        plan = _recorded_plan(folder, requested, options)
    continues = requested is None or (options.resume and not is_new)
    if requested is not None and options.dry_run:
        for arm in requested.expansion.arms:
            if arm.config.data.path is not None:  # a preview needs no data, but refuses wrong data
                check_arm(arm)
    if requested is not None and (is_new or (options.dry_run and not continues)):
        requested.show(options)
    if options.dry_run:
        if continues:
            _show_remaining(folder, plan, options, again)
        return 0
    definition = requested.study.text if requested is not None and is_new else None
    executor = requested.executor if requested is not None else _executor(options, plan.arms)
    return _run(folder, plan, options, again, definition, executor)


class _RequestedStudy:
    """A study that is given by its definition (not its directory), expanded into arms, with a forecast of each."""

    def __init__(self, options: StudyOptions, given: dict[str, Any], argv: Sequence[str]):
        assert options.study is not None
        self.study: StudySpec = parse_spec.with_overrides(parse_spec.load(options.study), given)
        budget = parse_spec.budget_from_options(
            options.minutes_per_arm, options.tokens_per_arm, options.steps_per_arm
        )
        self.expansion: Expansion = expand(self.study, seeds=options.seeds, budget=budget, only=options.only)
        self.executor = _executor(options, self.expansion.arms)
        self.devices = len(self.executor.devices())
        arms, machine = self.expansion.arms, local_machine()
        self.forecasts = {arm.id: forecast(arm, machine, self.study.memory_fraction) for arm in arms}
        # The preview says why times are unknown, if those of some arm are.
        machines = [machine.running(arm.config) for arm in arms]
        self.machine = next((one for one in machines if one.request is None), machine)
        self.plan = StudyPlan(
            **vars(self.expansion),
            name=self.study.name,
            question=self.study.question,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(["deskside", "study", *argv]),
            deskside=deskside.__version__,
            memory_fraction=self.study.memory_fraction,
            claims=self.study.claims,
            forecasts={arm_id: forecast.seconds_total for arm_id, forecast in self.forecasts.items()},
        )

    def show(self, options: StudyOptions) -> None:
        """Print the plan: on standard output for a dry run, else on standard error."""
        from deskside.study.narrative import dry_run
        from deskside.utils.printer import Printer

        parts = self.study, self.expansion, self.forecasts, self.machine, self.devices
        if options.dry_run and options.json:
            print_json(dry_run.plan_json(*parts), indent=1)
        else:
            dry_run.print_plan(*parts, printer=Printer(sys.stdout if options.dry_run else sys.stderr))


def _requested_study(
    options: StudyOptions, given: dict[str, Any], argv: Sequence[str]
) -> tuple[_RequestedStudy | None, StudyFolder]:
    """Return the requested study (None if only its directory is given) and its directory. Raises UsageError."""
    definition, directory = options.study, options.out
    if definition is not None and definition not in parse_spec.preset_names() and Path(definition).is_dir():
        if directory is not None:
            raise UsageError(
                f"{definition} and --out {directory}: both name the directory of the study; give one of them"
            )
        definition, directory = None, definition
    if definition is not None and options.resume and directory is None:
        is_path = "/" in definition and not definition.endswith(".toml")
        if is_path:
            raise UsageError(f"{definition}: no such folder; deskside runs lists the studies")
    if definition is None:
        if directory is None:
            raise UsageError(
                f"STUDY is missing; give one of {', '.join(parse_spec.preset_names())}, a .toml file, or the "
                f"directory of a study"
            )
        folder = StudyFolder(Path(directory))
        if not folder.begun:
            raise UsageError(
                f"{directory}: is not a study (no {PLAN}); start one with: deskside study STUDY --out DIR"
            )
        defining = [f"--{key.replace('_', '-')}" for key in DEFINING_OPTIONS if getattr(options, key)]
        defining += [f"--{part}" for part in given]
        if defining and (options.resume or options.dry_run):
            raise UsageError(
                f"{defining[0]}: a begun study keeps its definition; leave it out, or start another study with --out"
            )
        return None, folder
    if directory is not None:
        check_folder(Path(directory))
    requested = _RequestedStudy(options, given, argv)
    path = Path(directory) if directory is not None else STUDIES / requested.study.name
    return requested, StudyFolder(path)


def _recorded_plan(
    folder: StudyFolder, requested: _RequestedStudy | None, options: StudyOptions
) -> StudyPlan:
    """Return the recorded plan of a study, with more seeds if they are requested. Raises UsageError."""
    plan = folder.read()
    if requested is not None and options.resume:
        difference = plan.difference(requested.plan)
        if difference is not None:
            raise UsageError(
                f"{folder.path}: was started with other arms ({difference}); continue it as it is: deskside study "
                f"{folder.path} --resume, or start another with --out"
            )
        return plan.with_seeds(requested.plan.seeds)
    if options.seeds is None:
        return plan
    return plan.with_seeds(dict.fromkeys(plan.seeds, check_seeds(options.seeds, "--seeds")))


def _executor(options: StudyOptions, arms: Sequence[PlannedArm]) -> Executor:
    return make_executor(options.executor, options.devices, {arm.config.compute.device for arm in arms})


def make_executor(name: ExecutorName, devices: str | None, kinds: Collection[str]) -> Executor:
    """Return the executor of the trials. Raises UsageError for GPUs or a Ray cluster that do not exist.

    devices: --devices; kinds: `compute.device` of the trials.
    """
    if name == "local":
        return LocalExecutor(choose(devices, kinds))
    if devices is not None:
        raise UsageError("--devices: is for one machine; on a Ray cluster all GPUs are used: leave it out")
    return RayExecutor(kinds)


def executor_options(name: ExecutorName, devices: str | None) -> str:
    """Return what a command for continuing needs to run its trials in the same place."""
    executor = "" if name == "local" else f" --executor {name}"
    return executor if devices is None else f"{executor} --devices {shlex.quote(devices)}"


def _show_remaining(folder: StudyFolder, plan: StudyPlan, options: StudyOptions, again: list[str]) -> None:
    """Print the trials that --resume would run. Only reads the journal, since another process may be writing it."""
    histories, locks = replay_file(folder.path / JOURNAL), held_locks()
    trials: list[tuple[PlannedArm, int, str, str]] = []  # the last two: status, reason
    for arm, seed in plan.trials():
        history = histories.get((arm.id, seed), TrialHistory())
        status: str = history.status
        if status == "running" and not is_running(folder.path, folder.run(arm.id, seed), locks):
            status = INTERRUPTED
        trials.append((arm, seed, status, history.reason))
    remaining = [trial for trial in trials if trial[2] not in FINAL or trial[2] in again]
    if options.json:
        rows = [
            {"arm": arm.id, "seed": seed, "status": status, "reason": reason}
            for arm, seed, status, reason in trials
        ]
        print_json({"study": plan.name, "trials": rows, "left": len(remaining)}, indent=1)
        return
    from deskside.utils.printer import Printer

    printer = Printer()
    printer.text(
        f"study {plan.name}: {len(trials) - len(remaining)} of {len(trials)} trials are done", "strong"
    )
    for arm, seed, status, reason in remaining:
        because = f": {reason}" if reason else ""
        printer.text(f"{arm.label}, seed {seed}: {status}{because}", indent=2, hanging=2)


def _statuses(options: StudyOptions) -> list[str]:
    """Return the statuses in --again. Raises UsageError."""
    if options.again is None:
        return []
    if not options.resume:
        raise UsageError("--again has no effect without --resume; add it")
    statuses = [status.strip() for status in options.again.split(",")]
    for status in statuses:
        if status not in FINAL:
            raise UsageError(
                f"--again {status}: is not a status of a trial that has ended; give some of {','.join(FINAL)}"
            )
    return statuses


def _run(
    folder: StudyFolder,
    plan: StudyPlan,
    options: StudyOptions,
    again: list[str],
    definition: str | None,
    executor: Executor,
) -> int:
    """Run the remaining trials, write the report and print the outcome. Returns the exit code.

    definition: the TOML text of a new study; None for one that is resumed.
    """
    from deskside.study.execute.runner import Runner, prepare_all

    if definition is not None:
        prepare_all(plan.arms, say)
        folder.create(plan, definition)
    resume = f"deskside study {shlex.quote(str(folder.path))} --resume"
    resume += executor_options(options.executor, options.devices)
    resume += " --keep-models" if options.keep_models else ""
    with folder.lock(say) as lock:
        if definition is None:
            folder.write(plan)
        runner = Runner(folder, plan, executor, keep_models=options.keep_models, lock=lock)
        remaining = runner.remaining(again)
        if definition is None:
            prepare_all([arm for arm, _ in remaining], say)
            count = len(plan.trials())
            say(f"study {plan.name}: {count - len(remaining)} of {count} trials are done")
        try:
            stopped = runner.run(remaining)
        except KeyboardInterrupt as error:
            signals.add_remedy(error, f"continue with: {resume}")
            raise
        except RunError as error:
            raise RunError(f"{error}; then continue with: {resume}") from None
        results = runner.write_results()
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
                "results": str(folder.path / RESULTS),  # holds the numbers
                "report": None if page is None else str(page),
                "trials": _counts(results),
                "arms": [
                    {"id": arm.id, "label": arm.label, "group": arm.group, "status": arm.status}
                    for arm in results.arms
                ],
            }
        )
    elif page is not None:
        _print_outcome(folder, results, page, resume)
    if stopped is not None:
        say(f"stopped by {stopped}; continue with: {resume}")
        return exit_code(stopped)
    if not any(arm.finished() for arm in results.arms):
        reason = next((trial.reason for arm in results.arms for trial in arm.trials if trial.reason), "")
        raise RunError(f"{folder.path}: no trial finished; the first error: {reason}")
    return 0


def _counts(results: Results) -> dict[str, int]:
    """Return the number of trials by status."""
    return dict(Counter(trial.status for arm in results.arms for trial in arm.trials))


def _print_outcome(folder: StudyFolder, results: Results, page: Path, resume: str) -> None:
    """Print the outcome and what to do next. resume: the command that continues the study."""
    from deskside.cli.answer import print_answer
    from deskside.study.narrative.cautions import cautions
    from deskside.study.narrative.outcome_table import print_outcome
    from deskside.study.stats.languages import read_records
    from deskside.utils.printer import Printer

    printer = Printer()
    print_outcome(results, printer)
    for caution in cautions(results, read_records(results, folder.path)):
        printer.text(caution, "attention", hanging=2)
    for arm in results.arms:
        for trial in arm.trials:
            if trial.status != "finished":
                printer.text(f"{arm.label}, seed {trial.seed}: {trial.status}: {trial.reason}", hanging=2)
    counts = _counts(results)
    answer = ", ".join(f"{number} {status}" for status, number in counts.items())
    commands = [f"dashboard {shlex.quote(str(folder.path.parent))}"]
    if failed := [status for status in counts if status in FINAL and status != "finished"]:
        commands.append(f"{resume.removeprefix('deskside ')} --again {','.join(failed)}")
    files = {"results": folder.path / RESULTS, "report": page}
    print_answer(printer, f"{plural(sum(counts.values()), 'trial')}: {answer}.", files, *commands)
