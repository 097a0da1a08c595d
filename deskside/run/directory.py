"""The run directory, readable without deskside.

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
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deskside.config.align import GrpoConfig
from deskside.config.base import first_problem
from deskside.config.run import SCHEMA_VERSION, RunConfig
from deskside.utils import strict_json
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import append_line, sync, write_atomically, write_error
from deskside.utils.parsing import Unreadable, json_value


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
        """Raise UsageError for an invalid or used name, before anything expensive happens."""
        if name is None:
            return
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            raise UsageError(f"--name {name!r}: must be a plain folder name")
        if (root / name).exists():
            path = root / name
            raise UsageError(
                f"{path} exists; choose another --name, or continue it with: deskside train --resume {path}"
            )

    @classmethod
    def create(cls, root: Path, name: str | None, default: str) -> "RunDirectory":
        """Create a directory. A given name must be free; the default gets a number if it is not."""
        path, number = root / (name or default), 2
        try:
            cls.check_name(root, name)
            root.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    path.mkdir()
                except FileExistsError:
                    if name is not None:
                        raise UsageError(
                            f"{path} exists; choose another --name, or continue it with: deskside train --resume {path}"
                        ) from None
                    path, number = root / f"{default}-{number}", number + 1
                else:
                    (path / "checkpoints").mkdir()
                    return cls(path)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"--runs {root}: is a file, or lies below one; give a folder") from None
        except OSError as error:
            raise RunError(f"{error.filename or path}: cannot be created: {error.strerror}") from None

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open an existing run. Raises UsageError if there is none."""
        if not (path / "run.json").is_file():
            raise UsageError(f"{path}: is not a run (no run.json); runs are made by: deskside train PRESET")
        return cls(path)

    @contextlib.contextmanager
    def held(self, first: bool) -> Iterator[None]:
        """Lock the run for training. The lock ends with the process; only the process with `first` takes it.

        Raises UsageError if another process is training this run.
        """
        if not first:
            yield
            return
        with self.alone(".lock", "is training this run"):
            yield

    @contextlib.contextmanager
    def alone(self, lock: str, doing: str) -> Iterator[None]:
        """Lock the file `lock` of the run. Raises UsageError if another process, `doing` something, holds it."""
        with (self.path / lock).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"{self.path}: another process {doing}; stop that one first") from None
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
        """Return the run's configuration with its paths resolved. Raises RunError if run.json is invalid."""
        run = self.read_json("run.json")
        try:
            config = RunConfig.model_validate(run["config"])
        except (KeyError, TypeError, ValueError) as error:
            reason = first_problem(error) if isinstance(error, ValidationError) else "it has no config"
            raise RunError(f"{self.path / 'run.json'}: has no valid run configuration ({reason})") from None
        if run.get("schema_version") != SCHEMA_VERSION:
            raise RunError(
                f"{self.path / 'run.json'}: has schema version {run.get('schema_version')}; this deskside reads "
                f"{SCHEMA_VERSION}"
            )
        return reached_by(config, run)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace a JSON file atomically."""
        write_atomically(self.path / name, strict_json.dumps(value, indent=1) + "\n")

    def event(self, text: str) -> None:
        """Append a dated sentence to events.log."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        append_line(self.path / "events.log", f"{now} {text}")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append the metrics of one step. Numbers that are not finite become null, as JSON has no NaN."""
        append_line(self.metrics, strict_json.dumps(row))

    def sync_metrics(self) -> None:
        """Sync the logged steps, so that a checkpoint never survives a crash that loses the rows of its steps.

        Raises RunError if the disk fails.
        """
        try:
            for path in (self.metrics, self.path):  # and the folder, which holds the file's name
                if path.exists():  # no step has been logged before the first checkpoint
                    sync(path)
        except OSError as error:
            raise write_error(self.metrics, error) from None

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the logged steps, skipping a half-written last line. Raises RunError naming a damaged line."""
        if self.metrics.exists():
            with self.metrics.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        yield self._row(number, line)

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
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
        """Return whether the run has a checkpoint (even a damaged one) or a logged step."""
        entries = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return any(not entry.name.startswith(".tmp-") for entry in entries) or any(self.read_metrics())

    def cut_metrics(self, step: int) -> int:
        """Drop rows after `step`, so that a repeated step is logged once. Returns the number of dropped rows."""
        rows = list(self.read_metrics())
        kept = [row for row in rows if row["step"] <= step]
        write_atomically(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        return len(rows) - len(kept)


def reached(path: str, directory: object) -> str:
    """Resolve a path of a configuration, which refers to the directory where the run was started.

    directory: that directory, if known. A path that no longer exists there, because the tree was moved,
    is also looked up from the current directory.
    """
    if not isinstance(directory, str) or Path(path).is_absolute() or Path(directory) == Path.cwd():
        return path
    there = Path(directory) / path
    return path if not there.exists() and Path(path).exists() else str(there)


def reached_by(config: RunConfig, run: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the paths of its data and reward file resolved. run: the content of run.json."""
    directory = run.get("directory")
    if config.data.path is not None:
        data = config.data.model_copy(update={"path": reached(config.data.path, directory)})
        config = config.model_copy(update={"data": data})
    if isinstance(config.align, GrpoConfig) and ".py:" in config.align.reward:
        file, _, function = config.align.reward.rpartition(":")
        align = config.align.model_copy(update={"reward": f"{reached(file, directory)}:{function}"})
        config = config.model_copy(update={"align": align})
    return config
