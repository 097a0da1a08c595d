"""A run, whatever its objective: set up, settle the micro-batch, plan, train, measure, export."""

import shutil
import signal
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import deskside
from deskside.budget.scaling import scales
from deskside.budget.shape import flops_per_token
from deskside.config.run import SCHEMA_VERSION, RunConfig
from deskside.kernels.matmul_peak import measure_matmul_peak
from deskside.model.transformer import Transformer
from deskside.optim.build import Optimizer, build
from deskside.run.directory import RunDirectory
from deskside.train import environment_record, parallel
from deskside.train.loop.callback import Callback
from deskside.train.loop.clock import Clock, StepPlan
from deskside.train.loop.guard import Guard
from deskside.train.loop.step import Stepper
from deskside.train.loop.step_hooks import MetricsFile, Terminal, check_trackers, trackers
from deskside.train.loop.stop import StopSignal
from deskside.train.loop.trainer import StageWork, StepLogger, Trainer, TrainProgress
from deskside.train.objective import Evaluation, NextToken, Objective, Session
from deskside.train.parallel import World
from deskside.train.prepare import setup
from deskside.train.prepare.batch_size_finder import BatchSizeFinder
from deskside.train.prepare.dry_step import Fit
from deskside.train.prepare.preflight import check_start
from deskside.train.prepare.step_planning import (
    final_evaluation,
    first_facts,
    first_plan,
    mean_tokens,
    modelled_memory_gib,
    recorded_plan,
)
from deskside.train.prepare.time_budget import MEASURE_SHARE, TimeBudget
from deskside.train.state import finalize
from deskside.train.state.checkpointer import Checkpointer
from deskside.train.state.init_weights import InitialWeights, keep_tokenizer
from deskside.train.state.lora_run import facts as adapter_facts
from deskside.utils import signals
from deskside.utils.errors import RunError, UsageError


@dataclass(frozen=True)
class RunOutcome:
    """What became of a run: `status` is "finished", or the signal that stopped it."""

    run: RunDirectory
    status: str
    summary: dict[str, Any]
    first: bool

    @property
    def exit_code(self) -> int:
        """The exit code of a command that did nothing but this run."""
        return 0 if self.status == "finished" else signals.exit_code(self.status)


def start(
    config: RunConfig,
    root: Path,
    name: str | None,
    default_name: str,
    command: str,
    initial: InitialWeights | None = None,
    watch: Callback | None = None,
    into: RunDirectory | None = None,
    objective: Objective | None = None,
) -> RunOutcome:
    """Begin a new run, in a directory of its own or in one that was made for it (`into`).

    objective: None is pretraining; for others the one that `config.align` names.
    """
    check_start(config)
    objective = _checked(objective, config, "start it with that command")
    world = parallel.join(config.compute.device, config.parallel.mode)
    try:
        path = [""]
        if world.first:
            run = into or RunDirectory.create(root, name, default_name)
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
                    "config": config.model_dump(mode="json"),
                },
            )
            path = [str(run.path)]
        if world.size > 1:
            torch.distributed.broadcast_object_list(path, src=0)
        run = RunDirectory(Path(path[0]))
        try:
            with run.held(world.first):
                return _Run(run, config, world, objective, initial, False, watch or Callback()).train()
        except BaseException:
            # What failed or was interrupted before it had a plan left nothing worth keeping.
            if world.first and into is None and not (run.path / "plan.json").exists():
                shutil.rmtree(run.path, ignore_errors=True)
            raise
    finally:
        parallel.leave(world)


def resume(path: Path, watch: Callback | None = None, objective: Objective | None = None) -> RunOutcome:
    """Continue a run from its newest good checkpoint, exactly.

    A run that was stopped before its first checkpoint starts over, from the weights that it was started from. Raises
    UsageError when the run is finished already. objective: as in `start`.
    """
    run = RunDirectory.open(path)
    config = run.config()
    objective = _checked(objective, config, "resume it with that command")
    if (run.path / "summary.json").exists():
        raise UsageError(
            f"{path} is finished; start another run from its weights with: deskside train --init {path}"
        )
    check_start(config)
    # Replicas may come back in another number, one included; shards may not.
    mode = "shard" if config.parallel.mode == "shard" else "auto"
    world = parallel.join(config.compute.device, mode)
    try:
        with run.held(world.first):
            begun = world.shared(run.has_begun)
            initial = None if begun else InitialWeights.recorded(run, config)
            if not begun and world.first:
                run.event("there is no checkpoint: starting from the beginning")
                Terminal.say("there is no checkpoint: starting from the beginning")
            return _Run(run, config, world, objective, initial, begun, watch or Callback()).train()
    finally:
        parallel.leave(world)


def _checked(objective: Objective | None, config: RunConfig, remedy: str) -> Objective:
    """Raises UsageError unless the objective is the configuration's."""
    chosen, wanted = objective or NextToken(), config.align.name if config.align else NextToken.name
    if chosen.name != wanted:
        raise UsageError(f"align: this is a run of deskside {wanted}; {remedy}")
    return chosen


class _Run:
    """One process's part in a run."""

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        world: World,
        objective: Objective,
        initial: InitialWeights | None,
        resumed: bool,
        watch: Callback,
    ):
        self.run, self.config, self.world, self.resumed, self.watch = run, config, world, resumed, watch
        self.objective = objective
        self.recorded: dict[str, Any] = {}
        if resumed and (run.path / "plan.json").exists():
            self.recorded = recorded_plan(run)
        assert config.schedule.length is not None  # `start` has seen to it
        self.length = config.schedule.length
        self.clock = Clock(config.schedule.clock, deskside.STARTED, watch.spent)
        setup.be_deterministic(config)
        torch.manual_seed(config.seed)
        check_trackers(config.track)
        # Before data is prepared, which may take hours: what this machine cannot do is refused at once.
        self.recipe, self.precision_facts = world.shared(
            lambda: setup.choose_recipe(config, world.device, self.say, self.recorded.get("precision"))
        )
        setup.check_execution(config, world, self.recipe)
        data = setup.ensure_data(config, world, self.say)
        self.stage_plans = setup.open_stages(config, data, objective)
        self.validation = objective.open(config, data, "val", config.batch.sequence_length)
        self.check_data(data, initial)
        start = setup.Start(initial, run.path, resumed, self.say)
        self.model: Transformer = setup.build_model(config, world, self.recipe, start)
        self.attention, self.attention_facts = world.shared(
            lambda: setup.choose_attention(
                config, self.model, world, config.batch.sequence_length, self.recorded.get("attention")
            )
        )
        self.execution = setup.prepare_execution(config, self.model, world, self.recipe, self.precision_facts)
        self.precision = self.execution.precision
        self.guard = Guard(config.guard)
        peak_flops = measure_matmul_peak(world.device, self.model.activation_dtype)
        self.meter = environment_record.Meter(world.device, world.size, peak_flops)
        self.decided_until = 0

    def say(self, text: str) -> None:
        """Tell the person and the events file."""
        if self.world.first:
            self.run.event(text)
            Terminal.say(text)

    def check_data(self, data: Path, initial: InitialWeights | None) -> None:
        """Refuse weights of another tokenizer, and to go on with other data. Keeps the tokenizer in the run."""
        self.fingerprint = self.validation.fingerprint
        if self.recorded.get("data", self.fingerprint) != self.fingerprint:
            raise UsageError(
                f"data.path: {data} is not the data that {self.run.path} was trained on; put that back, or start "
                f"another run from its weights with: deskside train --init {self.run.path} --data.path {data}"
            )
        if initial is not None:
            initial.check_tokenizer(data)
        if self.world.first and not self.run.tokenizer.exists():
            keep_tokenizer(data, self.run)

    # The run

    def train(self) -> RunOutcome:
        self.stepper = Stepper(
            self.model,
            self.build_optimizer(self.config.batch.tokens, self.config.batch.tokens),
            self.guard,
            self.world,
            self.config.compute,
            self.attention,
            self.config.optim.grad_clip,
            [p for p in self.model.parameters() if p.requires_grad],
            self.precision,
            self.config.precision,
            self.objective,
        )
        # A resumed run is refused nothing: it ends late rather than not at all.
        budget = TimeBudget(None if self.resumed else self.wall_limit(), self.clock.seconds)
        finder = BatchSizeFinder(self.config, self.stepper, self.modelled_memory, self.say, budget)
        fits, dry_seconds = finder.find(self.stage_plans, self.recorded.get("fit"))
        stages = [
            StageWork(
                until=plan.stage.until,
                sequence_length=plan.stage.sequence_length,
                tokens_per_step=plan.tokens_per_step,
                micro_rows=fitted.micro_rows,
                window=plan.stage.window,
                dataset=plan.dataset,
                dry_seconds=seconds,
                flops_per_token=flops_per_token(self.config.model, plan.stage.sequence_length),
            )
            for plan, fitted, seconds in zip(self.stage_plans, fits, dry_seconds, strict=True)
        ]
        self.session = Session(
            self.run,
            self.config,
            self.world,
            self.model,
            self.attention,
            self.precision,
            self.validation,
            fits[-1].micro_rows,
            self.resumed,
            self.say,
            budget,
            dry_seconds[-1] * stages[-1].sequence_length / stages[-1].tokens_per_step,
        )
        self.objective.begin(self.session)
        for stage in stages:
            stage.dry_seconds += self.world.agreed([self.objective.seconds_beside_step()])[0]
        self.rehearse_measure(fits[-1].micro_rows * self.config.batch.sequence_length * self.world.size)

        self.save_seconds = float(self.recorded.get("save_seconds", 0.0))
        self.before = self.measure_before()
        plan = self.first_plan(stages)
        facts = self.facts(plan, fits, stages)
        self.stepper.optimizer = self.build_optimizer(facts["scaling_tokens"], mean_tokens(stages))
        keeper = Checkpointer(
            self.run,
            self.config,
            self.world,
            self.model,
            self.stepper.optimizer,
            self.precision,
            self.guard,
            self.clock,
            self.event,
            self.say,
        )
        progress = self.restore(keeper)
        restored = progress.step if progress else None

        def write_plan(plan: StepPlan) -> None:
            if self.world.first:
                self.run.write_json("plan.json", {**facts, "revisions": plan.to_json()})

        if self.world.first:
            environment = environment_record.describe(self.world.device, self.run.path)
            peak = round(self.meter.peak_flops / 1e12, 2)
            environment["matmul_peak_tflops"] = {"value": peak, "source": "measured"}
            self.run.write_json("environment.json", environment)
        write_plan(plan)
        if progress is None:
            # Proves at once that the disk takes a checkpoint, and shows how long that is.
            progress = TrainProgress()
            began = time.perf_counter()
            keeper.save(progress, self.clock.seconds())
            facts["save_seconds"] = self.save_seconds = time.perf_counter() - began
            write_plan(plan)

        hooks: list[StepLogger] = []
        if self.world.first:
            resolved = self.config.model_dump(mode="json")
            hooks = [MetricsFile(self.run), Terminal(progress.step, plan.total_steps(progress.step))]
            hooks += [*trackers(self.config.track, self.run, resolved), self.watch]
        trainer = Trainer(
            self.config,
            self.stepper,
            plan,
            self.clock,
            progress,
            stages,
            keeper,
            hooks,
            evaluate=lambda: self.measure(self.config.evaluate.tokens).row,
            measure=self.meter.complete,
            event=self.event,
            journal=write_plan,
            limit_seconds=self.length.value if self.length.unit == "seconds" else None,
            reserve=self.reserve,
            decided_until=self.decided_until,
        )
        environment_record.reset_peak_memory(self.world.device)
        try:
            with StopSignal() as stop:
                self.watch.begin(self.run, stop, self.validation)
                status = trainer.run(stop)
        finally:
            for hook in hooks:
                hook.close()
        if status != "finished":
            if self.world.size > 1:
                # The launcher sends SIGTERM to all processes as soon as one has exited; this one has work left.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            go_on = self.watch.go_on or f"{self.objective.command} --resume"
            self.say(f"{status}: saved at step {trainer.progress.step}; go on with: {go_on} {self.run.path}")
            return RunOutcome(self.run, status, {}, self.world.first)
        if trainer.progress.step != restored:  # else it was stopped while finishing: that checkpoint is there
            keeper.save(trainer.progress, self.clock.seconds())
        # What is evaluated and exported is the configuration's model, not a stage's.
        self.stepper.set_window(None)
        self.precision.use(False)
        return RunOutcome(self.run, status, self.finish(trainer), self.world.first)

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Evaluate on everything, sample, export, and write the summary. Every rank calls this."""
        measured = self.measure(self.final_evaluation()[1])
        self.event(
            f"final evaluation: {measured.tokens:,} of {self.validation.num_tokens:,} validation tokens"
        )
        speed, flops = trainer.tokens_per_second(), trainer.flops_per_second()
        totals = finalize.Totals(
            steps=trainer.progress.step,
            tokens=trainer.progress.tokens,
            seconds=self.clock.seconds(),
            tokens_per_second=speed,
            mfu=self.meter.mfu(flops) if flops else None,
            peak_memory_gib=environment_record.peak_memory_gib(self.world.device),
            peak_reserved_gib=environment_record.peak_reserved_gib(self.world.device),
        )
        model = finalize.whole_model(self.model, self.world)
        if not self.world.first:
            return {}
        if measured.baselines is not None:
            measured.summary.update(measured.baselines())
        summary = finalize.summarise(self.config, model, totals, measured.summary, self.precision_facts)
        summary |= {"before": self.before} if self.before else {}
        summary["samples"] = self.objective.samples(self.session, model)
        self.event(finalize.export(self.run, model))
        summary |= self.watch.outcome(summary)
        self.run.write_json("summary.json", summary)
        self.event(f"finished: {measured.said}")
        return summary

    def event(self, text: str) -> None:
        if self.world.first:
            self.run.event(text)

    def restore(self, keeper: Checkpointer) -> TrainProgress | None:
        if not self.resumed:
            return None
        progress = keeper.load_newest()
        if progress is None:
            raise RunError(
                f"{self.run.checkpoints}: the checkpoints have gone while the run was being resumed"
            )
        step = progress.step
        dropped = self.run.cut_metrics(step) if self.world.first else 0
        self.decided_until = step + dropped
        self.world.barrier()
        self.say(f"resumed at step {step}" + (f"; {dropped} later steps are repeated" if dropped else ""))
        return progress

    # Batch and time

    def build_optimizer(self, total_tokens: int, step_tokens: float) -> Optimizer:
        """The optimizer with its rates scaled to the run's length and batch."""
        hidden = self.config.model.hidden_size
        scaling = scales(hidden, round(step_tokens), total_tokens, self.config.optim.name)
        return build(self.model, self.config.optim, scaling)

    def reserve(self) -> float:
        """Return the seconds to keep for what follows the last step: evaluation, checkpoint, samples, report."""
        if self.clock.kind != "wall":
            return 0.0
        follows = self.objective.samples_seconds() + self.watch.reserve(self.wall_limit())
        return self.final_evaluation()[0] + 2 * self.save_seconds + follows

    def wall_limit(self) -> float | None:
        """Return the length in wall-clock seconds, None for any other length."""
        return self.length.value if self.length.unit == "seconds" and self.clock.kind == "wall" else None

    def final_evaluation(self) -> tuple[float, int | None]:
        """Its seconds, and its tokens where the run is too short for all of them."""
        tokens = self.validation.num_tokens
        return final_evaluation(self.length, self.clock.kind, self.evaluation_seconds, tokens)

    def first_plan(self, stages: list[StageWork]) -> StepPlan:
        """The recorded plan of a resumed run, else the first estimate, the same on every process."""
        if self.recorded.get("revisions"):
            return StepPlan.from_json(self.recorded["revisions"])
        dry = [stage.dry_seconds for stage in stages]
        elapsed, reserve, *dry = self.world.agreed([self.clock.seconds(), self.reserve(), *dry])
        return first_plan(self.length, stages, elapsed, reserve, dry)

    def facts(self, plan: StepPlan, fits: list[Fit], stages: list[StageWork]) -> dict[str, Any]:
        """plan.json but for the revisions: what was settled when the run began, kept when it resumes."""
        if self.recorded:
            return {**self.recorded, "fit": [f.to_json() for f in fits]}
        tokens = max(f.micro_rows * stage.sequence_length for f, stage in zip(fits, stages, strict=True))
        # A CPU's resident set is not modelled.
        memory = self.modelled_memory(tokens) if self.world.device.type == "cuda" else None
        settled = {
            "data": self.fingerprint,
            "fit": [f.to_json() for f in fits],
            "attention": self.attention_facts,
            "precision": self.precision_facts,
            "compile": self.execution.mode,
        }
        settled |= {"before": self.before} if self.before else {}
        settled |= {"adapter": adapter_facts(self.model, self.config)} if self.config.adapter else {}
        return first_facts(self.config, plan, stages, self.reserve(), memory) | settled

    def modelled_memory(self, micro_tokens: int) -> float:
        native, world = bool(self.precision_facts["native"]), self.world
        return modelled_memory_gib(
            self.config, micro_tokens, self.recipe, self.execution.mode, native, world.size, world.sharded
        )

    # Measures

    def measure_before(self) -> dict[str, Any] | None:
        """What the weights that the run starts from come to, where the objective asks for it."""
        if "before" in self.recorded or not self.objective.measured_first:
            return self.recorded.get("before")
        measured = self.measure(self.final_evaluation()[1])
        self.say(f"before the first step: {measured.said}")
        return measured.summary

    def rehearse_measure(self, tokens: int) -> None:
        """Measure twice on a slice: the first one compiles, the second shows what the final one will take.

        On a CPU nothing compiles, and a run of limited length may save the second.
        """
        began = self.clock.seconds()
        self.measure(tokens)
        took = self.world.agreed([self.clock.seconds() - began])[0]
        if self.world.device.type != "cpu" or took <= self.session.budget.share(MEASURE_SHARE / 5):
            self.measure(tokens)

    def measure(self, max_tokens: int | None) -> Evaluation:
        """The objective's own measure on the validation split."""
        began = time.perf_counter()
        with self.precision.high_precision():
            measured = self.objective.measure(self.session, max_tokens)
        if self.world.sharded:
            parallel.reshard(self.model)
        # What the final one will take, by the newest that there was: the machine may have become slower since.
        share = max(1.0, self.validation.num_tokens / max(1, measured.tokens))
        # One stopwatch for all: it decides how much the final one reads, and every process must run the model as often.
        self.evaluation_seconds = self.world.agreed([(time.perf_counter() - began) * share])[0]
        return measured
