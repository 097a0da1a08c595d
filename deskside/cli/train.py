"""`deskside train`: pretrain a model, or continue a run; --dry-run only checks data and prints the configuration."""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import (
    MODEL_HELP,
    REVISION_HELP,
    RunOptions,
    launch,
    must_launch,
    name_of_preset,
    process_count,
    set_length,
    set_trackers,
)
from deskside.config import merge, presets
from deskside.config.depth_series import of_depth
from deskside.config.duration import Duration
from deskside.config.gpu_batch import build_on_gpus
from deskside.config.model import ModelConfig
from deskside.config.optim import TABLE_RATES
from deskside.config.run import RunConfig
from deskside.config.sections import BatchConfig
from deskside.data.reading.index_file import is_prepared
from deskside.run.directory import RunDirectory
from deskside.train.preflight import check_start, set_cublas_workspace
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.format import plural
from deskside.utils.hub import short_name, with_revision
from deskside.utils.quick_start import create_cuda_context, quick_imports

if TYPE_CHECKING:
    from deskside.optim.lr_schedule import SchedulePoint

# What helps if experts are given for a dense model, by key
UPCYCLING = dict.fromkeys(
    ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "add --upcycle to copy its MLPs to experts",
)
WARMUP_ENDS = "warm-up ends"  # label of a row of optim.lr_schedule.describe


@dataclass(kw_only=True)
class TrainOptions(RunOptions):
    """Pretrain a model.

    Examples:
      deskside train demo
      deskside train 124m --data.path data/english --hours 2
      deskside train my.toml --optim.lr 0.01 --tokens 2B --name trial
      deskside train 124m --dry-run
      deskside train --init runs/124m --upcycle --model.num_experts 8 --model.num_experts_per_tok 2 --hours 2
      deskside train --resume runs/124m
      deskside train 124m --data.path data/english --hours 2 --gpus auto
    """

    preset: str | None = option(
        "a preset (see deskside presets) or a .toml file", None, metavar="PRESET", positional=True
    )
    depth: int | None = option(
        "instead of a preset: number of layers of a model of the depth series", None, metavar="N"
    )
    init: str | None = option(f"start from the weights of this model: {MODEL_HELP}", None, metavar="MODEL")
    revision: str | None = option(REVISION_HELP, None, metavar="REV")
    upcycle: bool = option("--init is dense: start a mixture whose experts are copies of its MLP", False)
    dry_run: bool = option("check the data, print the configuration and schedule, and do not train", False)


COMMAND = Command(
    "train",
    TrainOptions,
    configuration=True,
    common=(
        "data.path",
        "optim.name",
        "optim.lr",
        "batch.tokens",
        "batch.sequence_length",
        "precision.name",
        "seed",
    ),
)


def run(argv: Sequence[str]) -> int:
    """Run `deskside train` and return the exit code. Raises UsageError and RunError."""
    options, given = COMMAND.parse_config(argv)
    if options.resume is not None:
        other = ("preset", "name", "hours", "steps", "tokens", "track", "depth", "init", "revision")
        moved = options.runs != TrainOptions.runs
        if given or options.upcycle or moved or any(getattr(options, name) is not None for name in other):
            raise UsageError(
                "--resume uses the run's own configuration; give no other options with it, but --gpus"
            )
        if options.dry_run:
            return _dry_run(RunDirectory.open(Path(options.resume)).config(), None, options.json)
        return resume("train", argv, options)
    layers = _layers(options)
    set_trackers(given, options.track, layers)
    processes = process_count(options.gpus, [*layers, given])
    launching = must_launch(processes) and not options.dry_run
    initial = None
    if options.init is not None and not launching:
        from deskside.weights.load import load_model

        initial = load_model(with_revision(options.init, options.revision))
    # With --init, each launched process reads the model and checks its shape.
    if options.init is None or not launching:
        config = _configure(options, given, layers, initial, processes)
        if options.dry_run:
            return _dry_run(config, initial, options.json)
        check_start(config)
    is_rank_zero = int(os.environ.get("RANK", "0")) == 0
    if is_rank_zero:  # for other ranks, rank 0 may have created the directory already
        RunDirectory.check_name(Path(options.runs), options.name)
    if launching:
        if options.init is None:  # else each process makes the configuration, and all wait for the first
            # Not at the top, because it imports numpy, which takes time.
            from deskside.data.corpus.prepare_sources import prepare_sources

            prepare_sources(config, say)
        return launch("train", argv, processes)
    if initial is not None and is_rank_zero:
        chosen = merge.merge([*layers, given])[0]
        if not _chooses_data(chosen):
            say(f"--init: trains on the data of {options.init}: {config.data.path}")
        if not options.upcycle:
            warn_of_high_rate(chosen)
    set_cublas_workspace(config)
    if config.compute.device != "cpu":
        create_cuda_context()
    with quick_imports():
        from deskside.train import training_run
        from deskside.train.loop.callbacks import ReserveReportTime
        from deskside.train.state.init_weights import InitialWeights

    read_weights = InitialWeights.of_dense if options.upcycle else InitialWeights.of
    outcome = training_run.start(
        config,
        (Path(options.runs), options.name, _default_name(options, initial)),
        shlex.join(["deskside", "train", *argv]),
        read_weights(initial, initial.source) if initial is not None else None,
        watch=ReserveReportTime(),
    )
    from deskside.cli.answer import finish  # imports rich, which takes time

    return finish(outcome, None, options.json)


def warn_of_high_rate(chosen: Mapping[str, Any]) -> None:
    """Warn if trained weights would start with learning rates of random ones. chosen: the user's configuration."""
    optim = chosen.get("optim", {})
    rates = ("lr",) if optim.get("name") == "adamw" else ("lr", *TABLE_RATES)
    if defaults := [f"optim.{name}" for name in rates if name not in optim]:
        verb = "has the default" if len(defaults) == 1 else "have the defaults"
        say(
            f"warning: --init: {', '.join(defaults)} {verb} for random weights; trained weights usually need lower "
            "ones, such as --optim.name adamw --optim.scale false --optim.lr 2e-5"
        )


def resume(command: str, argv: Sequence[str], options: RunOptions) -> int:
    """Continue the run `options.resume` of any objective, and return the exit code. Raises UsageError and RunError.

    command, argv: the command that does this, for the processes of --gpus.
    """
    path = Path(str(options.resume))
    config = config_to_resume(path)
    processes = process_count(options.gpus, [config.model_dump(include={"compute"})])
    if must_launch(processes):
        return launch(command, argv, processes)
    set_cublas_workspace(config)
    from deskside.align import objective_of
    from deskside.train import training_run
    from deskside.train.loop.callbacks import ReserveReportTime

    outcome = training_run.resume(path, ReserveReportTime(), objective_of(config))
    from deskside.cli.answer import finish  # imports rich, which takes time

    return finish(outcome, config.align.name if config.align is not None else None, options.json)


def config_to_resume(run: Path) -> RunConfig:
    """Return the configuration of the run of --resume. Raises UsageError if there is none, here or on another node."""
    if "WORLD_SIZE" in os.environ:
        from deskside.train.nodes import check_resumed_run_is_shared

        check_resumed_run_is_shared(run)
    return RunDirectory.open(run).config()


def _layers(options: TrainOptions) -> list[dict[str, Any]]:
    """Return the layers of the preset or depth. Raises UsageError without a model, or with two."""
    if options.preset is not None and options.depth is not None:
        raise UsageError("--depth and a preset both set the shape of the model; give one of them")
    if options.preset is None and options.depth is None and options.init is None:
        raise UsageError(f"no preset is given; {presets.CHOICES.format(names=', '.join(presets.names()))}")
    if options.preset is not None:
        return presets.for_pretraining(options.preset)
    return [] if options.depth is None else [of_depth(options.depth)]


def _configure(
    options: TrainOptions,
    given: dict[str, Any],
    layers: list[dict[str, Any]],
    initial: Any,
    processes: int,
) -> RunConfig:
    """Return the configuration: preset or depth, the shape of the initial model, and the given options."""
    set_length(given, options)
    chosen = merge.merge([*layers, given])[0]
    if options.upcycle:
        layers = _upcycled_layers(options, given, layers, initial)
    elif initial is not None:
        remedies = {} if initial.config.num_experts else UPCYCLING
        merge.refuse_other_model(initial.config, given, str(options.init), remedies)
        layers = [*layers, *merge.resolved_layers("model", initial.config.model_dump(mode="json"))]
        layers = [*layers, _rates_of_tables(merge.merge([*layers, given])[0])]
    if initial is not None:
        layers = [_defaults_of(initial, chosen), *layers]
    config = build_on_gpus([*layers, given], processes)
    if options.upcycle:
        _check_upcycled(options, initial.config, config)
    return config


def _defaults_of(initial: Any, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer of defaults that fit the loaded model: rows that are not longer than its positions.

    Of a pretraining run, they are its batch and, unless the user has chosen other data, its data. chosen: the user's
    configuration.
    """
    positions = initial.config.max_position_embeddings
    # A power of two, which divides the default batch.tokens.
    rows = min(BatchConfig().sequence_length, 2 ** int(math.log2(positions)))
    layer: dict[str, Any] = {"batch": {"sequence_length": rows}}
    config = None if initial.run_dir is None else RunDirectory(initial.run_dir).config()
    if config is None or config.align is not None:
        return layer
    # The run's tokens per step may be no multiple of other rows.
    keys = (
        {"sequence_length"} if "sequence_length" in chosen.get("batch", {}) else {"sequence_length", "tokens"}
    )
    layer["batch"] = config.batch.model_dump(mode="json", include=keys)
    if not _chooses_data(chosen):
        layer["data"] = config.data.model_dump(mode="json", exclude_defaults=True)
    return layer


def _chooses_data(chosen: Mapping[str, Any]) -> bool:
    return bool({"path", "sources"} & chosen.get("data", {}).keys())


def _rates_of_tables(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer in which AdamW has one rate for all trained weights, except for rates that the user has chosen.

    The higher default rates of embedding and head are for random weights. chosen: the user's configuration.
    """
    optim = chosen.get("optim", {})
    if optim.get("name") != "adamw":
        return {}
    return {"optim": {"name": "adamw", **{name: None for name in TABLE_RATES if name not in optim}}}


def _upcycled_layers(
    options: TrainOptions, given: dict[str, Any], layers: list[dict[str, Any]], initial: Any
) -> list[dict[str, Any]]:
    """Return the layers of a mixture of experts that starts as the dense model `initial`.

    layers: of the preset or depth; [] takes the shape of the dense model. Unless they are set, the width of an expert
    is that of the dense MLP, and the weight of the load-balancing loss is the default, not the one in the file of the
    dense model, where it has no effect.
    """
    if initial is None:
        raise UsageError("--upcycle: upcycle which dense model? add --init MODEL")
    dense = initial.config
    shape = [] if layers else merge.resolved_layers("model", dense.model_dump(mode="json"))
    merged, _ = merge.merge([*shape, *layers, given])
    if merged.get("model", {}).get("num_experts"):  # else the message should be about their number
        shape.append(
            {
                "model": {
                    "moe_intermediate_size": dense.intermediate_size,
                    "router_aux_loss_coef": ModelConfig().router_aux_loss_coef,
                }
            }
        )
    return [*shape, *layers]


def _check_upcycled(options: TrainOptions, dense: ModelConfig, config: RunConfig) -> None:
    """Raise UsageError for a shape that differs from the dense model's, and for adapters."""
    from deskside.weights.upcycle import check_upcycling

    check_upcycling(dense, config.model, str(options.init))
    if config.adapter is not None:
        raise UsageError(
            "adapter: the copies become experts only if all weights train; leave out the adapter"
        )


def _default_name(options: TrainOptions, initial: Any) -> str:
    """Return the name of the run directory if --name is not given. initial: the loaded model of --init."""
    if options.preset is not None:
        return name_of_preset(options.preset)
    return f"d{options.depth}" if options.depth is not None else short_name(initial.source)


# The dry run


def _dry_run(config: RunConfig, initial: Any, as_json: bool) -> int:
    """Refuse the data that the run itself would refuse, else print what it would do. initial: the model of --init."""
    if config.data.path is not None:
        from deskside.train.text_rows import check_data  # imports numpy, which takes time

        check_data(config)
        if initial is not None and is_prepared(config.data.path):
            from deskside.train.state.init_weights import InitialWeights

            InitialWeights.of(initial, initial.source).check_tokenizer(Path(config.data.path))
    return _print_dry_run(config, as_json)


def _print_dry_run(config: RunConfig, as_json: bool) -> int:
    """Print the resolved configuration, parameters by group, FLOPs per token and the schedule."""
    from deskside.budget.adapters import training_flops_per_token
    from deskside.budget.shape import parameter_groups
    from deskside.config.step_options import adapter_spec
    from deskside.optim.lr_schedule import describe

    groups = parameter_groups(config.model)
    flops = training_flops_per_token(config.model, config.batch.sequence_length, adapter_spec(config))
    length = config.schedule.length
    steps, tokens = _planned_length(config)
    # The share of a warm-up that is given in steps, tokens or time is unknown if the length of the run is unknown.
    warmup_share_unknown = steps is None and isinstance(config.schedule.warmup, Duration)
    # If `steps` is unknown, any large number will do: the steps of the rows are not printed.
    grows = config.schedule.batch_growth > 1
    schedule = config.schedule.model_copy(update={"stages": config.stages()}) if grows else config.schedule
    rows = describe(schedule, steps or 10**9)
    if as_json:
        points = [
            {
                "what": row.what,
                "progress": None if warmup_share_unknown and row.what == WARMUP_ENDS else row.progress,
                "step": row.step if steps else None,
                "lr_factor": row.lr_factor * config.batch_lr_factor(_step_tokens(config, row)),
            }
            for row in rows
        ]
        result = {
            "config": config.model_dump(mode="json"),
            "parameters": {**groups, "total": sum(groups.values())},
            "flops_per_token": flops,
            "steps": steps,
            "tokens": tokens or None,
            "schedule": points,
        }
        print_json(result, indent=1)
        return 0

    from deskside.utils.printer import Printer  # imports rich, which takes time

    printer = Printer()
    printer.text("configuration", "strong")
    for path, _ in merge.config_fields():
        value: Any = config
        for part in path:
            value = getattr(value, part, None)
        if value is not None and value != ():
            printer.text(f"{'.'.join(path)} = {value}", indent=2, hanging=4)
    total = sum(groups.values())
    cells = [[name, f"{count:,}", f"{count / total:.1%}"] for name, count in groups.items() if count]
    printer.text()
    printer.table(["parameters", "count", "share"], [*cells, ["total", f"{total:,}", ""]], "lrr")
    per_weight = "6" if config.adapter is None else "4 per frozen weight, 6"
    printer.text(
        f"training FLOPs per token: {flops:.4g} (modelled: {per_weight} per weight, causal attention)"
    )
    cells = []
    for row in rows:
        sequence = row.stage.sequence_length if row.stage else config.batch.sequence_length
        progress = f"{row.progress:.1%}"
        if warmup_share_unknown and row.what == WARMUP_ENDS:
            progress = str(config.schedule.warmup)
        step = f"{row.step:,}" if steps else ""
        tokens_per_step = _step_tokens(config, row)
        rate = f"{row.lr_factor * config.batch_lr_factor(tokens_per_step):.0%}"
        batch = [f"{tokens_per_step:,}"] if grows else []
        cells.append([row.what, progress, step, rate, str(sequence), *batch])
    printer.text()
    columns = [
        "schedule",
        "progress",
        "step",
        "learning rate",
        "sequence",
        *(["batch, tokens"] if grows else []),
    ]
    printer.table(columns, cells, "l" + "r" * (len(columns) - 1))
    if steps:
        printer.text(f"{plural(steps, 'step')} of {round(tokens / steps):,} tokens: {tokens:,} tokens")
    elif length is not None:
        unknown = "data" if length.unit == "epochs" else "speed measured when the run starts"
        printer.text(f"length {length}: the steps depend on the {unknown}")
    else:
        printer.text("the run has no length yet; give --hours, --steps or --tokens")
    return 0


def _step_tokens(config: RunConfig, point: "SchedulePoint") -> int:
    """Return the tokens per step at a point of the schedule."""
    return config.batch.tokens if point.stage is None else config.stage_tokens(point.stage)


def _planned_length(config: RunConfig) -> tuple[int | None, int]:
    """Return the run's length in steps and in tokens; (None, 0) if it is unset, or given as time or epochs."""
    step_tokens = config.mean_step_tokens()
    length = config.schedule.length
    if length is None or length.unit not in ("steps", "tokens"):
        return None, 0
    steps = int(length.value) if length.unit == "steps" else max(1, math.ceil(length.value / step_tokens))
    return steps, int(steps * step_tokens)
