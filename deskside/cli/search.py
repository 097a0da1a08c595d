"""`deskside search`: find better settings for the user's card and text within some hours."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import deskside
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import MINUTES, JsonOption
from deskside.cli.study import DEVICES_HELP, EXECUTOR_HELP, ExecutorName, executor_options, make_executor
from deskside.config import merge, presets
from deskside.config.duration import parse_hours
from deskside.config.run import RunConfig
from deskside.pipeline.state_schema import MAX_HOURS
from deskside.run.record import flatten
from deskside.study.forecast import LocalMachine, forecast, local_machine
from deskside.study.search.memory_check import MemoryCheck, memory_check
from deskside.study.search.outcome import Outcome
from deskside.study.search.proxy import choose_proxy
from deskside.study.search.search_budget import Division, divide
from deskside.study.search.search_folder import RESULT, WINNER, SearchFolder, SearchPlan, length_layer
from deskside.study.search.space import DEPTH, dimensions
from deskside.study.search.suggestions import Sampler, import_optuna
from deskside.study.spec.expand import PlannedArm
from deskside.study.spec.parse_spec import check_seeds
from deskside.train.preflight import check_start
from deskside.utils import signals
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import check_folder
from deskside.utils.signals import exit_code

SEARCHES = Path("searches")  # directory of all searches
MEMORY_FRACTION = 0.85  # share of the GPU memory that a trial may use, as in a study


@dataclass(kw_only=True)
class SearchOptions(JsonOption):
    """Find better settings for this machine and text: learning rate, batch, size of the model and others.

    PRESET is a preset or a .toml file whose settings are the default; or the directory of a search, with --resume.

    Trials are chosen by TPE (Optuna), checked by the planner before they start,
    and ended early if they are worse than others at the same time (successive
    halving). The best one is then compared with the default on fresh seeds.

    If the run that is searched for (--schedule.length) is too long for enough
    trials, they are shorter and their model is smaller; settings carry over by
    optim.scale.

    Examples:
      deskside search 124m --data.path data/english --hours 10
      deskside search demo --hours 0.2 --minutes-per-trial 0.2 --over optim.lr,batch.tokens,model.depth
      deskside search 124m --data.path data/english --hours 10 --over optim.lr=0.01:0.2,schedule.decay --dry-run
      deskside search searches/124m --resume
    """

    preset: str | None = option(
        "a preset, a .toml file, or the directory of a search; default: 124m",
        None,
        metavar="PRESET",
        positional=True,
    )
    hours: str | None = option("length of the whole search: 10, 90m", None, metavar="H")
    over: str | None = option(
        "searched keys, such as optim.lr,model.depth; KEY=LOW:HIGH sets a range; default: learning rates, decay, "
        "batch, depth and schedule",
        None,
        metavar="KEY,...",
    )
    sampler: Sampler = option("how trials are chosen", "tpe")
    pruner: Literal["halving", "none"] | None = option(
        "end the worse half of the trials early; default: halving, but none for random", None
    )
    minutes_per_trial: Annotated[float | None, MINUTES] = option(
        "training time of a trial; default: so that enough trials fit", None, metavar="M"
    )
    trials: int | None = option("at most this many trials", None, metavar="N")
    seeds: int = option("fresh seeds of the confirmation", 3, metavar="K")
    proxy: Literal["auto", "none"] = option(
        "auto: short trials train a smaller model; none: the whole one", "auto"
    )
    out: str | None = option("the search's directory; default: searches/NAME", None, metavar="DIR")
    executor: ExecutorName = option(EXECUTOR_HELP, "local")
    devices: str | None = option(DEVICES_HELP, None, metavar="0,1")
    resume: bool = option("continue a search; trials that have ended are not repeated", False)
    dry_run: bool = option("print what would be searched, and run nothing", False)


COMMAND = Command("search", SearchOptions, configuration=True, common=("data.path", "schedule.length"))


def run(argv: Sequence[str]) -> int:
    """Run `deskside search` and return the exit code. Raises UsageError and RunError."""
    options, given = COMMAND.parse_config(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "deskside search distributes its trials over the GPUs itself; start it without torchrun"
        )
    folder = _folder(options)
    previews_another = options.dry_run and not options.resume and not _names_directory(options)
    if folder.begun and not previews_another:
        if not options.resume and not options.dry_run:
            raise UsageError(
                f"{folder.path}: already holds a search; continue it with: deskside search {folder.path} --resume, or "
                f"give another directory with --out"
            )
        plan = folder.read()
        _check_same(options, given, argv, plan)
        check = memory_check(local_machine(), plan.memory_fraction, _on_cpu(plan))
        if options.dry_run:
            _show(plan, None, check, options)
            return 0
    else:
        plan, division, machine = _new_plan(options, given, argv, folder)
        check = memory_check(machine, plan.memory_fraction, _on_cpu(plan))
        excess, reason = check.excess(plan.trial())
        if excess:
            raise UsageError(
                f"the default configuration {reason}; give a smaller PRESET, or --batch.sequence_length"
            )
        _show(plan, division, check, options)
        if options.dry_run:
            return 0
        check_start(plan.trial())
        import_optuna()
        folder.create(plan)
    return _run(folder, plan, check, options)


def _names_directory(options: SearchOptions) -> bool:
    """Return True if PRESET is the directory of a search."""
    given = options.preset
    return given is not None and not given.endswith(".toml") and Path(given).is_dir()


def _folder(options: SearchOptions) -> SearchFolder:
    """Return the directory of the search, which may not exist yet. Raises UsageError."""
    given = options.preset
    if given is not None and _names_directory(options):
        if options.out is not None:
            raise UsageError(f"{given} and --out {options.out}: both name the directory; give one of them")
        folder = SearchFolder(Path(given))
        if not folder.begun:
            raise UsageError(
                f"{given}: is not a search (no search.json); begin one with: deskside search PRESET"
            )
        return folder
    path = Path(options.out) if options.out else SEARCHES / _name(given)
    check_folder(path)
    return SearchFolder(path)


def _name(preset: str | None) -> str:
    return Path(preset or "124m").name.removesuffix(".toml")


def _check_same(options: SearchOptions, given: dict[str, Any], argv: Sequence[str], plan: SearchPlan) -> None:
    """Raise UsageError if a resumed search is given another preset or other options than it was begun with."""
    if options.preset not in (None, plan.base) and not _names_directory(options):
        raise UsageError(
            f"{options.preset}: the search began with {plan.base}; leave it out, or begin another with --out"
        )
    begun, _ = COMMAND.parse_config(shlex.split(plan.command)[2:])
    names = ("hours", "over", "pruner", "minutes_per_trial", "trials", "sampler", "seeds", "proxy")
    repeated = COMMAND.given(argv)
    differing = [
        name.replace("_", "-")
        for name in names
        if name in repeated and getattr(options, name) != getattr(begun, name)
    ]
    if given and given != plan.given:
        differing += given
    if differing:
        raise UsageError(
            f"--{differing[0]}: a resumed search keeps its plan; leave it out, or begin another with --out"
        )


def _new_plan(
    options: SearchOptions, given: dict[str, Any], argv: Sequence[str], folder: SearchFolder
) -> tuple[SearchPlan, Division, LocalMachine]:
    """Return the plan of a new search, and how its hours are divided. Raises UsageError."""
    if options.resume:
        raise UsageError(f"{folder.path}: there is no search to resume; leave --resume out to begin one")
    if options.hours is None:
        raise UsageError("--hours: is missing; give the length of the whole search, such as --hours 10")
    try:
        hours = parse_hours(options.hours)
    except ValueError as error:
        raise UsageError(f"--hours: {error}") from None
    if not 0 < hours <= MAX_HOURS:
        raise UsageError(f"--hours: must be above zero and at most {MAX_HOURS:,.0f}, not {options.hours}")
    if options.trials is not None and options.trials < 2:
        raise UsageError(f"--trials: must be 2 or more, not {options.trials}; the first is the default")
    base = options.preset or "124m"
    layers = [*presets.for_pretraining(base), given]
    target = merge.build(layers)
    check_start(merge.build([*layers, {"schedule": {"length": "1 step"}}]))
    machine = local_machine()
    length = _target_seconds(target, machine)
    devices = len(make_executor(options.executor, options.devices, {target.compute.device}).devices())
    minutes = options.minutes_per_trial
    if minutes is not None and minutes <= 0:
        raise UsageError(f"--minutes-per-trial: must be above zero, not {minutes:g}")
    setup = _setup_seconds(layers, machine)
    division = divide(
        3600 * hours,
        devices,
        setup,
        check_seeds(options.seeds, "--seeds"),
        length,
        None if minutes is None else 60 * minutes,
    )
    proxy = choose_proxy(target, division.target_seconds, division.trial_seconds, options.proxy == "auto")
    small = merge.build([*layers, proxy.layer])
    if proxy.layer and not target.optim.scale:
        raise UsageError(
            "optim.scale: false does not carry settings over from a smaller model; set it to true, or give --proxy none"
        )
    space = dimensions(options.over, small)
    # The batch is searched relative to its default; another size of the smaller model says nothing about the target's.
    sizes = flatten(proxy.layer).keys() - {"batch.tokens"}
    if absolute := next((one.key for one in space if one.key in sizes), None):
        raise UsageError(
            f"--over {absolute}: does not carry over from the smaller model of the trials; search {DEPTH}, or give "
            f"--proxy none"
        )
    plan = SearchPlan(
        name=folder.path.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["deskside", "search", *argv]),
        deskside=deskside.__version__,
        base=base,
        given=given,
        layers=layers,
        space=space,
        proxy=proxy,
        target_seconds=division.target_seconds,
        trial_seconds=division.trial_seconds,
        hours=hours,
        setup_seconds=setup,
        confirm_at_target=division.confirm_at_target,
        seeds=options.seeds,
        sampler=options.sampler,
        prune=(options.pruner or ("none" if options.sampler == "random" else "halving")) == "halving",
        max_trials=options.trials,
        seed=target.seed,
        memory_fraction=MEMORY_FRACTION,
    )
    return plan, division, machine


def _target_seconds(target: RunConfig, machine: LocalMachine) -> float | None:
    """Return the training time of the run that is searched for; None if it has no length. Raises UsageError."""
    length = target.schedule.length
    if length is None:
        return None
    if length.unit == "seconds":
        return float(length.value)
    seconds = None
    if length.unit != "epochs":
        arm = PlannedArm("target", "target", "search", {}, "target", target, "")
        seconds = forecast(arm, machine).seconds_training
    if seconds is None:
        raise UsageError(
            f"schedule.length: how long {length} take is not known here; give a time, such as 2h"
        )
    return seconds


def _setup_seconds(layers: list[dict[str, Any]], machine: LocalMachine) -> float:
    """Return the seconds of a trial apart from its training: start, evaluation, end."""
    config = merge.build([*layers, length_layer(60.0)])
    timed = forecast(PlannedArm("trial", "trial", "search", {}, "trial", config, ""), machine)
    if timed.seconds_total is None or timed.seconds_training is None:
        return machine.setup_seconds
    return timed.seconds_total - timed.seconds_training


def _on_cpu(plan: SearchPlan) -> bool:
    return plan.trial().compute.device == "cpu"


def _show(plan: SearchPlan, division: Division | None, check: MemoryCheck, options: SearchOptions) -> None:
    """Print the plan: on standard output for a dry run, else on standard error."""
    from deskside.study.search.preview import plan_json, print_plan
    from deskside.utils.printer import Printer

    if options.dry_run and options.json:
        print_json(plan_json(plan, division, check), indent=1)
    else:
        print_plan(plan, division, check, Printer(sys.stdout if options.dry_run else sys.stderr))


def _run(folder: SearchFolder, plan: SearchPlan, check: MemoryCheck, options: SearchOptions) -> int:
    """Run the rest of a search, write its report and print the answer. Returns the exit code."""
    from deskside.study.search.conduct import conduct

    executor = make_executor(options.executor, options.devices, {plan.trial().compute.device})
    resume = f"deskside search {shlex.quote(str(folder.path))} --resume"
    resume += executor_options(options.executor, options.devices)
    try:
        outcome, stopped = conduct(folder, plan, executor, check)
    except KeyboardInterrupt as error:
        signals.add_remedy(error, f"continue with: {resume}")
        raise
    except RunError as error:
        raise RunError(f"{error}; then continue with: {resume}") from None
    page = None
    if stopped is None:
        from deskside.report.write import write_report

        page = write_report(folder.path)
    if options.json:
        print_json(
            {
                "status": "stopped" if stopped else "complete",
                "signal": stopped,
                **_summary(folder, outcome, page),
            }
        )
    elif page is not None:
        _print_answer(folder, outcome, page)
    if stopped is not None:
        say(f"stopped by {stopped}; continue with: {resume}")
        return exit_code(stopped)
    if outcome.winner is None:
        reason = next((trial.reason for trial in outcome.trials if trial.reason), "")
        raise RunError(f"{folder.path}: no trial finished; the first reason: {reason}")
    return 0


def _summary(folder: SearchFolder, outcome: Outcome, page: Path | None) -> dict[str, Any]:
    preset = folder.path / WINNER
    return {
        "search": outcome.name,
        "out": str(folder.path),
        "result": str(folder.path / RESULT),  # holds the numbers
        "report": None if page is None else str(page),
        "preset": str(preset) if preset.exists() else None,
        "trials": outcome.counts(),
        "winner": outcome.winner,
        "settings": outcome.settings,
        "edges": outcome.edge_text or None,
        "answer": outcome.answer,
    }


def _print_answer(folder: SearchFolder, outcome: Outcome, page: Path) -> None:
    from deskside.cli.answer import print_answer
    from deskside.study.search.preview import print_trials
    from deskside.utils.printer import Printer

    printer, preset = Printer(), folder.path / WINNER
    print_trials(outcome, printer)
    if outcome.edge_text:
        printer.text(f"\n{outcome.edge_text}")
    files, commands = {"report": page}, []
    if preset.exists():
        files["preset"] = preset
        commands.append(f"train {shlex.quote(str(preset))}")
    if outcome.further_command:
        commands.append(outcome.further_command)
    print_answer(printer, outcome.answer, files, *commands)
