"""Results of the parity benchmark: rows merged over folders and seeds, gaps to a reference arm, the Markdown table.

A gap is the arm's loss / the reference's loss with the same seed - 1. Both runs have the same initial weights and the
same data order, so the gap does not contain the variation between seeds. On the same text, nats per token and bits per
byte differ by a constant factor, so their gaps are equal.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deskside.utils.errors import UsageError

Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """An arm with the runs of all its seeds. gaps, train_gaps: in percent, for each seed that the reference has too.

    curve: [(tokens, mean bits per byte)]; gap_curve: [(tokens, mean gap in percent)]. spread: the range of the results
    over the seeds in percent of their mean; None with one seed.
    """

    name: str
    rows: list[Row]
    gaps: list[float] = field(default_factory=list)
    train_gaps: list[float] = field(default_factory=list)
    curve: list[tuple[float, float]] = field(default_factory=list)
    gap_curve: list[tuple[float, float]] = field(default_factory=list)

    @property
    def finished(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "finished"]

    @property
    def spread(self) -> float | None:
        values = [row["val_bpb"] for row in self.finished]
        return 100 * (max(values) - min(values)) / statistics.fmean(values) if len(values) > 1 else None


def read(folders: Sequence[Path]) -> list[Row]:
    """Return the rows of all folders, of repeated runs of an arm and seed the last finished one.

    Raises UsageError for a folder without results and for runs that cannot be compared.
    """
    by_run: dict[tuple[str, int], Row] = {}
    for folder in folders:
        path = folder / "parity.jsonl"
        if not path.is_file():
            raise UsageError(f"{folder}: has no parity.jsonl; make one with: python -m benchmarks.parity run")
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            key = (row["arm"], row["seed"])
            if key not in by_run or row["status"] == "finished" or by_run[key]["status"] != "finished":
                by_run[key] = row
    rows = list(by_run.values())
    # Other runs failed before they opened the data.
    trained = [row for row in rows if row["setting"]["data"] is not None]
    for row in trained[1:]:
        for key, value in trained[0]["setting"].items():
            if row["setting"][key] != value:
                raise UsageError(
                    f"{row['label']}: has {key} {row['setting'][key]}, {trained[0]['label']} has {value}; "
                    f"these runs cannot be compared, so report them apart"
                )
    return rows


def averages(rows: Sequence[Row], reference: str) -> list[Arm]:
    """Return the arms in the order of their first rows, with gaps to `reference` for the seeds that both have."""
    reference_rows = {row["seed"]: row for row in rows if row["arm"] == reference}
    arms = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        arm_rows = [row for row in rows if row["arm"] == name]
        pairs = [(row, reference_rows[row["seed"]]) for row in arm_rows if row["seed"] in reference_rows]
        if name == reference:
            pairs = []
        finished = [(a, b) for a, b in pairs if a["status"] == b["status"] == "finished"]
        arms.append(
            Arm(
                name,
                arm_rows,
                gaps=[_percent(a["val_bpb"], b["val_bpb"]) for a, b in finished],
                train_gaps=[_percent(a["train_loss_end"], b["train_loss_end"]) for a, b in finished],
                curve=_mean_curve([dict(row["curve"]) for row in arm_rows]),
                gap_curve=_mean_curve([_gap_curve(dict(a["curve"]), dict(b["curve"])) for a, b in pairs]),
            )
        )
    return arms


def table(arms: Sequence[Arm]) -> str:
    """Return the Markdown table of the arms with at least one finished run."""
    lines = [
        "| recipe | runs | blocks in BF16 | tokens/s | peak GiB | validation loss, nats | bits per byte "
        "| gap | training loss, gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        if arm.finished:
            row = arm.finished[0]
            bf16_blocks = ""
            if row["native"] is not None:
                bf16_blocks = "{} first, {} last of {}".format(*row["kept"], row["layers"])
            cells = [
                f"`{arm.name}`" + (f", {len(arm.finished)} seeds" if len(arm.finished) > 1 else ""),
                {None: "", True: "native", False: "emulated"}[row["native"]],
                bf16_blocks,
                _mean_and_range(arm, "tokens_per_second", ",.0f"),
                _mean_and_range(arm, "peak_memory_gib", ".1f"),
                _mean_and_range(arm, "val_loss", ".4f"),
                _mean_and_range(arm, "val_bpb", ".4f"),
                _signed(arm.gaps),
                _signed(arm.train_gaps),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(rows: Sequence[Row], arms: Sequence[Arm], reference: str) -> str:
    """Return the conditions of the runs in the table, and a line for each run that is missing in it."""
    lines = []
    finished = [row for row in rows if row["status"] == "finished"]
    if finished:
        setting, first = finished[0]["setting"], finished[0]
        machines = sorted(
            {f"{row['machine']['device']}, torch {row['machine']['torch']}" for row in finished}
        )
        options = "".join(f" --{key} {value}" for key, value in setting["keys"].items())
        lines.append(
            f"`{setting['preset']}`{options}, {first['tokens']:,} tokens "
            f"({first['tokens'] / setting['train_tokens']:.2f} passes over the training text) "
            f"in {setting['steps']:,} steps of {setting['tokens_per_step']:,.0f}, "
            f"sequence {setting['sequence_length']}, {setting['optimizer']}; "
            f"{'; '.join(machines)}. Runs with the same seed have the same initial weights and data order. "
            f"Validation loss: all {first['val_tokens']:,} validation tokens, weights in BF16. "
            f"Training loss: mean of the last tenth of the steps, in the recipe's own formats. "
            f"Gaps are to `{reference}` with the same seed."
        )
    for arm in arms:
        if arm.name == reference and arm.spread is not None:
            lines.append(
                f"Seeds {', '.join(str(row['seed']) for row in arm.finished)} of `{reference}` lie "
                f"{arm.spread:.2f} % apart."
            )
    for row in rows:
        if row["status"] == "failed":
            lines.append(f"`{row['arm']}`, seed {row['seed']}: failed: {row['error']}")
        elif row["status"] == "stopped":
            lines.append(
                f"`{row['arm']}`, seed {row['seed']}: stopped by the limit at {row['tokens']:,} tokens."
            )
        if row["skipped_steps"]:
            lines.append(f"`{row['arm']}`, seed {row['seed']}: {row['skipped_steps']} steps were skipped.")
    return "\n".join(lines)


def _percent(value: float, base: float) -> float:
    return 100 * (value / base - 1)


def _gap_curve(curve: dict[float, float], base: dict[float, float]) -> dict[float, float]:
    return {tokens: _percent(value, base[tokens]) for tokens, value in curve.items() if tokens in base}


def _mean_curve(curves: Sequence[dict[float, float]]) -> list[tuple[float, float]]:
    """Return the mean of the complete curves at their common points. Curves of runs that ended early are left out."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    longest = max(len(curve) for curve in curves)
    curves = [curve for curve in curves if len(curve) == longest]
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [(tokens, statistics.fmean(curve[tokens] for curve in curves)) for tokens in shared]


def _mean_and_range(arm: Arm, key: str, number_format: str) -> str:
    """Return the mean over the finished runs, and the range if there are several."""
    values = [row[key] for row in arm.finished if row[key] is not None]
    if not values:
        return ""
    text = format(statistics.fmean(values), number_format)
    if len(values) < 2:
        return text
    return f"{text} ({min(values):{number_format}} to {max(values):{number_format}})"


def _signed(gaps: Sequence[float]) -> str:
    if not gaps:
        return ""
    text = f"{statistics.fmean(gaps):+.2f} %"
    return text if len(gaps) < 2 else f"{text} ({min(gaps):+.2f} to {max(gaps):+.2f})"
