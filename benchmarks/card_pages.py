"""Write the documentation's pages on cards, docs/cards/*.md: what the planner proposes for 1, 8 and 24 hours.

    python -m benchmarks.card_pages

Every number on these pages is the planner's, without a probe, or a row of `deskside/facts/measurements.csv`. The pages
are committed so that they can be read without building the site; tests/benchmarks/test_card_pages.py compares them.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deskside.budget.shape import num_params
from deskside.facts.gpus import Gpu, find
from deskside.facts.measurements import Measurement, published
from deskside.measurements.reported import reported_for, reported_speeds
from deskside.plan.calibrate import OTHERS_MEMORY_ERROR
from deskside.plan.finetuning import METHODS, RANK, ROW_TOKENS, FinetuningNeed, finetuning_need
from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import make_request
from deskside.plan.result import Plan, PlannedBand
from deskside.utils.console import command_lines
from deskside.utils.format import count, dollars, gib_digits
from deskside.weights.published import PublishedCheckpoint, published_checkpoints

FOLDER = Path(__file__).parents[1] / "docs" / "cards"
HOURS = (1, 8, 24)
# File name -> a name that the planner accepts. Of cards with several variants, the one that most people have or rent.
CARDS = {
    "rtx3060": "RTX 3060 12GB",
    "rtx3090": "RTX 3090",
    "rtx4090": "RTX 4090",
    "rtx5090": "RTX 5090",
    "l4": "L4",
    "a100": "A100 80GB SXM",
    "h100": "H100 SXM",
    "h200": "H200 SXM",
}
OUR_CARD = "h200"
SIZES: tuple[dict[str, str], ...] = (
    {"preset": "124m"},
    {"preset": "340m"},
    {"preset": "710m"},
    {"preset": "1.3b"},
    {"params": "1.5B"},
    {"preset": "3b"},
)
CHECKPOINTS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B",
)
COMMAND_WIDTH = 84  # columns of code on a page
SHOWN_RUNS = 8  # published runs in a page's table


@dataclass(frozen=True)
class CardPlans:
    """The plans of one card.

    by_hours: the best model for each of HOURS. by_size: the verdict on each of SIZES. needs: for each of CHECKPOINTS,
    the memory of each of METHODS.
    """

    gpu: Gpu
    by_hours: tuple[Plan, ...]
    by_size: tuple[Plan, ...]
    needs: tuple[tuple[FinetuningNeed, ...], ...]


@cache
def plans_of(name: str) -> CardPlans:
    """Return the plans of a card, without the results of any probe."""
    with tempfile.TemporaryDirectory() as probes:

        def plan(**question: str | float) -> Plan:
            return make_plan(make_request(PlanQuestion(gpu=name, probes=probes, **question)))

        by_hours = tuple(plan(hours=hours) for hours in HOURS)
        by_size = tuple(plan(hours=max(HOURS), **size) for size in SIZES)
        request = make_request(PlanQuestion(gpu=name, probes=probes, preset="demo"))
    needs = tuple(
        tuple(finetuning_need(request, checkpoint.name, checkpoint.model, a) for a in METHODS.values())
        for checkpoint in checkpoints()
    )
    return CardPlans(find(name), by_hours, by_size, needs)


def checkpoints() -> list[PublishedCheckpoint]:
    """Return the checkpoints whose fine-tuning the pages show."""
    return [checkpoint for checkpoint in published_checkpoints() if checkpoint.name in CHECKPOINTS]


def card_page(slug: str) -> str:
    """Return the page of a card as Markdown."""
    plans = plans_of(CARDS[slug])
    gpu = plans.gpu
    return "\n".join(
        [
            f"# {gpu.name}",
            "",
            *_lead(plans, ours=slug == OUR_CARD),
            "",
            "## What to train in 1, 8 and 24 hours",
            "",
            "The model with the lowest expected loss among those that fit, pretrained from scratch on English text.",
            "The hours include evaluation and a margin. A model `dN` has N layers and a width of 64 N; `deskside "
            "presets` lists the other names.",
            "",
            *_hours_table(plans),
            "",
            *_commands(plans),
            "",
            "## Which sizes fit",
            "",
            f"The same card with a given model and {max(HOURS)} hours. *Changes* are the options with which it fits; "
            "without an entry it fits as it is. Every size is trained on as many tokens as the hours allow, so a large "
            "model that sees too few of them ends worse than a small one. A longer run has larger batches, in which "
            "the optimizer takes less of the time, so its tokens/s are higher than here.",
            "",
            *_size_table(plans),
            "",
            *_too_few_tokens(plans),
            "## Fine-tuning published models",
            "",
            f"GiB of GPU memory with AdamW, one row of {ROW_TOKENS:,} tokens per pass; LoRA of rank {RANK}. "
            "An asterisk: with options that save memory. *No*: the least it needs does not fit. `deskside models --gpu "
            f"{slug} --json` names the options, and lists all families.",
            "",
            *_finetuning_table(plans),
            "",
            "## Where these numbers come from",
            "",
            *_sources(plans),
            "",
        ]
    )


def _lead(plans: CardPlans, ours: bool) -> list[str]:
    gpu, best = plans.gpu, plans.by_hours[-1].best
    formats = [
        name
        for name, rate in (("BF16", gpu.bf16_flops), ("FP8", gpu.fp8_flops), ("FP4", gpu.fp4_flops))
        if rate
    ]
    measured = (
        "This is the card on which we measure: [performance](../performance.md), [records](../records.md)."
        if ours
        else "We have trained nothing on this card."
    )
    lines = [
        "> **These are plans, not measurements.** deskside's planner modelled every number in the first three tables. "
        f"{measured} On yours, `deskside probe` measures for three minutes, and `deskside plan --here` then uses what "
        "it measured.",
        "",
        f"Memory {gib_digits(gpu.memory_bytes)} GiB, {gpu.bf16_flops / 1e12:.0f} TFLOP/s in BF16 (dense, FP32 "
        f"accumulation), {gpu.bandwidth / 1e9:,.0f} GB/s, {gpu.watts:.0f} W. Tensor cores compute in "
        f"{', '.join(formats)}.",
    ]
    if best is None:
        return lines
    hours = max(HOURS)
    return [
        *lines,
        "",
        f"**In {hours} hours: a model of {count(best.candidate.params)} parameters on "
        f"{count(best.candidate.tokens[1])} tokens, expected at {_range(best.loss, '.2f')} bits per byte.**",
    ]


def _hours_table(plans: CardPlans) -> list[str]:
    bands = [plan.best for plan in plans.by_hours]
    rows: list[tuple[str, list[str]]] = [
        ("model", [f"{b.preset}, {count(b.candidate.params)} parameters" for b in bands if b]),
        ("tokens", [count(b.candidate.tokens[1]) for b in bands if b]),
        ("bits per byte", [_range(b.loss, ".2f") for b in bands if b]),
        ("tokens/s", [_range(b.estimate.tokens_per_second, ",.0f") for b in bands if b]),
        ("memory, GiB", [_range(_in_gib(b.estimate.memory_bytes), ".1f") for b in bands if b]),
        ("electricity", [_electricity(b) for b in bands if b]),
    ]
    lines = [_row(["", *(f"{hours} h" for hours in HOURS)]), _row(["---"] * (len(HOURS) + 1))]
    return [*lines, *(_row([name, *cells]) for name, cells in rows)]


def _electricity(band: PlannedBand) -> str:
    kwh, money = band.cost.kwh, band.cost.electricity
    if kwh is None or money is None:
        return "not known"
    return f"{kwh[1]:.1f} kWh, {dollars(money.amount[1])} at ${money.price:g} per kWh"


def _commands(plans: CardPlans) -> list[str]:
    lines = [
        "`DIR` is what `deskside data prepare` wrote ([how](../guides/own-text.md)).",
        "",
        "<!-- before: deskside data prepare corpus/*.jsonl.gz --out data/corpus -->",
        "```bash",
    ]
    for hours, plan in zip(HOURS, plans.by_hours, strict=True):
        if plan.best is not None:
            lines += [f"# {hours} h", *command_lines(plan.best.command, COMMAND_WIDTH, indent=0)]
    return [*lines, "```"]


def _size_table(plans: CardPlans) -> list[str]:
    lines = [
        _row(
            ["model", "parameters", "fits", "memory, GiB", "tokens/s", "tokens", "bits per byte", "changes"]
        ),
        _row(["---"] * 8),
    ]
    for size, plan in zip(SIZES, plans.by_size, strict=True):
        name = size.get("preset") or f"{size['params']} (`--params`)"
        if plan.best is None:
            assert plan.requested is not None
            memory = _range(_in_gib(plan.requested.memory_bytes), ".1f")
            lines.append(_row([name, "", "no", memory, "", "", "", ""]))
            continue
        band = plan.best
        changes = _changes(plan, band)
        lines.append(
            _row(
                [
                    name,
                    count(band.candidate.params),
                    "with changes" if changes else "yes",
                    f"{band.estimate.memory_bytes[1] / 2**30:.1f}",
                    f"{band.estimate.tokens_per_second[1]:,.0f}",
                    count(band.candidate.tokens[1]),
                    f"{band.loss[1]:.2f}",
                    " ".join(f"`{change}`" for change in changes),
                ]
            )
        )
    return lines


def _changes(plan: Plan, band: PlannedBand) -> list[str]:
    """Return the options with which a model fits, [] if it fits as requested."""
    assert plan.requested is not None
    if plan.requested.fits == "fits":
        return []
    words = band.command.split(" --")[1:]
    schedule = ("data.", "batch.", "schedule.", "optim.name", "model.")
    return [f"--{word}" for word in words if not word.startswith(schedule)]


def _too_few_tokens(plans: CardPlans) -> list[str]:
    """Return what the planner says about the 1.5B model's number of tokens, if it has too few."""
    plan = plans.by_size[SIZES.index({"params": "1.5B"})]
    said = [reason for reason in plan.reason_texts() if "tokens per parameter" in reason]
    return [f"Of the 1.5B model the planner says: {said[0]}.", ""] if said else []


def _finetuning_table(plans: CardPlans) -> list[str]:
    lines = [
        _row(["model", "parameters", "all weights", "LoRA", "LoRA over 4 bits"]),
        _row(["---", *["--:"] * 4]),
    ]
    for checkpoint, needs in zip(checkpoints(), plans.needs, strict=True):
        lines.append(_row([checkpoint.name, count(checkpoint.parameters), *map(_need, needs)]))
    return lines


def _need(need: FinetuningNeed) -> str:
    if need.memory_bytes is None:
        return "not supported"
    size = gib_digits(need.memory_bytes)
    return {"yes": size, "yes-if": f"{size} \\*", "no": f"no ({size})"}[need.answer]


def _sources(plans: CardPlans) -> list[str]:
    plan = plans.by_hours[-1]
    gpu, calibration = plans.gpu, plan.request.calibration
    runs = [run for run in published() if run.card == gpu.name and run.gpus == 1 and not run.rejected]
    timed = [run for run in runs if run.tokens_per_second and run.precision in ("bf16", "fp8")]
    lines = [
        f"- **Speed**: modelled ({calibration.basis}), within {calibration.speed_spread:.0%} either way.",
        f"- **Memory**: modelled, within {calibration.memory_spread:.0%} either way (published runs of other "
        f"trainers: up to {OTHERS_MEMORY_ERROR:.0%} off); of the card's memory, what the driver keeps is left out.",
        "- **Loss**: modelled, for English text; your text has other bits per byte.",
        f"- **Data sheet**: {gpu.source} (`deskside/facts/gpus.csv`).",
        "- How such predictions compare with measurements: [planner accuracy](../planner-accuracy.md). "
        "What we measured ourselves was measured on an H200: [performance](../performance.md).",
        "",
    ]
    lines += [*_reported_table(gpu.name), ""]
    if not timed:
        return [
            *lines,
            "We know of no published training run on one such card (`deskside/facts/measurements.csv`).",
        ]
    shown = sorted(timed, key=lambda run: (run.precision, run.params or 0))[:SHOWN_RUNS]
    return [
        *lines,
        f"Measured by others on one such card: {len(shown)} of {len(timed)} runs in `deskside/facts/measurements.csv`. "
        "Their programs and models differ from ours.",
        "",
        *_published_table(shown),
    ]


def _published_table(runs: Sequence[Measurement]) -> list[str]:
    lines = [
        _row(["model", "program", "precision", "tokens/s", "source"]),
        _row(["---", "---", "---", "--:", "---"]),
    ]
    for run in runs:
        assert run.tokens_per_second is not None
        speed = f"{run.tokens_per_second:,.0f}"
        lines.append(_row([run.model, run.framework, run.precision, speed, run.source]))
    return lines


def _reported_table(name: str) -> list[str]:
    """Return the speeds that owners of such cards reported."""
    speeds = reported_speeds(reported_for(name))
    share = "[Share yours](../guides/share-your-card.md)"
    if not speeds:
        return [f"No owner of such a card has reported measurements yet. {share}."]
    lines = [
        f"Reported by owners of such cards (`deskside facts list --gpu '{name}'`). {share}.",
        "",
        _row(["parameters", "row", "tokens per pass", "precision, optimizer", "tokens/s", "reports"]),
        _row(["--:", "--:", "--:", "---", "--:", "--:"]),
    ]
    for speed in speeds:
        point = speed.point
        lines.append(
            _row(
                [
                    count(num_params(point.config)),
                    f"{point.sequence_length:,}",
                    f"{point.micro_tokens:,}",
                    f"{point.precision}, {point.optimizer}",
                    _range(speed.tokens_per_second, ",.0f"),
                    str(speed.reports),
                ]
            )
        )
    return lines


def index_page() -> str:
    """Return the page that compares the cards."""
    lines = [
        "# Which card trains what",
        "",
        "> **These are plans, not measurements**: the planner's proposals without a probe. Each card's page has the "
        "ranges, the sizes that fit, and what was measured on such a card by others.",
        "",
        "The model with the lowest expected loss in the given hours, pretrained from scratch: its parameters, and the "
        "expected bits per byte on English text.",
        "",
        _row(
            ["card", "memory, GiB", *(f"{hours} h" for hours in HOURS), f"1.5B parameters in {max(HOURS)} h"]
        ),
        _row(["---", "--:", *["---"] * (len(HOURS) + 1)]),
    ]
    for slug, name in CARDS.items():
        plans = plans_of(name)
        cells = [
            f"{count(plan.best.candidate.params)}, {plan.best.loss[1]:.2f}" if plan.best else "nothing"
            for plan in plans.by_hours
        ]
        lines.append(
            _row(
                [
                    f"[{plans.gpu.name}]({slug}.md)",
                    gib_digits(plans.gpu.memory_bytes),
                    *cells,
                    _big(plans.by_size[SIZES.index({"params": "1.5B"})]),
                ]
            )
        )
    return "\n".join(
        [
            *lines,
            "",
            "Other cards: `deskside plan --gpu list` names them, and `deskside plan --gpu NAME --hours 24` plans for "
            "one. For the card in your machine: `deskside probe`, then `deskside plan --here --hours 24`.",
            "",
        ]
    )


def _big(plan: Plan) -> str:
    if plan.best is None:
        return "does not fit"
    fits = "fits" if not _changes(plan, plan.best) else "fits with changes"
    return f"{fits}: {count(plan.best.candidate.tokens[1])} tokens, {plan.best.loss[1]:.2f}"


def _in_gib(size: tuple[float, float, float]) -> tuple[float, float, float]:
    low, expected, high = size
    return low / 2**30, expected / 2**30, high / 2**30


def _range(value: tuple[float, float, float], form: str) -> str:
    low, expected, high = (format(each, form) for each in value)
    return expected if low == high else f"{expected} ({low} to {high})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    return {"index.md": index_page(), **{f"{slug}.md": card_page(slug) for slug in CARDS}}


def main() -> None:
    """Write all pages."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["DESKSIDE_DATA"] = empty  # reports that only this user has are not for the pages
        for name, text in pages().items():
            (FOLDER / name).write_text(text, "utf-8")
            print(FOLDER / name)


if __name__ == "__main__":
    main()
