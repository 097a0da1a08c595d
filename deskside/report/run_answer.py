"""The beginning of a run's report: what was trained, how good it is, how long it took and what it cost."""

from deskside.facts.power_and_prices import electricity_prices
from deskside.report.document import Block, Bullets, KeyNumber, KeyNumbers
from deskside.report.run_plan import recipe_used
from deskside.run.lineage import energy_use
from deskside.run.record import DAMAGED, RunRecord, has_known_peak, machine_name, mapping, number, text
from deskside.run.validation import (
    BASELINES,
    baselines,
    not_reached,
    partial_text,
    told_baselines,
)
from deskside.utils.format import count, elapsed, percent
from deskside.utils.format import number as number_text

CLOCKS = {"wall": "by the wall clock", "training": "of training steps alone"}  # those of `schedule.clock`


def parameters(record: RunRecord) -> float | None:
    """Return the number of parameters of the model, or None if it is not known."""
    found = record.summary.get("parameters")
    return number(mapping(found).get("total")) if isinstance(found, dict) else number(found)


def objective(record: RunRecord) -> str:
    """Return sft, dpo, kto or grpo, or "" for pretraining."""
    return text(record.summary.get("objective")) or text(mapping(record.config.get("align")).get("name"))


def loss_unit(record: RunRecord) -> str:
    """Return the unit of a run's losses: only a mean of -ln p over tokens has one, so "" for DPO, KTO and GRPO."""
    return "nats per token" if objective(record) in ("", "sft") else ""


def trained(record: RunRecord) -> str:
    """Return a sentence like "164M parameters, trained on 10M tokens in 39.1 s on NVIDIA H200."; "" if not known."""
    size, tokens, seconds = (
        parameters(record),
        record.newest("tokens", "tokens"),
        record.newest("seconds", "seconds"),
    )
    if tokens is None or seconds is None:
        return ""
    model = f"{count(size)} parameters, trained" if size is not None else "Trained"
    machine = machine_name(record.environment, "")
    return f"{model} on {count(tokens)} tokens in {elapsed(seconds)}{f' on {machine}' if machine else ''}."


def verdict(record: RunRecord) -> str:
    """Return the result in one line, compared with its baseline, and a note if the run has not finished."""
    state = "" if record.finished else " The run has not finished."
    if record.state == DAMAGED:
        state = " Its summary.json is damaged, so its results are not known."
    result = _objective_result(record) or _pretraining_result(record)
    return result + _overfitting(record) + _sharing(record) + state


def _sharing(record: RunRecord) -> str:
    share = number(record.summary.get("gpu_shared"))
    if not share:
        return ""
    return f" Another process computed on the GPU for {percent(share, 0)} of the time, which made the run slower."


def _overfitting(record: RunRecord) -> str:
    """Return a sentence about overfitting, and about the checkpoint whose weights were exported instead of the last."""
    step = number(record.summary.get("best_step"))
    found = " The run overfits: its validation loss rose while its training loss fell."
    kept = (
        ""
        if step is None
        else f" The model is that of step {step:,.0f}, which had the lowest validation loss."
    )
    return (found if record.summary.get("overfits") else "") + kept


def _objective_result(record: RunRecord) -> str | None:
    """Return the held-out result of SFT, DPO or GRPO; None for pretraining or without such a result."""
    before = mapping(record.summary.get("before"))

    def result(key: str, number_format: str, template: str, better: str) -> str | None:
        final, initial = number(record.summary.get(key)), number(before.get(key))
        if final is None:
            return None
        earlier = "" if initial is None else f", {shown(initial, number_format)} before the first step"
        part = partial_text(record.summary, "the held-out data")
        read = f", on {part}" if part else ""
        return (
            f"{template.format(shown(final, number_format))}{earlier}{read} (measured, {better} is better)."
        )

    if objective(record) == "sft" and number(before.get("val_loss")) is not None:
        return result("val_loss", ".3f", "{} nats per assistant token of held-out conversations", "lower")
    if objective(record) == "kto":
        return result("val_loss", ".3f", "KTO loss {} on held-out answers", "lower")
    return result(
        "val_accuracy", ".1%", "{} of held-out preference pairs ranked correctly", "higher"
    ) or result("val_reward", ".3f", "Mean reward {} on held-out questions", "higher")


def shown(value: float, number_format: str) -> str:
    """Return a formatted number; a percentage with a space before its sign, as everywhere in a report."""
    return f"{value:{number_format}}".replace("%", " %")


def _pretraining_result(record: RunRecord) -> str:
    """Return validation bits per byte, compared with gzip and the unigram model."""
    final = number(record.summary.get("val_bpb"))
    bpb = final if final is not None else record.last("val_bpb")
    if bpb is None:
        return "No verdict yet: this run has no validation result."
    whole = "validation text"
    result = f"{bpb:.3f} bits per byte on {partial_text(record.summary, whole) or whole}"
    known = baselines(record.summary)
    if not known:
        return f"{result} (measured); there is no gzip or unigram baseline to compare with."
    if missed := not_reached(bpb, known):
        opening = f"Not yet better than {' or '.join(BASELINES[name] for name in missed)}"
    elif "gzip" in known:
        opening = f"Better than gzip by {100 * (1 - bpb / known['gzip']):.0f} %"
    else:
        opening = "Measured"
    baseline_text = " and ".join(f"{value:.3f} of {name}" for name, value in known.items())
    return f"{opening}: {result}, against {baseline_text} (all measured, lower is better)."


def opening(record: RunRecord) -> list[Block]:
    """Return the key numbers of a run, its state and start, and what is missing from its report."""
    status = "summary.json is damaged" if record.state == DAMAGED else record.state
    created = text(record.run.get("created"))
    started = f"started {created[:16].replace('T', ' ')} UTC" if created else ""
    facts = [status, started, recipe_used(record.plan)]
    numbers = [*_quality(record), *_size_and_time(record), *_speed_and_memory(record), *_energy(record)]
    blocks: list[Block] = [KeyNumbers(numbers)] if numbers else []
    blocks.append(" \u00b7 ".join(fact for fact in facts if fact))
    if record.problems:
        blocks += ["Missing from this report:", Bullets(record.problems)]
    return blocks


def _quality(record: RunRecord) -> list[KeyNumber]:
    summary = record.summary
    bpb = record.newest("val_bpb", "val_bpb")
    if bpb is not None:
        part = f" on {read}" if (read := partial_text(summary)) else ""
        others = [
            f"; {name} has {value:.3f}" for name, value in told_baselines(bpb, baselines(summary)).items()
        ]
        return [KeyNumber("validation loss", f"{bpb:.3f}", f"bits per byte{part}{''.join(others)}")]
    found = (
        ("val_accuracy", "held-out pairs ranked correctly", ".1%"),
        ("val_reward", "mean reward, held-out questions", ".3f"),
        ("val_loss", ", ".join(filter(None, ("validation loss", loss_unit(record)))), ".3f"),
    )
    before = mapping(summary.get("before"))
    numbers = []
    for key, label, number_format in found:
        value, earlier = number(summary.get(key)), number(before.get(key))
        if value is not None:
            note = "" if earlier is None else f"{shown(earlier, number_format)} before training"
            numbers.append(KeyNumber(label, shown(value, number_format), note))
    return numbers


def _size_and_time(record: RunRecord) -> list[KeyNumber]:
    size, steps = parameters(record), record.newest("steps", "step")
    tokens, seconds = record.newest("tokens", "tokens"), record.newest("seconds", "seconds")
    clock = text(record.summary.get("clock")) or text(record.plan.get("clock"))
    numbers = [KeyNumber("parameters", count(size))] if size is not None else []
    if tokens is not None:
        noun = "step" if steps == 1 else "steps"
        numbers.append(
            KeyNumber(
                "tokens",
                count(tokens),
                "" if steps is None else f"in {count(steps)} {noun}",
            )
        )
    if seconds is not None:
        numbers.append(KeyNumber("time", elapsed(seconds), CLOCKS.get(clock, clock)))
    return numbers


def _speed_and_memory(record: RunRecord) -> list[KeyNumber]:
    speed = record.newest("tokens_per_second", "tokens_per_second")
    mfu = record.newest("mfu", "mfu") if has_known_peak(record.environment) else None
    memory = record.newest("peak_memory_gib", "memory_gib")
    whole = number(mapping(record.environment.get("gpu")).get("memory_gib"))
    numbers = []
    if speed is not None:
        note = "" if mfu is None else f"{100 * mfu:.1f} % model FLOPs utilization"
        numbers.append(KeyNumber("tokens per second", count(speed), note))
    if memory is not None:
        note = "" if whole is None else f"of {whole:.1f} GiB"
        numbers.append(KeyNumber("peak memory", f"{memory:.2f} GiB", note))
    return numbers


def _energy(record: RunRecord) -> list[KeyNumber]:
    """Return the energy of the GPU over the logged steps and its price, if its power was logged."""
    energy = energy_use(record.metrics)
    if energy is None:
        return []
    price = electricity_prices()[0]  # as in `deskside plan` without --price-kwh
    cost = energy.kilowatt_hours * price.usd
    amount = f"${cost:,.2f}" if cost >= 0.1 else f"{100 * cost:.2g} cents"
    note = f"one GPU; {amount} at ${price.usd:g} per kWh"
    hours = energy.kilowatt_hours
    size = f"{number_text(hours)} kWh" if hours >= 1 else f"{number_text(1000 * hours)} Wh"
    return [KeyNumber("energy", size, note)]
