"""The metrics and the learning curve of a trial, read from its run directory.

A metric that was not measured is absent. Two metrics come from elsewhere: `val_bpb_equal_tokens` from the comparison,
because it depends on the other trials, and `total_seconds` from the journal, because a run cannot measure the lifetime
of its own process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.budget.shape import num_params
from deskside.config.dimensions import projection_sizes
from deskside.config.recipes import recipe_named
from deskside.config.run import RunConfig
from deskside.run.record import emulated, has_known_peak, mapping, number, read_metrics, read_object

CURVE_POINTS = 200
ROW_TOKENS_PER_TEXT_TOKEN = 1.25  # upper bound; rows also contain padding and document ends
LAST_SHARE = 0.05  # the training loss is the mean over this last share of the logged steps
# The mean power excludes the start of the training time, while clocks and power settle: the smaller of 10 s and 20 %.
SETTLING_SECONDS, SETTLING_SHARE = 10.0, 0.2


@dataclass(frozen=True)
class Measured:
    """The measurements of one trial.

    Attributes:
        metrics: Values by their keys in metrics.py.
        curve: As in `results.Trial`.
        emulated: True if the run emulates its number format; None if the run has not recorded this yet.
        machine: Content of environment.json, or empty.
    """

    metrics: dict[str, float]
    curve: list[dict[str, float | None]]
    emulated: bool | None
    machine: dict[str, Any]


@dataclass(frozen=True)
class _Step:
    """A logged step. tokens, seconds: tokens and training time up to and including this step. row: of metrics.jsonl."""

    tokens: float
    seconds: float
    row: Mapping[str, Any]


def measure(run: Path, config: RunConfig) -> Measured:
    """Return the measurements of a run directory in any state. The final metrics require summary.json."""
    rows = [row for row in read_metrics(run).rows if number(row.get("tokens")) is not None]
    steps = _steps(rows)
    summary, plan = read_object(run / "summary.json")[0], read_object(run / "plan.json")[0]
    machine = read_object(run / "environment.json")[0]
    metrics: dict[str, float | None] = {
        "parameters": float(num_params(config.model)),
        "parameters_quantized": float(quantized_parameters(config)),
        "micro_tokens": _micro_tokens(plan, config),
        "watts": _watts(steps),
    }
    if steps:
        metrics |= {"tokens": number(rows[-1].get("tokens")), "steps": number(rows[-1].get("step"))}
        metrics["seconds"] = steps[-1].seconds
    if summary:
        for key in (
            "val_bpb",
            "val_loss",
            "mfu",
            "peak_memory_gib",
            "peak_reserved_gib",
            "gpu_shared",
            "tokens",
            "steps",
        ):
            metrics[key] = number(summary.get(key))
        loss = metrics["val_loss"]
        # exp overflows a float64 above 709.78.
        metrics["perplexity"] = math.exp(loss) if loss is not None and loss < 500 else None
        metrics["train_loss"] = _last_loss(rows)
        metrics["tokens_per_second"] = speed = number(summary.get("tokens_per_second")) or _speed(steps)
        if metrics["watts"] is not None and speed:
            metrics["joules_per_token"] = metrics["watts"] / speed
    if not has_known_peak(machine):
        metrics.pop("mfu", None)
    return Measured(
        metrics={key: float(value) for key, value in metrics.items() if value is not None},
        curve=_curve(steps, metrics.get("val_bpb") if _evaluates_whole_split(summary, config) else None),
        emulated=emulated(mapping(plan.get("precision"))),
        machine=machine,
    )


def quantized_parameters(config: RunConfig) -> int:
    """Return the number of weights whose products run in fewer than 16 bits.

    These are the weights of the blocks that the recipe quantizes, except for the projections in `precision.keep`, and
    those of the head if it is in FP8. If one of several projections with a shared weight is in `precision.keep`, all of
    them stay in BF16 (precision/convert.py).
    """
    precision, model = config.precision, config.model
    if precision.name == "auto" or not recipe_named(precision.name).quantized:
        return 0
    layers, kept = model.num_hidden_layers, set(precision.keep)
    block = sum(size for names, size in projection_sizes(model).items() if not kept.intersection(names))
    head = model.vocab_size * model.hidden_size if precision.head == "fp8" else 0
    return max(0, layers - sum(precision.recipe().kept_blocks(layers))) * block + head


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[_Step]:
    """Return the logged steps with the training time up to each, computed as the sum of tokens / speed.

    The `seconds` in the rows are not used, because they include set-up, evaluation and checkpoints if the run's clock
    is wall time.
    """
    steps: list[_Step] = []
    tokens = seconds = 0.0
    for row in rows:
        speed, step_end = number(row.get("tokens_per_second")), float(row["tokens"])
        if speed is not None and speed > 0:
            seconds += max(0.0, step_end - tokens) / speed
        tokens = step_end
        steps.append(_Step(tokens, seconds, row))
    return steps


def _speed(steps: Sequence[_Step]) -> float | None:
    """Return the mean tokens per second of training."""
    return steps[-1].tokens / steps[-1].seconds if steps and steps[-1].seconds > 0 else None


def _last_loss(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean training loss of the last steps."""
    last = rows[-max(1, round(LAST_SHARE * len(rows))) :]
    losses = [loss for row in last if (loss := number(row.get("loss"))) is not None]
    return sum(losses) / len(losses) if losses else None


def _watts(steps: Sequence[_Step]) -> float | None:
    """Return the mean power over the training time after the settling time."""
    if not steps:
        return None
    settled = min(SETTLING_SECONDS, SETTLING_SHARE * steps[-1].seconds)
    joules = total_seconds = step_start = 0.0
    for step in steps:
        watts, seconds = number(step.row.get("watts")), step.seconds - step_start
        if watts is not None and step_start >= settled:
            joules += watts * seconds
            total_seconds += seconds
        step_start = step.seconds
    return joules / total_seconds if total_seconds > 0 else None


def _micro_tokens(plan: Mapping[str, Any], config: RunConfig) -> float | None:
    """Return the tokens of a micro-batch in the run's last stage."""
    fits = plan.get("fit")
    rows = number(fits[-1].get("micro_rows")) if isinstance(fits, list) and fits else None
    return None if rows is None else rows * config.stages()[-1].sequence_length


def _evaluates_whole_split(summary: Mapping[str, Any], config: RunConfig) -> bool:
    """Return True if the evaluations during the run read the whole validation split, as the final one does.

    Otherwise the final loss is not comparable with the others and must not be a point of the same curve.
    """
    split_tokens = number(summary.get("val_tokens"))
    return split_tokens is not None and config.evaluate.tokens >= ROW_TOKENS_PER_TEXT_TOKEN * split_tokens


def _curve(steps: Sequence[_Step], final_bpb: float | None) -> list[dict[str, float | None]]:
    """Return at most CURVE_POINTS points of the curve, preferably evaluated ones.

    The last step is always among them. final_bpb: its loss on the validation split, if it belongs to the curve.
    """
    points: list[dict[str, float | None]] = [
        {
            "tokens": step.tokens,
            "seconds": step.seconds,
            "loss": number(step.row.get("loss")),
            "val_bpb": number(step.row.get("val_bpb")),
        }
        for step in steps
    ]
    if points and final_bpb is not None:
        points[-1]["val_bpb"] = final_bpb
    evaluated = [index for index, point in enumerate(points) if point["val_bpb"] is not None]
    kept = set(_spread(evaluated, CURVE_POINTS))
    if points:
        kept.add(len(points) - 1)
    others = [index for index in range(len(points)) if index not in kept]
    kept |= set(_spread(others, CURVE_POINTS - len(kept)))
    return [points[index] for index in sorted(kept)][-CURVE_POINTS:]


def _spread(indices: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the indices, evenly spaced and including the last."""
    if len(indices) <= most:
        return list(indices)
    return [indices[-1 - (n * len(indices)) // most] for n in range(max(0, most))]
