"""The phases of a run in one of its processes: set up, find the batch size, plan, train, evaluate, export."""

import shlex
import signal
import time
from dataclasses import dataclass
from typing import Any

import deskside
from deskside.config.gpu_batch import describe_batch
from deskside.config.run import RunConfig
from deskside.kernels.compile_ahead import count_compilations
from deskside.run.directory import RunDirectory
from deskside.run.record import emulated
from deskside.train import environment_record
from deskside.train.evaluation import Evaluator
from deskside.train.loop.callbacks import Callback, OnFirstStep, RunLog, Terminal, trackers
from deskside.train.loop.clock import Clock, StepPlan
from deskside.train.loop.gpu_sharing import GpuSharingWatch
from deskside.train.loop.overfitting import OverfittingWatch, validation_loss
from deskside.train.loop.router_collapse import RouterCollapseWatch
from deskside.train.loop.stage_work import StageWork
from deskside.train.loop.trainer import RunLength, Trainer, TrainProgress
from deskside.train.loop.unstable_start import UnstableStartWatch
from deskside.train.nvml import NvmlDevice
from deskside.train.objective import Objective, Session
from deskside.train.parallel import World
from deskside.train.prepare import setup
from deskside.train.prepare.batch_size_finder import BatchSizeFinder
from deskside.train.prepare.graph_choice import choose_graphs
from deskside.train.prepare.prepared_run import build_optimizer, prepare_run
from deskside.train.prepare.startup import Startup
from deskside.train.prepare.step_planning import (
    config_with_graphs,
    describe_mixture,
    describe_work,
    first_facts,
    first_plan,
    mean_tokens,
    mixture_epochs,
    modelled_memory_gib,
    native_formats,
    recorded_plan,
    validation_languages,
)
from deskside.train.state import finalize
from deskside.train.state.checkpointer import Checkpointer
from deskside.train.state.init_weights import InitialWeights
from deskside.train.time_budget import TimeBudget
from deskside.utils import launched, signals
from deskside.utils.errors import RunError


@dataclass(frozen=True)
class RunOutcome:
    """Result of a run. `status` is "finished", or what stopped it: the name of a signal, or the callback's reason."""

    run: RunDirectory
    status: str
    summary: dict[str, Any]
    is_rank_zero: bool

    @property
    def exit_code(self) -> int:
        """Exit code of a command that only does this run."""
        return signals.exit_code(self.status)


class RunExecution:
    """One process's part in a run: its phases in order, and what they share."""

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        world: World,
        objective: Objective,
        initial: InitialWeights | None,
        resumed: bool,
        callback: Callback,
        began: float | None = None,
        keep_model: bool = True,
    ):
        self.run, self.config, self.world, self.objective = run, config, world, objective
        self.initial, self.resumed, self.callback = initial, resumed, callback
        self.keep_model = keep_model
        self.log = RunLog(run, world.is_rank_zero)
        self.recorded: dict[str, Any] = {}  # plan.json of a resumed run
        self.watch = OverfittingWatch()
        card = NvmlDevice.from_torch(world.device) if world.device.type == "cuda" else None
        self.sharing = GpuSharingWatch(card)
        self.watches = (
            self.watch,
            self.sharing,
            RouterCollapseWatch(config.model),
            UnstableStartWatch(config),
        )
        if resumed and (run.path / "plan.json").exists():
            self.recorded = recorded_plan(run)
        assert config.schedule.length is not None  # checked by `preflight.check_start`
        self.length = config.schedule.length
        began = deskside.STARTED if began is None else began
        self.clock = Clock(config.schedule.clock, began, callback.earlier_seconds)
        compilations = count_compilations() if world.device.type == "cuda" else None
        self.startup = Startup(began, compilations)
        if callback.earlier_phases_until is not None:
            self.startup.done("earlier phases", callback.earlier_phases_until)
        self.startup.done("imports")

    def execute(self) -> RunOutcome:
        """Run all phases. Every rank calls this."""
        if self.world.size > 1:
            self.log.say(describe_batch(self.config, self.world.size))
        self.set_up()
        finder = BatchSizeFinder(self.config, self.stepper, self.modelled_memory, self.log.say, self.budget)
        self.micro_batches = finder.find(self.stages, self.recorded.get("fit"))
        choose_graphs(finder, self.stages, "cuda_graph" in self.recorded if self.recorded else None)
        self.config = config_with_graphs(self.config, self.stepper.graphed is not None)
        self.startup.done("compile and fit")
        self.begin_objective()
        self.startup.done("evaluation")
        plan = self.plan_steps(self.stages)
        self.facts |= {"tiles": self.prepared.tiles} if self.prepared.tiles else {}
        self.facts |= {"matmul": self.prepared.matmul} if self.prepared.matmul else {}
        self.stepper.optimizer = build_optimizer(
            self.context, self.stages, self.facts["scaling_tokens"], mean_tokens(self.stages)
        )
        with Checkpointer(self.context, self.stepper.optimizer, self.clock, self.log) as checkpointer:
            return self.run_plan(plan, checkpointer)

    def run_plan(self, plan: StepPlan, checkpointer: Checkpointer) -> RunOutcome:
        """Train from the newest checkpoint, if there is one, to the end of the plan, and finish the run."""
        config, restored = self.config, self.restore(checkpointer) if self.resumed else None
        # `progress` is the same object and keeps counting.
        restored_step = restored.step if restored else None
        if self.world.is_rank_zero:
            environment = environment_record.describe(self.world.device, self.run.path)
            peak = round(self.meter.peak_flops / 1e12, 2)
            environment["matmul_peak_tflops"] = {"value": peak, "source": "measured"}
            self.run.write_json("environment.json", environment)
        checkpointer.prepare()
        self.facts["foreground_checkpoints"] = checkpointer.foreground_reason
        self.write_plan(plan)
        progress = restored or self.save_first(checkpointer, plan)
        self.startup.done("checkpoint")
        length = RunLength(
            plan,
            self.clock,
            limit_seconds=self.length.value if self.length.unit == "seconds" else None,
            reserve=self.reserve,
            decided_until=self.decided_until,
            write_plan=self.write_plan,
            stops_early=lambda: config.evaluate.stop_early and self.watch.detected,
        )
        if self.world.is_rank_zero:
            first_step = OnFirstStep(lambda: self.record_startup(plan))
            terminal = Terminal(progress.step, plan.total_steps(progress.step), self.length.unit == "seconds")
            tracked = trackers(config.track, self.run, config.model_dump(mode="json"), progress.step)
            self.log.say(describe_work(config, plan, self.stages, progress.step, self.clock.seconds()))
            self.log.callbacks = [first_step, terminal, *tracked, *self.watches, self.callback]
        trainer = Trainer(
            self.stepper,
            self.stages,
            length,
            progress,
            checkpointer,
            self.log,
            evaluate=self.evaluator.during,
            complete_row=self.meter.complete,
        )
        status = self.train(trainer)
        self.stepper.release_graphs()
        if status != "finished":
            return self.stopped(status, trainer)
        # The final model is evaluated with the configured window, not with the last stage's, and in high precision.
        self.stepper.set_window(None)
        self.context.precision.set_active(False)
        self.evaluator.blend()
        # A run that was stopped after its last step already has the checkpoint of this step.
        if self.keep_model and trainer.progress.step != restored_step:
            checkpointer.save_now(trainer.progress, self.clock.seconds())
        self.best_step = self.end_with_best(checkpointer)
        with self.evaluator.averaged():
            return RunOutcome(self.run, status, self.finish(trainer), self.world.is_rank_zero)

    # Set-up

    def set_up(self) -> None:
        """Prepare the run on this machine, up to the choice of the micro-batch."""
        self.prepared = prepare_run(
            self.config,
            self.world,
            self.objective,
            self.initial,
            self.resumed,
            self.recorded,
            self.startup,
            self.log,
        )
        self.context, self.stepper, self.stages = (
            self.prepared.context,
            self.prepared.stepper,
            self.prepared.stages,
        )
        self.validation, self.meter = self.prepared.validation, self.prepared.meter
        # A resumed run is never refused for lack of time; it ends late instead.
        self.budget = TimeBudget(None if self.resumed else self.wall_limit(), self.clock.seconds)
        self.decided_until = 0
        self.save_seconds = float(self.recorded.get("save_seconds", 0.0))

    def begin_objective(self) -> None:
        """Start the objective, add its time per step to the stages, and measure how long an evaluation takes."""
        last = self.stages[-1]
        self.session = Session(
            self.run,
            self.config,
            self.world,
            self.context.model,
            self.context.attention,
            self.context.precision,
            self.validation,
            last.micro_rows,
            self.resumed,
            self.log.say,
            self.budget,
            last.dry_seconds * last.sequence_length / last.tokens_per_step,
        )
        self.objective.begin(self.session)
        for stage in self.stages:
            stage.dry_seconds += self.world.broadcast([self.objective.extra_step_seconds()])[0]
        self.evaluator = Evaluator(self.session, self.objective, self.wall_limit(), self.context.average)
        tokens = last.micro_rows * self.config.batch.sequence_length * self.world.size
        self.evaluator.rehearse(tokens, self.clock.seconds)
        self.evaluator.during_tokens = self.recorded.get("evaluate_tokens", self.evaluator.during_tokens)
        self.before = self.evaluator.before(self.recorded)

    # Plan

    def plan_steps(self, stages: list[StageWork]) -> StepPlan:
        """Return the plan of steps, and set `self.facts`, the other entries of plan.json. A resumed run reads both."""
        if self.recorded.get("revisions"):
            plan = StepPlan.from_json(self.recorded["revisions"])
        else:
            dry = [stage.dry_seconds for stage in stages]
            elapsed, reserve, *dry = self.world.broadcast([self.clock.seconds(), self.reserve(), *dry])
            plan = first_plan(self.length, stages, elapsed, reserve, dry)
        micro_batches = [micro_batch.to_json() for micro_batch in self.micro_batches]
        if self.recorded:
            self.facts = {**self.recorded, "fit": micro_batches}
            if self.config.compute.cuda_graph == "off":  # a captured pass may no longer fit
                self.facts.pop("cuda_graph", None)
            return plan
        tokens = max(stage.micro_rows * stage.sequence_length for stage in stages)
        # There is no memory model for a process on a CPU.
        memory = self.modelled_memory(tokens) if self.world.device.type == "cuda" else None
        self.facts = first_facts(self.config, plan, stages, self.reserve(), memory) | {
            "data": self.validation.fingerprint,
            "languages": validation_languages(self.validation),
            "fit": micro_batches,
            "attention": self.prepared.attention,
            "precision": self.prepared.precision,
            "compile": self.prepared.execution_mode,
            "evaluate_tokens": self.evaluator.during_tokens,
        }
        if self.initial is None:
            self.facts["embedding_std"] = self.config.embedding_std()
        self.facts |= {"before": self.before} if self.before else {}
        self.facts |= {"cuda_graph": "on"} if self.config.compute.cuda_graph == "on" else {}
        if epochs := self.facts["mixture_epochs"]:
            self.log.say(describe_mixture(self.config, self.stages, epochs))
        if self.config.adapter is not None:
            self.facts["adapter"] = setup.adapter_facts(self.context.model, self.config.adapter)
        return plan

    def write_plan(self, plan: StepPlan) -> None:
        if self.world.is_rank_zero:
            self.run.write_json("plan.json", {**self.facts, "revisions": plan.to_json()})

    def modelled_memory(self, micro_tokens: int) -> float:
        """Return the predicted peak memory of a step in GiB."""
        native, world = native_formats(self.prepared.precision), self.world
        return modelled_memory_gib(
            self.config,
            micro_tokens,
            self.prepared.recipe,
            self.prepared.execution_mode,
            native,
            world.size,
            world.sharded,
        )

    def reserve(self) -> float:
        """Return the seconds to reserve after the last step: for evaluation, checkpoint, samples and report."""
        if self.clock.kind != "wall":
            return 0.0
        samples, callback = self.objective.sampling_seconds(), self.callback.reserve(self.wall_limit())
        # A checkpoint that is still being written after the last step, the last checkpoint, and the export.
        saves = int(self.config.checkpoint.background is not False) + 2 * self.keep_model
        best = self.evaluator.during_seconds if self.config.checkpoint.keep_best else 0.0
        evaluations = self.evaluator.final()[0] + self.evaluator.blend_seconds() + best
        return evaluations + saves * self.save_seconds + samples + callback

    def wall_limit(self) -> float | None:
        """Return the run's length in wall-clock seconds, or None if it is given in another way."""
        return self.length.value if self.length.unit == "seconds" and self.clock.kind == "wall" else None

    def record_startup(self, plan: StepPlan) -> None:
        """Record the seconds until the first step in plan.json and the events file. Called on rank 0."""
        self.startup.done("first step")
        self.facts["startup"] = self.startup.to_json()
        self.write_plan(plan)
        self.log.event(self.startup.describe())

    # Checkpoints

    def restore(self, checkpointer: Checkpointer) -> TrainProgress:
        """Restore the newest checkpoint, and remove the metrics of later steps."""
        progress = checkpointer.load_newest()
        if progress is None:
            raise RunError(
                f"{self.run.checkpoints}: the checkpoints were deleted while the run was resumed; restore them"
            )
        step = progress.step
        dropped = self.run.cut_metrics(step) if self.world.is_rank_zero else 0
        self.decided_until = step + dropped
        self.world.barrier()
        self.log.say(f"resumed at step {step}" + (f"; {dropped} later steps are repeated" if dropped else ""))
        return progress

    def save_first(self, checkpointer: Checkpointer, plan: StepPlan) -> TrainProgress:
        """Write the checkpoint of step 0, to fail early if the disk is full, and to time a checkpoint."""
        progress, began = TrainProgress(), time.perf_counter()
        checkpointer.save_now(progress, self.clock.seconds())
        self.facts["save_seconds"] = self.save_seconds = time.perf_counter() - began
        self.write_plan(plan)
        return progress

    # Training

    def train(self, trainer: Trainer) -> str:
        """Run the training loop. Return the `RunOutcome.status`."""
        environment_record.reset_peak_memory(self.world.device)
        try:
            with signals.StopSignal() as stop:
                if self.world.is_rank_zero:
                    for watch in self.watches:
                        watch.begin(self.run, stop, self.validation)
                self.callback.begin(self.run, stop, self.validation)
                return trainer.run(stop)
        finally:
            self.log.close()

    @property
    def resume_command(self) -> str:
        """The command that continues this run."""
        run = shlex.quote(str(self.run.path))
        if self.callback.resume_command is not None:
            return f"{self.callback.resume_command} {run}"
        gpus = f" --gpus {self.world.size}" if launched.is_launched() else ""
        return f"{self.objective.command} --resume {run}{gpus}"

    def stopped(self, status: str, trainer: Trainer) -> RunOutcome:
        """Tell the user how to resume, and return the outcome of a run that was stopped."""
        if self.world.size > 1:
            # torchrun sends SIGTERM to the other processes as soon as one exits, but they still have to clean up.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        saved = f"{status}: saved at step {trainer.progress.step}"
        self.log.say(f"{saved}; resume with: {self.resume_command}")
        return RunOutcome(self.run, status, {}, self.world.is_rank_zero)

    # The end

    def end_with_best(self, checkpointer: Checkpointer) -> int | None:
        """With `checkpoint.keep_best`, return to the best checkpoint if the last weights are worse. Return its step."""
        if checkpointer.best is None:
            return None
        last = validation_loss(self.evaluator.evaluate(self.evaluator.during_tokens).metrics)
        loss, step = checkpointer.best
        # NaN is worse than any loss.
        if not self.world.broadcast([float(last is not None and not last <= loss)])[0]:
            return None
        self.log.say(
            f"ends with the weights of step {step}: validation loss {loss:.4f}, at the end {last:.4f}"
        )
        checkpointer.return_to_best()
        return step

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Evaluate, sample, export, and write the summary. Every rank calls this."""
        evaluation = self.evaluator.evaluate(self.evaluator.final()[1])
        self.log.event(
            f"final evaluation: {evaluation.tokens:,} of {self.validation.num_tokens:,} validation tokens"
        )
        share = evaluation.tokens / max(1, self.validation.num_tokens)
        seconds, device = self.clock.seconds(), self.world.device
        peak_memory_gib = environment_record.peak_memory_gib(device)
        model = finalize.whole_model(self.context.model, self.world)
        if not self.world.is_rank_zero:
            return {}
        flops, parameters_by_group = trainer.flops_per_second(), model.num_params()
        summary = {
            "schema_version": 1,
            "status": "finished",
            **({"objective": self.config.align.name} if self.config.align else {}),
            **evaluation.summary,
            **(evaluation.baselines() if evaluation.baselines is not None else {}),
            **({"val_share": share} if share < 1 else {}),
            "steps": trainer.progress.step,
            "tokens": trainer.progress.tokens,
            "mixture_epochs": mixture_epochs(self.stages, trainer.progress.rows),
            **({} if self.best_step is None else {"best_step": self.best_step}),
            **({"overfits": True} if self.watch.detected else {}),
            "seconds": seconds,
            "clock": self.clock.kind,
            "tokens_per_second": trainer.tokens_per_second(),
            **({"gpu_shared": self.sharing.share} if self.sharing.share else {}),
            # Recorded next to the speed, because an emulated format is slower than a native one.
            "precision": self.prepared.precision["chosen"],
            "emulated": emulated(self.prepared.precision),
            "mfu": self.meter.mfu(flops) if flops else None,
            "peak_memory_gib": peak_memory_gib,
            "peak_reserved_gib": environment_record.peak_reserved_gib(device),
            "parameters": sum(parameters_by_group.values()),
            "parameters_by_group": parameters_by_group,
            **({"before": self.before} if self.before else {}),
            **({"average": average.summary()} if (average := self.context.average) else {}),
            "samples": self.objective.samples(self.session, model),
        }
        if self.keep_model:
            self.log.event(finalize.export(self.run, model))
        summary |= self.callback.summary_entries(summary)
        self.run.write_json("summary.json", summary)
        self.log.event(f"finished: {evaluation.message}")
        return summary
