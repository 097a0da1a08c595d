"""`deskside probe --share FILE`: write the measurements as an anonymous card report (measurements/card_report.py)."""

import datetime
import json
import shlex
import sys
from pathlib import Path

from deskside.measurements.card_report import make_report
from deskside.measurements.plausible import check_report
from deskside.measurements.store import Machine, Store
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.files import write_atomically
from deskside.utils.format import plural

ADVICE = "attach it to an issue (template 'card report'), or use it here with: deskside facts add"


def check_share(path: Path, yes: bool, machine: Machine) -> None:
    """Raise UsageError if a report could not be made or written, before anything is measured."""
    if machine.device != "cuda":
        raise UsageError(f"--share: reports are about GPUs, and this machine trains on {machine.card}")
    if path.exists():
        raise UsageError(f"--share {path}: exists already; give the name of a new file")
    if not path.parent.is_dir():
        raise UsageError(f"--share {path}: there is no folder {path.parent}; make it first")
    if not yes and not sys.stdin.isatty():
        raise UsageError("--share: asks before it writes, and stdin is not a terminal; add --yes")


def doctor_verdicts(seconds: float) -> dict[str, str]:
    """Return the verdict of each quick check of the doctor. Raises UsageError after `seconds`."""
    from deskside.doctor.examine import examine

    try:
        report = examine(True, say, seconds)
    except TimeoutError:
        raise UsageError("--minutes: too short for the doctor's checks, which a report needs") from None
    return {check["id"]: check["verdict"] for check in report["checks"]}


def share(path: Path, machine: Machine, store: Store, verdicts: dict[str, str], yes: bool) -> None:
    """Show the report of this machine on standard error, ask unless `yes`, and write it. Raises UsageError."""
    today = datetime.datetime.now(datetime.UTC).date()
    try:
        report = make_report(machine, store.rows(machine), verdicts, today)
    except ValueError as error:
        raise UsageError(f"--share: {error}") from None
    try:
        check_report(report, today)
    except UsageError as error:
        say(f"note: deskside facts add would refuse this report: {error}")
    text = json.dumps(report.to_json(), indent=1) + "\n"
    print(text, end="", file=sys.stderr, flush=True)
    if not yes and not _agreed(path):
        say("nothing was written")
        return
    write_atomically(path, text)
    say(f"written to {path}: {plural(len(report.points), 'point')}; {ADVICE} {shlex.quote(str(path))}")


def _agreed(path: Path) -> bool:
    print(f"This is all that {path} would hold. Write it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
