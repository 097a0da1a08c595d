"""The two phases of a search: trials until the time of the confirmation, then the winner against the default."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deskside.config import merge
from deskside.config.duration import Duration
from deskside.study.execute.executor import Executor
from deskside.study.execute.runner import TARGET, Runner, prepare_all
from deskside.study.execute.study_folder import StudyPlan
from deskside.study.execute.trial_queue import ArmAndSeed, TrialList
from deskside.study.metrics import QUALITY
from deskside.study.results import Factor, Group, Results
from deskside.study.search.edges import find_edges
from deskside.study.search.memory_check import MemoryCheck
from deskside.study.search.outcome import (
    DEFAULT,
    WINNER,
    Outcome,
    SearchTrial,
    answer,
    best_so_far,
    best_trial,
    comparison,
    preset_text,
    search_trials,
    settings_text,
    write_outcome,
)
from deskside.study.search.search_folder import SEED, SearchFolder, SearchPlan, SpentTime
from deskside.study.search.search_folder import WINNER as WINNER_FILE
from deskside.study.search.search_queue import GROUP, SearchQueue, settings_of
from deskside.study.search.space import settings_layer
from deskside.study.search.suggestions import Suggestions
from deskside.study.spec.expand import PlannedArm
from deskside.utils.console import say
from deskside.utils.files import write_atomically
from deskside.utils.format import plural

DEFINITION = "# Made by deskside search; the plan is in ../search.json.\n"


def conduct(
    folder: SearchFolder, plan: SearchPlan, executor: Executor, check: MemoryCheck, target: str = TARGET
) -> tuple[Outcome, str | None]:
    """Begin or continue a search. Returns its outcome, and the name of the signal that stopped it or None.

    target: as in `Runner`. Raises RunError, for example if no trial can run.
    """
    spent = SpentTime(folder.path)
    devices = len(executor.devices())
    if not folder.trials.begun:
        write_outcome(_outcome(plan, [], None, None, devices, spent.seconds(), complete=False), folder.path)
        prepare_all([PlannedArm(DEFAULT, DEFAULT, GROUP, {}, DEFAULT, plan.trial(), "")], say)
        folder.trials.create(_study(plan, GROUP, f"trials of {plan.name}", [], 1), DEFINITION)
    with folder.trials.lock(say) as lock:
        runner = Runner(folder.trials, folder.trials.read(), executor, lock=lock, target=target)
        suggestions = Suggestions(folder.path, plan.space, plan.sampler, plan.prune, plan.seed, plan.name)
        queue = SearchQueue(plan, suggestions, runner, check, spent, devices)

        def write_progress() -> None:
            trials = search_trials(suggestions.trials())
            best = best_trial(trials)
            outcome = _outcome(plan, trials, best, None, devices, spent.seconds(), complete=False)
            outcome.importances.update(suggestions.importances())
            write_outcome(outcome, folder.path)

        queue.on_change = write_progress
        # The winner stays what it was when its confirmation began, even if a resume has time for more trials.
        stopped = None if folder.confirm.begun else runner.run_queue(queue)
        runner.write_results()
        spent.save()
        write_progress()
        suggested = suggestions.trials()
        trials = search_trials(suggested)
        best, results, edges = best_trial(trials), None, None
        if best is not None:
            edges = find_edges(plan, suggested[best.number].parameters, best.settings, folder.path)
        if stopped is None and best is not None and best.number != 0:
            parameters = suggested[best.number].parameters
            # From here on, settings are the target's; a proxy's may be smaller.
            best = replace(best, settings=settings_of(plan, plan.target(parameters)))
            results, stopped = _confirm(folder, plan, parameters, best, executor, spent, queue, target)
            write_preset(folder, plan, parameters, answer(plan, best, results, stopped is None))
        spent.save()
        outcome = _outcome(plan, trials, best, results, devices, spent.seconds(), stopped is None)
        outcome = replace(outcome, edges=edges)
        if outcome.trials:
            outcome.importances.update(suggestions.importances())
        write_outcome(outcome, folder.path)
    return outcome, stopped


class _UntilEnd(TrialList):
    """The trials of the confirmation, as far as they fit into the hours."""

    def __init__(self, trials: Sequence[ArmAndSeed], spent: SpentTime, end: float, each: float):
        super().__init__(trials)
        self._spent, self._end, self._each = spent, end, each

    def take(self) -> ArmAndSeed | None:
        return None if self.is_over() else super().take()

    def is_over(self) -> bool:
        return super().is_over() or self._spent.seconds() + self._each > self._end

    def reason_to_end(self, trial: ArmAndSeed, run: Path) -> str | None:
        return "the time of the search is over" if self._spent.seconds() > self._end + self._each else None


def _confirm(
    folder: SearchFolder,
    plan: SearchPlan,
    parameters: dict[str, Any],
    best: SearchTrial,
    executor: Executor,
    spent: SpentTime,
    queue: SearchQueue,
    target: str,
) -> tuple[Results, str | None]:
    """Train the default and the winner with fresh seeds. Returns the results, and the signal that stopped it."""
    if not folder.confirm.begun:
        configs = {DEFAULT: plan.confirmed(), WINNER: plan.confirmed(parameters)}
        labels = {DEFAULT: DEFAULT, WINNER: settings_text(best.settings)}
        budget = (
            f"{plan.target_seconds if plan.confirm_at_target else plan.trial_seconds:g} seconds of training"
        )
        arms = [
            PlannedArm(name, labels[name], "confirm", {"settings": name}, DEFAULT, config, budget)
            for name, config in configs.items()
        ]
        say(f"confirming trial {best.number} against the default with {plural(plan.seeds, 'fresh seed')}")
        folder.confirm.create(
            _study(plan, "confirm", f"{plan.name}: confirmation", arms, plan.seeds), DEFINITION
        )
    with folder.confirm.lock(say) as lock:
        runner = Runner(folder.confirm, folder.confirm.read(), executor, lock=lock, target=target)
        training = plan.target_seconds if plan.confirm_at_target else plan.trial_seconds
        trials = _UntilEnd(runner.remaining(), spent, 3600 * plan.hours, training + queue.setup_seconds)
        runner.display.done = len(runner.plan.trials()) - len(trials.waiting())
        stopped = runner.run_queue(trials)
        return runner.write_results(), stopped


def _study(plan: SearchPlan, group: str, title: str, arms: list[PlannedArm], seeds: int) -> StudyPlan:
    """Return the plan of one of the search's two studies. The confirmation's seeds are fresh."""
    confirms = group != GROUP
    factors = [Factor("settings", "settings", [DEFAULT, WINNER])] if confirms else []
    budget = arms[0].budget if arms else f"{plan.trial_seconds:g} seconds of training"
    return StudyPlan(
        groups=[Group(group, title, plan.base, "full", budget, factors, [])],
        arms=arms,
        excluded=[],
        seeds={group: seeds},
        name=f"{plan.name}-{'confirm' if confirms else 'trials'}",
        question="Are the settings found better than the default?" if confirms else "",
        created=plan.created,
        command=plan.command,
        deskside=plan.deskside,
        memory_fraction=plan.memory_fraction,
        claims=(),
        forecasts={},
        first_seed=SEED + confirms,
    )


def write_preset(folder: SearchFolder, plan: SearchPlan, parameters: dict[str, Any], sentence: str) -> None:
    """Write the winner as a preset, with what was given on the command line and the target's length."""
    target = plan.target(timed=False)
    length = (
        []
        if target.schedule.length
        else [{"schedule": {"length": str(Duration(plan.target_seconds, "seconds"))}}]
    )
    layers = [plan.given, *settings_layer(plan.space, parameters, target), *length]
    base = os.path.relpath(plan.base, folder.path) if plan.base.endswith(".toml") else plan.base
    write_atomically(folder.path / WINNER_FILE, preset_text(plan, merge.merge(layers)[0], base, sentence))


def _outcome(
    plan: SearchPlan,
    trials: list[SearchTrial],
    best: SearchTrial | None,
    results: Results | None,
    devices: int,
    spent_seconds: float,
    complete: bool,
) -> Outcome:
    confirmed = comparison(results)
    means = {arm.id: arm.estimate(QUALITY) for arm in results.arms} if results is not None else {}
    default, winner = means.get(DEFAULT), means.get(WINNER)
    return Outcome(
        name=plan.name,
        sampler=plan.sampler,
        prune=plan.prune,
        hours=plan.hours,
        devices=devices,
        proxy=plan.proxy.why,
        trials=trials,
        best_so_far=best_so_far(trials),
        winner=None if best is None else best.number,
        settings={} if best is None else best.settings,
        confirmed=confirmed,
        default_mean=None if default is None else default.mean,
        winner_mean=None if winner is None else winner.mean,
        confirmed_on=plan.confirmed_on,
        answer=answer(plan, best, results, complete),
        spent_seconds=spent_seconds,
        complete=complete,
    )
