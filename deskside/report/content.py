"""What a run's report says, section by section, from a RunRecord."""

import shlex

from deskside.report import words
from deskside.report.configuration import differences
from deskside.report.document import (
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Figure,
    Paragraph,
    Sample,
    Section,
    Table,
)
from deskside.report.plan import plan_blocks, precision_words
from deskside.run.record import RunRecord, mapping, number, objects, text

EVENTS_SHOWN = 20
NOTED = (
    "skip",
    "roll",
    "resum",
    "damaged",
    "throttl",
    "out of memory",
    "stopp",
    "spike",
    "not finite",
    "warn",
)


def compose(record: RunRecord, figures: list[Figure], absent: list[str]) -> Document:
    """The whole report. `figures` are drawn already; `absent` says which could not be."""
    return Document(
        title=f"Training run {record.name}",
        verdict=verdict(record),
        sections=(
            Section("At a glance", _glance(record)),
            Section("Curves", (*figures, *_lines(absent))),
            Section("The plan against what happened", plan_blocks(record)),
            Section("Samples", _samples(record)),
            Section("Events", _events(record)),
            Section("Configuration", _configuration(record)),
            Section("Machine", _machine(record)),
            Section("Commands to type next", (Code("\n".join(commands(record))),)),
        ),
    )


def verdict(record: RunRecord) -> str:
    """One line: validation bits per byte against gzip and unigram, and whether the run came to its end."""
    bpb = validation_bpb(record)
    state = "" if record.finished else " The run has not come to its end."
    before, after = _before(record), number(record.summary.get("val_loss"))
    if text(record.summary.get("objective")) == "sft" and before is not None and after is not None:
        return (
            f"{after:.3f} nats per token that an assistant says on held-out conversations, {before:.3f} before the "
            f"first step (measured, lower is better).{state}"
        )
    if aligned := _aligned(record):
        return f"{aligned}{state}"
    if bpb is None:
        return f"No verdict yet: this run has no validation result.{state}"
    baselines = {name: number(record.summary.get(f"{name}_bpb")) for name in ("gzip", "unigram")}
    known = {name: value for name, value in baselines.items() if value is not None}
    beside = " and ".join(f"{value:.3f} of {name}" for name, value in known.items())
    figure = f"{bpb:.3f} bits per byte on validation text"
    if not known:
        return f"{figure} (measured); there is no gzip or unigram baseline to compare with.{state}"
    gzip = baselines["gzip"]
    if gzip is None:
        opening = "Measured"
    elif bpb < gzip:
        opening = f"Better than gzip by {100 * (1 - bpb / gzip):.0f} %"
    else:
        opening = "Not yet better than gzip"
    return f"{opening}: {figure}, against {beside} (all measured, lower is better).{state}"


def _aligned(record: RunRecord) -> str | None:
    """What preferences or rewards came to on held-out data; None for other runs."""
    first = mapping(record.summary.get("before"))
    accuracy, reward = (number(record.summary.get(key)) for key in ("val_accuracy", "val_reward"))
    if accuracy is not None:
        before = number(first.get("val_accuracy"))
        since = "" if before is None else f", {before:.1%} before the first step"
        return f"{accuracy:.1%} of held-out pairs the right way round{since} (measured, higher is better)."
    if reward is not None:
        before = number(first.get("val_reward"))
        since = "" if before is None else f", {before:.3f} before the first step"
        return f"Mean reward {reward:.3f} on held-out questions{since} (measured, higher is better)."
    return None


def validation_bpb(record: RunRecord) -> float | None:
    """Bits per byte of the final evaluation, or the newest one during training."""
    final = number(record.summary.get("val_bpb"))
    return final if final is not None else record.last("val_bpb")


def _before(record: RunRecord) -> float | None:
    """The validation loss of the weights that the run began with, where that was measured."""
    return number(mapping(record.summary.get("before")).get("val_loss"))


def commands(record: RunRecord) -> list[str]:
    """What a person may want to type now."""
    run = shlex.quote(str(record.path))
    lines = [
        f"deskside chat {run}",
        f"deskside eval {run} --json",
        f"deskside export {run} --to hf --out {shlex.quote(f'{record.path.name}-hf')}",
    ]
    return lines if record.finished else [f"deskside train --resume {run}", *lines]


def _glance(record: RunRecord) -> tuple[Block, ...]:
    summary = record.summary
    mfu, before = _either(record, "mfu", "mfu"), _before(record)
    rows = [
        ("status", text(summary.get("status")) or "not finished", ""),
        ("validation loss", _nats(number(summary.get("val_loss"))), "measured"),
        *([("the same, before the first step", _nats(before), "measured")] if before is not None else []),
        ("training loss, last step", _nats(record.last("loss")), "measured"),
        ("parameters", words.count(_parameters(record)), "measured"),
        ("tokens trained on", words.count(_either(record, "tokens", "tokens")), "measured"),
        ("steps", words.count(_either(record, "steps", "step")), "measured"),
        ("time", _time(record), "measured"),
        ("precision", precision_words(record.plan) or "not known", ""),
        (
            "tokens per second",
            words.count(_either(record, "tokens_per_second", "tokens_per_second")),
            "measured",
        ),
        (
            "model FLOPs utilisation",
            "not known" if mfu is None else f"{100 * mfu:.1f} %",
            "measured speed, modelled FLOPs",
        ),
        ("peak memory", _gib(_either(record, "peak_memory_gib", "memory_gib")), "measured"),
    ]
    known = [(name, value, "" if value == "not known" else source) for name, value, source in rows]
    blocks: list[Block] = [Table(("what", "value", "source"), tuple(known))]
    created, command = (
        text(record.run.get("created")),
        record.run.get("command", record.run.get("command_line")),
    )
    if isinstance(command, list):
        command = shlex.join(str(word) for word in command)
    if created:
        blocks.append(Paragraph(f"Begun {created}."))
    if text(command):
        blocks.append(Code(str(command)))
    if record.missing:
        blocks += [Paragraph("What this report could not know:"), Bullets(tuple(record.missing))]
    return tuple(blocks)


def _samples(record: RunRecord) -> tuple[Block, ...]:
    samples = objects(record.summary.get("samples"))
    if not samples:
        return (Paragraph("There are no samples; they are made when a run ends."),)
    blocks: list[Block] = []
    for sample in samples:
        blocks.append(Sample(text(sample.get("prompt")), text(sample.get("text"))))
        beside = [
            (name, text(sample.get(key))) for name, key in (("before", "before"), ("wanted", "reference"))
        ]
        if told := [f"{name}: {said}" for name, said in beside if said]:
            blocks.append(Details("What it said before, and what was wanted", (Code("\n\n".join(told)),)))
    return tuple(blocks)


def _events(record: RunRecord) -> tuple[Block, ...]:
    if not record.events:
        return (Paragraph("No events were logged."),)
    skips = sum(line.get("skipped") is True for line in record.metrics)
    told = [
        f"{skips} of {len(record.metrics)} logged steps skipped",
        f"{_lines_with(record, 'went back to step', 'rolled back')} rollbacks",
        f"{_lines_with(record, 'resumed')} resumes",
    ]
    opening = Paragraph(f"{', '.join(told)} (measured).")
    if len(record.events) <= EVENTS_SHOWN:
        return (opening, Code("\n".join(record.events)))
    noted = [line for line in record.events if any(stem in line.lower() for stem in NOTED)]
    shown = noted[-EVENTS_SHOWN:] or record.events[-EVENTS_SHOWN:]
    whole = Details(f"All {len(record.events)} lines", (Code("\n".join(record.events)),))
    return (opening, Code("\n".join(shown)), whole)


def _lines_with(record: RunRecord, *stems: str) -> int:
    return sum(any(stem in line.lower() for stem in stems) for line in record.events)


def _configuration(record: RunRecord) -> tuple[Block, ...]:
    if not record.config:
        return (Paragraph("The configuration is unknown."),)
    changed, everything = differences(record.config)
    rows = tuple((key, words.plain(value), default) for key, value, default in changed)
    first: Block = Paragraph("Every option has its default value.")
    if rows:
        first = Table(("option", "this run", "default"), rows)
    whole = tuple((key, words.plain(value)) for key, value in everything)
    return (first, Details("The whole configuration", (Table(("option", "value"), whole),)))


def _machine(record: RunRecord) -> tuple[Block, ...]:
    if not record.environment:
        return (Paragraph("The machine is unknown."),)
    rows = tuple(words.facts(record.environment, otherwise="measured"))
    return (Table(("what", "value", "source"), rows),)


def _lines(sentences: list[str]) -> tuple[Block, ...]:
    return (Bullets(tuple(sentences)),) if sentences else ()


def _either(record: RunRecord, in_summary: str, in_metrics: str) -> float | None:
    value = number(record.summary.get(in_summary))
    return value if value is not None else record.last(in_metrics)


def _parameters(record: RunRecord) -> float | None:
    value = record.summary.get("parameters")
    return number(mapping(value).get("total")) if isinstance(value, dict) else number(value)


def _time(record: RunRecord) -> str:
    clock = text(record.summary.get("clock")) or text(record.plan.get("clock"))
    value = _either(record, "seconds", "seconds")
    return words.seconds(value) + (f" ({clock})" if clock and value is not None else "")


def _nats(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4f} nats per token"


def _gib(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f} GiB"
