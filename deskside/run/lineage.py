"""The history of a model, read from run directories: one stage for each run, from first to last.

A run that started from another run's weights names it, so earlier stages are included as long as they exist. Facts
that a directory does not record are None, and nothing is inferred from the configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from deskside.data.reading.shards import DatasetIndex, read_index
from deskside.run.directory import reached
from deskside.run.record import MISSING, mapping, number, read_metrics, read_object
from deskside.utils.errors import RunError, UsageError

MOST_STAGES = 16
OBJECTIVES = {
    None: "pretraining (next token)",
    "sft": "supervised fine-tuning on conversations",
    "dpo": "direct preference optimisation",
    "grpo": "reinforcement learning from verifiable rewards (GRPO)",
}
Warn = Callable[[str], None]


@dataclass(frozen=True)
class SourceShare:
    """A source of text: tag, language, and share of the training split."""

    name: str
    lang: str
    documents: int
    tokens: int
    licence: str | None


@dataclass(frozen=True)
class EnergyUse:
    """The energy of one GPU over logged steps that have a power reading: `steps` of `logged`."""

    kilowatt_hours: float
    steps: int
    logged: int


@dataclass(frozen=True)
class RunStage:
    """One run. summary, environment and plan are its files, empty if missing or damaged.

    specs: the sources as given. began_from: the name of a run or model, "random weights", or None if unknown.
    """

    name: str
    created: str | None
    objective: str
    config: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any]
    plan: dict[str, Any]
    sources: list[SourceShare] = field(default_factory=list)
    specs: list[str] = field(default_factory=list)
    energy: EnergyUse | None = None
    began_from: str | None = None


def stages(run_dir: Path, warn: Warn) -> list[RunStage]:
    """Return the run and its predecessors, oldest first. warn is called for each damaged file."""
    found: list[RunStage] = []
    seen: set[Path] = set()
    path: Path | None = run_dir
    while path is not None and len(found) < MOST_STAGES and path.resolve() not in seen:
        seen.add(path.resolve())
        run = _object(path / "run.json", warn)
        init = run.get("init")
        earlier = _run_of(Path(init)) if isinstance(init, str) else None
        began_from = "random weights" if "init" in run and init is None else None
        if isinstance(init, str):
            began_from = (earlier or Path(init)).resolve().name
        found.append(_stage(path, run, began_from, warn))
        path = earlier
    return found[::-1]


def _run_of(path: Path) -> Path | None:
    """Return the run that a path of --init refers to: the run, its exported model, or one of its checkpoints."""
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "run.json").is_file():
            return folder
    return None


def _stage(path: Path, run: dict[str, Any], began_from: str | None, warn: Warn) -> RunStage:
    config = mapping(run.get("config"))
    data, align = mapping(config.get("data")), mapping(config.get("align"))
    kind = align.get("name")
    specs = [s for s in (align.get("data") or data.get("sources") or []) if isinstance(s, str)]
    folder = data.get("path")
    index = _index(Path(reached(folder, run.get("directory")))) if isinstance(folder, str) else None
    name, created = run.get("name"), run.get("created")
    return RunStage(
        name=name if isinstance(name, str) else path.resolve().name,
        created=created[:10] if isinstance(created, str) else None,
        objective=OBJECTIVES.get(kind, str(kind)),
        config=config,
        summary=_object(path / "summary.json", warn),
        environment=_object(path / "environment.json", warn),
        plan=_object(path / "plan.json", warn),
        sources=[] if index is None else _sources(index, any(s.startswith("bundled:") for s in specs)),
        specs=[s if s.startswith(("hf:", "bundled:")) else Path(s).name for s in specs],
        energy=_energy(path, warn),
        began_from=began_from,
    )


def _index(folder: Path) -> DatasetIndex | None:
    """Return the index of prepared text or conversations, or None if it is gone or of another kind."""
    try:
        return read_index(folder)
    except (UsageError, RunError, OSError):
        return None


def _sources(index: DatasetIndex, bundled: bool) -> list[SourceShare]:
    """Return the sources of the training split, largest first."""
    licences = _bundled_licenses() if bundled else {}
    found = []
    for tag, (documents, tokens) in index.splits["train"].counts_by_tag().items():
        info = index.tags[tag]
        found.append(
            SourceShare(info.source, info.lang, documents, tokens, licences.get(info.source.split(":")[0]))
        )
    return found


def _bundled_licenses() -> dict[str, str]:
    """Return the licenses of the bundled texts, from the table in their README."""
    text = (files("deskside.data") / "bundled" / "LICENCES.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    named = [row for row in rows if row[0].startswith("`")]
    return {row[0].strip("`").removesuffix(".txt"): row[-1] for row in named}


def _energy(run_dir: Path, warn: Warn) -> EnergyUse | None:
    """Return the sum of watts times step time, where a step takes its tokens over its speed, so pauses do not count."""
    log = read_metrics(run_dir)
    if damaged := log.damaged + log.partial:
        warn(f"{run_dir / 'metrics.jsonl'}: {damaged} damaged lines are left out of the energy")
    joules, steps, before = 0.0, 0, 0.0
    rows = [row for row in log.rows if number(row.get("tokens")) is not None]
    for row in rows:
        tokens, speed, watts = (number(row.get(key)) for key in ("tokens", "tokens_per_second", "watts"))
        if tokens is not None and watts is not None and speed and tokens > before:
            joules, steps = joules + watts * (tokens - before) / speed, steps + 1
        before = tokens or 0.0
    return EnergyUse(joules / 3.6e6, steps, len(rows)) if steps else None


def _object(path: Path, warn: Warn) -> dict[str, Any]:
    """Return a JSON object of the run, or {} after a warning if the file is damaged."""
    value, problem = read_object(path)
    if problem and problem != MISSING:
        warn(f"{path}: is not used for the model card: it {problem}")
    return value
