"""`deskside study`: parse, show what would run, run it, write the report, print where it is."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

import deskside
from deskside.cli import overrides
from deskside.study.execute.devices import choose
from deskside.study.execute.journal import FILE as JOURNAL
from deskside.study.execute.journal import FINAL, Past, replay_file
from deskside.study.execute.study_folder import Plan, StudyFolder
from deskside.study.forecast import Here, forecast, here
from deskside.study.results import Results
from deskside.study.spec import parse_spec
from deskside.study.spec.expand import Expansion, expand
from deskside.study.spec.parse_spec import check_seeds
from deskside.study.spec.spec import StudySpec
from deskside.utils import strict_json
from deskside.utils.errors import RunError, UsageError
from deskside.utils.signals import exit_code

DESCRIPTION = """Run a matrix of configurations fairly, and compare them with error bars.

STUDY is a preset, a .toml file, or, with --resume, the directory of a study.

Each trial (an arm with one seed) is an ordinary run in a process of its own.

A trial that runs out of memory, diverges or is killed is a result, too.

Any key of the configuration can be given as well, and holds for every arm.

A trial's checkpoints are deleted when it ends; its model, but for --keep-models.

Examples:
  deskside study matrix16-quick
  deskside study architecture --data.path data/english --seeds 3 --dry-run
  deskside study my.toml --out studies/mine --only size=small
  deskside study studies/mine --resume
  deskside study studies/mine --resume --again oom,failed --seeds 5
"""
STUDIES = Path("studies")
DEFINITION = ("minutes_per_arm", "tokens_per_arm", "only")


@dataclass(kw_only=True)
class StudyOptions:
    """Options of the command itself."""

    study: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(metavar="STUDY", help="a preset, a .toml file, or a directory"),
    ] = None
    out: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help="the study's directory; default: studies/NAME")
    ] = None
    minutes_per_arm: Annotated[
        float | None, tyro.conf.arg(metavar="M", help="minutes of training for every trial, compile excluded")
    ] = None
    tokens_per_arm: Annotated[
        str | None, tyro.conf.arg(metavar="N", help="tokens for every trial, as 100M")
    ] = None
    seeds: Annotated[int | None, tyro.conf.arg(metavar="K", help="seeds of every arm")] = None
    only: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="X", help="keep these: factor=level[,level], an arm's name (with * and ?), a group"
        ),
    ] = ()
    devices: Annotated[
        str | None,
        tyro.conf.arg(metavar="0,1", help="GPUs to spread the trials over; default: all that are visible"),
    ] = None
    resume: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="go on with a study: nothing that is done is repeated"),
    ] = False
    again: Annotated[
        str | None,
        tyro.conf.arg(metavar="STATUS", help="with --resume: repeat trials that ended so, as oom,failed"),
    ] = None
    keep_models: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="keep the model of every finished trial")
    ] = False
    dry_run: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="show what would run, and stop")
    ] = False
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="JSON on standard output")] = False


def run(argv: Sequence[str]) -> int:
    """The command; returns the exit code. Raises UsageError and RunError."""
    options, given = overrides.parse(StudyOptions, argv, "deskside study", DESCRIPTION)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("deskside study spreads its trials over GPUs itself: start it without torchrun")
    again = _statuses(options)
    wanted, folder = _wanted(options, given, argv)
    begins = not folder.begun
    if begins:
        assert wanted is not None  # `_wanted` has seen to it
        plan = wanted.plan
    else:
        if not options.resume and not options.dry_run:
            raise UsageError(
                f"{folder.path}: holds a study already; go on with: deskside study {folder.path} --resume, or give "
                f"another directory with --out"
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
    """A study that was named by its definition, expanded and forecast."""

    def __init__(self, options: StudyOptions, given: dict[str, Any], argv: Sequence[str]):
        assert options.study is not None
        self.study: StudySpec = parse_spec.with_overrides(parse_spec.load(options.study), given)
        budget = parse_spec.budget(options.minutes_per_arm, options.tokens_per_arm)
        self.expansion: Expansion = expand(self.study, seeds=options.seeds, budget=budget, only=options.only)
        self.devices = choose(options.devices, {arm.config.compute.device for arm in self.expansion.arms})
        self.here: Here = here()
        self.forecasts = {
            arm.id: forecast(arm, self.here, self.study.memory_fraction) for arm in self.expansion.arms
        }
        self.plan = Plan.of(
            self.study,
            self.expansion,
            {name: found.seconds_total for name, found in self.forecasts.items()},
            datetime.now(UTC).isoformat(timespec="seconds"),
            shlex.join(["deskside", "study", *argv]),
            deskside.__version__,
        )

    def show(self, options: StudyOptions) -> None:
        """The plan: on standard output when it is all that is asked for, else on standard error."""
        from rich.console import Console

        from deskside.study.narrative import dry_run

        parts = self.study, self.expansion, self.forecasts, self.here, len(self.devices)
        if options.dry_run and options.json:
            print(strict_json.dumps(dry_run.plan_json(*parts), indent=1))
        else:
            dry_run.plan_table(*parts, console=Console(highlight=False, stderr=not options.dry_run))


def _wanted(
    options: StudyOptions, given: dict[str, Any], argv: Sequence[str]
) -> tuple[_Wanted | None, StudyFolder]:
    """What was asked for, None where a directory is to be resumed as it is; and the study's directory."""
    name, named = options.study, options.out
    if name is not None and name not in parse_spec.names() and Path(name).is_dir():
        if named is not None:
            raise UsageError(f"{name} and --out {named}: both name the study's directory; give one of them")
        name, named = None, name
    if name is None:
        if named is None:
            raise UsageError(
                f"which study? one of {', '.join(parse_spec.names())}, a .toml file, or the directory of one"
            )
        folder = StudyFolder(Path(named))
        if not folder.begun:
            raise UsageError(
                f"{named}: is not a study (no study.json); begin one with: deskside study STUDY --out DIR"
            )
        odd = [f"--{key.replace('_', '-')}" for key in DEFINITION if getattr(options, key)]
        odd += [f"--{part}" for part in given]
        if odd and options.resume:
            raise UsageError(
                f"{odd[0]}: a study is resumed as it was begun; leave it out, or begin another with --out"
            )
        return None, folder
    wanted = _Wanted(options, given, argv)
    return wanted, StudyFolder(Path(named) if named is not None else STUDIES / wanted.study.name)


def _recorded(folder: StudyFolder, wanted: _Wanted | None, options: StudyOptions) -> Plan:
    """The plan that the study was begun with, with more seeds if they are asked for."""
    plan = folder.read()
    if wanted is not None and options.resume and (why := plan.difference(wanted.plan)) is not None:
        raise UsageError(
            f"{folder.path}: was begun with other arms ({why}); go on with it as it is: deskside study {folder.path} "
            f"--resume, or begin another with --out"
        )
    if wanted is not None and options.resume:
        return plan.with_seeds(wanted.plan.seeds)
    if options.seeds is None:
        return plan
    return plan.with_seeds(dict.fromkeys(plan.seeds, check_seeds(options.seeds, "--seeds")))


def _show_left(folder: StudyFolder, plan: Plan, options: StudyOptions, again: list[str]) -> None:
    """What a resume would run; reads the journal only, since another process may be writing it."""
    past = replay_file(folder.path / JOURNAL)
    states = [(arm, seed, past.get((arm.id, seed), Past())) for arm, seed in plan.trials()]
    left = [(arm, seed, one) for arm, seed, one in states if one.status not in FINAL or one.status in again]
    if options.json:
        trials = [
            {"arm": arm.id, "seed": seed, "status": one.status, "reason": one.reason}
            for arm, seed, one in states
        ]
        print(strict_json.dumps({"study": plan.name, "trials": trials, "left": len(left)}, indent=1))
        return
    print(f"study {plan.name}: {len(states) - len(left)} of {len(states)} trials are done")
    for arm, seed, one in left:
        print(f"  {arm.label}, seed {seed}: {one.status}{f': {one.reason}' if one.reason else ''}")


def _statuses(options: StudyOptions) -> list[str]:
    if options.again is None:
        return []
    if not options.resume:
        raise UsageError("--again repeats trials of a study that was run: give --resume too")
    statuses = [status.strip() for status in options.again.split(",")]
    for status in statuses:
        if status not in FINAL:
            raise UsageError(f"--again {status}: no trial ends so; give some of {','.join(FINAL)}")
    return statuses


def _run(folder: StudyFolder, plan: Plan, options: StudyOptions, again: list[str], text: str | None) -> int:
    """Run what is left, write the report, tell the outcome. text: of the definition where the study begins now."""
    from deskside.study.execute.prepare_data import prepare_all
    from deskside.study.execute.runner import Runner

    devices = choose(options.devices, {arm.config.compute.device for arm in plan.arms})
    if text is not None:
        prepare_all(plan.arms, _say)
        folder.create(plan, text)
    with folder.held(_say) as lock:
        if text is None:
            folder.write(plan)
        runner = Runner(folder, plan, devices, keep_models=options.keep_models, held=lock)
        todo = runner.left(again)
        if text is None:
            prepare_all([arm for arm, _ in todo], _say)
            _say(
                f"study {plan.name}: {len(plan.trials()) - len(todo)} of {len(plan.trials())} trials are done"
            )
        try:
            stopped = runner.run(todo)
        except KeyboardInterrupt:
            _say(f"stopped; go on with: deskside study {folder.path} --resume")
            raise
        except RunError as error:
            raise RunError(f"{error}; then go on with: deskside study {folder.path} --resume") from None
        results = runner.publish()
    page = None if stopped is not None else _report(folder)
    if options.json:
        print(strict_json.dumps(_summary(folder, results, stopped, page)))
    elif page is not None:
        _print(folder, results, page)
    if stopped is not None:
        _say(f"{stopped}: stopped; go on with: deskside study {folder.path} --resume")
        return exit_code(stopped)
    if not any(arm.finished() for arm in results.arms):
        reason = next((trial.reason for arm in results.arms for trial in arm.trials if trial.reason), "")
        raise RunError(f"{folder.path}: no trial finished; of the first one: {reason}")
    return 0


def _report(folder: StudyFolder) -> Path:
    from deskside.report.write import write_report

    return write_report(folder.path)


def _summary(folder: StudyFolder, results: Results, stopped: str | None, page: Path | None) -> dict[str, Any]:
    """What --json says at the end; the numbers are in results.json."""
    arms = [
        {"id": arm.id, "label": arm.label, "group": arm.group, "status": arm.status} for arm in results.arms
    ]
    return {
        "status": "stopped" if stopped is not None else "complete",
        "signal": stopped,
        "study": results.name,
        "out": str(folder.path),
        "results": str(folder.path / "results.json"),
        "report": None if page is None else str(page),
        "trials": _counts(results),
        "arms": arms,
    }


def _counts(results: Results) -> dict[str, int]:
    """Trials by status."""
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
