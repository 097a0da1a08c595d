"""`deskside plan --cloud`: write the SkyPilot task of a plan, and compare the costs of renting and owning."""

from pathlib import Path
from typing import Any

from deskside.plan.result import Plan
from deskside.utils.errors import UsageError


def write_task(plan: Plan, file: str | None, runs: str | None, wheel: str | None) -> dict[str, Any] | None:
    """Write the task of the --cloud options. Return its entry in the JSON output, None without --cloud.

    Raises UsageError.
    """
    if file is None:
        if runs is not None or wheel is not None:
            raise UsageError(
                "--cloud-runs and --cloud-wheel are about the task of --cloud FILE; give that too"
            )
        return None
    from deskside.plan import cloud

    task = cloud.task(plan, runs, wheel)
    return {
        "file": file,
        "start": cloud.write(task, Path(file)),
        "task": task,
        "offers": cloud.offers(plan, task["resources"]["use_spot"]),
    }


def show(rented: dict[str, Any]) -> None:
    """Print the prices and the command that starts the task. rented: from `write_task`."""
    from deskside.utils.format import dollars
    from deskside.utils.printer import Printer

    printer = Printer()
    printer.heading("Cost on a rented GPU and on your own:")
    offers = rented["offers"]
    rows = [[offer["offer"], f"${offer['usd_per_gpu_hour']:.2f}", dollars(offer["usd"])] for offer in offers]
    printer.table(["offer", "GPU hour", "this plan"], rows, "lrr")
    for source in dict.fromkeys(offer["source"] for offer in offers):
        printer.text(source, "quiet", indent=2, hanging=2)
    printer.heading(f"{rented['file']} is written; to start it:")
    printer.command(rented["start"])
