"""The run directory: plain files that other programs can read as well.

    runs/<name>/run.json         the resolved configuration; when, where and how the run was started
                environment.json hardware and software
                plan.json        planned steps and their revisions, micro-batch, attention backend
                metrics.jsonl    one object per step
                events.log       dated sentences
                checkpoints/     see weights/checkpoint.py
                summary.json     the outcome, written at the end

JSON files are replaced atomically and lines are appended in one write, so a kill leaves at most one half-written
last line, which readers skip and a resumed run removes.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deskside.config.align import GrpoConfig
from deskside.config.base import first_problem
from deskside.config.optim import TABLE_RATES
from deskside.config.run import SCHEMA_VERSION, RunConfig
from deskside.run.continuing import name_in_use
from deskside.utils import hub, strict_json
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import append_line, check_folder, create_folder, sync, write_atomically, write_error
from deskside.utils.parsing import Unreadable, json_value

# Values of options for runs from before an option existed, where its default differs now, by optimizer.
BEFORE_OPTIONS: dict[str | None, dict[str, None]] = {"adamw": dict.fromkeys(TABLE_RATES)}


class RunDirectory:
    """Paths and atomic writes of one run. Only the process with rank 0 writes."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.tokenizer = path / "tokenizer.json"
        self.model = path / "model"

    @staticmethod
    def check_name(root: Path, name: str | None) -> None:
        """Raise UsageError if a name is invalid or in use, or `root` cannot be a folder.

        For an early check, before anything expensive happens.
        """
        check_folder(root, "--runs")
        if name is None:
            return
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            raise UsageError(f"--name {name!r}: must be a plain folder name")
        if (root / name).exists():
            raise name_in_use(root / name)

    @classmethod
    def create(cls, root: Path, name: str | None, default: str) -> "RunDirectory":
        """Create `root`/`name`, which must not exist. Without a name, create `default`, or `default`-2 and so on."""
        path, number = root / (name or default), 2
        try:
            cls.check_name(root, name)
            create_folder(root, "--runs")
            while True:
                try:
                    path.mkdir()
                except FileExistsError:
                    if name is not None:
                        raise name_in_use(path) from None
                    path, number = root / f"{default}-{number}", number + 1
                else:
                    (path / "checkpoints").mkdir()
                    return cls(path)
        except OSError as error:
            raise RunError(f"{error.filename or path}: cannot be created: {error.strerror}") from None

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open an existing run. Raises UsageError if there is none."""
        if not (path / "run.json").is_file():
            there = Path("runs") / path
            hint = (
                f"did you mean {there}?"
                if (there / "run.json").is_file()
                else "runs are made by: deskside train PRESET"
            )
            raise UsageError(f"{path}: is not a run (no run.json); {hint}")
        return cls(path)

    @contextlib.contextmanager
    def lock_for_training(self, is_rank_zero: bool) -> Iterator[None]:
        """Lock the run for training, in the process of rank 0 only, until the block or the process ends.

        Raises UsageError if another process is training this run.
        """
        if not is_rank_zero:
            yield
            return
        with self.lock(".lock", "is training this run"):
            yield

    @contextlib.contextmanager
    def lock(self, file_name: str, activity: str) -> Iterator[None]:
        """Lock a file of the run. Raises UsageError if another process holds the lock.

        activity: what the other process does, for the message, such as "is training this run".
        """
        with (self.path / file_name).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"{self.path}: another process {activity}; stop it first") from None
            with contextlib.suppress(OSError):  # a lock that does not name its place still locks
                file.truncate(0)
                file.write(place_of_locks())
                file.flush()
            yield

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run. Raises RunError if it is missing or damaged."""
        try:
            value = json_value((self.path / name).read_bytes())
        except FileNotFoundError:
            raise RunError(
                f"{self.path / name}: is missing; the run cannot be continued without it"
            ) from None
        except Unreadable as error:
            raise RunError(
                f"{self.path / name}: is damaged ({error}); restore it or start a new run"
            ) from None
        if not isinstance(value, dict):
            raise RunError(f"{self.path / name}: is damaged (no JSON object); restore it or start a new run")
        return value

    def config(self) -> RunConfig:
        """Return the run's configuration from run.json, with its paths resolved. Raises RunError if it is invalid."""
        run = self.read_json("run.json")
        try:
            config = RunConfig.model_validate(_with_options_before_they_existed(run["config"]))
        except (KeyError, TypeError, ValueError) as error:
            reason = first_problem(error) if isinstance(error, ValidationError) else "it has no config"
            raise RunError(f"{self.path / 'run.json'}: has no valid run configuration ({reason})") from None
        if run.get("schema_version") != SCHEMA_VERSION:
            raise RunError(
                f"{self.path / 'run.json'}: has schema version {run.get('schema_version')}; this version of deskside "
                f"reads only {SCHEMA_VERSION}"
            )
        return with_resolved_paths(config, run)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace a JSON file atomically."""
        write_atomically(self.path / name, strict_json.dumps(value, indent=1) + "\n")

    def event(self, text: str) -> None:
        """Append a dated sentence to events.log."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        append_line(self.path / "events.log", f"{now} {text}")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append the metrics of one step to metrics.jsonl. Numbers that are not finite become null."""
        append_line(self.metrics, strict_json.dumps(row))

    def sync_metrics(self) -> None:
        """Flush metrics.jsonl to the disk. Called before a checkpoint is saved, so that its steps are never lost.

        Raises RunError if the disk fails.
        """
        try:
            for path in (self.metrics, self.path):  # the folder contains the file's name
                if path.exists():  # the file is missing if no step has been logged yet
                    sync(path)
        except OSError as error:
            raise write_error(self.metrics, error) from None

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of metrics.jsonl, without a half-written last line. Raises RunError if a line is damaged."""
        if self.metrics.exists():
            with self.metrics.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        yield self._parse_row(number, line)

    def _parse_row(self, number: int, line: bytes) -> dict[str, Any]:
        reason = "it holds no step"
        try:
            row = json_value(line)
        except ValueError as error:
            row, reason = None, str(error)
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise RunError(
                f"{self.metrics}: line {number} is damaged ({reason}); delete that line and resume"
            )
        return row

    def has_begun(self) -> bool:
        """Return True if the run has a checkpoint (even a damaged one) or a logged step."""
        entries = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return any(not entry.name.startswith(".tmp-") for entry in entries) or any(self.read_metrics())

    def cut_metrics(self, step: int) -> int:
        """Remove the rows after `step` from metrics.jsonl, since a resumed run repeats them. Returns their number."""
        rows = list(self.read_metrics())
        kept = [row for row in rows if row["step"] <= step]
        write_atomically(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        return len(rows) - len(kept)


def place_of_locks() -> str:
    """Return an identifier of this boot and container, within which processes see each other's locks.

    A lock's file names the place where it was taken. The identifier is empty if the system provides none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}\n"
    except OSError:
        return ""


def resolve_path(path: str, directory: object) -> str:
    """Resolve a path of a configuration, which is relative to the directory where the run was started.

    directory: the directory from run.json; anything but a string means that it is unknown. If the path exists only
    in the current directory, because the files were moved, it is returned unchanged. So is the name of a hub model.
    """
    is_name = path.startswith(hub.PREFIX) or Path(path).is_absolute()
    if not isinstance(directory, str) or is_name or Path(directory) == Path.cwd():
        return path
    resolved = Path(directory) / path
    was_moved = not resolved.exists() and Path(path).exists()
    return path if was_moved else str(resolved)


def _with_options_before_they_existed(config: Any) -> Any:
    """Return a recorded configuration, with missing options filled in from `BEFORE_OPTIONS`.

    A recorded configuration has every option, so a run without the key is older than the option.
    """
    optim = config.get("optim") if isinstance(config, dict) else None
    if not isinstance(optim, dict):  # `RunConfig` has the message for it
        return config
    return {**config, "optim": {**BEFORE_OPTIONS.get(optim.get("name"), {}), **optim}}


def with_resolved_paths(config: RunConfig, run: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with `data.path` and the files of `align.reward` and `align.tools` resolved.

    run: the content of run.json, with the directory where the run was started.
    """
    directory = run.get("directory")
    if config.data.path is not None:
        data = config.data.model_copy(update={"path": resolve_path(config.data.path, directory)})
        config = config.model_copy(update={"data": data})
    if isinstance(config.align, GrpoConfig):
        for name in ("reward", "tools"):
            value = getattr(config.align, name)
            if value is not None and ".py:" in value:
                file, _, functions = value.rpartition(":")
                align = config.align.model_copy(update={name: f"{resolve_path(file, directory)}:{functions}"})
                config = config.model_copy(update={"align": align})
    return config
