"""`deskside probe`: measure training speed and memory on this machine, and store them for the planner."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import PositiveFloat

from deskside.budget.shape import num_params
from deskside.budget.step_spec import Checkpointing, OptimizerName
from deskside.cli import probe_share
from deskside.cli.answer import print_answer
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import MINUTES, JsonOption
from deskside.config import merge, presets
from deskside.config.sections import PrecisionConfig
from deskside.measurements.store import (
    FINAL,
    Machine,
    Store,
    open_store,
    slug,
    this_cpu,
    this_machine,
)
from deskside.probe import table
from deskside.probe.grid import LONGEST_SEQUENCE, Point, Size, calibration_points, expand, order
from deskside.probe.sweep import MEASURE_CARD, MEASURE_POINT, PointResult, Sweep, SweepResult
from deskside.probe.sweep_display import progress_listener
from deskside.utils import signals
from deskside.utils.console import say, say_interrupted
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import count, plural
from deskside.utils.printer import Printer

CALIBRATION_MINUTES = 3.0
CLOSING_SECONDS = 5.0  # of the time limit, reserved for the tables and the plot
DEPTH_SEQUENCE_LENGTHS = (512, 1024, 2048)  # default with --depth
MAX_DEPTH = 128  # as in the planner: hidden size 8192, 104 billion parameters


@dataclass(kw_only=True)
class ProbeOptions(JsonOption):
    """Measure training speed and memory with short real training runs, stored for the planner.

    A point is a model with a sequence length and training options. Without --preset and --depth,
    a few points that calibrate the planner are measured, in at most 3 minutes.

    Stored points are not measured again, so an interrupted probe continues where it stopped. So does one with
    --again: the same command measures only what is left of it.

    --share writes all results of this card, driver and software, and the verdicts of deskside doctor --quick, to one
    file for other owners of such a card. It is shown first, and names no person, host, path or serial number.

    Examples:
      deskside probe --depth 12,16,20 --sequence 512,1024,2048 --minutes 20
      deskside probe --share my-card.json
    """

    preset: str | None = option("models: presets or .toml files, separated by commas", None, metavar="P,...")
    depth: str | None = option(
        "models of the depth series, with hidden size 64 x depth, such as 12,14,16", None, metavar="D,..."
    )
    sequence: str | None = option(
        "tokens per row, such as 512,1024,2048 (default: the preset's; with --depth these three)",
        None,
        metavar="T,...",
    )
    precision: str | None = option("recipes such as auto,bf16,fp32 (default: auto)", None, metavar="P,...")
    optimizer: str | None = option("muon, adamw or both (default: muon)", None, metavar="O,...")
    checkpointing: str | None = option(
        "activation checkpointing: none, attention, mlp, block (default: none)", None, metavar="C,..."
    )
    minutes: Annotated[PositiveFloat | None, MINUTES] = option(
        "time limit of the whole command (default: 3 without --preset and --depth, else none)",
        None,
        metavar="M",
    )
    device: Literal["auto", "cpu"] = option("auto measures the GPU if there is one", "auto")
    probes: str = option("directory of the stored results", "probes", metavar="DIR")
    again: bool = option("measure stored points again", False)
    share: str | None = option("write an anonymous report of this card for others", None, metavar="FILE")
    yes: bool = option("with --share: do not ask before writing", False)


COMMAND = Command("probe", ProbeOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside probe` and return the exit code. Raises UsageError and RunError."""
    return probe(COMMAND.parse(argv))


def probe(options: ProbeOptions, point_target: str = MEASURE_POINT, card_target: str = MEASURE_CARD) -> int:
    """Measure, store and print the points, and return the exit code.

    point_target, card_target: "module:function" that the measuring process calls; tests replace them.
    """
    began = time.monotonic()
    store = open_store(options.probes)
    machine = this_cpu() if options.device == "cpu" else this_machine()
    points = _points(options, machine)
    minutes = options.minutes
    if minutes is None and options.preset is None and options.depth is None:
        minutes = CALIBRATION_MINUTES
    if options.yes and options.share is None:
        raise UsageError("--yes: has no effect without --share; leave it out")
    verdicts: dict[str, str] = {}
    if options.share is not None:
        probe_share.check_share(Path(options.share), options.yes, machine)
        verdicts = probe_share.doctor_verdicts(
            math.inf if minutes is None else 60 * minutes - CLOSING_SECONDS
        )
    for line in store.notes(machine):
        say(line)
    with progress_listener() as watch, signals.raise_on_termination():
        sweep = Sweep(
            store,
            machine,
            watch,
            None if minutes is None else began + 60 * minutes - CLOSING_SECONDS,
            options.again,
            point_target,
            card_target,
        )
        result = sweep.measure(points)
    if result.interrupted and not options.json:  # leave out the points without results
        result.point_results = [each for each in result.point_results if each.row is not None]
    if result.point_results or not result.interrupted:
        _show(result, machine, store, options)
    if result.interrupted:
        measured = sum(point_result.origin == "measured" for point_result in result.point_results)
        say_interrupted(
            f"interrupted: {plural(measured, 'point')} measured and stored; run the same command again to continue"
        )
        return 128 + result.interrupted
    _check_measured(result, options)
    if options.share is not None:
        probe_share.share(Path(options.share), machine, store, verdicts, options.yes)
    return 0


def _points(options: ProbeOptions, machine: Machine) -> list[Point]:
    """Return the points to measure, in order. Raises UsageError."""
    if options.preset is not None and options.depth is not None:
        raise UsageError("--preset and --depth both choose the models; give one of them")
    if options.preset is None and options.depth is None:
        for name in ("sequence", "precision", "optimizer", "checkpointing"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name}: has no effect without a model; add --preset or --depth")
        return calibration_points(machine.memory_bytes, machine.device)
    if options.preset is not None:
        names = _split("preset", options.preset)
        lengths: Sequence[int] = ()  # each preset's own
    else:
        names = [f"d{number}" for number in _numbers("depth", options.depth or "", MAX_DEPTH)]
        lengths = DEPTH_SEQUENCE_LENGTHS
    sizes = [_size(name) for name in names]
    if options.sequence is not None:
        lengths = _numbers("sequence", options.sequence, LONGEST_SEQUENCE)
    points = expand(
        sizes,
        lengths,
        _choices("precision", options.precision, get_args(PrecisionConfig.model_fields["name"].annotation)),
        _choices("optimizer", options.optimizer, get_args(OptimizerName)),
        _choices("checkpointing", options.checkpointing, get_args(Checkpointing)),
        machine.device,
    )
    return order(points)


def _size(name: str) -> Size:
    config = merge.build(presets.for_pretraining(name))
    return Size(config.model, config.batch.sequence_length, config.batch.tokens)


def _split(option: str, text: str) -> list[str]:
    """Return the different values in a text, which are separated by commas. Raises UsageError for an empty value."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"--{option}: {text!r} has an empty value; separate values by single commas")
    return list(dict.fromkeys(words))


def _numbers(option: str, text: str, maximum: int) -> list[int]:
    """Return the positive whole numbers in a text. Raises UsageError."""
    words = _split(option, text)
    for word in words:
        digits = word.lstrip("0")
        if not (word.isascii() and word.isdecimal() and digits):
            raise UsageError(f"--{option}: {word!r} is not a positive whole number; write it like 12,16,20")
        # The length is compared first, because int() rejects thousands of digits.
        if len(digits) > len(str(maximum)) or int(digits) > maximum:
            shown = digits if len(digits) < 20 else f"{digits[:20]}..."
            raise UsageError(f"--{option}: {shown} cannot be measured; use at most {maximum}")
    return [int(word) for word in words]


def _choices(option: str, text: str | None, allowed: Sequence[str]) -> list[str]:
    """Return the values in a text, by default the first allowed value. Raises UsageError."""
    if text is None:
        return [allowed[0]]
    words = _split(option, text)
    for word in words:
        if word not in allowed:
            raise UsageError(f"--{option}: {word!r} is not one of {', '.join(allowed)}")
    return words


def _show(result: SweepResult, machine: Machine, store: Store, options: ProbeOptions) -> None:
    picture: Path | None = None
    if result.rows():
        # Imports matplotlib, which takes half a second. --help and usage errors do not need it.
        from deskside.probe.heatmap import draw

        picture = store.folder / f"{slug(machine.card)}.png"
        draw(result.rows(), machine.card, picture)
    if options.json:
        print_json(_as_json(result, machine, store, picture))
        return
    printer = Printer()
    printer.text(f"{machine.card}, {machine.memory_bytes / 2**30:.1f} GiB, torch {machine.torch}", "strong")
    stored = sum(point_result.origin == "stored" for point_result in result.point_results)
    if stored:
        of = f"{stored} of {plural(len(result.point_results), 'point')}"
        before = "stored before; --again measures them again"
        printer.text(f"{of} were {'measured again before this continued' if options.again else before}")
    table.show(printer, result.point_results)
    if picture is not None:
        files = {"rows": store.path(machine.card), "map": picture}
        print_answer(printer, _answer(result, machine), files, "plan --here --hours 24")


def _answer(result: SweepResult, machine: Machine) -> str:
    """Return the results in one sentence: how many points, and the fastest."""
    measured = [
        (float(each.row["result"]["tokens_per_second"]), each)
        for each in result.point_results
        if each.row is not None and each.status == "ok"
    ]
    found = f"{len(measured)} of {len(result.point_results)} points have a speed on {machine.card}"
    if not measured:
        return f"{found}."
    speed, best = max(measured, key=lambda pair: pair[0])
    size = count(num_params(best.point.model))
    return f"{found}; the fastest is {best.point.shape} ({size}) with {count(speed)} tokens/s."


def _as_json(result: SweepResult, machine: Machine, store: Store, picture: Path | None) -> dict[str, Any]:
    return {
        "machine": {**machine.key(), "device": machine.device, "memory_bytes": machine.memory_bytes},
        "card": result.card,
        "points": [_point_as_json(point_result) for point_result in result.point_results],
        "interrupted": result.interrupted,
        "notes": [*store.notes(machine), *table.reasons(result.point_results)],
        "store": str(store.path(machine.card)),
        "map": None if picture is None else str(picture),
    }


def _point_as_json(point_result: PointResult) -> dict[str, Any]:
    point, row = point_result.point, point_result.row
    return {
        "spec": dict(point.spec),
        "shape": point.shape,
        "params": num_params(point.model),
        "status": point_result.status,
        "origin": point_result.origin,
        "error": "" if row is None else row["error"],
        "measured": {} if row is None else row["result"],
        "modelled": table.derived(point, row) if row is not None and point_result.status == "ok" else {},
        "when": None if row is None else row["when"],
    }


def _check_measured(result: SweepResult, options: ProbeOptions) -> None:
    """Raise UsageError or RunError if no point has a result."""
    statuses = [point_result.status for point_result in result.point_results]
    if any(status in (*FINAL, "skipped") for status in statuses):
        return
    if all(status == "no time" for status in statuses):
        raise UsageError(
            f"--minutes: {options.minutes or CALIBRATION_MINUTES:g} is too short to measure a point here"
        )
    row = next(point_result.row for point_result in result.point_results if point_result.row is not None)
    raise RunError(f"no point could be measured: {row['error']}")
