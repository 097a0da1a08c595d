"""A pretraining run: set up, settle the micro-batch, plan, train, evaluate, export."""

import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import deskside
from deskside.budget.scaling import scales
from deskside.config.run import SCHEMA_VERSION, RunConfig
from deskside.data.rows import PackedDataset
from deskside.errors import RunError, UsageError
from deskside.evaluate.bpb import BitsPerByte, evaluate_dataset
from deskside.export.checkpoints import load_weights
from deskside.kernels.matmul_peak import measure_matmul_peak
from deskside.model.transformer import Transformer
from deskside.optim.build import Optimizer, build
from deskside.train import finish, machine, parallel, setup
from deskside.train.clock import Clock, StepPlan
from deskside.train.fit import CPU_MICRO_TOKENS, Fit, fit, rows_per_rank, worst_case_batch
from deskside.train.guard import Guard
from deskside.train.hooks import MetricsFile, Terminal, trackers
from deskside.train.keeper import CheckpointKeeper
from deskside.train.parallel import World
from deskside.train.planning import first_plan, modelled_memory_gib, planned_tokens
from deskside.train.rundir import RunDirectory
from deskside.train.step import Stepper
from deskside.train.stop import StopSignal
from deskside.train.trainer import Hook, Progress, StageWork, Trainer

TIMED_DRY_STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """What became of a run: `status` is "finished", or the signal that stopped it."""

    run: RunDirectory
    status: str
    summary: dict[str, Any]
    first: bool


def start(
    config: RunConfig,
    root: Path,
    name: str | None,
    default_name: str,
    command: str,
    weights: dict[str, torch.Tensor] | None = None,
    init: str | None = None,
) -> Outcome:
    """Begin a new run. `weights` are the tensors to start from (continued pretraining), `init` says where from."""
    if config.schedule.length is None:
        raise UsageError(
            "schedule.length: the run has no length; give --hours 2, --schedule.steps 2000 or --schedule.tokens 1e9"
        )
    world = parallel.join(config.compute.device, config.parallel.mode)
    try:
        path = [""]
        if world.first:
            run = RunDirectory.create(root, name, default_name)
            run.write_json(
                "run.json",
                {
                    "schema_version": SCHEMA_VERSION,
                    "name": run.path.name,
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                    "command": command,
                    "deskside": deskside.__version__,
                    "init": init,
                    "config": config.model_dump(mode="json"),
                },
            )
            path = [str(run.path)]
        if world.size > 1:
            torch.distributed.broadcast_object_list(path, src=0)
        run = RunDirectory(Path(path[0]))
        try:
            with run.held(world.first):
                return _Run(run, config, world, weights, resumed=False).train()
        except BaseException:
            # What failed or was interrupted before it had a plan left nothing worth keeping.
            if world.first and not (run.path / "plan.json").exists():
                shutil.rmtree(run.path, ignore_errors=True)
            raise
    finally:
        parallel.leave(world)


def resume(path: Path) -> Outcome:
    """Continue a run from its newest good checkpoint, exactly. Raises UsageError when it is finished already."""
    run = RunDirectory.open(path)
    config = RunConfig.model_validate(run.read_json("run.json")["config"])
    if (run.path / "summary.json").exists():
        raise UsageError(
            f"{path} is finished; start another run from its weights with: deskside train --init {path}"
        )
    world = parallel.join(config.compute.device, config.parallel.mode)
    try:
        with run.held(world.first):
            return _Run(run, config, world, None, resumed=True).train()
    finally:
        parallel.leave(world)


class _Run:
    """One process's part in a run."""

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        world: World,
        weights: dict[str, torch.Tensor] | None,
        resumed: bool,
    ):
        self.run, self.config, self.world, self.resumed = run, config, world, resumed
        self.recorded: dict[str, Any] = {}
        if resumed and (run.path / "plan.json").exists():
            self.recorded = run.read_json("plan.json")
        self.masked = config.data.document_mask
        assert config.schedule.length is not None  # `start` has seen to it
        self.length = config.schedule.length
        self.clock = Clock(config.schedule.clock, deskside.STARTED)
        setup.be_deterministic(config)
        torch.manual_seed(config.seed)
        data = setup.ensure_data(config, world, self.say)
        self.stage_plans = setup.open_stages(config, data)
        self.validation = setup.open_split(config, data, "val", config.batch.sequence_length)
        if world.first and not run.tokenizer.exists():
            shutil.copyfile(data / "tokenizer.json", run.tokenizer)
        self.recipe, self.precision_facts = setup.choose_recipe(config.precision.name, world.device, self.say)
        self.model: Transformer = setup.build_model(config, world, self.recipe)
        if weights is not None:
            load_weights(self.model, weights)
        self.attention, self.attention_facts = setup.choose_attention(
            config, self.model, world, config.batch.sequence_length, self.recorded.get("attention")
        )
        self.compile_mode = setup.prepare_execution(config, self.model, world)
        self.guard = Guard(config.guard)
        peak_flops = measure_matmul_peak(world.device, self.model.activation_dtype)
        self.meter = machine.Meter(config, world.device, world.size, peak_flops)
        self.decided_until = 0

    def say(self, text: str) -> None:
        """Tell the person and the events file."""
        if self.world.first:
            self.run.event(text)
            Terminal.say(text)

    # The run

    def train(self) -> Outcome:
        fits, dry_seconds = self.settle_micro_batches()
        stages = [
            StageWork(
                until=plan.stage.until,
                sequence_length=plan.stage.sequence_length,
                tokens_per_step=plan.tokens_per_step,
                micro_rows=fitted.micro_rows,
                window=plan.stage.window,
                dataset=plan.dataset,
                dry_seconds=seconds,
            )
            for plan, fitted, seconds in zip(self.stage_plans, fits, dry_seconds, strict=True)
        ]
        self.evaluation_rows = fits[-1].micro_rows
        self.evaluation_seconds = self.time_evaluation()

        self.save_seconds = 0.0
        plan = self.first_plan(stages)
        planned = planned_tokens(plan.revisions[0].remaining, stages)
        scaling_tokens = int(self.recorded.get("scaling_tokens") or planned)
        self.stepper.optimizer = self.build_optimizer(scaling_tokens)
        keeper = CheckpointKeeper(
            self.run,
            self.config,
            self.world,
            self.model,
            self.stepper.optimizer,
            self.guard,
            self.clock,
            self.event,
            self.say,
        )
        progress = self.restore(keeper)
        restored = progress.step if progress else None

        def write_plan(plan: StepPlan) -> None:
            if self.world.first:
                self.run.write_json("plan.json", self.plan_json(plan, fits, stages, scaling_tokens))

        if not self.recorded:
            write_plan(plan)
        if self.world.first:
            facts = machine.describe(self.world.device, self.run.path)
            facts["matmul_peak_tflops"] = {
                "value": round(self.meter.peak_flops / 1e12, 2),
                "source": "measured",
            }
            self.run.write_json("environment.json", facts)
        if progress is None:
            # Proves at once that the disk takes a checkpoint, and shows how long that is.
            progress = Progress()
            began = time.perf_counter()
            keeper.save(progress, self.clock.seconds())
            self.save_seconds = time.perf_counter() - began

        hooks: list[Hook] = []
        if self.world.first:
            resolved = self.config.model_dump(mode="json")
            hooks = [MetricsFile(self.run), Terminal(progress.step, plan.total_steps(progress.step))]
            hooks += trackers(self.config.track, self.run, resolved)
        trainer = Trainer(
            self.config,
            self.stepper,
            plan,
            self.clock,
            progress,
            stages,
            keeper,
            hooks,
            evaluate=lambda: self.evaluate(self.config.evaluate.tokens).bpb,
            measure=self.meter.complete,
            event=self.event,
            journal=write_plan,
            limit_seconds=self.length.value if self.length.unit == "seconds" else None,
            reserve=self.reserve,
            decided_until=self.decided_until,
        )
        try:
            with StopSignal() as stop:
                status = trainer.run(stop)
        finally:
            for hook in hooks:
                hook.close()
        if status != "finished":
            self.say(
                f"{status}: saved at step {trainer.progress.step}; go on with: deskside train --resume {self.run.path}"
            )
            return Outcome(self.run, status, {}, self.world.first)
        if trainer.progress.step != restored:  # else it was stopped while finishing: that checkpoint is there
            keeper.save(trainer.progress, self.clock.seconds())
        return Outcome(self.run, status, self.finish(trainer), self.world.first)

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Evaluate on everything, sample, export, and write the summary. Every rank calls this."""
        result = self.evaluate(None)
        speed = trainer.tokens_per_second()
        totals = finish.Totals(
            steps=trainer.progress.step,
            tokens=trainer.progress.tokens,
            seconds=self.clock.seconds(),
            tokens_per_second=speed,
            mfu=self.meter.mfu(speed) if speed else None,
            peak_memory_gib=machine.peak_memory_gib(self.world.device),
        )
        model = finish.whole_model(self.model, self.world)
        if not self.world.first:
            return {}
        summary = finish.summarise(self.config, self.validation, model, totals, result)
        summary["samples"] = finish.samples(model, self.validation, self.run, self.config.seed)
        self.event(finish.export(self.run, model))
        self.run.write_json("summary.json", summary)
        self.event(f"finished: {result.bpb:.4f} bits per byte on the validation text")
        return summary

    def event(self, text: str) -> None:
        if self.world.first:
            self.run.event(text)

    def restore(self, keeper: CheckpointKeeper) -> Progress | None:
        if not self.resumed:
            return None
        progress = keeper.load_newest()
        if progress is None:
            init = self.run.read_json("run.json").get("init")
            if init is not None:
                raise RunError(
                    f"{self.run.path}: was stopped before its first checkpoint; start it again with --init {init}"
                )
            self.say("there is no checkpoint: starting from the beginning")
        step = progress.step if progress else 0
        dropped = self.run.cut_metrics(step) if self.world.first else 0
        self.decided_until = step + dropped
        self.world.barrier()
        self.say(f"resumed at step {step}" + (f"; {dropped} later steps are repeated" if dropped else ""))
        return progress

    # Batch and time

    def settle_micro_batches(self) -> tuple[list[Fit], list[float]]:
        """Fit and time every stage with dry steps, which also compile everything."""
        self.stepper = Stepper(
            self.model,
            self.build_optimizer(None),
            self.guard,
            self.world,
            self.config.compute,
            self.attention,
            self.config.optim.grad_clip,
            list(self.model.parameters()),
        )
        self.stepper.optimizer.set_progress(0.0, 0.0, 0)
        recorded = self.recorded.get("fit")
        fits, seconds = [], []
        for index, plan in enumerate(self.stage_plans):
            rows = rows_per_rank(plan.tokens_per_step, plan.stage.sequence_length, self.world)
            self.stepper.set_window(plan.stage.window)

            def dry(micro_rows: int, dataset: PackedDataset = plan.dataset) -> float:
                return self.dry_step(micro_rows, dataset, 1)

            # Another number of processes than before needs another division.
            if recorded and recorded[index]["micro_rows"] * recorded[index]["accumulation"] == rows:
                fitted = Fit(**{**recorded[index], "attempts": tuple(recorded[index]["attempts"])})
                dry(fitted.micro_rows)
            else:
                fitted = fit(dry, rows, self.largest_micro_rows(plan, rows), self.world, self.say)
            fits.append(fitted)
            seconds.append(
                min(
                    self.dry_step(fitted.micro_rows, plan.dataset, fitted.accumulation)
                    for _ in range(TIMED_DRY_STEPS)
                )
            )
        return fits, seconds

    def dry_step(self, micro_rows: int, dataset: PackedDataset, passes: int) -> float:
        """Seconds of a step on the worst batch, which changes nothing. Raises torch.OutOfMemoryError."""
        batch = worst_case_batch(
            dataset, micro_rows, passes * self.world.size, self.world.device, self.masked
        )
        began = time.perf_counter()
        try:
            self.stepper.run([batch] * passes, step=1, dry=True).read()
        except torch.OutOfMemoryError:
            self.stepper.optimizer.zero_grad()
            raise
        return time.perf_counter() - began

    def largest_micro_rows(self, plan: setup.StagePlan, rows: int) -> int:
        """Where fitting starts: what was asked for, all rows on a GPU, a cache-sized batch on a CPU."""
        length = plan.stage.sequence_length
        if self.config.batch.micro_tokens != "auto":
            return self.config.batch.micro_tokens // length
        return rows if self.world.device.type == "cuda" else max(1, CPU_MICRO_TOKENS // length)

    def build_optimizer(self, total_tokens: int | None) -> Optimizer:
        """The optimizer, scaled to the run's length; for dry steps without one."""
        batch = self.config.batch.tokens
        scaling = scales(self.config.model.hidden_size, batch, total_tokens or batch, self.config.optim.name)
        return build(self.model, self.config.optim, scaling)

    def time_evaluation(self) -> float:
        """Seconds that the final evaluation will take, from the second of two short ones (the first compiles)."""
        tokens = self.evaluation_rows * self.config.batch.sequence_length * self.world.size
        seconds = 0.0
        for _ in range(2):
            began = time.perf_counter()
            measured = self.evaluate(tokens)
            seconds = time.perf_counter() - began
        return seconds * max(1.0, self.validation.num_tokens / max(1, measured.tokens))

    def reserve(self) -> float:
        """Seconds to keep for what follows the last step: checkpoint, evaluation, export."""
        return self.evaluation_seconds + 2 * self.save_seconds if self.clock.kind == "wall" else 0.0

    def first_plan(self, stages: list[StageWork]) -> StepPlan:
        """The recorded plan of a resumed run, else the first estimate, the same on every process."""
        if self.recorded.get("revisions"):
            return StepPlan.from_json(self.recorded["revisions"])
        dry = [stage.dry_seconds for stage in stages]
        elapsed, reserve, *dry = self.world.agreed([self.clock.seconds(), self.reserve(), *dry])
        return first_plan(self.length, stages, elapsed, reserve, dry)

    def plan_json(
        self, plan: StepPlan, fits: list[Fit], stages: list[StageWork], scaling_tokens: int
    ) -> dict[str, Any]:
        first = plan.revisions[0]
        return {
            "length": str(self.length),
            "clock": self.config.schedule.clock,
            "initial": {
                "steps": first.remaining,
                "tokens": planned_tokens(first.remaining, stages),
                "seconds": first.elapsed_seconds
                + first.remaining * (first.step_seconds or 0.0)
                + self.reserve(),
                "step_seconds": first.step_seconds,
                # A CPU's resident set is not modelled.
                "memory_gib": self.modelled_memory(fits) if self.world.device.type == "cuda" else None,
            },
            "scaling_tokens": scaling_tokens,
            "fit": [fitted.to_json() for fitted in fits],
            "attention": self.attention_facts,
            "precision": self.precision_facts,
            "compile": self.compile_mode,
            "revisions": plan.to_json(),
        }

    def modelled_memory(self, fits: list[Fit]) -> float:
        tokens = [f.micro_rows * p.stage.sequence_length for f, p in zip(fits, self.stage_plans, strict=True)]
        shards = self.world.size if self.world.sharded else 1
        return modelled_memory_gib(
            self.config, max(tokens), self.compile_mode != "off", self.recipe == "bf16", shards
        )

    # Measures

    def evaluate(self, max_tokens: int | None) -> BitsPerByte:
        """Bits per byte of the validation split, shared among the processes."""
        result = evaluate_dataset(
            self.model,
            self.validation,
            micro_rows=self.evaluation_rows,
            device=self.world.device,
            max_tokens=max_tokens,
            attention=self.attention,
            document_mask=self.masked,
            rank=self.world.rank,
            world_size=self.world.size,
            reduce=self.world.summed,
        )
        parallel.reshard(self.model)
        return result
