"""Examine this machine: its hardware and software, what works and how fast, what to use and what to fix.

Facts and checks come from child processes (`machine_facts`, `check_list`); `advice` derives the recommendations from
them. This process does not import torch, so it can report a torch that does not start.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from deskside.doctor import advice, check_list
from deskside.utils import child_process
from deskside.utils.trials import TrialCache

SCHEMA = 1
FACTS_SECONDS = 120.0

Say = Callable[[str], None]


def examine(quick: bool, say: Say = lambda _: None, seconds: float = float("inf")) -> dict[str, Any]:
    """Examine this machine, change nothing on it, and return a report in plain JSON.

    Args:
        quick: Run only the cheap checks, in about 10 seconds; with a time limit, only those that a run depends on.
        say: Receives lines of progress.
        seconds: Time limit. Raises TimeoutError when it is exceeded.

    The report has:
        trains: True if training works here; why: the reason in one line if it does not.
        machine: Facts (`machine_facts.collect`), {} if torch does not start.
        checks: A list of {"id", "group", "name", "verdict", "reason", "to_bf16"} and, where measured, "seconds",
            "errors" (relative, by name), "tolerance", "speed" ({"value", "unit", "source"}) and "details". The verdict
            is works, wrong numbers, unsupported, not installed, out of memory, timeout or crashed.
        use: Recommendations as {"what", "value", "why", "option"}.
        fix: Problems as {"severity", "problem", "remedy"}, most important first.
        kept_trials: The folder of the trials' results that are kept for later runs, and their number.
        power: The first GPU's power limits in watts and the effects of lower ones, None without a GPU.
        seconds: Duration of the examination.
    """
    began = time.monotonic()
    deadline, cache = began + seconds, TrialCache()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "quick": quick,
        "kept_trials": {"folder": str(cache.folder), "number": len(cache.trials())},
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
        report |= {"trains": False, "why": problem, "machine": {}, "checks": [], "use": [], "fix": [fix]}
        return report | {"power": None, "stderr": outcome.output, "seconds": _since(began)}
    facts = outcome.value
    facts["libraries"] = check_list.library_versions()
    if quick and seconds < float("inf"):
        checks = check_list.essential_checks(facts, seconds)
    else:
        checks = check_list.all_checks(facts, quick)
    results = check_list.run_all(checks, say, deadline)
    return report | conclude(facts, results, quick) | {"seconds": _since(began)}


def conclude(facts: dict[str, Any], results: list[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """Return the report's conclusions from facts and check results, without using a device."""
    advice.add_bf16_ratios(results)
    fixes = advice.find_problems(facts, results)
    trains = advice.can_train(results)
    return {
        "trains": trains,
        "why": "" if trains else fixes[0]["problem"],
        "machine": facts,
        "checks": results,
        "use": advice.recommend(facts, results, quick),
        "fix": fixes,
        "power": advice.power(facts),
    }


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)
