"""The common steps of `deskside sft`, `dpo`, `kto` and `grpo`: load a model, prepare the data, train, write the report.

Each command is a subclass of `FinetuneRun`, which defines how its data is prepared and its training defaults.
"""

import contextlib
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import deskside
from deskside.cli.finetune_defaults import DOCUMENT_MASK, FinetuneDefaults
from deskside.cli.options import Command, option
from deskside.cli.shared_options import (
    MODEL_HELP,
    REVISION_HELP,
    RunOptions,
    launch,
    must_launch,
    process_count,
    set_length,
    set_trackers,
)
from deskside.cli.train import config_to_resume, resume
from deskside.config import merge, presets
from deskside.config.dimensions import padded_vocabulary
from deskside.config.duration import Duration
from deskside.config.run import RunConfig
from deskside.data.reading.index_file import INDEX
from deskside.run.continuing import check_unfinished
from deskside.run.directory import RunDirectory
from deskside.train.preflight import set_cublas_workspace
from deskside.train.time_budget import TooShortError
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.hub import short_name, with_revision
from deskside.utils.progress import time_limit
from deskside.utils.quick_start import quick_imports

PREPARE_SHARE = 0.5  # maximum share of a run's time limit for starting and preparing the data
WAIT_SECONDS = 24 * 3600  # how long other ranks wait for rank 0 to prepare the data
# Configuration keys in the short help.
COMMON = ("optim.lr", "batch.tokens", "batch.sequence_length", "adapter.rank", "precision.name", "seed")


@dataclass(kw_only=True)
class FinetuneOptions(RunOptions):
    """Options of every fine-tuning command."""

    source: str | None = option(
        f"model to start from: {MODEL_HELP}",
        None,
        metavar="MODEL",
        positional=True,
    )
    revision: str | None = option(REVISION_HELP, None, metavar="REV")
    resume_from: str | None = option(
        "continue to train the adapters of this PEFT directory; its base is the model to start from",
        None,
        metavar="PEFT_DIR",
    )
    # The field is not named `data` because the configuration has a part `data`.
    sources: tuple[str, ...] = option(
        "training data: .jsonl[.gz|.zst], .parquet, a directory, hf:owner/name",
        (),
        name="data",
        metavar="SOURCE",
    )
    config: str | None = option(
        "TOML file of options, such as that of deskside import-config; options on the command line take precedence",
        None,
        metavar="FILE",
    )
    val: tuple[str, ...] = option("held-out data; default: a share of --data", (), metavar="SOURCE")
    epochs: str | None = option("length in passes over the data", None, metavar="E")


@dataclass(frozen=True)
class PreparedData:
    """Training data that a run prepares, or reuses if an earlier run has prepared it.

    Attributes:
        source: The first source; the name of the folder contains its name.
        kind: Kind of the data; part of the name of the folder.
        noun: Plural noun for the examples in messages.
        key: Hash that identifies the data and the tokenizer.
        key_of: Returns the key of a prepared folder, None if it has none.
        prepare: Prepares the data in a folder.
    """

    source: str
    kind: str
    noun: str
    key: str
    key_of: Callable[[Path], str | None]
    prepare: Callable[[Path], object]

    def folder(self, data_path: str | None) -> Path:
        """Return the folder of the prepared data. Rank 0 prepares it if needed; other ranks wait for it.

        data_path: --data.path; by default, the folder is in data/. Raises UsageError if the folder holds other data.
        """
        name = Path(self.source.removeprefix("hf:").rstrip("/")).name.split(":")[0].split(".")[0] or "data"
        path = (
            Path("data") / f"{name}-{self.kind}-{self.key}"
            if data_path is None
            else Path(os.path.expanduser(data_path))
        )
        index, deadline = path / INDEX, time.monotonic() + WAIT_SECONDS
        while not index.is_file() and int(os.environ.get("RANK", "0")) and time.monotonic() < deadline:
            time.sleep(0.5)
        if not index.is_file():
            self.prepare(path)
        if self.key_of(path) not in (self.key, None):
            raise UsageError(
                f"--data.path {path}: holds other {self.noun}, or is for another tokenizer; give another path, or "
                f"leave it out"
            )
        return path


class FinetuneRun:
    """One fine-tuning command, from its arguments to its report."""

    command: ClassVar[Command[Any]]
    example: ClassVar[str]  # name of a data file, for usage errors
    defaults: ClassVar[FinetuneDefaults]

    def __init__(self, argv: Sequence[str]):
        self.argv = argv
        self.options, self.given = self.command.parse_config(argv)
        self.name = self.command.name

    def check(self) -> None:
        """Check the objective's own options before anything is loaded. Raises UsageError."""

    def data(self, tokenizer: Path) -> PreparedData:
        """Return the data of the objective."""
        raise NotImplementedError

    def batch(self, loaded: Any, data: Path, vocab_size: int) -> dict[str, int]:
        """Return the default batch for a loaded model and its prepared data. vocab_size: of the chat tokenizer."""
        raise NotImplementedError

    def run(self) -> int:
        """Run the command and return its exit code. Raises UsageError and RunError."""
        options, given = self.options, self.given
        if options.resume is not None:
            return self._resume()
        if options.config is not None:
            self._read_config(options.config)
        self._require_arguments()
        self.processes = process_count(options.gpus, [given])
        set_length(given, options, f"{self.defaults.epochs} epochs")
        set_trackers(given, options.track)
        self.align = objective_config(self.name, options, given)
        self.check()
        is_rank_zero = int(os.environ.get("RANK", "0")) == 0
        if is_rank_zero:  # for other ranks, rank 0 may have created the directory already
            RunDirectory.check_name(Path(options.runs), options.name)
        if must_launch(self.processes):
            return launch(self.name, self.argv, self.processes)
        loaded = self._load()
        merge.refuse_other_model(loaded.config, given, loaded.source)
        with tempfile.TemporaryDirectory() as folder:
            chat = _chat_tokenizer(loaded, self.align.template, Path(folder))
            with _time_limit(wall_limit(given)):
                data = self.data(Path(folder)).folder(given.get("data", {}).get("path"))
        config = self._configure(loaded, data, chat.vocab_size)
        if is_rank_zero and data.parent == Path("data"):  # the default folder
            say(f"data: prepared in {data}; later runs reuse it")
        from deskside.cli.answer import finish  # imports rich, which takes time

        return finish(self._train(config, loaded, chat.reinitialized), self.name, options.json)

    def _load(self) -> Any:
        """Return the model to start from. With --resume-from, `self.adapters` are set, and their options are given."""
        options = self.options
        with quick_imports():
            from deskside.weights.load import load_base, load_model
            from deskside.weights.peft_training import adapter_options

        if options.source is None and options.revision is not None:
            raise UsageError(f"--revision {options.revision}: name the model that has this revision too")
        source = None if options.source is None else with_revision(options.source, options.revision)
        self.adapters: Any = None
        if options.resume_from is None:
            return load_model(str(source))
        loaded, self.adapters = load_base(options.resume_from, source)
        wanted = adapter_options(self.adapters, loaded.config)
        given = self.given.get("adapter", {})
        for key in sorted(given.keys() & wanted.keys() - {"dropout"}):
            raise UsageError(
                f"--adapter.{key}: the adapters of {options.resume_from} have their own; leave it out"
            )
        self.given["adapter"] = {**wanted, **given}
        return loaded

    def _read_config(self, file: str) -> None:
        """Merge the keys of a TOML file under those given on the command line.

        Raises UsageError if it is for another command, or not valid.
        """
        layer = merge.merge(presets.layers(file))[0]
        for part, info in RunConfig.model_fields.items():
            if merge.parts_of(info.annotation) and not isinstance(layer.get(part, {}), dict):
                raise UsageError(f"--config {file}: {part} must be a table; write its keys below [{part}]")
        align = layer.get("align", {})
        if align.pop("name", self.name) != self.name:
            raise UsageError(f"--config {file}: its table [align] is for another command than {self.name}")
        options = self.options
        for own, key in (("sources", "data"), ("val", "val")):
            from_file = align.pop(key, [])
            if not isinstance(from_file, str | list):
                raise UsageError(f"--config {file}: align.{key}: give one source, or a list of sources")
            from_file = (from_file,) if isinstance(from_file, str) else tuple(from_file)
            setattr(options, own, getattr(options, own) or from_file)
        lengths = ("hours", "steps", "tokens", "epochs")
        if any(getattr(options, name, None) is not None for name in lengths):
            layer.get("schedule", {}).pop("length", None)
        given, _ = merge.merge([layer, self.given])
        self.given.clear()
        self.given.update(given)

    def _require_arguments(self) -> None:
        """Raise UsageError if the model or the data is missing."""
        source, usage = self.options.source, f"deskside {self.name} runs/NAME --data {self.example}"
        if source is None and self.options.resume_from is None:
            raise UsageError(f"MODEL is missing: name the model to start from: {usage}")
        if str(source).endswith(".toml"):
            raise UsageError(
                f"{source}: deskside {self.name} starts from a model, not from a .toml file; write the file's keys as "
                f"options: {usage} --optim.lr 1e-5"
            )
        if not self.options.sources:
            raise UsageError(f"--data is required: {usage}")

    def _configure(self, loaded: Any, data: Path, vocab_size: int) -> RunConfig:
        """Return the run's configuration: the given options on top of the objective's defaults."""
        batch = self.batch(loaded, data, vocab_size)
        model = loaded.config.model_dump(mode="json")
        if vocab_size > model["vocab_size"]:
            model["vocab_size"] = padded_vocabulary(vocab_size)
        default_layer = {
            **self.defaults.layer(model["hidden_size"], self.given),
            "align": self.align.model_dump(mode="json"),
            "batch": batch,
        }
        given = {part: values for part, values in self.given.items() if part != "align"}
        given["data"] = {**given.get("data", {}), "path": str(data)}
        return merge.build([default_layer, *merge.resolved_layers("model", model), given])

    def _train(self, config: RunConfig, loaded: Any, fresh_tokens: Sequence[int]) -> Any:
        """Train and return a `training_run.RunOutcome`. fresh_tokens: ids of tokens without a trained embedding."""
        options, source = self.options, loaded.source
        set_cublas_workspace(config)
        from deskside.align import objective_of
        from deskside.train import training_run
        from deskside.train.loop.callbacks import ReserveReportTime
        from deskside.train.state.init_weights import InitialWeights

        return training_run.start(
            config,
            (Path(options.runs), options.name, f"{short_name(source)}-{self.name}"),
            shlex.join(["deskside", self.name, *self.argv]),
            replace(InitialWeights.of_chat(loaded, source, config, fresh_tokens), adapters=self.adapters),
            objective=objective_of(config),
            watch=ReserveReportTime(),
        )

    def _resume(self) -> int:
        """Continue the run of --resume, and return the exit code. Raises UsageError and RunError."""
        options = self.options
        other = (
            "source",
            "revision",
            "resume_from",
            "config",
            "sources",
            "val",
            "name",
            "hours",
            "steps",
            "tokens",
            "track",
            "epochs",
            "questions",
        )
        moved = options.runs != type(options).runs
        if self.given or moved or any(getattr(options, name, None) for name in other):
            raise UsageError(
                "--resume uses the run's own configuration; give no other options with it, but --gpus"
            )
        align = config_to_resume(Path(options.resume)).align
        check_unfinished(Path(options.resume))
        command = align.name if align is not None else "train"
        if self.name not in ("sft", command):  # sft resumes runs of every command
            raise UsageError(
                f"{options.resume}: was made by deskside {command}; continue it with: deskside {command} --resume "
                f"{options.resume}"
            )
        return resume(self.name, self.argv, options)


# Parts of a command


def objective_config(name: str, options: FinetuneOptions, given: dict[str, Any]) -> Any:
    """Return the validated options of the objective. Raises UsageError."""
    align: dict[str, Any] = {"name": name, "data": list(options.sources), "val": list(options.val)}
    return merge.build([{"align": {**align, **given.get("align", {})}}, DOCUMENT_MASK]).align


def wall_limit(given: dict[str, Any]) -> float | None:
    """Return the run's length in seconds if it is given in wall-clock time, else None."""
    schedule = given.get("schedule", {})
    lengths = {key: schedule[key] for key in ("length", *merge.LENGTH_ALIASES) if key in schedule}
    text = merge.merge([{"schedule": lengths}])[0]["schedule"].get("length")
    if text is None or schedule.get("clock", "wall") != "wall":
        return None
    try:
        length = Duration.parse(text)
    except ValueError:
        return None  # the validation of the configuration reports the error
    return length.value if length.unit == "seconds" else None


@contextlib.contextmanager
def _time_limit(limit: float | None) -> Iterator[None]:
    """Raise UsageError if preparing data in the `with` block would take over `PREPARE_SHARE` of the time limit."""
    if limit is None:
        yield
        return
    seconds = max(0.0, PREPARE_SHARE * limit - (time.perf_counter() - deskside.STARTED))

    def error(remaining: float) -> UsageError:
        reason = f"preparing the data takes {remaining:.0f} s more"
        return TooShortError(limit, reason, (limit + remaining) / PREPARE_SHARE)

    with time_limit(seconds, error):
        yield


def _chat_tokenizer(loaded: Any, template: str | None, folder: Path) -> Any:
    """Write the model's tokenizer to `folder` and return it. template: a file with another chat template."""
    from deskside.data.chat import chat_template

    text = None
    if template is not None:
        try:
            text = Path(template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--align.template {template}: cannot be read ({error})") from None
    return chat_template.make_chat_tokenizer(loaded.tokenizer_dir, folder, text)
