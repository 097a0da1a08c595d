"""One process of the scaling benchmark: a GPU, which measures cases together with those of the other processes.

    python -m benchmarks.scaling_launcher --standalone --nproc-per-node N -m benchmarks.scaling_worker SPEC

The step is built and timed as by the probe (`probe/point.py`), so it is that of `deskside train` without its data
loader, checkpoints and evaluation. One process group measures all cases in turn: starting another one takes longer than
a case. Rank 0 appends a row to the file `rows` of SPEC after each.
"""

import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import step_profile
from benchmarks.step_config import configuration
from deskside.probe.point import StepTimer, memory_peaks, prepare_step, quantile, random_batches
from deskside.train import environment_record, parallel
from deskside.train.loop.step import StepMetrics
from deskside.train.nvml import NvmlDevice, query
from deskside.train.parallel import World
from deskside.train.prepare import attention_choice
from deskside.utils import launched

WARMUP_STEPS = 5
WARMUP_SECONDS = {"cuda": 1.5, "cpu": 0.0}  # the card reaches its power limit
MIN_STEPS = 8
PROFILED_STEPS = 2
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
BANDWIDTH_BYTES = [2**exponent for exponent in range(20, 30)]
BANDWIDTH_SECONDS = 0.3  # for each size
SCRATCH = 2**28  # bytes that are cleared between two collectives, to empty the cache


def measure(case: Mapping[str, Any], spec: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Measure a case. Every rank calls this; the result is that of rank 0, with memory and energy of all.

    case: preset, optimizer, tokens, and `config`, other configuration keys. spec: `seconds` of counted steps, and
    whether to `profile`.
    """
    config = configuration({name: case[name] for name in ("preset", "optimizer", "tokens", "config")})
    world = replace(world, sharded=config.parallel.mode == "shard")
    prepared = prepare_step(config, world=world)
    device, rows = world.device, prepared.rows_per_step
    environment_record.reset_peak_memory(device)
    batches = random_batches(prepared.rows, prepared.fit.micro_rows, rows, world)
    sensors = ClockSensors(device)
    timer = HostTimer(prepared.stepper, batches, prepared.fit.accumulation, sensors)
    warmup, _ = timer.run(0.0, WARMUP_STEPS)
    # Rank 0 decides how many steps, because the ranks would not agree about the time.
    step_seconds, warmed = world.broadcast([statistics.median(warmup), sum(warmup)])
    if (left := WARMUP_SECONDS[device.type] - warmed) > 0:
        timer.run(0.0, math.ceil(left / step_seconds))
    world.barrier()
    joules, began = _joules(device), time.perf_counter()
    steps = max(MIN_STEPS, math.ceil(float(spec["seconds"]) / step_seconds))
    timer.launches.clear()
    seconds, readings = timer.run(0.0, steps)
    launch, sensor = statistics.median(timer.launches), statistics.median(sensors.seconds or [0.0])
    elapsed, used = time.perf_counter() - began, _joules(device)
    peaks = world.gather(memory_peaks(device)["peak_allocated_bytes"])
    clocks = [float(reading["sm_mhz"]) for reading in readings if reading["sm_mhz"] is not None]
    watts = world.gather(None if joules is None or used is None else (used - joules) / elapsed)
    row = {
        **{name: config.batch.tokens / quantile(seconds, 1 - share) for name, share in QUANTILES.items()},
        "steps": len(seconds),
        "peak_gib": [round(peak / 2**30, 3) for peak in peaks if peak is not None],
        "watts": [round(value, 1) for value in watts if value is not None],
        "sm_mhz": world.gather(round(statistics.fmean(clocks)) if clocks else None),
        "step_seconds_of_ranks": [round(x, 6) for x in world.gather(statistics.median(seconds))],
        "launch_seconds_of_ranks": [round(x, 6) for x in world.gather(launch)],
        "sensor_seconds_of_ranks": [round(x, 6) for x in world.gather(sensor)],
        "micro_tokens": prepared.fit.micro_rows * config.batch.sequence_length,
        "compile": prepared.mode,
        "native": prepared.native,
        "recipe": prepared.recipe,
        "attention": attention_that_ran(prepared.attention),
        "loss_last": timer.losses[-1],
        "finite": timer.finite,
    }
    if spec["profile"]:
        row["profile"] = world.gather(_profile(timer, row["step_seconds_of_ranks"][world.rank], world))
    return row


def attention_that_ran(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the backends of the measured steps, for full and windowed layers. facts: those of `choose_attention`."""
    found = {kind: facts[kind] for kind in attention_choice.KINDS if kind in facts}
    return {kind: trial.get(attention_choice.SHARED_ROWS, trial["name"]) for kind, trial in found.items()}


class ClockSensors(environment_record.Sensors):
    """Sensors that also read the clock of the multiprocessors in MHz, which falls at the power limit.

    seconds: what each query of the driver took.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.seconds: list[float] = []

    def _query(self) -> dict[str, Any]:
        """Return the readings of `Sensors`, and "sm_mhz"."""
        if self._card is None:
            return {**super()._query(), "sm_mhz": None}
        import pynvml

        began = time.perf_counter()
        clock = query(pynvml.nvmlDeviceGetClockInfo, self._card.handle, pynvml.NVML_CLOCK_SM)
        reading = {**super()._query(), "sm_mhz": clock}
        self.seconds.append(time.perf_counter() - began)
        return reading


class HostTimer(StepTimer):
    """A step timer that also measures the host. launches: seconds that it took to launch each step.

    If the device is slower than the host, they include waiting for a place in its queue.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.launches: list[float] = []

    def launch(self) -> StepMetrics:
        """Launch one step, without waiting for it."""
        began = time.perf_counter()
        metrics = super().launch()
        self.launches.append(time.perf_counter() - began)
        return metrics


def _profile(timer: StepTimer, step_seconds: float, world: World) -> dict[str, Any]:
    """Return what a trace of a few steps says of this rank: `communication`, and milliseconds by kind of kernel.

    Every rank traces its own steps, because the slowest card decides, and the others wait for it in NCCL's kernels.
    """
    stepper = timer.stepper
    optimizer = stepper.optimizer
    stepper.optimizer = step_profile.MarkedOptimizer(optimizer)  # type: ignore[assignment]
    try:
        events = step_profile.record(timer.launch, PROFILED_STEPS, world.device)
    finally:
        stepper.optimizer = optimizer
    activities = step_profile.activities(events, world.device.type)
    split = step_profile.split(activities, PROFILED_STEPS, 1000 * step_seconds, world.device.type)
    kinds = {kind: round(values["ms"], 3) for kind, values in split["kinds"].items()}
    return {**communication(activities, PROFILED_STEPS), "kinds_ms": kinds}


def communication(activities: Sequence[step_profile.Activity], steps: int) -> dict[str, float]:
    """Return the milliseconds per step of communication, exposed communication, other kernels, and all of them."""
    sent = [activity for activity in activities if "nccl" in activity.name.lower()]
    other = [activity for activity in activities if "nccl" not in activity.name.lower()]
    busy = {
        name: step_profile.busy_microseconds(part) / steps / 1e3
        for name, part in (("communication_ms", sent), ("compute_ms", other), ("busy_ms", activities))
    }
    return {**busy, "exposed_ms": busy["busy_ms"] - busy["compute_ms"], "collectives": len(sent) / steps}


def bandwidth(world: World) -> list[dict[str, Any]]:
    """Return rows of the bandwidth of an all-reduce by size: 2 (n - 1) / n x bytes / time, as in nccl-tests.

    The bytes of a size are reduced over all ranks again and again, and the median counts. Float32, as gradients.
    """
    rows = []
    on_gpu = world.device.type == "cuda"
    scratch = torch.empty(SCRATCH if on_gpu else 1, dtype=torch.uint8, device=world.device)
    for size in BANDWIDTH_BYTES if on_gpu else BANDWIDTH_BYTES[:2]:
        values = torch.zeros(size // 4, device=world.device)
        times: list[float] = []
        repeats = 3
        while len(times) < repeats:
            scratch.zero_()
            if on_gpu:
                torch.cuda.synchronize(world.device)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            if on_gpu:
                torch.cuda.synchronize(world.device)
            times.append(time.perf_counter() - began)
            if len(times) == 3:
                slowest = world.broadcast([times[-1]])[0]
                repeats = max(5, min(50, math.ceil(BANDWIDTH_SECONDS / slowest)))
        seconds = statistics.median(times[2:])
        factor = 2 * (world.size - 1) / world.size
        rows.append({"bytes": size, "seconds": seconds, "bus_bandwidth": factor * size / seconds})
    return rows


def _joules(device: torch.device) -> float | None:
    """Wait for the GPU and return the joules that it has used since the driver was loaded; None without NVML."""
    if device.type != "cuda":
        return None
    import pynvml

    torch.cuda.synchronize(device)
    card = NvmlDevice.from_torch(device)
    used = None if card is None else query(pynvml.nvmlDeviceGetTotalEnergyConsumption, card.handle)
    return None if used is None else used / 1000


def about(world: World) -> dict[str, Any]:
    """Return the entries of every row: the cards of the group, and torch's version. Every rank calls this.

    card: the indices of the cards on their machine. uuids: what tells them from those of another machine.
    """
    on_gpu = world.device.type == "cuda"
    uuids = world.gather(str(torch.cuda.get_device_properties(world.device).uuid) if on_gpu else None)
    return {
        "card": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "uuids": [uuid for uuid in uuids if uuid is not None],
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }


def main() -> int:
    """Measure the cases of the specification, in this process of the group."""
    launched.begin()
    spec = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    world = parallel.init_distributed(spec["device"], "auto", context=spec["context"])
    facts = about(world)

    def write(row: dict[str, Any]) -> None:
        if world.is_rank_zero:
            with Path(spec["rows"]).open("a") as file:
                file.write(json.dumps({**row, **facts, "when": _now()}) + "\n")

    try:
        if spec["bandwidth"]:
            for row in bandwidth(world):
                write({"gpus": world.size, "p2p": spec["p2p"], **row})
        for case in spec["cases"]:
            (left,) = world.broadcast([spec["end"] - time.time()])
            if left < 0:
                break
            write({**case["row"], **measure(case, spec, world)})
            for _ in range(3):  # a cycle may be freed only after another one
                gc.collect()
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
    finally:
        parallel.destroy_distributed(world)
    return 0


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())


if __name__ == "__main__":
    sys.exit(main())
