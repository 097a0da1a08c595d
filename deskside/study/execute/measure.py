"""The metrics and the learning curve of a trial, read from its run directory.

A metric that was not measured is absent. `val_bpb_equal_tokens` is computed by the comparison, because it depends
on the other trials; `total_seconds` comes from the journal, because a run cannot time the start and the end of its
own process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.budget.shape import num_params
from deskside.config.recipes import recipe_named
from deskside.config.run import RunConfig
from deskside.run.record import number, read_metrics, read_object

CURVE_POINTS = 200
ROWS_PER_TEXT = 1.25  # upper bound of tokens in rows (padding and document ends included) per token of text
LAST_SHARE = 0.05  # the training loss is the mean over this share of the logged steps
# Excluded at the start, while clocks and power settle: the smaller of both.
SETTLING_SECONDS, SETTLING_SHARE = 10.0, 0.2


@dataclass(frozen=True)
class Measured:
    """The measurements of one trial.

    metrics: keyed as in stats/metrics.py. curve: as in `results.Trial`. emulated: None if the run has not decided
    it yet. machine: environment.json, or empty.
    """

    metrics: dict[str, float]
    curve: list[dict[str, float | None]]
    emulated: bool | None
    machine: dict[str, Any]


@dataclass(frozen=True)
class _Step:
    """A logged step. seconds: training time up to and including this step."""

    tokens: float
    seconds: float
    row: Mapping[str, Any]


def measure(run: Path, config: RunConfig) -> Measured:
    """Read a run directory in any state. Final metrics require summary.json."""
    rows = [row for row in read_metrics(run).rows if number(row.get("tokens")) is not None]
    steps = _training_time(rows)
    summary, plan = read_object(run / "summary.json")[0], read_object(run / "plan.json")[0]
    found: dict[str, float | None] = {
        "parameters": float(num_params(config.model)),
        "parameters_quantized": float(quantized_parameters(config)),
        "micro_tokens": _micro_tokens(plan, config),
        "watts": _watts(steps),
    }
    if steps:
        found |= {"tokens": number(rows[-1].get("tokens")), "steps": number(rows[-1].get("step"))}
        found["seconds"] = steps[-1].seconds
    if summary:
        for key in ("val_bpb", "val_loss", "mfu", "peak_memory_gib", "peak_reserved_gib", "tokens", "steps"):
            found[key] = number(summary.get(key))
        loss = found["val_loss"]
        found["perplexity"] = math.exp(loss) if loss is not None and loss < 500 else None
        found["train_loss"] = _last_loss(rows)
        found["tokens_per_second"] = speed = number(summary.get("tokens_per_second")) or _speed(steps)
        if found["watts"] is not None and speed:
            found["joules_per_token"] = found["watts"] / speed
    precision = plan.get("precision")
    return Measured(
        {key: float(value) for key, value in found.items() if value is not None},
        _curve(steps, found.get("val_bpb") if _whole_split(summary, config) else None),
        not precision["native"] if isinstance(precision, Mapping) and "native" in precision else None,
        read_object(run / "environment.json")[0],
    )


def quantized_parameters(config: RunConfig) -> int:
    """Return the number of weights whose products run in fewer than 16 bits.

    These are the weights of the blocks that the recipe quantizes, without `precision.keep`, and of the head if it
    is in FP8. Projections that share one weight stay in BF16 together (precision/apply.py).
    """
    asked, model = config.precision, config.model
    if asked.name == "auto" or not recipe_named(asked.name).quantized:
        return 0
    layers, D = model.num_hidden_layers, model.hidden_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    sizes = {"q_proj": D * q, "k_proj": D * kv, "v_proj": D * kv, "o_proj": q * D}
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), D * model.intermediate_size)
    if not model.gated_mlp:
        del sizes["gate_proj"]
    shared: list[tuple[str, ...]] = [("q_proj", "k_proj", "v_proj")] if model.fused_qkv else []
    shared += [("gate_proj", "up_proj")] if model.fused_gate_up and model.gated_mlp else []
    kept: set[str] = set(asked.keep)
    for group in shared:
        kept |= set(group) if kept & set(group) else set()
    block = sum(size for name, size in sizes.items() if name not in kept)
    head = model.vocab_size * D if asked.head == "fp8" else 0
    return max(0, layers - sum(asked.recipe().kept_blocks(layers))) * block + head


def _training_time(rows: Sequence[Mapping[str, Any]]) -> list[_Step]:
    """Return the steps with the training time up to each: tokens over speed, without pauses.

    The run's own `seconds` include set-up, evaluation and checkpoints when its clock is wall time.
    """
    steps: list[_Step] = []
    tokens = seconds = 0.0
    for row in rows:
        speed, now = number(row.get("tokens_per_second")), float(row["tokens"])
        if speed is not None and speed > 0:
            seconds += max(0.0, now - tokens) / speed
        tokens = now
        steps.append(_Step(tokens, seconds, row))
    return steps


def _speed(steps: Sequence[_Step]) -> float | None:
    return steps[-1].tokens / steps[-1].seconds if steps and steps[-1].seconds > 0 else None


def _last_loss(rows: Sequence[Mapping[str, Any]]) -> float | None:
    last = rows[-max(1, round(LAST_SHARE * len(rows))) :]
    losses = [loss for row in last if (loss := number(row.get("loss"))) is not None]
    return sum(losses) / len(losses) if losses else None


def _watts(steps: Sequence[_Step]) -> float | None:
    """Return the mean power over the training time, after it has settled."""
    if not steps:
        return None
    settled = min(SETTLING_SECONDS, SETTLING_SHARE * steps[-1].seconds)
    joules = time = before = 0.0
    for step in steps:
        watts, lasted = number(step.row.get("watts")), step.seconds - before
        if watts is not None and before >= settled:
            joules, time = joules + watts * lasted, time + lasted
        before = step.seconds
    return joules / time if time > 0 else None


def _micro_tokens(plan: Mapping[str, Any], config: RunConfig) -> float | None:
    """Return the tokens of a micro-batch in the run's last stage."""
    fits = plan.get("fit")
    rows = number(fits[-1].get("micro_rows")) if isinstance(fits, list) and fits else None
    return None if rows is None else rows * config.stages()[-1].sequence_length


def _whole_split(summary: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether the evaluations during the run read the whole validation split, as the final one does.

    Otherwise the last point would not belong to the same curve, and the comparison at equal tokens would mix both.
    """
    whole = number(summary.get("val_tokens"))
    return whole is not None and config.evaluate.tokens >= ROWS_PER_TEXT * whole


def _curve(steps: Sequence[_Step], final_bpb: float | None) -> list[dict[str, float | None]]:
    """Thin the curve to CURVE_POINTS points, among them evaluated ones and the last, which gets `final_bpb`."""
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
    kept = {index for index, point in enumerate(points) if point["val_bpb"] is not None}
    kept = set(_spread(sorted(kept), CURVE_POINTS)) | ({len(points) - 1} if points else set())
    others = [index for index in range(len(points)) if index not in kept]
    kept |= set(_spread(others, CURVE_POINTS - len(kept)))
    return [points[index] for index in sorted(kept)][-CURVE_POINTS:]


def _spread(indices: Sequence[int], most: int) -> list[int]:
    """Pick at most `most` indices, evenly spaced, including the last."""
    if len(indices) <= most:
        return list(indices)
    return [indices[-1 - (n * len(indices)) // most] for n in range(max(0, most))]
