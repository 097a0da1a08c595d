"""Content of a run's page besides its charts, as plain data: key numbers, samples, configuration and events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deskside.dashboard.run_table import TableRow
from deskside.run.record import RunRecord, flatten, number, objects, text
from deskside.run.validation import share_text
from deskside.utils.format import count, dollars, elapsed, percent, value_text

NOTABLE_EVENTS = (
    "went back to step",
    "rolled back",
    "resumed",
    "throttl",
    "out of memory",
    "spike",
    "not finite",
    "overfitting",
    "ends with the weights of",
)
SCORED = "validation text read"  # label of the share of it that the final evaluation read, if not all


@dataclass(frozen=True)
class SampleText:
    """A text that the model generated. others: the answer before training and the reference, where there are any."""

    title: str
    prompt: str
    text: str
    others: dict[str, str]


def key_numbers(row: TableRow, newest: Mapping[str, float]) -> dict[str, str | None]:
    """Return label -> value of the numbers at the top of the page, None where nothing was measured.

    newest: the value of each metric at the end or, until then, the last logged one.
    """

    def shown(value: float | None, form: str) -> str | None:
        return None if value is None else format(value, form)

    bpb = row.bpb if row.bpb is not None else newest.get("val_bpb")
    quality = {"best bits per byte": shown(bpb, ".4f")}
    if bpb is None and "val_accuracy" in newest:
        quality = {"held-out accuracy": percent(newest["val_accuracy"], 1)}
    elif bpb is None and "val_reward" in newest:
        quality = {"held-out reward": shown(newest["val_reward"], ".3f")}
    elif bpb is None and "val_margin" in newest:  # KTO, with good and bad answers held out
        quality = {"held-out margin": shown(newest["val_margin"], ".3f")}
    elif bpb is None and "val_loss" in newest:
        quality = {"held-out loss": shown(newest["val_loss"], ".4f")}
    share = 1.0 if row.val_share is None else row.val_share
    return {
        **quality,
        **({SCORED: share_text(share)} if share < 1 else {}),
        "training loss": shown(newest.get("loss"), ".4f"),
        "tokens": count(newest["tokens"]) if "tokens" in newest else None,
        "tokens/s": shown(row.tokens_per_second, ",.0f"),
        "MFU": None if row.mfu is None else percent(row.mfu, 1),
        "time": None if row.seconds is None else elapsed(row.seconds),
        "memory, GiB": shown(newest.get("memory_gib"), ".2f"),
        "power, W": shown(newest.get("watts"), ".0f"),
        "electricity": None if row.dollars is None else cost_text(row.dollars),
    }


def last_bpb_note(row: TableRow) -> str:
    """Return a sentence if the last evaluation was worse than an earlier one, otherwise the empty string."""
    if row.bpb is None or row.last_bpb is None or f"{row.last_bpb:.4f}" == f"{row.bpb:.4f}":
        return ""
    more = f"{row.last_bpb:.4f} bits per byte, {row.last_bpb - row.bpb:.4f} more than the lowest"
    if row.status != "finished":
        return f"The newest evaluation: {more}."
    return f"At the end: {more}, which is of an evaluation during training; those may read less of the text."


def cost_text(amount: float) -> str:
    """Return a cost in dollars; of less than a cent, that it is so little."""
    return "< $0.01" if amount < 0.01 else dollars(amount)


def samples(record: RunRecord) -> list[SampleText]:
    """Return the texts that the run generated when it finished."""
    return [
        SampleText(
            title=text(sample.get("language")),
            prompt=text(sample.get("prompt")),
            text=text(sample.get("text")),
            others={name: other for name in ("before", "reference") if (other := text(sample.get(name)))},
        )
        for sample in objects(record.summary.get("samples"))
    ]


def option_rows(records: Mapping[str, RunRecord], only_different: bool) -> list[dict[str, str]]:
    """Return a table row for every option of the runs' configurations, with the option's value in each run.

    A run whose configuration is not known has no values.
    """
    options = {name: flatten(record.config) for name, record in records.items() if record.config}
    keys = list(dict.fromkeys(key for values in options.values() for key in values))
    rows = []
    for key in keys:
        values = [value_text(values[key]) if key in values else "(none)" for values in options.values()]
        if not only_different or len(set(values)) > 1:
            rows.append({"option": key, **dict(zip(options, values, strict=True))})
    return rows


def notable(events: Sequence[str]) -> list[str]:
    """Return the lines of events.log about resumes, rollbacks, throttling and other trouble."""
    return [line for line in events if any(part in line.lower() for part in NOTABLE_EVENTS)]


def newest_values(rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Return the last finite value of each metric."""
    values: dict[str, float] = {}
    for row in rows:
        values |= {key: value for key, logged in row.items() if (value := number(logged)) is not None}
    return values
