"""`deskside doctor`: what this machine is, what works on it with what numbers, what to use and what to mend.

Facts and checks come from children (`doctor_facts`, `doctor_checks`), advice from plain data (`doctor_advice`). This
process imports no torch, so that it can tell about a torch that does not start.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from deskside.config import strict_json
from deskside.config.commandline import parse
from deskside.probe import child, doctor_advice, doctor_checks, doctor_table

SCHEMA = 1
FACTS_SECONDS = 120.0

Say = Callable[[str], None]


@dataclass
class Doctor:
    """What works on this machine, with what numbers, and what to mend. Takes one to five minutes.

    Example: deskside doctor

    Example: deskside doctor --quick --json
    """

    quick: bool = False
    """Only plain matmuls, memory, the choice of attention and eager training steps: some seconds."""
    json: bool = False
    """Print one JSON object on standard output."""


def run(argv: Sequence[str]) -> int:
    """The command. 0, or 1 when training cannot work here. Raises UsageError."""
    options = parse(Doctor, argv, "deskside doctor")
    with _progress() as say:
        found = examine(options.quick, say)
    if options.json:
        print(strict_json.dumps(found))
    else:
        doctor_table.show(found, Console())
    return 0 if found["trains"] else 1


def examine(quick: bool, say: Say = lambda _: None, seconds: float = float("inf")) -> dict[str, Any]:
    """Examine this machine. Plain JSON:

    trains: whether training can work here; why: one line when it cannot. machine: facts (`doctor_facts.collect`), {}
    when torch does not start. checks: a list of {"id", "group", "name", "verdict", "reason", "seconds"} and, where
    measured, "errors" (relative, against float64, by name), "tolerance", "speed" ({"value", "unit", "source"}),
    "to_bf16", "details". verdict: works, wrong numbers, unsupported, not installed, out of memory, timeout or crashed.
    use: a list of {"what", "value", "why", "option"}. fix: of {"severity", "problem", "remedy"}, most important first.
    power: the first card's limits in watts and what lower ones cost, None without a card. seconds: that this took.

    quick: a fifth of the checks, some 10 seconds; with a limit in seconds only those that a run depends on. Changes
    nothing on the machine. Raises TimeoutError when it is not done after so many seconds.
    """
    began = time.monotonic()
    deadline = began + seconds
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "quick": quick,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    say("looking at the machine and its software")
    outcome = child.run("deskside.probe.doctor_facts:collect", {}, min(FACTS_SECONDS, seconds))
    if outcome.status == "timeout" and time.monotonic() >= deadline:
        raise TimeoutError(f"the doctor was not done after {seconds:.0f} s")
    if outcome.status != "ok":
        problem = f"torch does not start here: {outcome.error}"
        mend = {
            "severity": "stops training",
            "problem": problem,
            "remedy": "install torch again: pip install --force-reinstall torch",
        }
        found |= {"trains": False, "why": problem, "machine": {}, "checks": [], "use": [], "fix": [mend]}
        return found | {"power": None, "stderr": outcome.stderr, "seconds": _since(began)}
    facts = outcome.value
    facts["libraries"] = doctor_checks.versions()
    limited = quick and seconds < float("inf")
    checks = doctor_checks.essential(facts) if limited else doctor_checks.listing(facts, quick)
    results = doctor_checks.run_all(checks, say, deadline)
    return found | conclude(facts, results, quick) | {"seconds": _since(began)}


def conclude(facts: dict[str, Any], results: list[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """What facts and results come to. No device is asked."""
    doctor_advice.add_ratios(results)
    mends = doctor_advice.fix(facts, results, quick)
    trains = doctor_advice.trains(results)
    return {
        "trains": trains,
        "why": "" if trains else mends[0]["problem"],
        "machine": facts,
        "checks": results,
        "use": doctor_advice.use(facts, results, quick),
        "fix": mends,
        "power": doctor_advice.power(facts),
    }


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


@contextmanager
def _progress() -> Iterator[Say]:
    """Tells on standard error what is being done: one changing line in a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(f"doctor: {text}", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield lambda text: status.update(text)
