"""The parts of a run before the micro-batch is chosen: its data, model, precision, attention and kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deskside.budget.scaling import decay_for_epochs, scales
from deskside.config.run import RunConfig
from deskside.kernels.choose_matmul import summary
from deskside.kernels.matmul_peak import measure_matmul_peak
from deskside.model.transformer import Transformer
from deskside.optim.average import WeightAverage
from deskside.optim.build import Optimizer, build
from deskside.optim.groups import trained_parameters
from deskside.run.continuing import weights_command
from deskside.run.directory import RunDirectory
from deskside.train import environment_record, nodes
from deskside.train.loop.callbacks import RunLog, check_trackers
from deskside.train.loop.stage_work import StageWork
from deskside.train.loop.step import Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.objective import Objective, RowDataset
from deskside.train.parallel import World
from deskside.train.prepare import setup
from deskside.train.prepare.attention_choice import (
    choose_attention,
    recorded_attention,
    run_tokens,
    shared_row_names,
)
from deskside.train.prepare.fused_tiles import choose_and_use_tiles
from deskside.train.prepare.matmul_backend import choose_and_use_matmul
from deskside.train.prepare.startup import Startup
from deskside.train.prepare.step_planning import check_host_memory
from deskside.train.state.init_weights import InitialWeights, copy_tokenizer
from deskside.utils.errors import UsageError
from deskside.utils.trials import TrialCache


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data is open, and whose model is ready for dry steps.

    Attributes:
        stages: The stages of the run, without micro-batches.
        validation: The held-out split.
        context, stepper: The model and its steps. The optimizer is for dry steps only.
        meter: Measures memory, power and model FLOPs utilization.
        recipe: Name of the precision recipe.
        execution_mode: See `setup.Execution`.
        precision, attention, tiles, matmul: Entries of plan.json about what was chosen; {} if nothing was.
    """

    stages: list[StageWork]
    validation: RowDataset
    context: TrainContext
    stepper: Stepper
    meter: environment_record.Meter
    recipe: str
    execution_mode: str
    precision: dict[str, Any]
    attention: dict[str, Any]
    tiles: dict[str, Any]
    matmul: dict[str, Any]


def prepare_run(
    config: RunConfig,
    world: World,
    objective: Objective,
    initial: InitialWeights | None,
    resumed: bool,
    recorded: Mapping[str, Any],
    startup: Startup,
    log: RunLog,
) -> PreparedRun:
    """Check this machine, open the data, and build the model of the run that `log` belongs to. Every rank calls this.

    initial: the weights to start from; None is random weights. recorded: plan.json of a resumed run, whose choices are
    kept; {} for a new run. startup: gets the seconds of each part.
    """
    run, cache = log.run, TrialCache()
    setup.use_deterministic_kernels(config)
    torch.manual_seed(config.seed)
    check_trackers(config.track)
    # Refuse what this machine does not support before data is prepared, which may take hours.
    recipe, precision_facts = world.broadcast_result(
        lambda: setup.choose_recipe(config, world.device, log.say, recorded.get("precision"), cache)
    )
    setup.execution_mode(config, recipe, world.device)
    if warning := config.model.all_experts_warning():
        log.say(f"warning: {warning}")
    startup.done("self-check")
    data = setup.ensure_data(config, world, log.say)
    stages = setup.open_stages(config, data, objective)
    validation = objective.open(config, data, "val", config.batch.sequence_length)
    check_data(data, validation.fingerprint, run, world, initial, recorded)
    startup.done("data")
    model = setup.build_model(config, world, recipe, setup.WeightSource(initial, run.path, resumed, log.say))
    startup.done("model")
    peak_flops = measure_matmul_peak(world.device, model.activation_dtype)
    attention_facts = recorded.get("attention") or world.broadcast_result(
        lambda: choose_attention(config, model, world, peak_flops, cache)
    )
    attention = recorded_attention(attention_facts)
    if names := shared_row_names(attention_facts):
        log.say(f"attention of shared rows: {names}")
    startup.done("attention trial")
    execution = setup.prepare_execution(config, model, world, recipe, precision_facts, cache)
    tiles: dict[str, Any] = {}
    matmul: dict[str, Any] = {}
    if execution.mode == "fused":
        tokens = run_tokens(config, world, peak_flops)
        tiles = choose_and_use_tiles(model, world, recipe, tokens, cache)
        matmul = choose_and_use_matmul(config, execution.precision, world, tokens, cache, recorded)
        if matmul:
            log.say(f"quack-kernels computes {summary(matmul)}")
    startup.done("sublayers")
    if world.device.type == "cuda":
        check_host_memory(config, recipe, execution.mode, world)
    context = TrainContext(
        config=config,
        world=world,
        model=model,
        attention=attention,
        precision=execution.precision,
        objective=objective,
        is_compiled=execution.mode in ("block", "model"),
        average=build_average(config, model, world),
    )
    meter = environment_record.Meter(world.device, world.size, peak_flops)
    # This optimizer is used for the dry steps only, so its learning rates do not matter.
    optimizer = build_optimizer(context, stages, config.batch.tokens, config.batch.tokens)
    return PreparedRun(
        stages=stages,
        validation=validation,
        context=context,
        stepper=Stepper(context, optimizer, log.event),
        meter=meter,
        recipe=recipe,
        execution_mode=execution.mode,
        precision=precision_facts,
        attention=attention_facts,
        tiles=tiles,
        matmul=matmul,
    )


def check_data(
    data: Path,
    fingerprint: str,
    run: RunDirectory,
    world: World,
    initial: InitialWeights | None,
    recorded: Mapping[str, Any],
) -> None:
    """Check that the data fits the initial weights and, on resume, is the same. Copy its tokenizer into the run.

    fingerprint: that of the held-out split. Raises UsageError.
    """
    nodes.check_data_is_equal(world, fingerprint)
    if recorded.get("data", fingerprint) != fingerprint:
        raise UsageError(
            f"data.path: {data} is not the data that {run.path} was trained on; restore that data, or "
            f"start another run from its weights with: {weights_command(run.path)}"
        )
    if initial is not None:
        initial.check_tokenizer(data)
    if world.is_rank_zero and not run.tokenizer.exists():
        copy_tokenizer(data, run)


def build_optimizer(
    context: TrainContext, stages: list[StageWork], total_tokens: int, step_tokens: float
) -> Optimizer:
    """Return an optimizer whose learning rates are scaled to the run's length and batch size."""
    config = context.config
    scaling = scales(config.model.hidden_size, round(step_tokens), total_tokens, config.optim.name)
    epochs = total_tokens / max(1, stages[-1].dataset.num_tokens)
    decay = decay_for_epochs(epochs, config.optim.weight_decay_epochs)
    scaling = replace(scaling, weight_decay=decay * scaling.weight_decay)
    return build(
        context.model,
        config.optim,
        scaling,
        replicas=context.world.replicas,
        tied_until=config.schedule.tied_until,
    )


def build_average(config: RunConfig, model: Transformer, world: World) -> WeightAverage | None:
    """Return the average of the weights if the run has one, with its memory, before the batch size is chosen."""
    if config.average.name == "none":
        return None
    return WeightAverage(trained_parameters(model), config.average, world.device)
