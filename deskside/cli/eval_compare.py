"""`deskside eval MODEL --compare OTHER`: the difference of two models on the same items of each task."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deskside.evaluate.items import select_indices
from deskside.evaluate.paired import PairedDifference, score_difference, verdict_difference
from deskside.evaluate.run_task import PreparedTask, TaskResult
from deskside.evaluate.tasks import Translation
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, json_value
from deskside.utils.printer import Printer

Records = Sequence[Mapping[str, Any]]


def is_items_file(other: str) -> bool:
    """Return True if --compare names a file of --items instead of a model."""
    return Path(other).is_file()


def read_items_file(path: Path) -> dict[str, Records]:
    """Return the records of a file that --items wrote, by task. Raises UsageError if it is not one."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json_value(line)
            by_task.setdefault(record["task"], []).append({**record, "index": int(record["index"])})
        except (Unreadable, KeyError, TypeError, ValueError):
            raise UsageError(
                f"--compare {path}: line {number} is not the result of an item; give a model, or a file of --items"
            ) from None
    return dict(by_task)


def check_items(
    tasks: Sequence[PreparedTask], limit: int | None, others: Mapping[str, Records], other: str
) -> None:
    """Raise UsageError unless the other model's results are of the items that will be evaluated, and of their kind."""
    for prepared in tasks:
        name, items = prepared.chosen.name, prepared.items
        indices = select_indices(items, limit, prepared.chosen.task.spread)
        expected = {(index, items[index].origin) for index in indices}
        found = {(record["index"], record.get("origin")) for record in others.get(name, ())}
        if found != expected:
            raise UsageError(
                f"--compare {other}: has {len(found)} items of {name}, which are not the {len(expected)} of this "
                "evaluation; evaluate both with the same --tasks, --tasks-dir and --limit"
            )
        key, kind = ("chrf", float) if isinstance(prepared.chosen.task, Translation) else ("right", bool)
        if not all(isinstance(record.get(key), kind) for record in others[name]):
            raise UsageError(
                f"--compare {other}: its results of {name} are of another kind; evaluate it again"
            )


def compare(results: Sequence[TaskResult], others: Mapping[str, Records]) -> dict[str, PairedDifference]:
    """Return the difference of each task. others: the other model's records, of the same items."""
    return {result.chosen.name: _difference(result, others[result.chosen.name]) for result in results}


def _difference(result: TaskResult, others: Records) -> PairedDifference:
    theirs = {record["index"]: record for record in others}
    pairs = [(record, theirs[record["index"]]) for record in result.records]
    if isinstance(result.chosen.task, Translation):
        return score_difference([a["chrf"] for a, _ in pairs], [b["chrf"] for _, b in pairs])
    return verdict_difference([a["right"] for a, _ in pairs], [b["right"] for _, b in pairs])


def shown_significant(differences: Mapping[str, PairedDifference]) -> dict[str, bool]:
    """Return for each task whether its difference is significant, corrected for the number of tasks."""
    from deskside.study.stats.statistics import significant  # imports scipy, which takes time

    tested = {name: each.p for name, each in differences.items() if each.p is not None}
    verdicts = dict(zip(tested, significant(list(tested.values())), strict=True))
    return {name: verdicts.get(name, False) for name in differences}


def as_json(differences: Mapping[str, PairedDifference], model: str) -> dict[str, Any]:
    """Return the comparison for --json. difference: the evaluated model minus `model`."""
    from deskside.study.stats.statistics import FALSE_DISCOVERY_RATE

    verdicts = shown_significant(differences)
    tasks = {name: {**each.as_dict(), "significant": verdicts[name]} for name, each in differences.items()}
    return {"model": model, "tasks": tasks, "false_discovery_rate": FALSE_DISCOVERY_RATE}


def print_differences(
    printer: Printer,
    results: Sequence[TaskResult],
    differences: Mapping[str, PairedDifference],
    first: str,
    second: str,
) -> None:
    """Print a row for each task."""
    from deskside.study.stats.statistics import FALSE_DISCOVERY_RATE

    verdicts = shown_significant(differences)
    rows = []
    for result in results:
        name, each = result.chosen.name, differences[result.chosen.name]
        scale = 1 if isinstance(result.chosen.task, Translation) else 100  # chrF2 is from 0 to 100 already
        interval = "unknown"
        if each.low is not None and each.high is not None:
            interval = f"{scale * each.low:+.1f} to {scale * each.high:+.1f}"
        values = (
            f"{scale * each.first:.1f}",
            f"{scale * each.second:.1f}",
            f"{scale * each.difference:+.1f}",
        )
        rows.append([name, *values, interval, f"{each.n:,}", "yes" if verdicts[name] else "no"])
    printer.text()
    printer.fields([("first", first), ("second", second)])
    headings = ["task", "first", "second", "difference", "95 % interval", "items", "significant"]
    printer.table(headings, rows, "lrrrrrl")
    printer.text(
        "of 100, measured on the same items; significant: corrected for several tasks, a false discovery rate of "
        f"{FALSE_DISCOVERY_RATE:.0%}",
        "quiet",
    )
