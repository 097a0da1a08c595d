"""Seconds until the first step, by part: with empty caches, and twice with the caches that this filled.

    python -m benchmarks.first_step [--preset 124m] [--precision bf16,fp8-delayed] [options of benchmarks.step]
        [--json FILE]

Run it in the root of the repository. The caches are Triton's, torch's, CUDA's and deskside's own (kept trials and
self-checks, FlashAttention-4's kernels); the files of the Python packages are in the page cache of the system, or not.

The length of the run decides whether attention backends that are slow to start are tried: --schedule.length "500 steps"
is a short run, and the default is a long one.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import step
from deskside.utils.errors import UsageError

STATES = ("empty caches", "warm", "warm again")


def parts(marks: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each part from the cumulative marks of `step_measure.measure`."""
    ends = list(marks.values())
    return {name: end - begin for (name, end), begin in zip(marks.items(), [0.0, *ends], strict=False)}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of one arm. results: those of `step.starts`; the last may be an error."""
    values = [result["value"] for result in results if result["status"] == "ok"]
    columns = [parts(value["cold_start"]) for value in values]
    lines = [f"{'seconds':<22}" + "".join(f"{state:>14}" for state in STATES[: len(values)])]
    for name in columns[0] if columns else ():
        lines.append(f"{name:<22}" + "".join(f"{column[name]:>14.2f}" for column in columns))
    lines.append(f"{'all':<22}" + "".join(f"{sum(column.values()):>14.2f}" for column in columns))
    if all(value["compilations"] for value in values):
        for name in values[0]["compilations"] if values else ():
            cells = "".join(f"{value['compilations'][name]:>14}" for value in values)
            lines.append(f"{name.replace('_', ' '):<22}{cells}")
    for state, value in zip(STATES, values, strict=False):
        for kind, trial in value["attention"].items():
            if kind != "stages":
                left_out = "".join(f"; {name} not tried: {why}" for name, why in trial["not_tried"].items())
                lines.append(f"{state}: attention {kind}: {trial['name']}, {trial['trial']}{left_out}")
    lines += [
        f"{state}: {result['error']}"
        for state, result in zip(STATES, results, strict=False)
        if result["status"] != "ok"
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every start was measured, 1 if one was not, 2 for wrong usage."""
    try:
        options, specs = step.parse(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = []
    for arm, spec in specs:
        results = step.starts(spec, len(STATES))
        rows.append({"arm": arm, "starts": results})
        print(f"{options.preset}, {arm}\n{table(results)}\n", flush=True)
        if options.json:
            options.json.write_text(
                json.dumps({"benchmark": "first_step", "results": rows}, indent=1), "utf-8"
            )
    return int(any(result["status"] != "ok" for row in rows for result in row["starts"]))


if __name__ == "__main__":
    raise SystemExit(main())
