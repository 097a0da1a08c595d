"""`deskside go`: the full pipeline within a time budget."""

import contextlib
import gc
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
from deskside.cli.options import Command, option
from deskside.cli.output import print_json, print_next
from deskside.cli.shared_options import (
    GPUS_HELP,
    JsonOption,
    launch,
    name_of_preset,
    process_count,
)
from deskside.config import merge, presets
from deskside.config.duration import HOURS
from deskside.measurements.store import open_store
from deskside.pipeline import phases
from deskside.pipeline.pipeline_state import FILE, PipelineState, damaged, tail_seconds
from deskside.pipeline.state_schema import MAX_GIB, MAX_HOURS, PHASES
from deskside.run.directory import RunDirectory, with_resolved_paths
from deskside.train.prepare.preflight import set_cublas_workspace
from deskside.utils.errors import RunError, UsageError
from deskside.utils.launched import is_launched
from deskside.utils.machine import this_machine
from deskside.utils.signals import exit_code_of

BEFORE_TRAINING = PHASES[: PHASES.index("train")]
LONG_WAIT = 0.02  # share of the time budget; if the user takes longer to answer, planning is repeated
# Part of the error of `training_run.start` as well, which `Pipeline.train` rewrites.
TOO_SHORT = " is too short: "
LENGTH_KEYS = ("length", "hours", "steps", "tokens", "clock")  # of the schedule


@dataclass(kw_only=True)
class GoOptions(JsonOption):
    """Run the full pipeline within a time budget: doctor, probe, plan, pretraining, evaluation, export, report.

    The hours are wall-clock and include everything from the start of this command to its end.

    Examples:
      deskside go --hours 24 --data data/english
      deskside go --hours 90m --preset 124m --data data/english --yes
      deskside go --hours 8 --data data/english --target-loss 1.05
      deskside go --hours 8 --preset 124m --data data/english --tokens 500M
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
    corpus: str | None = option("directory of the prepared data", None, name="data", metavar="DIR")
    gpu_budget: float | None = option("GPU memory that may be used; default: all of it", None, metavar="GIB")
    target_loss: float | None = option(
        "bits per byte to reach; training stops early if the pilot shows that it is out of reach",
        None,
        metavar="BPB",
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
        if not _has_trained(state.run):
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
    except KeyboardInterrupt:
        print(f"stopped; continue with: deskside go --resume {state.run.path}", file=sys.stderr)
        raise


def _train_as_rank(options: GoOptions) -> int:
    """Train as one of the processes that `Pipeline.train` has started, and return the exit code.

    Only the launcher writes the state of the pipeline.
    """
    begun = options.resume is not None
    path = Path(str(options.resume)) if begun else Path(options.runs) / str(options.name)
    pipeline = Pipeline(PipelineState.of_launcher(path), options.yes, options.json)
    return exit_code_of(pipeline.train_here(pipeline.pilot(), begun))


class Pipeline:
    """Runs the phases of a pipeline in this process."""

    def __init__(self, state: PipelineState, yes: bool, as_json: bool):
        self.state, self.yes, self.as_json = state, yes, as_json
        self.run, self.options = state.run, state.data["options"]
        self.exit_code = 0  # that of a signal if it stopped the training

    def run_phases(self) -> PipelineState | None:
        """Run the remaining phases. Returns the state of the new run if the pipeline continues in another one."""
        first = PHASES.index(self.state.phase)
        for phase in BEFORE_TRAINING[first:]:
            self.state.enter(phase)
            getattr(self, phase)()
        if self.state.phase != "report":
            self.state.enter("train")
            next_state = self.train()
            if next_state is not None:
                return next_state
            if not (self.run.path / "summary.json").exists():  # training was stopped
                return None
        self.report()
        return None

    def say(self, text: str) -> None:
        """Print a line on standard error and add it to the run's events."""
        self.run.event(text)
        print(text, file=sys.stderr, flush=True)

    def request(self) -> phases.PipelineRequest:
        """Return the pipeline request of the recorded options."""
        return phases.PipelineRequest.of(self.state.hours, self.options)

    # The phases: `run_phases` calls these methods by name

    def doctor(self) -> None:
        machine = this_machine()
        seconds = phases.doctor_allowance(self.state.hours, machine) - self.state.seconds_spent()
        result = phases.doctor(machine, seconds, self.say)
        self.state.set_result("doctor", result)
        self.say(f"doctor: {result['status']}: {result['reason']}")
        if result["status"] == "unfit":
            raise RunError(f"training cannot work here: {result['reason']}; see deskside doctor")

    def probe(self) -> None:
        machine = this_machine()
        seconds = phases.allowance(self.state.hours, machine.device) - self.state.seconds_spent()
        result = phases.probe(machine, open_store(self.request().probes), seconds, self.say)
        self.state.set_result("probe", result)
        if result["status"] == "skipped":
            self.say(f"probe: skipped: {result['reason']}")
        else:
            self.say(f"probe: {result['measured']} points measured now, {result['stored']} from before")

    def plan(self) -> None:
        result = self._make_plan()
        began = time.perf_counter()
        if not self.yes and not _ask_to_continue():
            raise UsageError("not confirmed; nothing was started")
        waited = time.perf_counter() - began
        if waited > LONG_WAIT * self.state.hours * 3600:
            self.say(f"the answer took {waited:.0f} s of the time budget: planning again for the rest")
            result = self._make_plan()
        self.state.set_result("plan", result)

    def _make_plan(self) -> dict[str, Any]:
        """Plan the remaining time, and print the plan. Raises UsageError and RunError if there is none."""
        seconds = self.state.seconds_left() - self.state.seconds_reserved()
        if seconds <= 0:
            raise _out_of_time(self.state)
        self._prepare_data()
        seconds = self.state.seconds_left() - self.state.seconds_reserved()
        result, plan = phases.plan(self.request(), seconds)
        for line in phases.plan_lines(result):
            self.say(line)
        if plan is not None:
            self.run.write_json("planner.json", plan.to_json())
        target = self.options["target_loss"]
        if target is not None and result["status"] == "made" and result["bpb"][0] > target:
            raise RunError(
                f"{target:g} bits per byte is out of reach in this time: the plan's best case is {result['bpb'][0]:.3f}"
            )
        return {**result, "pretrain_seconds": seconds}

    def _prepare_data(self) -> None:
        """Prepare the preset's own data, if it has some. The plan needs it, since it bounds the loss by a baseline."""
        if self.options["data"] is not None:
            return
        from deskside.data.corpus.analyze import CorpusOptions
        from deskside.data.corpus.prepare import prepare

        config = merge.build([phases.preset_config(self.request())])
        data = config.data
        if data.path is None or not data.sources or (Path(data.path) / "index.json").exists():
            return
        self.say(f"preparing {', '.join(data.sources)} into {data.path}")
        vocabulary = config.model.vocab_size
        prepare(
            list(data.sources),
            data.path,
            CorpusOptions(vocab_size=vocabulary, val_fraction=data.val_fraction, seed=config.seed),
        )

    def train(self) -> PipelineState | None:
        """Train until the run is finished or stopped. Returns the state of the run that replaces it, if any."""
        if (self.run.path / "summary.json").exists():
            return None
        from deskside.pipeline.pilot import OTHER_BAND_IS_BETTER, TARGET_OUT_OF_REACH

        plan, target = self.state.result("plan"), self.options["target_loss"]
        pilot = self.pilot()
        # If an earlier process was killed between the pilot's decision and its consequences, carry them out now.
        status = pilot.decision
        already_decided = status == OTHER_BAND_IS_BETTER or (
            status == TARGET_OUT_OF_REACH and target is not None
        )
        if not already_decided and self.request().gpus > 1:
            self.exit_code = self._train_in_processes()
            pilot = self.pilot()  # with what it has decided
            status = "finished" if (self.run.path / "summary.json").exists() else pilot.decision
        elif not already_decided:
            status = self.train_here(pilot, _has_begun(self.run))
            self.exit_code = exit_code_of(status)
        if self.exit_code:
            return None
        if status == TARGET_OUT_OF_REACH and target is not None:
            extrapolation = pilot.loss_text()
            self.state.drop_target()  # so that --resume continues without it
            raise RunError(
                f"{target:g} bits per byte is out of reach: {extrapolation}; to continue anyway: "
                f"deskside go --resume {self.run.path}"
            )
        if status == OTHER_BAND_IS_BETTER:
            _free_memory()
            return self._continue_with_band(plan, pilot.chosen_band)
        return None

    def _train_in_processes(self) -> int:
        """Train in one process for each GPU, and return the exit code: 0, or that of a signal."""
        self.state.save()  # they count the time from here
        path = self.run.path
        new = ["--runs", str(path.parent), "--name", path.name]
        code = launch("go", ["--resume", str(path)] if _has_begun(self.run) else new, self.request().gpus)
        if code and not _has_trained(self.run):
            self.say(f"stopped; continue with: deskside go --resume {path}")
        return code

    def pilot(self) -> Any:
        """Return the `pilot.Pilot`, which has the configuration of the run, and its decision if there is one."""
        from deskside.pipeline.pilot import Pilot

        plan = self.state.result("plan")
        config = phases.final_config(plan["config"], self.state.hours * 3600, self.options.get("length"))
        return Pilot(self.state, with_resolved_paths(config, self.options), plan, self.options["target_loss"])

    def train_here(self, pilot: Any, begun: bool) -> str:
        """Train in this process, and return the status: "finished", or what stopped it. begun: as `_has_begun`."""
        config = pilot.config
        set_cublas_workspace(config)
        from deskside.train import training_run

        self._limit_memory(config.compute.device)
        try:
            if begun:
                return training_run.resume(self.run.path, pilot).status
            command = str(self.state.data["command"])
            return training_run.start(config, self.run, command, watch=pilot).status
        except UsageError as error:
            # Report the option that the user gave: --hours became the length of the schedule.
            option, too_short, reason = str(error).partition(TOO_SHORT)
            if not (too_short and option.startswith("schedule.length: ")):
                raise
            reason = reason.partition("; --hours ")[0]  # the suggested hours are those of training alone
            raise UsageError(f"--hours: {self.state.hours:g} h{TOO_SHORT}{reason}") from None

    def report(self) -> None:
        from deskside.report.write import write_report

        self.state.enter("report")
        page = write_report(self.run.path)
        summary = self.run.read_json("summary.json")
        self.state.enter("done")
        seconds, hours = self.state.seconds_spent(), self.state.hours
        self.say(f"done after {seconds:.0f} of {hours * 3600:.0f} s")
        if self.as_json:
            budget = {"run": str(self.run.path), "spent_seconds": seconds, "budget_seconds": hours * 3600}
            print_json({**summary, **budget})
            return
        print(f"validation  {summary['val_bpb']:.3f} bits per byte")
        for name in ("gzip", "unigram"):
            if summary.get(f"{name}_bpb") is not None:
                print(f"{name:<10}  {summary[f'{name}_bpb']:.3f} bits per byte on the same text")
        for sample in summary["samples"][:1]:
            print(f"\nsample: {sample['prompt']!r} ->\n  " + "\n  ".join(sample["text"].splitlines()))
        print_next(
            page, f"chat {self.run.path}", f"sft {self.run.path} --data CHAT.jsonl    # fine-tune it for chat"
        )

    # Helpers

    def _limit_memory(self, device: str) -> None:
        """Limit the GPU memory of this process to --gpu-budget."""
        if self.options["gpu_budget"] is None or device == "cpu":
            return
        import torch

        from deskside.train.parallel import limit_gpu_memory

        if torch.cuda.is_available():
            limit_gpu_memory(
                torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), self.options["gpu_budget"]
            )

    def _continue_with_band(self, plan: dict[str, Any], band: dict[str, Any]) -> PipelineState:
        """Return the state of a new run that trains another band of the plan in the remaining time."""
        old = self.state
        if old.continued_in is None:
            old.continue_in(
                RunDirectory.create(self.run.path.parent, None, f"{self.run.path.name}-{band['preset']}")
            )
        assert old.continued_in is not None
        run = RunDirectory(old.continued_in)  # exists already if an earlier process was killed here
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        results = {**old.data["results"], "plan": {**plan, **band, "bands": []}}
        new = PipelineState.begin(
            run, old.hours, dict(self.options), str(old.data["command"]), old.spent_before, "train", results
        )
        self.say(f"the run continues as {run.path}")
        return new


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
    if lengths and options.preset is None:
        raise UsageError(f"--{next(iter(lengths))}: needs a model; add --preset, or leave it out")
    if "path" in given.get("data", {}) or "sources" in given.get("data", {}):
        raise UsageError("--data.path, --data.sources: give prepared data with --data DIR")
    elapsed, tail = time.perf_counter() - deskside.STARTED, tail_seconds(options.hours)
    if options.hours * 3600 <= elapsed + tail:
        raise UsageError(
            f"--hours: {options.hours:g} h{TOO_SHORT}starting took {elapsed:.0f} s, and {tail:.0f} s are reserved for "
            f"samples and the report"
        )
    layers = [given] if options.preset is None else [*presets.for_pretraining(options.preset), given]
    recorded_options = {
        "gpus": process_count(options.gpus, layers),
        "preset": options.preset,
        # {"steps": "5"} becomes "5 steps".
        "length": merge.merge([{"schedule": lengths}])[0]["schedule"]["length"] if lengths else None,
        "data": options.corpus,
        "given": given,
        "gpu_budget": options.gpu_budget,
        "target_loss": options.target_loss,
        "probes": options.probes,
        "directory": str(Path.cwd()),
    }
    request = phases.PipelineRequest.of(options.hours, recorded_options)
    if options.corpus is not None:
        phases.vocabulary(options.corpus)  # raises UsageError if it is not prepared data
    if options.preset is None and options.corpus is None:
        raise UsageError("--data DIR is required; prepare it with: deskside data prepare SOURCE --out DIR")
    if options.preset is not None:
        config = phases.final_config(phases.preset_config(request), options.hours * 3600, request.length)
        from deskside.train.prepare.preflight import check_start

        check_start(config)
        fine_tuning = next((part for part in ("adapter", "align") if getattr(config, part) is not None), None)
    else:
        fine_tuning = "adapter" if "adapter" in given else None
    if fine_tuning is not None:
        raise UsageError(f"{fine_tuning}: deskside go only pretrains; fine-tune the result with deskside sft")
    if options.gpu_budget is not None and this_machine().device == "cpu":
        raise UsageError("--gpu-budget: this machine has no GPU; leave it out")
    _check_can_confirm(options)
    path = Path(options.runs) / (options.name or "")
    if options.name is not None and path.exists():
        resume = f", or continue with: deskside go --resume {path}" if (path / FILE).exists() else ""
        raise UsageError(f"{path} exists; choose another --name{resume}")
    run = RunDirectory.create(Path(options.runs), options.name, name_of_preset(options.preset or "go"))
    return PipelineState.begin(run, options.hours, recorded_options, shlex.join(["deskside", "go", *argv]))


def _resume_pipeline(options: GoOptions, given: dict[str, Any]) -> PipelineState:
    """Open the stopped pipeline, in the run in which it continues. Raises UsageError and RunError."""
    others = ("hours", "steps", "tokens", "preset", "corpus", "gpu_budget", "target_loss", "name")
    if given or any(getattr(options, name) is not None for name in others):
        raise UsageError(
            "--resume uses the options of the stopped pipeline; give no other options with it, but --gpus"
        )
    state = PipelineState.open(Path(str(options.resume)))
    # Follow the pipeline to its last run that has a state. A run without a state is created by the one before it.
    visited: set[Path] = set()
    while state.continued_in is not None and (state.continued_in / FILE).exists():
        visited.add(state.run.path.resolve())
        if state.continued_in.resolve() in visited:
            raise damaged(state.run.path, f"continued_in: {state.continued_in.name} leads back here")
        state = PipelineState.open(state.continued_in)
    if state.phase == "done":
        raise UsageError(f"{state.run.path} is done; its report is {state.run.path / 'report.html'}")
    if options.gpus is not None:
        config = state.result("plan").get("config", {})
        state.set_gpus(process_count(options.gpus, [config, state.data["options"]["given"]]))
    if state.phase in BEFORE_TRAINING:
        _check_can_confirm(options)
    if state.seconds_left() <= 0 and state.phase != "report" and not _has_trained(state.run):
        raise _out_of_time(state)
    return state


def _has_begun(run: RunDirectory) -> bool:
    """Return True if a run was started by an earlier process."""
    return (run.path / "run.json").exists()


def _has_trained(run: RunDirectory) -> bool:
    """Return True if a run has a training step or a checkpoint."""
    return run.metrics.exists() or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))


def _out_of_time(state: PipelineState) -> RunError:
    """Return the error for a time budget that leaves no time to train."""
    spent, budget, reserved = state.seconds_spent(), state.hours * 3600, state.seconds_reserved()
    return RunError(
        f"the time budget is used up: {spent:.0f} of {budget:.0f} s are spent, and {reserved:.0f} s are reserved "
        f"for samples and the report; start again with more --hours"
    )


def _free_memory() -> None:
    """Free the GPU memory and compiled code of an abandoned run."""
    import torch

    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _ask_to_continue() -> bool:
    """Return True if the user agrees to the plan."""
    with contextlib.suppress(EOFError):
        print("go? [Y/n] ", end="", file=sys.stderr, flush=True)
        return input().strip().lower() in ("", "y", "yes")
    return False
