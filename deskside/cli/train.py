"""`deskside train`: parse, show what would run, run it, print what came of it."""

import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from deskside.cli import overrides
from deskside.config import merge, presets
from deskside.config.duration import Duration
from deskside.config.run import RunConfig
from deskside.train.prepare.preflight import check_start
from deskside.utils import strict_json
from deskside.utils.errors import UsageError

LENGTHS = ("hours", "steps", "tokens")  # options that are the schedule's length
WARMUP = "warm-up ends"  # what optim.schedule.describe calls it

DESCRIPTION = """Pretrain a model.

Examples:
  deskside train demo
  deskside train 124m --data.path data/english --hours 2
  deskside train my.toml --optim.lr 0.01 --schedule.tokens 2B --name trial
  deskside train 124m --dry-run
  deskside train --resume runs/124m
  torchrun --nproc-per-node 2 -m deskside train 124m --data.path data/english
"""


@dataclass(kw_only=True)
class TrainOptions:
    """Options of the command itself."""

    preset: Annotated[
        tyro.conf.Positional[str | None], tyro.conf.arg(metavar="PRESET", help="a preset or a .toml file")
    ] = None
    name: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help="folder under --runs; default: the preset's")
    ] = None
    hours: Annotated[
        str | None, tyro.conf.arg(metavar="H", help="length of the run, the same as --schedule.hours")
    ] = None
    steps: Annotated[
        str | None, tyro.conf.arg(metavar="N", help="length in optimizer steps, the same as --schedule.steps")
    ] = None
    tokens: Annotated[
        str | None,
        tyro.conf.arg(metavar="N", help="length in tokens, such as 10M, the same as --schedule.tokens"),
    ] = None
    depth: Annotated[
        int | None, tyro.conf.arg(metavar="N", help="shape from the depth dial instead of a preset")
    ] = None
    resume: Annotated[str | None, tyro.conf.arg(metavar="RUN", help="go on with a stopped run")] = None
    init: Annotated[str | None, tyro.conf.arg(metavar="RUN|HF_DIR", help="start from these weights")] = None
    runs: Annotated[str, tyro.conf.arg(metavar="DIR", help="where run directories are made")] = "runs"
    dry_run: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="show what would run, and stop")
    ] = False
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="JSON on standard output")] = False


def run(argv: Sequence[str]) -> int:
    """The command; returns the exit code. Raises UsageError and RunError."""
    options, given = overrides.parse(TrainOptions, argv, "deskside train", DESCRIPTION)
    source = _load(options.init) if options.init is not None else None
    if options.resume is not None:
        extra = [f for f in ("preset", "name", *LENGTHS, "depth", "init") if getattr(options, f) is not None]
        if given or extra:
            raise UsageError("--resume takes the configuration of the run; give no other options with it")
        config = _recorded(Path(options.resume))
    else:
        config = _configure(options, given, source)
    if options.dry_run:
        return _show(config, options.json)
    if options.resume is None:
        from deskside.run.directory import RunDirectory

        check_start(config)
        if not int(os.environ.get("RANK", "0")):  # another process may have made it already
            RunDirectory.check_name(Path(options.runs), options.name)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by CUDA when torch starts it

    from deskside.train import training_run
    from deskside.train.loop.callback import ReportFollows
    from deskside.train.state.init_weights import InitialWeights

    if options.resume is not None:
        from deskside.align.registry import objective_of

        outcome = training_run.resume(Path(options.resume), ReportFollows(), objective_of(config))
        if config.align is not None:
            from deskside.cli.sft import finish

            return finish(outcome, options.json)
    else:
        outcome = training_run.start(
            config,
            Path(options.runs),
            options.name,
            _default_name(options),
            shlex.join(["deskside", "train", *argv]),
            InitialWeights.of(source, str(options.init)) if source is not None else None,
            watch=ReportFollows(),
        )
    if outcome.first and outcome.status == "finished":
        from deskside.report.write import write_report

        page = write_report(outcome.run.path)
        if options.json:
            print(strict_json.dumps(outcome.summary))
        else:
            _print_outcome(outcome.run.path, outcome.summary, page)
    elif outcome.first and options.json:
        print(strict_json.dumps(stopped(outcome.run, outcome.status)))
    return outcome.exit_code


def stopped(run: Any, signal: str) -> dict[str, Any]:
    """What --json says of a run that a signal ended; the steps are those that were saved."""
    from deskside.weights.checkpoint_files import find

    saved = [checkpoint.step for checkpoint in find(run.checkpoints)[:1]]
    return {"status": "stopped", "signal": signal, "run": str(run.path), "steps": saved[0] if saved else None}


def _configure(options: TrainOptions, given: dict[str, Any], source: Any) -> RunConfig:
    if options.preset is not None and options.depth is not None:
        raise UsageError("--depth and a preset both give a shape; give one of them")
    if options.preset is None and options.depth is None and options.init is None:
        raise UsageError(f"which preset? one of {', '.join(presets.names())}, d12 ... d20, or a .toml file")
    layers: list[dict[str, Any]] = []
    if options.preset is not None:
        layers = presets.for_pretraining(options.preset)
    if options.depth is not None:
        layers = [presets.depth(options.depth)]
    if source is not None:
        merge.refuse_other_model(source.config, given, str(options.init))
        layers += merge.resolved("model", source.config.model_dump(mode="json"))
    for name in LENGTHS:
        value = getattr(options, name)
        if value is None:
            continue
        schedule = given.setdefault("schedule", {})
        if name in schedule:
            raise UsageError(f"--{name} and --schedule.{name}: give one of them")
        schedule[name] = value
    return merge.build([*layers, given])


def _default_name(options: TrainOptions) -> str:
    if options.preset is not None:
        return Path(options.preset).stem if options.preset.endswith(".toml") else options.preset
    return f"d{options.depth}" if options.depth is not None else Path(str(options.init)).name


def _load(source: str) -> Any:
    from deskside.weights.load import load_model

    return load_model(source)


def _recorded(path: Path) -> RunConfig:
    from deskside.run.directory import RunDirectory

    return RunDirectory.open(path).config()


def _show(config: RunConfig, as_json: bool) -> int:
    """The resolved configuration, parameters by group, FLOPs per token and the schedule."""
    from deskside.budget.shape import flops_per_token, parameter_groups
    from deskside.optim.schedule import describe

    groups = parameter_groups(config.model)
    flops = flops_per_token(config.model, config.batch.sequence_length)
    length = config.schedule.length
    steps, tokens = _planned(config)
    # Without a number of steps, what is counted in steps has no place in the run yet.
    unplaced = steps is None and isinstance(config.schedule.warmup, Duration)
    rows = describe(config.schedule, steps or 10**9)
    if as_json:
        schedule = [
            {
                "what": r.what,
                "progress": None if unplaced and r.what == WARMUP else r.progress,
                "step": r.step if steps else None,
                "lr_factor": r.lr_factor,
            }
            for r in rows
        ]
        result = {
            "config": config.model_dump(mode="json"),
            "parameters": {**groups, "total": sum(groups.values())},
            "flops_per_token": flops,
            "steps": steps,
            "tokens": tokens or None,
            "schedule": schedule,
        }
        print(strict_json.dumps(result, indent=1))
        return 0

    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    print("configuration")
    for path, _ in merge.keys():  # noqa: SIM118 - a function, not a dict
        value: Any = config
        for part in path:
            value = getattr(value, part, None)
        if value is not None and value != ():
            print(f"  {'.'.join(path)} = {value}")
    table = Table("parameters", "count", "share", title=None)
    for name, count in groups.items():
        if count:
            table.add_row(name, f"{count:,}", f"{count / sum(groups.values()):.1%}")
    table.add_row("total", f"{sum(groups.values()):,}", "")
    console.print(table)
    print(f"training FLOPs per token: {flops:.4g} (modelled: 6 per weight, causal attention)")
    table = Table("schedule", "progress", "step", "learning rate", "sequence")
    for row in rows:
        sequence = row.stage.sequence_length if row.stage else config.batch.sequence_length
        table.add_row(
            row.what,
            str(config.schedule.warmup) if unplaced and row.what == WARMUP else f"{row.progress:.1%}",
            f"{row.step:,}" if steps else "",
            f"{row.lr_factor:.0%}",
            str(sequence),
        )
    console.print(table)
    if steps:
        print(f"{steps:,} steps of {round(tokens / steps):,} tokens: {tokens:,} tokens")
    elif length is not None:
        print(f"length {length}: the steps follow from the speed measured when the run starts")
    else:
        print("no length is set yet: give --hours, --schedule.steps or --schedule.tokens")
    return 0


def _planned(config: RunConfig) -> tuple[int | None, int]:
    """Steps and tokens of a run whose length is in one of them, as training plans them; else None and 0."""
    mean = config.mean_step_tokens()
    length = config.schedule.length
    if length is None or length.unit not in ("steps", "tokens"):
        return None, 0
    steps = int(length.value) if length.unit == "steps" else max(1, math.ceil(length.value / mean))
    return steps, int(steps * mean)


def _print_outcome(path: Path, summary: dict[str, Any], page: Path) -> None:
    def number(value: float | None) -> str:
        return "not known" if value is None else f"{value:.3f}"

    print(f"validation  {number(summary['val_bpb'])} bits per byte")
    print(f"gzip -9     {number(summary['gzip_bpb'])} bits per byte on the same text")
    print(f"unigram     {number(summary['unigram_bpb'])} bits per byte on the same text")
    print(
        f"trained     {summary['tokens']:,} tokens in {summary['seconds']:.0f} s ({summary['clock']} clock)"
    )
    print(f"speed       {speed(summary)}")
    for number_, sample in enumerate(summary["samples"], 1):
        print(f"\nsample {number_}: {sample['prompt']!r} ->")
        print("\n".join(f"  {line}" for line in sample["text"].splitlines()))
    print(f"\nreport: {page}")
    print("next:")
    for command in (
        f"deskside chat {path}",
        f"deskside eval {path}",
        f"deskside export {path} --to hf --out my-model",
    ):
        print(f"  {prefix()}{command}")


def speed(summary: dict[str, Any]) -> str:
    """Return the speed of the steps alone, and beside it that of the whole run where that is lower."""
    how = summary["precision"] + (", emulated" if summary["emulated"] else "")
    rate, seconds = summary["tokens_per_second"], summary["seconds"]
    if not rate or not seconds:
        return f"not known, in {how}"
    overall = summary["tokens"] / seconds
    beside = f"; {overall:,.0f} with set-up, evaluation and checkpoints" if overall < 0.99 * rate else ""
    return f"{rate:,.0f} tokens/s in training steps{beside} ({how})"


def prefix() -> str:
    """How this program was started, so that the printed commands work when .venv/bin is not on the path."""
    folder = Path(sys.argv[0]).parent
    on_path = any(Path(p) == folder for p in os.environ.get("PATH", "").split(os.pathsep))
    if Path(sys.argv[0]).name != "deskside" or on_path:
        return ""
    try:
        return f"{folder.relative_to(Path.cwd())}/"
    except ValueError:
        return f"{folder}/"
