"""Measure one point of the grid: a short training run with deskside's own step, including the optimizer.

The run is that of `deskside train`, except for the data: random tokens whose frequency falls as 1 / rank (Zipf's law),
like those of text, so that the embedding's gradient has as many collisions. The micro-batch is fitted as in a run.
Warm-up steps bring the GPU to its power limit and to stable clocks; the steps after them are timed. Times are measured
between the ends of successive steps on the device, so host time counts only if the device waits for it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

import deskside
from deskside.budget.adapters import training_flops_per_token
from deskside.budget.format_costs import LowFormat
from deskside.budget.scaling import scales
from deskside.budget.shape import num_params
from deskside.config import merge
from deskside.config.gpu_batch import rows_each
from deskside.config.run import RunConfig
from deskside.config.step_options import adapter_spec
from deskside.data.reading.loader import Batch
from deskside.kernels.choose_matmul import summary
from deskside.kernels.matmul_peak import measure_matmul_peak
from deskside.optim.build import build
from deskside.probe.grid import COUNTED_STEPS, WARMUP_STEPS
from deskside.train import environment_record, parallel
from deskside.train.loop.stage_work import StageWork
from deskside.train.loop.step import DeviceEvent, StepMetrics, Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.objective import RowDataset
from deskside.train.prepare import attention_choice, setup
from deskside.train.prepare.batch_size_finder import BatchSizeFinder, MicroBatch
from deskside.train.prepare.fused_tiles import choose_and_use_tiles
from deskside.train.prepare.graph_choice import choose_graphs
from deskside.train.prepare.matmul_backend import choose_and_use_matmul
from deskside.train.prepare.step_planning import config_with_graphs, modelled_memory_gib, native_formats
from deskside.utils.machine import this_machine
from deskside.utils.trials import TrialCache

WARMUP_SECONDS = {"cuda": 2.0, "cpu": 1.0}
MEASURED_SECONDS = {"cuda": 4.0, "cpu": 4.0}
BATCHES = 4  # number of different micro-batches, used in turn
OPTIMIZER_RUNS = 5
LAUNCH_RUNS = 3
LR_FACTOR = 0.1  # a low learning rate, because the first steps of a run are the least stable


@dataclass(frozen=True)
class RandomRows:
    """Stand-in for a packed dataset, with rows of random tokens."""

    sequence_length: int
    vocab_size: int

    def max_boundaries(self, rows: int) -> int:
        """Return the number of documents in `rows` rows: every row is one document."""
        return rows


def point_config(spec: dict[str, Any]) -> RunConfig:
    """Return the run configuration of a point. Raises UsageError for an impossible one.

    spec: `model` (fields of ModelConfig), `sequence_length`, `tokens` per optimiser step, and optionally `micro_tokens`
    ("auto"), `optimizer` ("muon"), `precision` ("auto"), `activation_checkpointing` ("none"), `compile` ("auto"),
    `attention` ("auto"), `device` ("auto") and `cuda_graph` ("auto").
    """
    batch = {"sequence_length", "tokens", "micro_tokens"} & spec.keys()
    compute = {"activation_checkpointing", "compile", "attention", "device", "cuda_graph"} & spec.keys()
    config = {
        "model": spec["model"],
        "batch": {key: spec[key] for key in sorted(batch)},
        "optim": {"name": spec.get("optimizer", "muon")},
        "precision": {"name": spec.get("precision", "auto")},
        "compute": {key: spec[key] for key in sorted(compute)},
        "schedule": {"length": "1000000 steps"},
    }
    return merge.build([config])


@dataclass(frozen=True)
class PreparedStep:
    """A training step that is ready to run.

    Attributes:
        fit: The micro-batch that fits in memory.
        attention: The chosen attention backends with their measurements.
        native: True if the hardware supports the recipe's formats, False if they are emulated.
        native_formats: Formats of the recipe that run on tensor cores, see `step_planning.native_formats`.
        mode: Execution mode of the step (`compute.compile`).
        peak_flops: FLOP/s of a large matmul on this device.
        notes: Messages of the set-up, and of captures in later steps (`compute.cuda_graph`).
    """

    config: RunConfig
    recipe: str
    stepper: Stepper
    fit: MicroBatch
    attention: dict[str, Any]
    native: bool
    native_formats: frozenset[LowFormat]
    mode: str
    peak_flops: float
    notes: list[str]

    @property
    def rows(self) -> RandomRows:
        return RandomRows(self.config.batch.sequence_length, self.config.model.vocab_size)

    @property
    def rows_per_step(self) -> int:
        batch = self.config.batch
        return rows_each(batch.tokens, batch.sequence_length, self.stepper.world.readers)


def prepare_step(
    config: RunConfig,
    report: Callable[[str], None] = lambda done: None,
    world: parallel.World | None = None,
) -> PreparedStep:
    """Build model, optimizer and step as `deskside train` does, with a micro-batch that fits. Runs in its own process.

    report: called with a description after each part of the set-up. world: processes that train together, each of
    which calls this; None is this process alone. Raises UsageError for an impossible run.
    """
    world = world or parallel.init_distributed(config.compute.device, "auto", config.compute.gpu_budget)
    torch.manual_seed(config.seed)
    notes: list[str] = []
    cache = TrialCache()
    # Ranks must not decide on their own: they could differ where a trial is a matter of timing.
    recipe, precision = world.broadcast_result(
        lambda: setup.choose_recipe(config, world.device, notes.append, cache=cache)
    )
    report("recipe checked")
    model = setup.build_model(config, world, recipe)
    report("model built")
    peak = measure_matmul_peak(world.device, model.activation_dtype)
    measurements = world.broadcast_result(
        lambda: attention_choice.choose_attention(config, model, world, peak, cache)
    )
    report("attention chosen")
    native, formats = bool(precision["native"]), native_formats(precision)
    execution = setup.prepare_execution(config, model, world, recipe, precision, cache)
    if execution.mode == "fused":
        tokens = attention_choice.run_tokens(config, world, peak)
        choose_and_use_tiles(model, world, recipe, tokens, cache)
        if facts := choose_and_use_matmul(config, execution.precision, world, tokens, cache):
            notes.append(f"quack-kernels computes {summary(facts)}")
    report("sublayers checked")
    scaling = scales(
        config.model.hidden_size, config.batch.tokens, 1000 * config.batch.tokens, config.optim.name
    )
    context = TrainContext(
        config=config,
        world=world,
        model=model,
        attention=attention_choice.recorded_attention(measurements),
        precision=execution.precision,
    )
    stepper = Stepper(context, build(model, config.optim, scaling, replicas=world.replicas), notes.append)

    def modelled_gib(tokens: int) -> float:
        return modelled_memory_gib(config, tokens, recipe, execution.mode, formats, world.size, world.sharded)

    finder = BatchSizeFinder(config, stepper, modelled_gib, notes.append)
    rows = RandomRows(config.batch.sequence_length, config.model.vocab_size)
    length, tokens = config.batch.sequence_length, config.batch.tokens
    stages = [StageWork(1.0, length, None, tokens, cast(RowDataset, rows))]
    (fit,) = finder.find(stages)
    choose_graphs(finder, stages)
    config = config_with_graphs(config, stepper.graphed is not None)
    report("compiled and fitted")
    mode = execution.mode
    return PreparedStep(config, recipe, stepper, fit, measurements, native, formats, mode, peak, notes)


def measure_point(spec: dict[str, Any]) -> dict[str, Any]:
    """Train for some seconds and return speed and memory. Runs in its own process.

    spec: as in `point_config`, and optionally `warmup_seconds` and `seconds` (those of the timed steps).
    """
    of_others = used_by_others(spec)
    asked = point_config(spec)
    prepared = prepare_step(asked)
    config, world, fit = prepared.config, prepared.stepper.world, prepared.fit
    device = world.device
    setup_seconds = time.perf_counter() - deskside.STARTED

    environment_record.reset_peak_memory(device)
    batches = random_batches(prepared.rows, fit.micro_rows, prepared.rows_per_step, world)
    timer = StepTimer(prepared.stepper, batches, fit.accumulation, environment_record.Sensors(device))
    timer.run(spec.get("warmup_seconds", WARMUP_SECONDS[device.type]), WARMUP_STEPS)
    seconds, sensor_readings = timer.run(spec.get("seconds", MEASURED_SECONDS[device.type]), COUNTED_STEPS)
    launch_seconds = timer.launch_seconds() if device.type == "cuda" else None
    step = statistics.median(seconds)
    speed = config.batch.tokens / step
    flops = training_flops_per_token(config.model, config.batch.sequence_length, adapter_spec(config))
    memory = memory_peaks(device, of_others)
    watts = [float(s["watts"]) for s in sensor_readings if s["watts"] is not None]
    throttled = [s["throttled"] for s in sensor_readings if s["throttled"] is not None]
    return {
        "tokens_per_second": speed,
        "step_seconds": {
            "median": step,
            "p10": quantile(seconds, 0.1),
            "p90": quantile(seconds, 0.9),
        },
        "optimizer_seconds": optimizer_seconds(prepared.stepper, batches[0]),
        "steps": len(seconds),
        "mfu": speed * flops / prepared.peak_flops,
        "flops_per_token": flops,
        "matmul_peak_tflops": prepared.peak_flops / 1e12,
        **memory,
        "micro_tokens": fit.micro_rows * config.batch.sequence_length,
        "accumulation": fit.accumulation,
        "attempts": list(fit.attempts),
        "watts": statistics.fmean(watts) if watts else None,
        "celsius": max((s["celsius"] for s in sensor_readings if s["celsius"] is not None), default=None),
        "throttled": any(throttled) if throttled else None,
        "loss_first": timer.losses[0],
        "loss_last": timer.losses[-1],
        "finite": timer.finite,
        "setup_seconds": setup_seconds,
        "launch_seconds": launch_seconds,
        "attention": prepared.attention,
        "compile": prepared.mode,
        "cuda_graph": asked.compute.cuda_graph,
        "replays": prepared.stepper.graphed is not None,
        "precision": prepared.recipe,
        "params": num_params(config.model),
        "device": device.type,
        "notes": prepared.notes,
    }


class StepTimer:
    """Runs steps, measures their times on the device, and records every loss."""

    def __init__(
        self, stepper: Stepper, batches: list[Batch], accumulation: int, sensors: environment_record.Sensors
    ):
        self.stepper, self.batches, self.sensors = stepper, batches, sensors
        self.accumulation = accumulation
        self.step = 0
        self.losses: list[float] = []
        self.finite = True

    def run(self, min_seconds: float, min_steps: int) -> tuple[list[float], list[dict[str, Any]]]:
        """Run steps until both minimums are reached. Return the seconds of all steps but the last, and sensor readings.

        The host launches one step ahead, as in training, and reads the sensors while the device works.
        """
        seconds: list[float] = []
        sensor_readings: list[dict[str, Any]] = []
        previous, pending = DeviceEvent(self.stepper.world.device), None
        began = time.perf_counter()
        while len(seconds) < min_steps or time.perf_counter() - began < min_seconds:
            metrics = self.launch()
            if pending is not None:
                self.read(pending)
                seconds.append(pending.end.seconds_since(previous))
                previous = pending.end
            pending = metrics
            sensor_readings.append(self.sensors.read())
        assert pending is not None
        self.read(pending)
        return seconds, sensor_readings

    def launch(self) -> StepMetrics:
        """Launch one step, without waiting for it."""
        self.step += 1
        self.stepper.set_progress(LR_FACTOR, 0.0, self.step)
        chosen = [self.batches[(self.step + i) % len(self.batches)] for i in range(self.accumulation)]
        return self.stepper.run(chosen, self.step)

    def launch_seconds(self) -> float:
        """Return the seconds that the host takes to launch a step while the device is idle: the shortest of a few runs.

        The host waits while the launch queue of the device is full, so it is too high for steps of many kernels.
        """
        seconds = []
        for _ in range(LAUNCH_RUNS):
            began = time.perf_counter()
            metrics = self.launch()
            seconds.append(time.perf_counter() - began)
            self.read(metrics)
        return min(seconds)

    def read(self, metrics: StepMetrics) -> None:
        """Wait for a step and record its loss, and whether it was finite."""
        loss, _, skipped = metrics.read()
        self.losses.append(loss)
        self.finite = self.finite and not skipped


def random_batches(
    rows: RandomRows, micro_rows: int, rows_per_step: int, world: parallel.World
) -> list[Batch]:
    """Return a few micro-batches of random tokens whose frequency falls as 1 / rank.

    rows_per_step: rows of this process in a step. As with `Loader`, each of the `readers` has other tokens, processes
    that share rows have the same, and `Batch.num_valid_step` counts the tokens of all.
    """
    generator = torch.Generator().manual_seed(world.reader)
    weights = 1.0 / torch.arange(1, rows.vocab_size + 1, dtype=torch.float64)
    shape = (micro_rows, rows.sequence_length)
    batches = []
    for _ in range(BATCHES):
        drawn = torch.multinomial(weights, shape[0] * shape[1], replacement=True, generator=generator)
        tokens_BT = drawn.view(shape).to(world.device)
        valid = tokens_BT.numel()
        step_valid = world.readers * rows_per_step * rows.sequence_length
        batches.append(Batch(tokens_BT, tokens_BT.roll(-1, dims=1), None, None, valid, step_valid))
    return batches


def optimizer_seconds(stepper: Stepper, batch: Batch) -> float:
    """Return the median seconds of gradient clipping and the update after the backward."""
    seconds = []
    for _ in range(OPTIMIZER_RUNS):
        stepper.begin_step(1, 1)
        sums = stepper.forward_backward([batch])
        _synchronize(stepper.world.device)
        began = time.perf_counter()
        stepper.update(sums, 1, batch.num_valid_step)  # a dry step's update would write no memory
        _synchronize(stepper.world.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def used_by_others(spec: dict[str, Any]) -> int:
    """Return the bytes of the GPU that other programs use, if this process has not used it yet; 0 on a CPU."""
    if spec.get("device") == "cpu":
        return 0
    machine = this_machine()
    return 0 if machine.free_bytes is None else machine.memory_bytes - machine.free_bytes


def memory_peaks(device: torch.device, of_others: int = 0) -> dict[str, int | None]:
    """Return peak bytes of torch's allocator, and bytes that this process uses on the device; on a CPU the peak
    resident set. of_others: from `used_by_others`."""
    if device.type != "cuda":
        resident = round(environment_record.peak_memory_gib(device) * 2**30)
        return {"peak_allocated_bytes": resident, "peak_reserved_bytes": None, "device_used_bytes": None}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "device_used_bytes": max(torch.cuda.memory_reserved(device), total - free - of_others),
    }


def quantile(values: list[float], share: float) -> float:
    """Return the quantile `share` (0 to 1) without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
