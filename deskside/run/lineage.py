"""The training history of a model, read from run directories: one stage for each run, from first to last.

A run that started from the weights of another run records its path, so earlier runs are included if their directories
still exist. Facts that a directory does not record are None; they are not inferred from the configuration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from deskside.data.reading.index import DatasetIndex, read_index
from deskside.run.directory import resolve_path
from deskside.run.record import MISSING, mapping, number, read_metrics, read_object
from deskside.utils import hub
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import plural

MAX_STAGES = 16
OBJECTIVES = {
    None: "pretraining (next token)",
    "sft": "supervised fine-tuning on conversations",
    "dpo": "direct preference optimization",
    "kto": "Kahneman-Tversky optimization (KTO) on labelled answers",
    "grpo": "reinforcement learning from verifiable rewards (GRPO)",
}
FROM_SCRATCH = "random weights"
Warn = Callable[[str], None]


@dataclass(frozen=True)
class SourceShare:
    """A source of text (its name and language), with its number of documents and tokens in the training split."""

    name: str
    lang: str
    documents: int
    tokens: int
    licence: str | None


@dataclass(frozen=True)
class EnergyUse:
    """The energy of one GPU over the steps that have a power reading: `steps` of the `logged` steps."""

    kilowatt_hours: float
    steps: int
    logged: int


@dataclass(frozen=True)
class RunStage:
    """One run in a model's history. summary, environment and plan are its JSON files, {} if missing or damaged.

    specs: the source specs that were given; for a file, its name. started_from: the name of a run or model, "random
    weights" (`FROM_SCRATCH`), or None if unknown. hub_base: the hub model, as owner/name, that it was started from.
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
    started_from: str | None = None
    hub_base: str | None = None


def stages(run_dir: Path, warn: Warn) -> list[RunStage]:
    """Return the run and its predecessors, at most `MAX_STAGES`, oldest first.

    `warn` is called with a message for each damaged file.
    """
    history: list[RunStage] = []
    seen: set[Path] = set()
    path: Path | None = run_dir
    while path is not None and len(history) < MAX_STAGES and path.resolve() not in seen:
        seen.add(path.resolve())
        run = _object(path / "run.json", warn)
        init, earlier = run.get("init"), None
        started_from = FROM_SCRATCH if "init" in run and init is None else None
        if isinstance(init, str):
            is_name = init.startswith(hub.PREFIX)
            initial = Path(resolve_path(init, run.get("directory")))
            # As a path, a name would be below the current directory, which may be that of another run.
            earlier = None if is_name else _run_directory(initial)
            started_from = init.removeprefix(hub.PREFIX) if is_name else (earlier or initial).resolve().name
        history.append(_stage(path, run, started_from, warn))
        if isinstance(init, str):
            history[-1] = replace(history[-1], hub_base=hub.owner_and_name(init))
        path = earlier
    return history[::-1]


def _run_directory(path: Path) -> Path | None:
    """Return the run directory of a path given to --init: a run, its exported model, or one of its checkpoints."""
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "run.json").is_file():
            return folder
    return None


def _stage(path: Path, run: dict[str, Any], started_from: str | None, warn: Warn) -> RunStage:
    config = mapping(run.get("config"))
    data, align = mapping(config.get("data")), mapping(config.get("align"))
    kind = align.get("name")
    specs = [s for s in (align.get("data") or data.get("sources") or []) if isinstance(s, str)]
    folder = data.get("path")
    index = _index(Path(resolve_path(folder, run.get("directory")))) if isinstance(folder, str) else None
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
        started_from=started_from,
    )


def _index(folder: Path) -> DatasetIndex | None:
    """Return the index of prepared text or conversations, or None if there is no valid one in `folder`."""
    try:
        return read_index(folder)
    except (UsageError, RunError, OSError):
        return None


def _sources(index: DatasetIndex, bundled: bool) -> list[SourceShare]:
    """Return the sources of the training split, largest first."""
    licences = _bundled_licences() if bundled else {}
    shares = []
    for tag, (documents, tokens) in index.splits["train"].counts_by_tag().items():
        info = index.tags[tag]
        shares.append(
            SourceShare(info.source, info.lang, documents, tokens, licences.get(info.source.split(":")[0]))
        )
    return shares


def _bundled_licences() -> dict[str, str]:
    """Return the licences of the bundled texts by source name, from the tables in LICENCES.md."""
    text = (files("deskside.data") / "bundled" / "LICENCES.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    source_rows = [row for row in rows if row[0].startswith("`")]
    return {row[0].strip("`").removesuffix(".txt"): row[-1] for row in source_rows}


def _energy(run_dir: Path, warn: Warn) -> EnergyUse | None:
    log = read_metrics(run_dir)
    if damaged := log.damaged + log.partial:
        warn(f"{run_dir / 'metrics.jsonl'}: {plural(damaged, 'damaged line')} not counted in the energy")
    return energy_use(log.rows)


def energy_use(metrics: Sequence[Mapping[str, Any]]) -> EnergyUse | None:
    """Return the energy of the logged steps that have a power reading, or None if there is none.

    The time of a step is its tokens divided by its tokens per second, so pauses between steps do not count.
    metrics: the rows of metrics.jsonl.
    """
    joules, steps, tokens_before = 0.0, 0, 0.0
    rows = [row for row in metrics if number(row.get("tokens")) is not None]
    for row in rows:
        tokens, speed, watts = (number(row.get(key)) for key in ("tokens", "tokens_per_second", "watts"))
        if tokens is not None and watts is not None and speed and tokens > tokens_before:
            joules += watts * (tokens - tokens_before) / speed
            steps += 1
        tokens_before = tokens or 0.0
    kilowatt_hours = joules / 3.6e6
    return EnergyUse(kilowatt_hours, steps, len(rows)) if steps else None


def _object(path: Path, warn: Warn) -> dict[str, Any]:
    """Return a JSON object of the run, or {} if the file is missing, or, after a warning, if it is damaged."""
    value, problem = read_object(path)
    if problem and problem != MISSING:
        warn(f"{path}: {problem}; it is left out of the model card")
    return value
