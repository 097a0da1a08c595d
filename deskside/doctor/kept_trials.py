"""Show the trials and self-checks whose results are kept for later runs (`utils/trials.py`)."""

from collections.abc import Mapping
from typing import Any

from deskside.utils.printer import Printer
from deskside.utils.trials import KeptTrial, TrialCache


def describe(cache: TrialCache) -> dict[str, Any]:
    """Return {"folder", "trials": [{"kind", "problem", "chosen", "seconds", "when", "valid_here"}]} for --json.

    valid_here: True if the result is of this machine and of the installed versions.
    """
    rows = [_row(trial, cache.machine) for trial in cache.trials()]
    return {"folder": str(cache.folder), "trials": rows}


def show(described: Mapping[str, Any], printer: Printer) -> None:
    """Print the result of `describe`."""
    printer.text(f"{len(described['trials'])} kept trials in {described['folder']}", "strong")
    if not described["trials"]:
        return
    rows = [
        [
            row["kind"],
            row["problem"],
            row["chosen"],
            f"{row['seconds']:.1f} s",
            row["when"][:16].replace("T", " "),
            "yes" if row["valid_here"] else "no",
        ]
        for row in described["trials"]
    ]
    printer.table(["trial", "problem", "chosen", "took", "when", "used here"], rows, "lllrll", indent=1)
    printer.text(
        "used here: no if it is of another card or version. deskside doctor --clear-trials deletes all, and later runs "
        "try again",
        "quiet",
    )


def _row(trial: KeptTrial, machine: Mapping[str, Any] | None) -> dict[str, Any]:
    spec = trial.key.get("spec", {})
    facts = {
        name: value for name, value in spec.items() if isinstance(value, (str, int)) and value is not False
    }
    return {
        "kind": trial.kind,
        "problem": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()),
        "chosen": str(trial.result.get("name", "")),
        "seconds": trial.seconds,
        "when": trial.when,
        "valid_here": trial.key.get("machine") == machine,
    }
