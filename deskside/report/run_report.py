"""The content of a run's report, section by section."""

import shlex
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from deskside.config.run import RunConfig
from deskside.report.document import (
    Block,
    Bullets,
    CodeBlock,
    Details,
    Image,
    ReportDocument,
    Sample,
    Section,
    Table,
)
from deskside.report.run_answer import loss_unit, objective, opening, parameters, trained, verdict
from deskside.report.run_plan import plan_blocks, provenance_rows, recipe_used
from deskside.run.continuing import resume_command
from deskside.run.record import RunRecord, flatten, has_known_peak, mapping, number, objects, text
from deskside.utils.console import command_lines
from deskside.utils.format import UNKNOWN, count, elapsed, percent, plural, value_text

MAX_EVENTS = 20
COMMAND_COLUMNS = 100
# Of a long log, only the last lines with one of these parts are shown at first.
NOTABLE_EVENTS = (
    "skip",
    "roll",
    "resum",
    "damaged",
    "throttl",
    "out of memory",
    "stopp",
    "spike",
    "not finite",
    "overfitting",
    "ends with the weights of",
    "warn",
)
OPTIONAL_SECTIONS = ("align", "adapter")  # sections of the configuration that a plain pretraining run lacks


def compose(
    record: RunRecord,
    images: Sequence[Image],
    missing: Sequence[str],
    languages: Sequence[Block] = (),
    experts: Sequence[Block] = (),
) -> ReportDocument:
    """Return the report of a run.

    `images` are drawn already; `missing` has a sentence for each missing plot; `languages` and `experts` are the
    sections about the languages of the data and the experts of the model, which are left out if they are empty.
    """
    curves = (
        *images,
        *((Bullets(missing),) if missing else ()),
        *_by_position(record),
        *_long_context(record),
    )
    return ReportDocument(
        title=f"Training run {record.name}",
        verdict=f"{trained(record)} {verdict(record)}".strip(),
        opening=opening(record),
        sections=(
            Section("Curves", curves),
            *((Section("Languages", languages),) if languages else ()),
            *((Section("Experts", experts),) if experts else ()),
            Section("Plan against measurement", plan_blocks(record)),
            Section("Samples", samples(record)),
            Section("Events", _events(record)),
            Section("Configuration", _configuration(record)),
            Section("Every result, and the machine", _all_results(record)),
            Section("Next commands", (CodeBlock("\n".join(commands(record))),)),
        ),
    )


def commands(record: RunRecord) -> list[str]:
    """Return commands to run next."""
    run = shlex.quote(str(record.path))
    lines = [
        f"deskside chat {run}",
        f"deskside eval {run} --json",
        f"deskside export {run} --to hf --out {shlex.quote(f'{record.path.name}-hf')}",
    ]
    resume = resume_command(record.path)
    return lines if resume is None else [resume, *lines]


def _results_table(record: RunRecord) -> Table:
    summary = record.summary

    def loss(value: float | None) -> str:
        return UNKNOWN if value is None else f"{value:.4f} {loss_unit(record)}".rstrip()

    mfu, memory = record.newest("mfu", "mfu"), record.newest("peak_memory_gib", "memory_gib")
    utilization = UNKNOWN if mfu is None else f"{100 * mfu:.1f} %"
    if not has_known_peak(record.environment):
        utilization = "not known: the peak of a CPU depends on what else it does"
    loss_before = number(mapping(summary.get("before")).get("val_loss"))
    seconds = record.newest("seconds", "seconds")
    clock = text(summary.get("clock")) or text(record.plan.get("clock"))
    rows = [
        ("status", record.state, ""),
        ("validation loss", loss(number(summary.get("val_loss"))), "measured"),
        *(
            [("validation loss before the first step", loss(loss_before), "measured")]
            if loss_before is not None
            else []
        ),
        ("training loss, last step", loss(record.last("loss")), "measured"),
        ("parameters", count(parameters(record)), "measured"),
        ("tokens trained on", count(record.newest("tokens", "tokens")), "measured"),
        ("steps", count(record.newest("steps", "step")), "measured"),
        ("time", elapsed(seconds) + (f" ({clock})" if clock and seconds is not None else ""), "measured"),
        ("precision", recipe_used(record.plan) or UNKNOWN, ""),
        ("tokens per second", count(record.newest("tokens_per_second", "tokens_per_second")), "measured"),
        (
            "model FLOPs utilization",
            utilization,
            "measured speed, modelled FLOPs",
        ),
        ("peak memory", UNKNOWN if memory is None else f"{memory:.2f} GiB", "measured"),
    ]
    rows = [(name, value, "" if value == UNKNOWN else source) for name, value, source in rows]
    return Table(("quantity", "value", "source"), rows)


def _by_position(record: RunRecord) -> list[Block]:
    """Return a table of bits per byte by position in the row; nothing for rows of one bucket."""
    buckets = objects(record.summary.get("bpb_by_position"))
    if len(buckets) < 2:
        return []
    rows = []
    for bucket in buckets:
        bpb = number(bucket.get("bpb"))
        positions = f"{count(number(bucket.get('start')))} to {count(number(bucket.get('stop')))}"
        rows.append(
            (positions, UNKNOWN if bpb is None else f"{bpb:.4f}", count(number(bucket.get("tokens"))))
        )
    return [
        "Bits per byte by position in the row, on the validation text (measured). They fall with the position if the "
        "model uses the text before a token.",
        Table(("positions", "bits per byte", "tokens"), rows),
    ]


def _long_context(record: RunRecord) -> list[Block]:
    """Return a table by task, length and depth, if the run was evaluated with --long-context."""
    cells = objects(record.long_context.get("cells"))
    if not cells:
        return []
    depths = sorted({depth for cell in cells if (depth := number(cell.get("depth"))) is not None})
    by_row: dict[tuple[str, float | None], dict[float | None, str]] = {}
    for cell in cells:
        accuracy = number(cell.get("accuracy"))
        row = by_row.setdefault((text(cell.get("task")), number(cell.get("length"))), {})
        row[number(cell.get("depth"))] = UNKNOWN if accuracy is None else percent(accuracy, 0)
    rows = [
        (task, count(length), *(row.get(depth, "") for depth in (None, *depths)))
        for (task, length), row in by_row.items()
    ]
    return [
        "Long-context tasks: share of the expected words in the answers, at each depth or for the whole text, at step "
        f"{count(number(record.long_context.get('step')))} (measured).",
        Table(
            ("task", "tokens", "whole text", *(f"depth {percent(depth or 0, 0)}" for depth in depths)), rows
        ),
    ]


def samples(record: RunRecord) -> list[Block]:
    """Return the samples of a run with their prompts, or a sentence if there are none."""
    found = objects(record.summary.get("samples"))
    if not found:
        return ["There are no samples; they are generated when a run finishes."]
    blocks: list[Block] = []
    for sample in found:
        if language := text(sample.get("language")):
            blocks.append(f"{language}:")
        between = "\n" if objective(record) else ""  # an answer is not the rest of the question's line
        blocks.append(Sample(text(sample.get("prompt")) + between, text(sample.get("text"))))
        others = [(name, text(sample.get(name))) for name in ("before", "reference")]
        if answers := [f"{name}: {answer}" for name, answer in others if answer]:
            blocks.append(
                Details("Answer before training, and reference answer", [CodeBlock("\n\n".join(answers))])
            )
    return blocks


def _events(record: RunRecord) -> list[Block]:
    if not record.events:
        return ["No events were logged."]

    def matching(*parts: str) -> list[str]:
        return [line for line in record.events if any(part in line.lower() for part in parts)]

    skips = sum(row.get("skipped") is True for row in record.metrics)
    opening = (
        f"{skips} of {len(record.metrics)} logged steps skipped, "
        f"{len(matching('went back to step', 'rolled back'))} rollbacks, {len(matching('resumed'))} resumes "
        "(measured)."
    )
    notable = matching(*NOTABLE_EVENTS)[-MAX_EVENTS:]
    all_events = Details(f"All {len(record.events)} lines", [CodeBlock("\n".join(record.events))])
    return [opening, *([CodeBlock("\n".join(notable))] if notable else []), all_events]


def _all_results(record: RunRecord) -> list[Block]:
    machine: Block = "The machine is unknown."
    if record.environment:
        rows = provenance_rows(record.environment, "measured")
        machine = Details("Machine", [Table(("quantity", "value", "source"), rows)])
    return [Details("Results, with their sources", [_results_table(record)]), machine]


def _configuration(record: RunRecord) -> list[Block]:
    if not record.config:
        return [*_command(record), "The configuration is unknown."]
    options, defaults = flatten(record.config), _default_options(record.config)
    # The optional sections have no defaults; other options without a default are unknown to this version.
    changed = []
    for key, value in options.items():
        if key not in defaults:
            is_optional = key.split(".")[0] in OPTIONAL_SECTIONS
            changed.append((key, value_text(value), "(none)" if is_optional else "(unknown option)"))
        elif defaults[key] != value:
            changed.append((key, value_text(value), value_text(defaults[key])))
    changes: Block = "Every option has its default value."
    if changed:
        summary = f"Changed from the defaults ({plural(len(changed), 'option')})"
        changes = Details(summary, [Table(("option", "this run", "default"), changed)], printed=True)
    all_options = Table(("option", "value"), [(key, value_text(value)) for key, value in options.items()])
    return [*_command(record), changes, Details("The whole configuration", [all_options])]


def _command(record: RunRecord) -> list[Block]:
    command = record.run.get("command", record.run.get("command_line"))
    if isinstance(command, list):
        command = shlex.join(str(word) for word in command)
    lines = command_lines(text(command), COMMAND_COLUMNS, indent=0)
    return [CodeBlock("\n".join(lines))] if text(command) else []


def _default_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the default of every option; for the options of the optimizer and schedule, those of the chosen one."""
    plain = RunConfig()
    chosen = {
        section: {"name": name}
        for section in ("optim", "schedule")
        if (name := text(mapping(config.get(section)).get("name")))
    }
    try:
        defaults = RunConfig.model_validate(chosen)
    except ValidationError:  # an optimizer or schedule that this version does not have
        defaults = plain
    # The default of the choice itself is that of a plain configuration.
    plain_names = {f"{section}.name": getattr(plain, section).name for section in chosen}
    return {**flatten(defaults.model_dump(mode="json")), **plain_names}
