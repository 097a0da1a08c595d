"""Start and resume training runs, whose phases are in `run_execution.py`."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import deskside
from deskside.config.gpu_batch import check_processes
from deskside.config.run import SCHEMA_VERSION, RunConfig
from deskside.run.continuing import check_unfinished
from deskside.run.directory import RunDirectory
from deskside.train import nodes, parallel
from deskside.train.loop.callbacks import Callback, Terminal
from deskside.train.next_token import NextToken
from deskside.train.objective import Objective
from deskside.train.preflight import check_start
from deskside.train.run_execution import RunExecution, RunOutcome
from deskside.train.state.init_weights import InitialWeights
from deskside.utils import signals
from deskside.utils.errors import UsageError


def start(
    config: RunConfig,
    where: RunDirectory | tuple[Path, str | None, str],
    command: str,
    initial: InitialWeights | None = None,
    watch: Callback | None = None,
    objective: Objective | None = None,
    began: float | None = None,
    keep_model: bool = True,
) -> RunOutcome:
    """Start a new run, and train until it is finished or stopped.

    Args:
        where: An existing run directory, or the arguments of `RunDirectory.create` for a new one.
        command: The command line, for run.json.
        initial: The weights to start from; None is random weights.
        watch: A callback that controls the run.
        objective: The objective that `config.align` names; None is pretraining.
        began: Value of time.perf_counter() from which a limit in hours counts. None is the import of deskside, the
            start of a command; a notebook gives its own.
        keep_model: Save the last step, and export the model. Otherwise the run ends with its summary.
    """
    check_start(config)
    objective = _check_objective(objective, config, "start it with this command")
    compute = config.compute
    split = config.parallel
    world = parallel.init_distributed(compute.device, split.mode, compute.gpu_budget, split.context)
    try:
        check_processes(config, world.size)
        run = None
        if world.is_rank_zero:
            run = where if isinstance(where, RunDirectory) else RunDirectory.create(*where)
            run.write_json(
                "run.json",
                {
                    "schema_version": SCHEMA_VERSION,
                    "name": run.path.name,
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                    "command": command,
                    "directory": str(Path.cwd()),
                    "deskside": deskside.__version__,
                    "init": initial.source if initial else None,
                    "fresh": list(initial.fresh) if initial else [],
                    "adapters": str(initial.adapters.folder) if initial and initial.adapters else None,
                    "config": config.model_dump(mode="json"),
                },
            )
        run = RunDirectory(Path(world.broadcast_result(lambda: str(run.path if run else ""))))
        try:
            nodes.check_run_is_shared(world, run.path)
            with run.lock_for_training(world.is_rank_zero), nodes.explain_lost_process(run.path):
                execution = RunExecution(
                    run, config, world, objective, initial, False, watch or Callback(), began, keep_model
                )
                return _execute(execution)
        except BaseException:
            # A run that failed or was interrupted before it had a plan contains nothing worth keeping.
            if world.is_rank_zero and isinstance(where, tuple) and not (run.path / "plan.json").exists():
                shutil.rmtree(run.path, ignore_errors=True)
            raise
    finally:
        parallel.destroy_distributed(world)


def resume(
    path: Path,
    watch: Callback | None = None,
    objective: Objective | None = None,
    began: float | None = None,
    keep_model: bool = True,
) -> RunOutcome:
    """Resume a run from its newest valid checkpoint.

    A run that was stopped before its first checkpoint starts again with its initial weights. Raises UsageError if the
    run is finished. watch, objective, began, keep_model: as in `start`.
    """
    run = RunDirectory.open(path)
    config = run.config()
    objective = _check_objective(objective, config, "resume it with this command")
    check_unfinished(path)
    check_start(config)
    # The number of processes may change, but a sharded run needs more than one.
    mode = "shard" if config.parallel.mode == "shard" else "auto"
    context = config.parallel.context
    world = parallel.init_distributed(config.compute.device, mode, config.compute.gpu_budget, context)
    try:
        check_processes(config, world.size)
        with run.lock_for_training(world.is_rank_zero), nodes.explain_lost_process(run.path):
            begun = world.broadcast_result(run.has_begun)
            initial = None if begun else InitialWeights.recorded(run, config)
            if not begun and world.is_rank_zero:
                run.event("there is no checkpoint: starting from the beginning")
                Terminal.say("there is no checkpoint: starting from the beginning")
            execution = RunExecution(
                run, config, world, objective, initial, begun, watch or Callback(), began, keep_model
            )
            return _execute(execution)
    finally:
        parallel.destroy_distributed(world)


def _execute(execution: RunExecution) -> RunOutcome:
    """Run all phases. An interrupt, which ends the run without a checkpoint, names the command that resumes the run."""
    try:
        return execution.execute()
    except KeyboardInterrupt as error:
        if (execution.run.path / "plan.json").exists():
            signals.add_remedy(error, f"resume with: {execution.resume_command}")
        raise


def _check_objective(objective: Objective | None, config: RunConfig, remedy: str) -> Objective:
    """Return the objective (None: pretraining). Raises UsageError unless it is the one that the configuration names."""
    objective = objective or NextToken()
    expected = config.align.name if config.align else NextToken.name
    if objective.name != expected:
        raise UsageError(f"align: this is a run of deskside {expected}; {remedy}")
    return objective
