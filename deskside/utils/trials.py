"""Results of trials and self-checks that are kept for later runs: CACHE/trials/KIND-HASH.json.

    {"schema": 1, "kind": "attention", "key": {"machine": {...}, "spec": {...}}, "result": {...}, "digest": "...",
     "seconds": 3.1, "when": "2026-11-23T20:14:03+00:00"}

A result is valid for one machine (`machine.Machine.key`: card, driver, power limit, versions of torch and Triton, a
digest of the code of a step and of its checks) and one specification of the problem. There is one file per key. It is
replaced as a whole, so several processes may write at the same time, and the last one wins.

The cache only saves time: if a file is damaged or cannot be written, one line says so and the trial is repeated.
"""

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import cache_folder, replace_atomically
from deskside.utils.machine import this_machine
from deskside.utils.parsing import json_value

SCHEMA = 1


@dataclass(frozen=True)
class KeptTrial:
    """A kept result. seconds: how long the trial took."""

    kind: str
    key: Mapping[str, Any]
    result: Mapping[str, Any]
    seconds: float
    when: str


@dataclass
class TrialCache:
    """The kept results in a folder. Without a folder, nothing is read or kept.

    If the machine cannot be identified, nothing is kept either, and one line says why.
    """

    folder: Path | None = field(default_factory=lambda: cache_folder() / "trials")

    @cached_property
    def machine(self) -> dict[str, Any] | None:
        """The part of every key that identifies this machine; None if it cannot be identified."""
        try:
            return this_machine().key()
        except (UsageError, RunError) as error:
            say(f"trials are not kept: {error}")
            return None

    def find(self, kind: str, spec: Mapping[str, Any]) -> KeptTrial | None:
        """Return the kept result for this machine and specification, or None."""
        path = self._path(kind, spec)
        if path is None or not path.exists():
            return None
        try:
            trial = _read(path)
        except (OSError, ValueError) as error:
            say(f"{path}: cannot be used ({error}); the trial is repeated")
            return None
        return trial if trial is not None and _digest(trial.key) == _digest(self._key(spec)) else None

    def keep(self, kind: str, spec: Mapping[str, Any], result: Mapping[str, Any], seconds: float) -> None:
        """Keep a result, which must be JSON. If it cannot be written, print a line."""
        path = self._path(kind, spec)
        if path is None:
            return
        content = {
            "schema": SCHEMA,
            "kind": kind,
            "key": self._key(spec),
            "result": result,
            "digest": _digest(result),
            "seconds": round(seconds, 3),
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(path, path.with_name(f".{path.name}.{os.getpid()}")) as temporary:
                temporary.write_text(json.dumps(content, indent=1), "utf-8")
        except (OSError, RunError) as error:
            say(f"the result of a trial is not kept: {error}")

    def trials(self) -> list[KeptTrial]:
        """Return all readable results, of other machines and versions too, the newest first."""
        found = []
        for path in self._files():
            try:
                trial = _read(path)
            except (OSError, ValueError):
                continue
            if trial is not None:
                found.append(trial)
        return sorted(found, key=lambda trial: trial.when, reverse=True)

    def clear(self) -> int:
        """Delete all results and return their number. Raises RunError."""
        files = self._files()
        try:
            for path in files:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{error.filename}: cannot be deleted: {error.strerror}") from None
        return len(files)

    def _files(self) -> list[Path]:
        return [] if self.folder is None else sorted(self.folder.glob("*.json"))

    def _key(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        return {"machine": self.machine, "spec": dict(spec)}

    def _path(self, kind: str, spec: Mapping[str, Any]) -> Path | None:
        if self.folder is None or self.machine is None:
            return None
        return self.folder / f"{kind}-{_digest(self._key(spec))}.json"


NO_CACHE = TrialCache(None)


def _digest(value: Any) -> str:
    """Return a digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> KeptTrial | None:
    """Read a file; None for one of another schema. Raises OSError, and ValueError for a damaged one."""
    content = json_value(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("is damaged")
    if content.get("schema") != SCHEMA:
        return None
    fields = ("kind", "key", "result", "seconds", "when")
    if not content.keys() >= {*fields, "digest"} or _digest(content["result"]) != content["digest"]:
        raise ValueError("is damaged")
    return KeptTrial(*(content[name] for name in fields))
