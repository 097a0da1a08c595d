"""The first plan of a run: its number of steps and tokens, and the predicted memory of a step."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from deskside.budget.format_costs import LowFormat, Precision, quantized
from deskside.budget.host_memory import host_memory
from deskside.budget.memory import training_memory
from deskside.budget.shape import num_params
from deskside.budget.step_spec import StepSpec
from deskside.config.duration import Duration
from deskside.config.run import RunConfig
from deskside.config.step_options import format_options, recipe_of, step_options
from deskside.data.reading.repetition import describe_epochs
from deskside.data.reading.rows import PackedDataset
from deskside.run.directory import RunDirectory
from deskside.train.loop.clock import Revision, StepPlan, remaining_steps
from deskside.train.loop.stage_work import StageWork
from deskside.train.objective import RowDataset
from deskside.train.parallel import World, local_processes
from deskside.train.time_budget import MARGIN, RECOMMENDED_STEPS, TooShortError
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import count, end_time, gib, plural
from deskside.utils.host_memory import usable_bytes


def first_plan(
    length: Duration,
    stages: Sequence[StageWork],
    elapsed: float,
    reserve: float,
    dry_seconds: Sequence[float],
) -> StepPlan:
    """Return the plan at step 0.

    elapsed: seconds of the run so far. reserve: seconds needed after the last step. dry_seconds: seconds of a step in
    each stage. These three determine the number of steps only if the length is a time. Raises UsageError if it is too
    short for a step.
    """
    if length.unit == "seconds":
        left = length.value - elapsed - reserve
        steps = remaining_steps(left, 0.0, [s.until for s in stages], dry_seconds)
        if steps < 1:
            why = (
                f"setting up took {elapsed:.0f} s, evaluation and saving need {reserve:.0f} s, and a step takes "
                f"{dry_seconds[0]:.2f} s"
            )
            raise TooShortError(
                length.value, why, MARGIN * (elapsed + reserve + RECOMMENDED_STEPS * dry_seconds[0])
            )
        reason = "estimated from dry steps"
    elif length.unit == "steps":
        steps, reason = int(length.value), "length in steps"
    else:
        tokens = float(length.value)
        if length.unit == "epochs":
            tokens *= stages[-1].dataset.num_rows * stages[-1].sequence_length
        steps, reason = max(1, math.ceil(tokens / mean_tokens(stages))), f"length in {length.unit}"
    return StepPlan([Revision(0, 0.0, steps, elapsed, dry_seconds[0], reason)])


def first_facts(
    config: RunConfig, plan: StepPlan, stages: Sequence[StageWork], reserve: float, memory_gib: float | None
) -> dict[str, Any]:
    """Return the entries of plan.json that describe the first plan: the length and the predictions."""
    first = plan.revisions[0]
    step_seconds = mean_over_run(stages, [stage.dry_seconds for stage in stages])
    tokens = max(1, round(first.remaining * mean_tokens(stages)))
    return {
        "length": str(config.schedule.length),
        "clock": config.schedule.clock,
        "initial": {
            "steps": first.remaining,
            "tokens": tokens,
            "seconds": first.elapsed_seconds + first.remaining * step_seconds + reserve,
            "step_seconds": step_seconds,
            "memory_gib": memory_gib,
        },
        "scaling_tokens": tokens,
        "train_tokens": stages[-1].dataset.num_tokens,
        "save_seconds": 0.0,
        "mixture_epochs": mixture_epochs(stages, planned_rows(stages, first.remaining)),
    }


def describe_work(
    config: RunConfig, plan: StepPlan, stages: Sequence[StageWork], step: int, elapsed: float
) -> str:
    """Return the run's model and its expected end, in one line.

    step: the last finished step. elapsed: seconds of the run so far, by its clock.
    """
    length, steps = config.schedule.length, plan.total_steps(step)
    assert length is not None  # checked by `preflight.check_start`
    estimated = length.unit == "seconds"
    if estimated and config.schedule.clock == "wall":
        seconds = length.value - elapsed
    else:
        seconds = (steps - step) * mean_over_run(stages, [stage.dry_seconds for stage in stages])
    verb = "trains" if config.align is None else "fine-tunes"
    what = f"a model of {count(num_params(config.model))} parameters"
    tokens = count(round(steps * mean_tokens(stages)))
    return (
        f"{verb} {what} on {tokens} tokens in {'about ' if estimated else ''}{plural(steps, 'step')}; "
        f"done {end_time(seconds)}"
    )


def mixture_epochs(stages: Sequence[StageWork], rows: Mapping[int, int]) -> dict[str, float]:
    """Return the epochs of each component of a mixture; {} without a mixture.

    rows: the rows that are used at each sequence length.
    """
    totals: dict[str, float] = {}
    for length, number in rows.items():
        dataset = next(stage.dataset for stage in stages if stage.sequence_length == length)
        if not isinstance(dataset, PackedDataset) or len(dataset.component_names) == 1:
            return {}
        for name, epochs in dataset.epochs(number).items():
            totals[name] = totals.get(name, 0.0) + epochs
    return totals


def config_with_graphs(config: RunConfig, graphs: bool) -> RunConfig:
    """Return the configuration with `compute.cuda_graph` set to on or off, as decided for a run that has auto."""
    compute = config.compute.model_copy(update={"cuda_graph": "on" if graphs else "off"})
    return config.model_copy(update={"compute": compute})


def describe_mixture(config: RunConfig, stages: Sequence[StageWork], epochs: Mapping[str, float]) -> str:
    """Return the line about the planned epochs of a run's mixture."""
    dataset = stages[-1].dataset
    assert isinstance(dataset, PackedDataset)  # no other data has components
    return describe_epochs(epochs, config.data, dataset.component_tokens, dataset.component_rows)


def validation_languages(validation: RowDataset) -> list[str]:
    """Return the languages that evaluations tell apart; [] for one language, and for data without languages."""
    known = validation.languages if isinstance(validation, PackedDataset) else []
    return known if len(known) > 1 else []


def planned_rows(stages: Sequence[StageWork], steps: int) -> dict[int, int]:
    """Return the rows that `steps` steps use at each sequence length."""
    rows: dict[int, int] = {}
    start = 0.0
    for stage in stages:
        length, rows_per_step = stage.sequence_length, stage.tokens_per_step // stage.sequence_length
        rows[length] = rows.get(length, 0) + round((stage.until - start) * steps) * rows_per_step
        start = stage.until
    return rows


def recorded_plan(run: RunDirectory) -> dict[str, Any]:
    """Return plan.json of a run that is resumed. Raises RunError if it lacks what a resumed run needs."""
    plan = run.read_json("plan.json")
    try:
        revisions = StepPlan.from_json(plan["revisions"]).revisions
        valid = (
            bool(revisions)
            and revisions[0].step == 0
            and all(isinstance(r.remaining, int) and isinstance(r.progress, float) for r in revisions)
            and isinstance(plan["attention"]["full"]["name"], str)
            and isinstance(plan["precision"]["chosen"], str)
            and int(plan["scaling_tokens"]) > 0
            and float(plan["save_seconds"]) >= 0
            and all(int(f["micro_rows"]) > 0 and int(f["accumulation"]) > 0 for f in plan["fit"])
            and all(isinstance(f["attempts"], list) for f in plan["fit"])
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        valid = False
    if not valid:
        raise RunError(
            f"{run.path / 'plan.json'}: is damaged; restore it, or start another run from this one's model ({run.path})"
        )
    return plan


def native_formats(facts: Mapping[str, Any]) -> frozenset[LowFormat]:
    """Return the formats that run on tensor cores, from the entries of plan.json that `setup.choose_recipe` returns.

    NVFP4 products are assumed to be emulated.
    """
    found: dict[LowFormat, bool] = {
        "fp8": bool(facts["native"]),
        "fp8-grouped": bool(facts.get("experts", {}).get("native")),
    }
    return frozenset(format for format, native in found.items() if native)


def modelled_memory_gib(
    config: RunConfig,
    micro_tokens: int,
    recipe: str,
    mode: str,
    native: Collection[LowFormat],
    processes: int = 1,
    sharded: bool = False,
) -> float:
    """Return the peak memory of one GPU in a step with `micro_tokens` per forward pass, by `budget/memory.py`.

    recipe: the chosen precision recipe. mode: see `setup.Execution`. native: see `native_formats`.
    """
    spec = step_spec(config, micro_tokens, recipe, mode, native, processes, sharded)
    return training_memory(config.model, spec).allocated / 2**30


def check_host_memory(config: RunConfig, recipe: str, mode: str, world: World) -> None:
    """Raise UsageError if this machine lacks the host memory that the run would page-lock with one row per pass."""
    longest = max(stage.sequence_length for stage in config.stages())
    spec = step_spec(config, longest, recipe, mode, (), world.size, world.sharded)
    items = {item: local_processes() * size for item, size in host_memory(config.model, spec).items()}
    needed, usable = sum(items.values()), usable_bytes()
    if usable is None or needed <= usable:
        return
    parts = ", ".join(f"{item} {gib(size)}" for item, size in items.items())
    raise UsageError(
        f"host memory: this run keeps {gib(needed)} there ({parts}), and this machine has {gib(usable)} left; close "
        f"other programs, or use --optim.states 8bit, --optim.weights bfloat16, --optim.gradients released or a "
        f"smaller model"
    )


def step_spec(
    config: RunConfig,
    micro_tokens: int,
    recipe: str,
    mode: str,
    native: Collection[LowFormat],
    processes: int = 1,
    sharded: bool = False,
) -> StepSpec:
    """Return the step whose memory `modelled_memory_gib` predicts."""
    options = step_options(config)
    own_tokens = micro_tokens // options["context"]
    passes = 1 if own_tokens * processes >= config.batch.tokens else 2  # more than two need no more memory
    precision, layers = cast("Precision", recipe), config.model.num_hidden_layers
    kept = recipe_of(config, precision).kept_blocks(layers) if quantized(precision) else (0, 0)
    formats = format_options(config, precision, native, mode == "fused")
    if sharded and formats["copies"] == "step":
        formats["copies"] = "use"
    return StepSpec(
        sequence_length=micro_tokens,  # the number of rows in a pass does not matter for memory
        tokens=passes * own_tokens * processes,
        micro_tokens=own_tokens,
        gpus=processes,
        sharded=sharded,
        compiled=mode != "off",
        kept_blocks=min(layers, sum(kept)),
        **options,
        **formats,
    )


def mean_tokens(stages: Sequence[StageWork]) -> float:
    """Return the mean number of tokens per step of the run."""
    return mean_over_run(stages, [stage.tokens_per_step for stage in stages])


def mean_over_run(stages: Sequence[StageWork], values: Sequence[float]) -> float:
    """Return the mean of the stages' values, weighted by each stage's share of the run."""
    starts = [0.0, *(stage.until for stage in stages[:-1])]
    return sum((s.until - start) * value for s, start, value in zip(stages, starts, values, strict=True))
