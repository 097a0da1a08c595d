"""Timing of a peer's training step, in its own process."""

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers_models
from benchmarks.step_config import configuration
from deskside.budget.shape import num_params
from deskside.probe.point import RandomRows, memory_peaks, quantile, random_batches
from deskside.train import environment_record
from deskside.train.loop.step import DeviceEvent
from deskside.train.parallel import World


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Return median, p10 and p90 of the step time, speed, peak memory, and seconds to the end of the first step.

    spec: `peer`, `preset`, `tokens` per step, `sequence_length`, `rows` of a micro-batch, `steps`, `warmup`, `folder`,
    `device` and `began`, the value of time.monotonic() when the command was given. Raises UsageError.
    """
    config = configuration({key: spec[key] for key in ("preset", "tokens", "sequence_length", "device")})
    kind = config.compute.device
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if kind == "auto" else kind)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    T, folder = config.batch.sequence_length, spec.get("folder")
    work = peers_models.Work(config.model, T, Path(folder) if folder else None, device)
    peer = peers_models.build(spec["peer"], work)
    rows = min(spec["rows"], config.batch.tokens // T)
    accumulation = config.batch.tokens // (rows * T)
    batches = random_batches(RandomRows(T, config.model.vocab_size), rows, rows, World(device))

    def step(number: int) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for i in range(accumulation):
            batch = batches[(number + i) % len(batches)]
            loss = peer.loss(batch.tokens_BT, batch.targets_BT) / accumulation
            loss.backward()
            total += loss.detach()
        peer.update()
        return total

    losses = [float(step(0))]
    first_step = time.monotonic() - float(spec["began"])
    environment_record.reset_peak_memory(device)
    for number in range(1, spec["warmup"]):
        step(number)
    marks = [DeviceEvent(device)]
    pending = []
    for number in range(spec["steps"]):
        pending.append(step(spec["warmup"] + number))
        marks.append(DeviceEvent(device))
    seconds = [b.seconds_since(a) for a, b in itertools.pairwise(marks)]
    losses += [float(loss) for loss in pending]
    median = statistics.median(seconds)
    memory = memory_peaks(device)["peak_allocated_bytes"]
    return {
        "tokens_per_second": config.batch.tokens / median,
        "step_ms": {
            "median": 1e3 * median,
            "p10": 1e3 * quantile(seconds, 0.1),
            "p90": 1e3 * quantile(seconds, 0.9),
        },
        "peak_allocated_gib": None if memory is None else memory / 2**30,
        "first_step_seconds": first_step,
        "micro_rows": rows,
        "accumulation": accumulation,
        "params": sum(p.numel() for p in peer.parameters),
        "params_of_preset": num_params(config.model),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "finite": all(loss == loss and abs(loss) != float("inf") for loss in losses),
        "compiled": peer.compiled,
        "notes": peer.notes,
        "device": device.type,
        "torch": torch.__version__,
    }
