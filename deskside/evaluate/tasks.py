"""Evaluation tasks, defined in tasks.toml, and their selection.

A task defines where its records are, how a record becomes a prompt, and how an answer is judged. Templates are Python
format strings over the fields of a record. A data folder may define further tasks in its own tasks.toml.
"""

import difflib
import os
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
MAX_DEPTH = 3  # levels of folders below --tasks-dir that are searched
FIELD_KEYS = {"shots_same", "gold", "options", "references"}  # keys of a task that name a field of a record
TEMPLATE_KEYS = {"prompt", "choices", "answer", "reference", "tests", "chat_prompt", "entry_point", "helpers"}
DATA_HINT = (
    "give --tasks-dir DIR, a folder with llm-foundry's scripts/eval/local_data or files like them, "
    "or --tasks-dir hf: to read from the Hugging Face hub"
)


class Hub(Part):
    """A dataset on the Hugging Face hub, and the reader in datasets.py that converts its records."""

    source: str
    reader: str

    @field_validator("reader")
    @classmethod
    def _is_known(cls, reader: str) -> str:
        return _known_reader(reader)


class DerivedField(Part):
    """A field for templates, which depends on the value of another field: mapped words, or whole conditional texts.

    Attributes:
        of: The field that decides.
        map: Templates by its value; numbers are written as in JSON, and true, false and null too.
        default: Template for other values, and for records that lack the field; None makes such records invalid.
    """

    of: str
    map: dict[str, str] = Field(default_factory=dict)
    default: str | None = None

    @property
    def templates(self) -> tuple[str, ...]:
        return (*self.map.values(), *(() if self.default is None else (self.default,)))

    @model_validator(mode="after")
    def _templates_can_be_read(self) -> Self:
        if not self.templates:
            raise ValueError("has neither map nor default; add map")
        for template in self.templates:
            check_template(template)
        return self


def check_template(template: str) -> None:
    """Raise ValueError if a template is not a Python format string."""
    try:
        list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{template!r} is not a valid template ({error})") from None


def _known_reader(name: str) -> str:
    """Return the name of a reader. Raises ValueError for an unknown one."""
    if name not in READERS:
        raise ValueError(f"{name!r} is not one of {', '.join(READERS)}")
    return name


class _TaskBase(Part):
    """Fields of every kind of task.

    Attributes:
        files: Patterns of file names, in order of preference.
        reader: The reader in datasets.py that converts the records of these files; None if they need no conversion.
        derived: Further fields by name, in order; each may use those before it.
        between: Separator after each few-shot example.
        shots: Number of few-shot examples.
        shots_same: A field in which examples must equal the question.
        core_shots: Number of few-shot examples in the CORE metric; None if the task is not part of it.
        chance: Accuracy of random guessing.
        spread: --limit selects items evenly from the whole file instead of the first ones.
    """

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    reader: str | None = None
    hub: Hub | None = None
    derived: dict[str, DerivedField] = Field(default_factory=dict)
    prompt: str
    between: str = "\n\n"
    shots: Annotated[int, Field(ge=0)] = 0
    shots_same: str | None = None
    core_shots: Annotated[int, Field(ge=0)] | None = None
    chance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    spread: bool = False

    @field_validator("reader")
    @classmethod
    def _is_known(cls, reader: str | None) -> str | None:
        return None if reader is None else _known_reader(reader)

    @model_validator(mode="after")
    def _templates_can_be_read(self) -> Self:
        for name in TEMPLATE_KEYS & set(type(self).model_fields):
            value = getattr(self, name)
            for template in [value] if isinstance(value, str) else value:
                try:
                    check_template(template)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        return self


class Choice(_TaskBase):
    """Multiple choice: the model's answer is the most probable one after the prompt.

    Attributes:
        choices: The field that contains the answers, or one template for each answer.
        gold: The field with the index of the correct answer, from 0.
        delimiter: Text between prompt and answer.
        score: The reported accuracy. Answers are compared by their log-likelihood: not normalized ("acc"), or divided
            by the number of characters ("acc_norm") or bytes ("acc_bytes").
    """

    kind: Literal["choice"]
    choices: str | tuple[str, ...] = "choices"
    gold: str = "gold"
    delimiter: str = " "
    score: Literal["acc", "acc_norm", "acc_bytes"] = "acc"


class Schema(_TaskBase):
    """A Winograd schema: the answer is the context, one of `options`, after which `prompt` is most probable."""

    kind: Literal["schema"]
    options: str = "context_options"
    gold: str = "gold"
    delimiter: str = " "


class CompletionTask(_TaskBase):
    """Correct if greedy decoding produces exactly the answer."""

    kind: Literal["completion"]
    answer: str
    delimiter: str = " "


class Generated(_TaskBase):
    """Generated text up to a stop string. `answer` is the template of the answer in few-shot examples."""

    answer: str = ""
    stop: tuple[str, ...] = ()
    max_new_tokens: Annotated[int, Field(ge=1)] = 256


class Number(Generated):
    """Correct if the number in the generated text equals `reference` (see `final_number`)."""

    kind: Literal["number"]
    reference: str


class Match(Generated):
    """Correct if the generated text equals one of `references`, ignoring case, articles and punctuation.

    references: The field with a text or a list of texts.
    """

    kind: Literal["match"]
    references: str


class Translation(Generated):
    """Generated text that is scored against `references` by BLEU and chrF (see `translation.py`).

    Attributes:
        references: The field with a text or a list of texts.
        tokenize: BLEU's tokenizer: "13a" for most languages, "zh" or "char" for those without spaces.
    """

    kind: Literal["translation"]
    references: str
    tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a"


class CodeTask(Generated):
    """Correct if the generated code passes the tests in the sandbox.

    Attributes:
        tests, entry_point, helpers: See `sandbox.check`.
        chat_prompt: The message to a chat model, instead of `prompt`.
    """

    kind: Literal["code"]
    tests: str
    entry_point: str = ""
    helpers: str = ""
    chat_prompt: str


Task = Annotated[
    Choice | Schema | CompletionTask | Number | Match | Translation | CodeTask, Field(discriminator="kind")
]
_TASKS: TypeAdapter[dict[str, Task]] = TypeAdapter(dict[str, Task])
GROUPS = ("core", "all")


@dataclass(frozen=True)
class SelectedTask:
    """A task to evaluate.

    Attributes:
        shots: Number of few-shot examples.
        source: Its data: a file or a hub dataset.
        core: True if the result counts for the CORE metric.
    """

    name: str
    task: Task
    shots: int
    source: str
    core: bool


@dataclass(frozen=True)
class TaskSelection:
    """The tasks to evaluate. `left_out`: names of tasks of a group whose data was not found."""

    chosen: tuple[SelectedTask, ...]
    left_out: tuple[str, ...]


@cache
def builtin_tasks() -> dict[str, Task]:
    """Return the built-in tasks."""
    return _read(files("deskside.evaluate").joinpath("tasks.toml").read_text("utf-8"), "tasks.toml")


def select(names: Sequence[str], folder: str | None, shots: int | None = None) -> TaskSelection:
    """Select tasks by name or group ("core", "all"), with their data under `folder` or, for "hf:", on the hub.

    Tasks of a group are skipped if their data is missing. Raises UsageError for an unknown name, for missing data of a
    task that is given by name, and for an invalid tasks.toml.

    Args:
        shots: Number of few-shot examples; None for each task's own.
    """
    tasks = dict(builtin_tasks())
    root: Path | None = None
    if folder is not None and folder != HUB:
        root = Path(os.path.expanduser(folder))
        if not root.is_dir():
            raise UsageError(f"--tasks-dir {folder}: no such folder; {DATA_HINT}")
        tasks |= _folder_tasks(root, tasks)
    unknown = next((name for name in names if name not in tasks and name not in GROUPS), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, [*tasks, *GROUPS], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join([*GROUPS, *sorted(tasks)])}"
        raise UsageError(f"--tasks {unknown}: there is no such task; {hint}")
    if folder is None:
        raise UsageError(f"--tasks {','.join(names)}: where is the data? {DATA_HINT}")
    paths = _data_files(root) if root is not None else []
    requested: dict[str, tuple[bool, bool]] = {}  # name -> (given by name, part of the group core)
    for name in names:
        if name in tasks:
            members = [name]
        else:
            members = [n for n, task in tasks.items() if name == "all" or task.core_shots is not None]
        for member in members:
            by_name, core = requested.get(member, (False, False))
            requested[member] = (by_name or name in tasks, core or name == "core")
    chosen, left_out = [], []
    for name, (by_name, core) in requested.items():
        task = tasks[name]
        source = _source(name, task, root, paths, required=by_name)
        if source is None:
            left_out.append(name)
            continue
        default_shots = task.core_shots if core and task.core_shots is not None else task.shots
        # Results with another number of few-shot examples are not comparable with CORE.
        counts_for_core = core and shots is None
        num_shots = default_shots if shots is None else shots
        chosen.append(SelectedTask(name, task, num_shots, source, counts_for_core))
    if not chosen:
        raise UsageError(f"--tasks-dir {folder}: contains no data of these tasks; {DATA_HINT}")
    return TaskSelection(tuple(chosen), tuple(left_out))


def _source(name: str, task: Task, root: Path | None, paths: Sequence[Path], required: bool) -> str | None:
    """Return the data of a task: one of the paths or, without `root`, a hub dataset. None if missing and optional."""
    if root is None:
        if task.hub is None and required:
            raise UsageError(
                f"--tasks {name}: is not read from the hub; give --tasks-dir DIR with {task.files[0]}"
            )
        return None if task.hub is None else task.hub.source
    for pattern in task.files:
        matches = [path for path in paths if path.match(pattern)]
        if matches:
            return str(matches[0])
    if required:
        raise UsageError(
            f"--tasks {name}: no file {task.files[0]} in {root} or {MAX_DEPTH} folders below; {DATA_HINT}"
        )
    return None


def _data_files(root: Path) -> list[Path]:
    """Return the files that may contain records, nearest to the root first."""
    paths: list[Path] = []
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        try:
            entries = sorted(path for folder in level for path in folder.iterdir())
        except OSError as error:
            raise UsageError(
                f"{error.filename}: cannot be listed ({error.strerror}); give --tasks-dir another folder"
            ) from None
        paths += [path for path in entries if path.is_file() and kind_of(path) not in (None, ".txt")]
        level = [path for path in entries if path.is_dir() and not path.name.startswith(".")]
    return paths


def _folder_tasks(root: Path, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Return the tasks defined in a data folder."""
    file = root / "tasks.toml"
    if not file.is_file():
        return {}
    folder_tasks = _read(file.read_bytes(), str(file))
    for name in folder_tasks:
        if name in tasks or name in GROUPS or "," in name:
            raise UsageError(f"{file}: {name!r} cannot be the name of a task; use another name")
    return folder_tasks


def _read(text: str | bytes, where: str) -> dict[str, Task]:
    try:
        return _TASKS.validate_python(toml_table(text))
    except Unreadable as error:
        raise UsageError(f"{where}: is not valid TOML ({error}); fix it") from None
    except ValidationError as error:
        raise UsageError(f"{where}: {first_problem(error)}; fix the file, or remove it") from None
