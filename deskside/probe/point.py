"""Measure one point of the grid: a short training run with our own step, including the optimizer.

It is the run that `deskside train` would do, but for the data, which is drawn at random: token frequencies fall as 1 /
rank (Zipf), as those of text do, so that the embedding's gradient meets the same collisions. The micro-batch is fitted
as in a run. Then come steps that are not counted, until the card has settled at its power limit and its clocks, and
steps that are. A step's time is what lies between its end and the last one's on the device, so the host's work counts
where it holds the device up, and only there.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

import deskside
from deskside.budget.scaling import scales
from deskside.budget.shape import flops_per_token, num_params
from deskside.config import merge
from deskside.config.run import RunConfig
from deskside.data.reading.loader import Batch
from deskside.kernels.matmul_peak import measure_matmul_peak
from deskside.optim.build import build
from deskside.train import environment_record, parallel
from deskside.train.loop.step import DeviceEvent, StepMetrics, Stepper
from deskside.train.objective import RowDataset, TrainContext
from deskside.train.prepare import attention_backends, setup
from deskside.train.prepare.batch_size_finder import BatchSizeFinder, MicroBatch, StageWork, rows_per_rank
from deskside.train.prepare.step_planning import modelled_memory_gib

WARMUP_SECONDS = {"cuda": 2.0, "cpu": 1.0}
MEASURED_SECONDS = {"cuda": 4.0, "cpu": 4.0}
FEWEST_STEPS = 5  # counted ones, however slow; half of them come before as warm-up
BATCHES = 4  # different micro-batches that are used in turn
OPTIMIZER_RUNS = 5
LAUNCHES = 3
LR_FACTOR = 0.1  # small, because the first steps of a run are its least stable ones


@dataclass(frozen=True)
class RandomRows:
    """Rows of random tokens instead of a packed dataset."""

    sequence_length: int
    vocab_size: int

    def max_boundaries(self, rows: int) -> int:
        """Every row is one document."""
        return rows


def configuration(spec: dict[str, Any]) -> RunConfig:
    """Return the run configuration of a point. Raises UsageError for an impossible one.

    spec: `model` (fields of ModelConfig), `sequence_length`, `tokens` per optimiser step, and optionally `micro_tokens`
    ("auto"), `optimizer` ("muon"), `precision` ("auto"), `activation_checkpointing` ("none"), `compile` ("auto"),
    `attention` ("auto") and `device` ("auto").
    """
    batch = {"sequence_length", "tokens", "micro_tokens"} & spec.keys()
    compute = {"activation_checkpointing", "compile", "attention", "device"} & spec.keys()
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
class Ready:
    """A step that is ready to run.

    attention: measurements by which its backends were chosen. native: whether the formats are the hardware's.
    mode: how it is executed. peak_flops: FLOP/s of a matmul here. notes: messages of the set-up.
    """

    config: RunConfig
    recipe: str
    stepper: Stepper
    fit: MicroBatch
    attention: dict[str, Any]
    native: bool
    mode: str
    peak_flops: float
    notes: list[str]

    @property
    def rows(self) -> RandomRows:
        return RandomRows(self.config.batch.sequence_length, self.config.model.vocab_size)

    @property
    def rows_per_step(self) -> int:
        batch = self.config.batch
        return rows_per_rank(batch.tokens, batch.sequence_length, self.stepper.world)


def make_ready(config: RunConfig, mark: Callable[[str], None] = lambda done: None) -> Ready:
    """Build model, optimizer and step as `deskside train` does, with a micro-batch that fits. Runs in its own process.

    mark: is told when each part is done. Raises UsageError for a run that cannot be here.
    """
    world = parallel.init_distributed(config.compute.device, "auto")
    torch.manual_seed(config.seed)
    notes: list[str] = []
    recipe, precision = setup.choose_recipe(config, world.device, notes.append)
    mark("recipe checked")
    model = setup.build_model(config, world, recipe)
    mark("model built")
    attention, facts = attention_backends.choose_attention(
        config, model, world, config.batch.sequence_length, None
    )
    mark("attention chosen")
    native = bool(precision["native"])
    execution = setup.prepare_execution(config, model, world, recipe, precision)
    peak = measure_matmul_peak(world.device, model.activation_dtype)
    scaling = scales(
        config.model.hidden_size, config.batch.tokens, 1000 * config.batch.tokens, config.optim.name
    )
    context = TrainContext(
        config=config, world=world, model=model, attention=attention, precision=execution.precision
    )
    stepper = Stepper(context, build(model, config.optim, scaling))
    finder = BatchSizeFinder(
        config,
        stepper,
        lambda tokens: modelled_memory_gib(config, tokens, recipe, execution.mode, native),
        notes.append,
    )
    rows = RandomRows(config.batch.sequence_length, config.model.vocab_size)
    length, tokens = config.batch.sequence_length, config.batch.tokens
    (fit,) = finder.find([StageWork(1.0, length, None, tokens, cast(RowDataset, rows))])
    mark("compiled and fitted")
    return Ready(config, recipe, stepper, fit, facts, native, execution.mode, peak, notes)


def measure_point(spec: dict[str, Any]) -> dict[str, Any]:
    """Train for some seconds and return speed and memory. Runs in its own process.

    spec: as in `configuration`, and optionally `warmup_seconds` and `seconds` to be counted.
    """
    ready = make_ready(configuration(spec))
    config, device, fit = ready.config, ready.stepper.world.device, ready.fit
    setup_seconds = time.perf_counter() - deskside.STARTED

    environment_record.reset_peak_memory(device)
    batches = random_batches(ready.rows, fit.micro_rows, ready.rows_per_step, device)
    timer = Timer(ready.stepper, batches, fit.accumulation, environment_record.Sensors(device))
    timer.run(spec.get("warmup_seconds", WARMUP_SECONDS[device.type]), FEWEST_STEPS // 2)
    seconds, sensed = timer.run(spec.get("seconds", MEASURED_SECONDS[device.type]), FEWEST_STEPS)
    launch_seconds = timer.launch_seconds() if device.type == "cuda" else None
    step = statistics.median(seconds)
    speed = config.batch.tokens / step
    flops = flops_per_token(config.model, config.batch.sequence_length)
    memory = memory_peaks(device)
    watts = [float(s["watts"]) for s in sensed if s["watts"] is not None]
    return {
        "tokens_per_second": speed,
        "step_seconds": {
            "median": step,
            "p10": quantile(seconds, 0.1),
            "p90": quantile(seconds, 0.9),
        },
        "optimizer_seconds": optimizer_seconds(ready.stepper, batches[0]),
        "steps": len(seconds),
        "mfu": speed * flops / ready.peak_flops,
        "flops_per_token": flops,
        "matmul_peak_tflops": ready.peak_flops / 1e12,
        **memory,
        "micro_tokens": fit.micro_rows * config.batch.sequence_length,
        "accumulation": fit.accumulation,
        "attempts": list(fit.attempts),
        "watts": statistics.fmean(watts) if watts else None,
        "celsius": max((s["celsius"] for s in sensed if s["celsius"] is not None), default=None),
        "throttled": any(bool(s["throttled"]) for s in sensed) if watts else None,
        "loss_first": timer.losses[0],
        "loss_last": timer.losses[-1],
        "finite": timer.finite,
        "setup_seconds": setup_seconds,
        "launch_seconds": launch_seconds,
        "attention": ready.attention,
        "compile": ready.mode,
        "precision": ready.recipe,
        "params": num_params(config.model),
        "device": device.type,
        "notes": ready.notes,
    }


class Timer:
    """Runs steps and measures their times on the device; keeps every loss."""

    def __init__(
        self, stepper: Stepper, batches: list[Batch], accumulation: int, sensors: environment_record.Sensors
    ):
        self.stepper, self.batches, self.sensors = stepper, batches, sensors
        self.accumulation = accumulation
        self.step = 0
        self.losses: list[float] = []
        self.finite = True

    def run(self, at_least: float, steps: int) -> tuple[list[float], list[dict[str, Any]]]:
        """Seconds of each step until both bounds are reached, and what the sensors said meanwhile.

        The host stays one step ahead, as in training, and reads the sensors while the device works.
        """
        seconds: list[float] = []
        sensed: list[dict[str, Any]] = []
        previous, pending = DeviceEvent(self.stepper.world.device), None
        began = time.perf_counter()
        while len(seconds) < steps or time.perf_counter() - began < at_least:
            numbers = self.launch()
            if pending is not None:
                self.read(pending)
                seconds.append(pending.end.seconds_since(previous))
                previous = pending.end
            pending = numbers
            sensed.append(self.sensors.read())
        assert pending is not None
        self.read(pending)
        return seconds, sensed

    def launch(self) -> StepMetrics:
        """Launch one step."""
        self.step += 1
        self.stepper.set_progress(LR_FACTOR, 0.0, self.step)
        chosen = [self.batches[(self.step + i) % len(self.batches)] for i in range(self.accumulation)]
        return self.stepper.run(chosen, self.step)

    def launch_seconds(self) -> float:
        """Return the host's seconds to launch a whole step while the device has nothing else to do, the least of a few.

        Launching stops while the device's queue is full, so a step of many kernels shows more than the host needs.
        """
        found = []
        for _ in range(LAUNCHES):
            began = time.perf_counter()
            numbers = self.launch()
            found.append(time.perf_counter() - began)
            self.read(numbers)
        return min(found)

    def read(self, numbers: StepMetrics) -> None:
        """Wait for a step and record its loss."""
        loss, _, skipped = numbers.read()
        self.losses.append(loss)
        self.finite = self.finite and not skipped


def random_batches(
    rows: RandomRows, micro_rows: int, rows_per_step: int, device: torch.device
) -> list[Batch]:
    """Return a few micro-batches of random tokens whose frequency falls as 1 / rank."""
    generator = torch.Generator().manual_seed(0)
    weights = 1.0 / torch.arange(1, rows.vocab_size + 1, dtype=torch.float64)
    shape = (micro_rows, rows.sequence_length)
    made = []
    for _ in range(BATCHES):
        drawn = torch.multinomial(weights, shape[0] * shape[1], replacement=True, generator=generator)
        tokens_BT = drawn.view(shape).to(device)
        valid = tokens_BT.numel()
        step_valid = rows_per_step * rows.sequence_length
        made.append(Batch(tokens_BT, tokens_BT.roll(-1, dims=1), None, None, valid, step_valid))
    return made


def optimizer_seconds(stepper: Stepper, batch: Batch) -> float:
    """Median seconds of clipping and updating alone. Real updates: a skipped one does not touch the memory."""
    skip = torch.zeros((), device=stepper.world.device)
    seconds = []
    for _ in range(OPTIMIZER_RUNS):
        stepper.forward_backward([batch])
        _synchronize(stepper.world.device)
        began = time.perf_counter()
        stepper.optimizer.clip_and_norm(stepper.grad_clip)
        stepper.optimizer.step(skip)
        stepper.optimizer.zero_grad()
        _synchronize(stepper.world.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_peaks(device: torch.device) -> dict[str, int | None]:
    """Return the peaks of torch's allocator and the used memory of the device; the resident set on a CPU."""
    if device.type != "cuda":
        resident = round(environment_record.peak_memory_gib(device) * 2**30)
        return {"peak_allocated_bytes": resident, "peak_reserved_bytes": None, "device_used_bytes": None}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "device_used_bytes": total - free,
    }


def quantile(values: list[float], share: float) -> float:
    """Return the quantile `share`."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
