"""The pipeline of `deskside go`: its phases, from doctor to report.

With several GPUs, only training runs in several processes (`train/launch.py`). This process plans before and reports
afterwards, and alone writes the state of the pipeline.
"""

import contextlib
import gc
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from deskside.cli.output import print_json
from deskside.cli.shared_options import launch
from deskside.config import merge
from deskside.measurements.store import open_store
from deskside.pipeline import checks, planning
from deskside.pipeline.pipeline_state import PipelineState
from deskside.pipeline.state_schema import PHASES
from deskside.run.directory import RunDirectory, with_resolved_paths
from deskside.train.preflight import set_cublas_workspace
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import end_time, plural
from deskside.utils.machine import this_cpu, this_machine
from deskside.utils.signals import exit_code

BEFORE_TRAINING = PHASES[: PHASES.index("train")]


class Pipeline:
    """Runs the phases of a pipeline in this process."""

    def __init__(self, state: PipelineState, yes: bool, as_json: bool):
        self.state, self.yes, self.as_json = state, yes, as_json
        self.run, self.options = state.run, state.data["options"]
        self.exit_code = 0  # that of a signal if it stopped the training

    def run_phases(self) -> PipelineState | None:
        """Run the remaining phases. Returns the state of the new run if the pipeline continues in another one."""
        first = PHASES.index(self.state.phase)
        self.say(
            f"trains, evaluates and reports in {self.state.run.path}; done {end_time(self.state.seconds_left())}"
        )
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
        say(text)

    def request(self) -> planning.PipelineRequest:
        """Return the pipeline request of the recorded options."""
        return planning.PipelineRequest.of(self.state.hours, self.options)

    # The phases: `run_phases` calls these methods by name

    def doctor(self) -> None:
        machine = this_machine()
        seconds = checks.doctor_allowance(self.state.hours, machine) - self.state.seconds_spent()
        result = checks.doctor(machine, seconds, self.say)
        self.state.set_result("doctor", result)
        status = "" if result["status"] == "fit" else f"{result['status']}: "
        self.say(f"doctor: {status}{result['reason']}")
        if result["status"] == "unfit":
            raise RunError(f"training cannot work here: {result['reason']}; see deskside doctor")

    def probe(self) -> None:
        machine = this_cpu() if self.request().on_cpu else this_machine()
        seconds = checks.allowance(self.state.hours, machine.device) - self.state.seconds_spent()
        result = checks.probe(machine, open_store(self.request().probes), seconds, self.say)
        self.state.set_result("probe", result)
        if result["status"] == "skipped":
            self.say(f"probe: skipped: {result['reason']}")
        else:
            self.say(
                f"probe: {plural(result['measured'], 'point')} measured now, {result['stored']} from before"
            )

    def plan(self) -> None:
        result = self._make_plan()
        if not self.yes:
            with self.state.waiting():
                agreed = _ask_to_continue()
            if not agreed:
                raise UsageError("not confirmed; nothing was started")
        self.state.set_result("plan", result)

    def _make_plan(self) -> dict[str, Any]:
        """Plan the remaining time, and print the plan. Raises UsageError and RunError if there is none."""
        seconds = self.state.seconds_left() - self.state.seconds_reserved()
        if seconds <= 0:
            raise out_of_time(self.state)
        self._prepare_data()
        seconds = self.state.seconds_left() - self.state.seconds_reserved()
        native_recipes = self.state.result("doctor").get("native_recipes", [])
        result, plan = planning.plan(self.request(), seconds, native_recipes)
        for line in planning.plan_lines(result):
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
        from deskside.data.corpus.prepare_sources import prepare_sources

        prepare_sources(merge.build([planning.preset_config(self.request())]), self.say)

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
            status = self.train_here(pilot, has_begun(self.run))
            self.exit_code = exit_code(status)
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
        """Train in one process for each GPU, and return the exit code: 0, or that of a signal after a checkpoint.

        Raises KeyboardInterrupt if a signal came before there was anything to save.
        """
        self.state.save()  # the processes count the time from here
        path = self.run.path
        new = ["--runs", str(path.parent), "--name", path.name]
        return launch("go", ["--resume", str(path)] if has_begun(self.run) else new, self.request().gpus)

    def pilot(self) -> Any:
        """Return the `pilot.Pilot`, which has the configuration of the run, and its decision if there is one."""
        began = time.perf_counter()
        from deskside.pipeline.pilot import Pilot

        plan = self.state.result("plan")
        # A plan has a length if the text is too small for the hours.
        length = self.options.get("length") or plan.get("length")
        seconds = plan.get("seconds") or self.state.hours * 3600
        config = planning.final_config(plan["config"], seconds, length)
        pilot = Pilot(
            self.state, with_resolved_paths(config, self.options), plan, self.options["target_loss"]
        )
        pilot.earlier_phases_until = began
        return pilot

    def train_here(self, pilot: Any, begun: bool) -> str:
        """Train in this process, and return the status: "finished", or what stopped it. begun: as `has_begun`."""
        config = pilot.config
        set_cublas_workspace(config)
        from deskside.train import training_run
        from deskside.train.time_budget import TooShortError

        self._limit_memory(config.compute.device)
        try:
            if begun:
                return training_run.resume(self.run.path, pilot).status
            command = str(self.state.data["command"])
            return training_run.start(config, self.run, command, watch=pilot).status
        except TooShortError as error:
            # --hours became the length of the schedule. The hours that the error recommends are only those of training.
            raise UsageError(
                f"--hours: {self.state.hours:g} h is too short: {error.why}; give more hours, or fewer tokens per step "
                "(--batch.tokens)"
            ) from None

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
        print_outcome(self.run, summary, page)

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
        of_all = {key: value for key, value in plan.items() if key not in ("length", "seconds")}
        results = {**old.data["results"], "plan": {**of_all, **band, "bands": []}}
        new = PipelineState.begin(
            run, old.hours, dict(self.options), str(old.data["command"]), old.spent_before, "train", results
        )
        self.say(f"the run continues as {run.path}")
        return new


def has_begun(run: RunDirectory) -> bool:
    """Return True if a run was started by an earlier process."""
    return (run.path / "run.json").exists()


def has_trained(run: RunDirectory) -> bool:
    """Return True if a run has a training step or a checkpoint."""
    return run.metrics.exists() or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))


def out_of_time(state: PipelineState) -> RunError:
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


def print_outcome(run: RunDirectory, summary: dict[str, Any], page: Path) -> None:
    """Print a sample of the trained model, the answer and what to do next. page: the report."""
    from deskside.cli.answer import pretraining_answer, print_answer, print_samples  # import rich
    from deskside.utils.printer import Printer

    printer, path = Printer(), shlex.quote(str(run.path))
    print_samples(printer, summary["samples"][:1])
    print_answer(
        printer,
        pretraining_answer(run, summary),
        {"run": run.path, "report": page},
        f"chat {path}",
        f"serve {path}",
        f"sft {path} --data CHAT.jsonl",
    )
