"""Evaluation tasks, described as data (tasks.toml), and their selection.

A task says where its records are, how a record becomes a prompt, and how an answer is judged. Templates are Python's
format strings over a record's fields. A folder of data may define further tasks in its own tasks.toml.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from deskside.config.base import Part, first_problem
from deskside.data.corpus.sources import kind_of
from deskside.evaluate.datasets import READERS
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, toml_table

HUB = "hf:"
DEPTH = 3  # folders below the one that is given
FIELDS = {"shots_same", "gold", "options", "references"}  # name a field of a record
TEMPLATES = {"prompt", "choices", "answer", "reference", "tests", "chat_prompt", "entry_point", "helpers"}
WHERE = (
    "give --tasks-dir DIR, a folder with llm-foundry's scripts/eval/local_data or files like them, "
    "or --tasks-dir hf: to read from the Hugging Face hub"
)


class Hub(Part):
    """A dataset on the hub, and the function of datasets.py that converts its records."""

    source: str
    reader: str

    @field_validator("reader")
    @classmethod
    def _is_known(cls, reader: str) -> str:
        if reader not in READERS:
            raise ValueError(f"{reader!r} is none of {', '.join(READERS)}")
        return reader


class _Base(Part):
    """Fields of every kind of task.

    files: patterns of file names, the best first. shots: solved examples before each question. shots_same: a field that
    examples must have in common with the question. core_shots: how many the CORE metric gives this task; None: it is
    not part of it. chance: the accuracy of guessing. spread: a limit takes records from the whole file, not the first.
    """

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    hub: Hub | None = None
    prompt: str
    between: str = "\n\n"
    shots: Annotated[int, Field(ge=0)] = 0
    shots_same: str | None = None
    core_shots: Annotated[int, Field(ge=0)] | None = None
    chance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    spread: bool = False

    @model_validator(mode="after")
    def _templates_can_be_read(self) -> Self:
        for name in TEMPLATES & set(type(self).model_fields):
            value = getattr(self, name)
            for template in [value] if isinstance(value, str) else value:
                try:
                    list(Formatter().parse(template))
                except ValueError as error:
                    raise ValueError(f"{name}: {template!r} is no template ({error})") from None
        return self


class Choice(_Base):
    """Multiple choice: the most probable answer after the prompt.

    choices: the field that holds them, or one template each. gold: the field with the right one's number, from 0.
    score: which accuracy is the task's own: of plain sums of log p, per character, or per byte of the answer.
    """

    kind: Literal["choice"]
    choices: str | tuple[str, ...] = "choices"
    gold: str = "gold"
    delimiter: str = " "
    score: Literal["acc", "acc_norm", "acc_bytes"] = "acc"


class Schema(_Base):
    """The context after which the same continuation is most probable. `prompt` is the continuation."""

    kind: Literal["schema"]
    options: str = "context_options"
    gold: str = "gold"
    delimiter: str = " "


class CompletionTask(_Base):
    """Correct if greedy decoding produces exactly the answer."""

    kind: Literal["completion"]
    answer: str
    delimiter: str = " "


class Generated(_Base):
    """Generated text up to a stop string. `answer` is that of an example, as it follows the prompt."""

    answer: str = ""
    stop: tuple[str, ...] = ()
    max_new_tokens: Annotated[int, Field(ge=1)] = 256


class Number(Generated):
    """Correct if the generated text ends with the number `reference`."""

    kind: Literal["number"]
    reference: str


class Match(Generated):
    """Correct if the text is one of the field `references`, ignoring case, articles and punctuation."""

    kind: Literal["match"]
    references: str


class CodeTask(Generated):
    """Correct if the generated code passes the tests in the sandbox.

    chat_prompt: what a chat model is asked. entry_point: the function under test. helpers: trusted source whose other
    definitions the tests use; without it they use those of the written code.
    """

    kind: Literal["code"]
    tests: str
    entry_point: str = ""
    helpers: str = ""
    chat_prompt: str


Task = Annotated[Choice | Schema | CompletionTask | Number | Match | CodeTask, Field(discriminator="kind")]
_TASKS: TypeAdapter[dict[str, Task]] = TypeAdapter(dict[str, Task])
GROUPS = ("core", "all")


@dataclass(frozen=True)
class SelectedTask:
    """A task to evaluate, with its number of few-shot examples and its data: a file or a hub dataset."""

    name: str
    task: Task
    shots: int
    source: str
    core: bool


@dataclass(frozen=True)
class TaskSelection:
    """The tasks to evaluate. `left_out` are tasks of a group whose data was not found."""

    chosen: tuple[SelectedTask, ...]
    left_out: tuple[str, ...]


@cache
def known() -> dict[str, Task]:
    """Return the built-in tasks."""
    return _read(files("deskside.evaluate").joinpath("tasks.toml").read_text("utf-8"), "tasks.toml")


def select(names: Sequence[str], folder: str | None, shots: int | None = None) -> TaskSelection:
    """Select tasks by name or group ("core", "all"), with their data under `folder` or, for "hf:", on the hub.

    A group takes what has data; a name must have it. Raises UsageError for a name that is not known, for no data, and
    for a damaged tasks.toml.
    """
    tasks = dict(known())
    root: Path | None = None
    if folder is None:
        root = None
    elif folder != HUB:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise UsageError(f"--tasks-dir {folder}: no such folder; {WHERE}")
        tasks |= _own(root, tasks)
    unknown = next((name for name in names if name not in tasks and name not in GROUPS), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, [*tasks, *GROUPS], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join([*GROUPS, *sorted(tasks)])}"
        raise UsageError(f"--tasks {unknown}: there is no such task; {hint}")
    if folder is None:
        raise UsageError(f"--tasks {','.join(names)}: where is the data? {WHERE}")
    found = _listing(root) if root is not None else []
    wanted: dict[str, tuple[bool, bool]] = {}  # name -> (must have data, with CORE's examples)
    for name in names:
        group = [each for each, task in tasks.items() if name == "all" or task.core_shots is not None]
        for member in [name] if name in tasks else group:
            before = wanted.get(member, (False, False))
            wanted[member] = (before[0] or name in tasks, before[1] or name == "core")
    chosen, left_out = [], []
    for name, (needed, core) in wanted.items():
        task = tasks[name]
        source = _source(name, task, root, found, needed)
        if source is None:
            left_out.append(name)
            continue
        own = task.core_shots if core and task.core_shots is not None else task.shots
        chosen.append(
            SelectedTask(name, task, own if shots is None else shots, source, core and shots is None)
        )
    if not chosen:
        raise UsageError(f"--tasks-dir {folder}: holds the data of none of these tasks; {WHERE}")
    return TaskSelection(tuple(chosen), tuple(left_out))


def _source(name: str, task: Task, root: Path | None, found: Sequence[Path], needed: bool) -> str | None:
    """Find a task's data; None if it is missing and optional."""
    if root is None:
        if task.hub is None and needed:
            raise UsageError(
                f"--tasks {name}: is not read from the hub; give --tasks-dir DIR with {task.files[0]}"
            )
        return None if task.hub is None else task.hub.source
    for pattern in task.files:
        matches = [path for path in found if path.match(pattern)]
        if matches:
            return str(matches[0])
    if needed:
        raise UsageError(
            f"--tasks {name}: no file {task.files[0]} in {root} or {DEPTH} folders below; {WHERE}"
        )
    return None


def _listing(root: Path) -> list[Path]:
    """Return files that may hold records, nearest to the root first."""
    found = []
    level = [root]
    for _ in range(DEPTH + 1):
        try:
            entries = sorted(path for folder in level for path in folder.iterdir())
        except OSError as error:
            raise UsageError(
                f"{error.filename}: cannot be listed ({error.strerror}); give --tasks-dir another folder"
            ) from None
        found += [path for path in entries if path.is_file() and kind_of(path) not in (None, ".txt")]
        level = [path for path in entries if path.is_dir() and not path.name.startswith(".")]
    return found


def _own(root: Path, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Return the tasks defined in a data folder."""
    file = root / "tasks.toml"
    if not file.is_file():
        return {}
    own = _read(file.read_bytes(), str(file))
    for name in own:
        if name in tasks or name in GROUPS or "," in name:
            raise UsageError(f"{file}: {name!r} cannot name a task here; give it another name")
    return own


def _read(text: str | bytes, where: str) -> dict[str, Task]:
    try:
        return _TASKS.validate_python(toml_table(text))
    except Unreadable as error:
        raise UsageError(f"{where}: is not valid TOML ({error}); fix it") from None
    except ValidationError as error:
        raise UsageError(f"{where}: {first_problem(error)}; fix it, or remove it") from None
