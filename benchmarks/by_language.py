"""Bits per byte of each language at the end of runs, by arm, with paired differences over seeds.

    python -m benchmarks.by_language --arm dense runs/dense-1 runs/dense-2 --arm experts runs/experts-1 runs/experts-2

The first arm is the baseline. Runs are paired by the seed in their configuration; a seed that an arm lacks is left out
of its differences. "mean" is the unweighted mean over the languages. Intervals are Student's 95 % intervals of the
logarithm of the ratio, as in studies.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from deskside.run.record import mapping, number, read_run
from deskside.study.stats.statistics import log_ratio, relative_difference

MEAN = "mean"
BySeed = dict[int, dict[str, float]]  # seed -> language -> bits per byte


def read_arm(folders: list[str]) -> BySeed:
    """Return the final bits per byte of an arm's runs. Raises SystemExit for an unfinished run, and a repeated seed."""
    found: BySeed = {}
    for folder in folders:
        record = read_run(Path(folder))
        languages = {
            language: bpb
            for language, values in mapping(record.summary.get("val_languages")).items()
            if (bpb := number(mapping(values).get("bpb"))) is not None
        }
        seed = number(record.config.get("seed"))
        if not languages or seed is None:
            raise SystemExit(f"{folder}: has no final bits per byte of languages")
        if int(seed) in found:
            raise SystemExit(f"{folder}: another run of this arm has the seed {int(seed)}")
        found[int(seed)] = {**languages, MEAN: statistics.mean(languages.values())}
    return found


def table(arms: dict[str, BySeed]) -> list[dict[str, Any]]:
    """Return a row for each arm and language: mean over seeds, and the relative difference to the first arm."""
    baseline = next(iter(arms.values()))
    rows: list[dict[str, Any]] = []
    for name, arm in arms.items():
        shared = [seed for seed in arm if seed in baseline]
        for language in next(iter(arm.values())):
            row: dict[str, Any] = {
                "arm": name,
                "language": language,
                "seeds": len(arm),
                "bpb": statistics.mean(values[language] for values in arm.values()),
            }
            if arm is not baseline and shared:
                ratio = log_ratio(
                    [arm[seed][language] for seed in shared], [baseline[seed][language] for seed in shared]
                )
                bounds = (ratio.mean, ratio.low, ratio.high)
                names = ("relative", "relative_low", "relative_high")
                row |= {
                    key: None if x is None else relative_difference(x)
                    for key, x in zip(names, bounds, strict=True)
                }
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", action="append", nargs="+", required=True, metavar="NAME RUN")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = table({name: read_arm(folders) for name, *folders in options.arm})
    print(
        "| arm | language | seeds | bits per byte | against the first arm | 95 % interval |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        change = interval = ""
        if row.get("relative") is not None:
            change = f"{100 * row['relative']:+.2f} %"
        if row.get("relative_low") is not None:
            interval = f"{100 * row['relative_low']:+.2f} to {100 * row['relative_high']:+.2f} %"
        print(
            f"| {row['arm']} | {row['language']} | {row['seeds']} | {row['bpb']:.4f} | {change} | {interval} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
