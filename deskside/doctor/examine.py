"""Examine this machine: its hardware and software, what works and how fast, what to use and what to fix.

Facts and checks come from child processes (`machine_facts`, `check_list`), advice from plain data (`advice`). This
process imports no torch, so it can report a torch that does not start.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from deskside.doctor import advice, check_list
from deskside.utils import child_process

SCHEMA = 1
FACTS_SECONDS = 120.0

Say = Callable[[str], None]


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
    outcome = child_process.run("deskside.doctor.machine_facts:collect", {}, min(FACTS_SECONDS, seconds))
    if outcome.status == "timeout" and time.monotonic() >= deadline:
        raise TimeoutError(f"the doctor was not done after {seconds:.0f} s")
    if outcome.status != "ok":
        problem = f"torch does not start here: {outcome.error}"
        remedy = "install torch again: pip install --force-reinstall torch"
        fix = {"severity": "stops training", "problem": problem, "remedy": remedy}
        found |= {"trains": False, "why": problem, "machine": {}, "checks": [], "use": [], "fix": [fix]}
        return found | {"power": None, "stderr": outcome.stderr, "seconds": _since(began)}
    facts = outcome.value
    facts["libraries"] = check_list.versions()
    limited = quick and seconds < float("inf")
    checks = check_list.essential(facts) if limited else check_list.all_checks(facts, quick)
    results = check_list.run_all(checks, say, deadline)
    return found | conclude(facts, results, quick) | {"seconds": _since(began)}


def conclude(facts: dict[str, Any], results: list[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """Derive the conclusions from facts and results. Uses no device."""
    advice.add_ratios(results)
    fixes = advice.fix(facts, results, quick)
    trains = advice.trains(results)
    return {
        "trains": trains,
        "why": "" if trains else fixes[0]["problem"],
        "machine": facts,
        "checks": results,
        "use": advice.use(facts, results, quick),
        "fix": fixes,
        "power": advice.power(facts),
    }


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)
