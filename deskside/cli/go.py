"""`deskside go`: the full pipeline within a time budget."""

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import deskside
from deskside.cli.go_pipeline import BEFORE_TRAINING, Pipeline, has_trained, out_of_time
from deskside.cli.options import Command, option
from deskside.cli.shared_options import (
    GPUS_HELP,
    JsonOption,
    check_length,
    name_of_preset,
    process_count,
)
from deskside.config import merge, presets
from deskside.config.base import UserPath
from deskside.config.duration import HOURS
from deskside.pipeline import planning
from deskside.pipeline.pipeline_state import PipelineState, damaged, tail_seconds
from deskside.pipeline.state_schema import MAX_GIB, MAX_HOURS
from deskside.run.continuing import PIPELINE_FILE
from deskside.run.directory import RunDirectory
from deskside.utils import signals
from deskside.utils.errors import RunError, UsageError
from deskside.utils.launched import is_launched
from deskside.utils.machine import this_machine
from deskside.utils.signals import exit_code

LENGTH_KEYS = ("length", "hours", "steps", "tokens", "clock")  # of the schedule


@dataclass(kw_only=True)
class GoOptions(JsonOption):
    """Run the full pipeline within a time budget: doctor, probe, plan, pretraining, evaluation, export, report.

    The hours are wall-clock and include everything from the start of this command to its end, but for the wait for an
    answer.

    Examples:
      deskside go --hours 24 --data data/english
      deskside go --hours 90m --preset 124m --data data/english --yes
      deskside go --hours 8 --data data/english --target-loss 1.05
      deskside go --hours 8 --preset 124m --data data/english --tokens 500M
      deskside go --hours 1 --data data/mine --own-corpus
      deskside go --hours 8 --data data/english --gpus auto
      deskside go --resume runs/go
    """

    hours: Annotated[float | None, HOURS] = option("time budget, such as 8, 8h or 90m", None, metavar="H")
    steps: str | None = option(
        "train the preset for this many steps; --hours remains the time budget", None, metavar="N"
    )
    tokens: str | None = option(
        "train the preset for this many tokens, such as 10M; --hours remains the time budget",
        None,
        metavar="N",
    )
    preset: str | None = option("model preset; default: chosen by the plan", None, metavar="PRESET")
    # The field is not named `data` because the configuration has a part `data`.
    corpus: UserPath | None = option("directory of the prepared data", None, name="data", metavar="DIR")
    gpu_budget: float | None = option("GPU memory that may be used; default: all of it", None, metavar="GIB")
    target_loss: float | None = option(
        "bits per byte to reach; training stops early if the pilot shows that it is out of reach",
        None,
        metavar="BPB",
    )
    own_corpus: bool = option(
        "regularize for reading a small corpus many times: more weight decay, the best checkpoint kept", False
    )
    name: str | None = option(
        "run directory under --runs; default: the preset's name, or go", None, metavar="NAME"
    )
    runs: str = option("directory of all runs", "runs", metavar="DIR")
    probes: str = option("directory of probe results", "probes", metavar="DIR")
    gpus: str | None = option(GPUS_HELP, None, metavar="N|auto")
    resume: str | None = option("continue a stopped pipeline with its remaining hours", None, metavar="RUN")
    yes: bool = option("do not ask for confirmation", False)


COMMAND = Command("go", GoOptions, configuration=True)


def run(argv: Sequence[str]) -> int:
    """Run `deskside go` and return the exit code. Raises UsageError and RunError."""
    options, given = COMMAND.parse_config(argv)
    if is_launched():
        return _train_as_rank(options)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("deskside go starts the processes itself: use --gpus N, without torchrun")
    if options.resume is not None:
        return _run_pipeline(_resume_pipeline(options, given), options)
    state = _create_pipeline(options, given, argv)
    try:
        return _run_pipeline(state, options)
    except (UsageError, RunError):
        # Without a training step, the run directory holds nothing of value: measurements are in the probe store.
        if not has_trained(state.run):
            shutil.rmtree(state.run.path, ignore_errors=True)
        raise


def _run_pipeline(state: PipelineState, options: GoOptions) -> int:
    """Run the remaining phases and return the exit code: 0, or that of the signal that stopped the training."""
    try:
        next_state: PipelineState | None = state
        while next_state is not None:
            state = next_state
            with state.recording():
                pipeline = Pipeline(state, options.yes, options.json)
                next_state = pipeline.run_phases()
        return pipeline.exit_code
    except KeyboardInterrupt as error:
        signals.add_remedy(error, f"continue with: deskside go --resume {shlex.quote(str(state.run.path))}")
        raise


def _train_as_rank(options: GoOptions) -> int:
    """Train as one of the processes that `Pipeline.train` has started, and return the exit code.

    Only the launcher writes the state of the pipeline.
    """
    begun = options.resume is not None
    path = Path(str(options.resume)) if begun else Path(options.runs) / str(options.name)
    pipeline = Pipeline(PipelineState.of_launcher(path), options.yes, options.json)
    return exit_code(pipeline.train_here(pipeline.pilot(), begun))


def _check_can_confirm(options: GoOptions) -> None:
    """Raise UsageError if the plan must be confirmed but there is no terminal to ask in."""
    if not options.yes and not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal, so the plan cannot be confirmed; pass --yes")


def _create_pipeline(options: GoOptions, given: dict[str, Any], argv: Sequence[str]) -> PipelineState:
    """Create a new pipeline. All options are validated before anything is written. Raises UsageError."""
    if options.hours is None:
        raise UsageError("--hours is required, such as --hours 24, or --resume RUN")
    for name, value, maximum in (
        ("--hours", options.hours, MAX_HOURS),
        ("--gpu-budget", options.gpu_budget, MAX_GIB),
        ("--target-loss", options.target_loss, math.inf),
    ):
        if value is not None and not value > 0:
            raise UsageError(f"{name}: must be a number above zero, not {value:g}")
        if value is not None and value > maximum:
            raise UsageError(f"{name}: must be at most {maximum:,.0f}, not {value:g}")
    for key in LENGTH_KEYS:
        if key in given.get("schedule", {}):
            raise UsageError(
                f"--schedule.{key}: the length of the run is --hours, --steps or --tokens; leave it out"
            )
    lengths = {name: getattr(options, name) for name in ("steps", "tokens") if getattr(options, name)}
    if len(lengths) > 1:
        raise UsageError("--steps and --tokens: the run can have one length only; give one of them")
    for name, value in lengths.items():
        check_length(name, str(value))
    if lengths and options.preset is None:
        raise UsageError(f"--{next(iter(lengths))}: needs a model; add --preset, or leave it out")
    if "path" in given.get("data", {}) or "sources" in given.get("data", {}):
        raise UsageError("--data.path, --data.sources: give prepared data with --data DIR")
    elapsed, tail = time.perf_counter() - deskside.STARTED, tail_seconds(options.hours)
    if options.hours * 3600 <= elapsed + tail:
        raise UsageError(
            f"--hours: {options.hours:g} h is too short: starting took {elapsed:.0f} s, and {tail:.0f} s are "
            f"reserved for samples and the report"
        )
    layers = [given] if options.preset is None else [*presets.for_pretraining(options.preset), given]
    recorded_options = {
        "gpus": process_count(options.gpus, layers),
        "preset": options.preset,
        # {"steps": "5"} becomes "5 steps".
        "length": merge.merge([{"schedule": lengths}])[0]["schedule"]["length"] if lengths else None,
        "data": options.corpus,
        "given": given,
        "own_corpus": options.own_corpus,
        "gpu_budget": options.gpu_budget,
        "target_loss": options.target_loss,
        "probes": options.probes,
        "directory": str(Path.cwd()),
        "yes": options.yes,
    }
    request = planning.PipelineRequest.of(options.hours, recorded_options)
    if options.corpus is not None:
        planning.unique_tokens(options.corpus)  # raises UsageError if it is not prepared data
    if options.preset is None and options.corpus is None:
        raise UsageError("--data DIR is required; prepare it with: deskside data prepare SOURCE --out DIR")
    if options.own_corpus and planning.prepared_data(request) is None:
        raise UsageError("--own-corpus: needs the size of the text; give prepared data with --data DIR")
    if options.preset is not None:
        config = planning.final_config(planning.preset_config(request), options.hours * 3600, request.length)
        from deskside.train.preflight import check_start

        check_start(config)
        fine_tuning = next((part for part in ("adapter", "align") if getattr(config, part) is not None), None)
    else:
        fine_tuning = "adapter" if "adapter" in given else None
    if fine_tuning is not None:
        raise UsageError(f"{fine_tuning}: deskside go only pretrains; fine-tune the result with deskside sft")
    if options.gpu_budget is not None and this_machine().device == "cpu":
        raise UsageError("--gpu-budget: this machine has no GPU; leave it out")
    _check_can_confirm(options)
    run = RunDirectory.create(Path(options.runs), options.name, name_of_preset(options.preset or "go"))
    return PipelineState.begin(run, options.hours, recorded_options, shlex.join(["deskside", "go", *argv]))


def _resume_pipeline(options: GoOptions, given: dict[str, Any]) -> PipelineState:
    """Open the stopped pipeline, in the run in which it continues. Raises UsageError and RunError."""
    others = ("hours", "steps", "tokens", "preset", "corpus", "gpu_budget", "target_loss", "name", "own_corpus",
              "runs", "probes")  # fmt: skip
    if given or any(getattr(options, name) != getattr(GoOptions, name) for name in others):
        raise UsageError(
            "--resume uses the options of the stopped pipeline; give no other options with it, but --gpus"
        )
    state = PipelineState.open(Path(str(options.resume)))
    # Follow the pipeline to its last run that has a state. A run without a state is created by the one before it.
    visited: set[Path] = set()
    while state.continued_in is not None and (state.continued_in / PIPELINE_FILE).exists():
        visited.add(state.run.path.resolve())
        if state.continued_in.resolve() in visited:
            raise damaged(state.run.path, f"continued_in: {state.continued_in.name} leads back here")
        state = PipelineState.open(state.continued_in)
    if state.phase == "done":
        raise UsageError(f"{state.run.path} is done; its report is {state.run.path / 'report.html'}")
    if options.gpus is not None:
        config = state.result("plan").get("config", {})
        state.set_gpus(process_count(options.gpus, [config, state.data["options"]["given"]]))
    options.yes = options.yes or bool(state.data["options"].get("yes"))
    if state.phase in BEFORE_TRAINING:
        _check_can_confirm(options)
    if state.seconds_left() <= 0 and state.phase != "report" and not has_trained(state.run):
        raise out_of_time(state)
    return state
