"""Run all measurements behind the documents, a list of commands, on the GPUs of this machine.

    python -m benchmarks.release --data data/english --sets DATA --out OUT [--only 'step*' parity ...] [--list]
        [--minutes 28] [--gpus 0,1] [--file benchmarks/release.toml ...]

release.toml lists the jobs: the command, the number of GPUs, the jobs that must succeed first, and the document that
contains the results. Jobs start in the order of --only, else of the files. Each has its GPUs to itself, because most of
them measure speed. A job that waits for more GPUs than are free also blocks the later ones, so that it is not starved.

OUT receives a folder and a log for each job, and state.json. Repeating the command skips jobs that succeeded; a job
that failed or was cut off starts again. --minutes is a hard limit: running jobs are then interrupted and may save their
results.

In commands, {data} is the prepared corpus, {sets} the folder of the data sets (sft/, preference/, verifiable/, eval/),
{out} the folder of the job, {work} a folder shared by all jobs, for runs that others start from, and {gpus} the numbers
of the GPUs of the job.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deskside.study.execute.devices import visible
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically

FILE = Path(__file__).with_name("release.toml")
GRACE = 30.0  # seconds between an interrupt and a kill
KEYS = {"name", "run", "gpus", "after", "minutes", "document"}


@dataclass(frozen=True)
class Job:
    """One command. gpus: how many it needs; after: jobs that must succeed first; minutes: its time limit."""

    name: str
    run: str
    gpus: int = 1
    after: tuple[str, ...] = ()
    minutes: float = 20.0
    document: str = ""


@dataclass
class Running:
    """The process of a job, its GPUs, its start time and the time when it will be killed."""

    job: Job
    process: "subprocess.Popen[bytes]"
    gpus: list[str]
    began: float
    log: IO[bytes]
    kill_at: float | None = None


def read(*paths: Path) -> list[Job]:
    """Return the jobs of these files.

    Raises UsageError for unknown keys, duplicate names, and a name in `after` that is not above.
    """
    rows: list[tuple[Path, dict[str, Any]]] = []
    for path in paths:
        try:
            rows += [(path, row) for row in tomllib.loads(path.read_text())["job"]]
        except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
            raise UsageError(f"{path}: cannot be read as a list of jobs: {error}") from None
    jobs: list[Job] = []
    for path, row in rows:
        wrong = set(row) - KEYS
        if wrong or not {"name", "run"} <= set(row):
            raise UsageError(
                f"{path}: a job has a name and a command (run), and may have gpus, after, minutes, document: {row}"
            )
        job = Job(**{**row, "after": tuple(row.get("after", ()))})
        known = {earlier.name for earlier in jobs}
        if job.name in known:
            raise UsageError(f"{path}: two jobs are called {job.name}")
        if missing := set(job.after) - known:
            raise UsageError(
                f"{path}: {job.name} comes after {', '.join(sorted(missing))}, which is not above it"
            )
        jobs.append(job)
    return jobs


def chosen(jobs: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    """Return the jobs with these names (* and ? allowed) in this order, each after its prerequisites.

    Raises UsageError for an unknown name.
    """
    by_name = {job.name: job for job in jobs}
    ordered: dict[str, Job] = {}

    def add(job: Job) -> None:
        for name in job.after:
            add(by_name[name])
        ordered.setdefault(job.name, job)

    for pattern in patterns or ("*",):
        matching = [job for job in jobs if fnmatch.fnmatchcase(job.name, pattern)]
        if not matching:
            raise UsageError(f"--only {pattern}: there is no such job; --list shows them")
        for job in matching:
            add(job)
    return list(ordered.values())


class Release:
    """Runs the jobs. state: job name -> status, as in state.json. words: values of the names in braces in commands."""

    def __init__(self, jobs: Sequence[Job], gpus: Sequence[str], out: Path, words: dict[str, str]):
        self.jobs, self.free, self.out, self.words = list(jobs), list(gpus), out, words
        self.running: list[Running] = []
        self.total = len(gpus)
        out.mkdir(parents=True, exist_ok=True)
        (out / "work").mkdir(exist_ok=True)
        self.state: dict[str, dict[str, Any]] = {}
        if (out / "state.json").exists():
            old = json.loads((out / "state.json").read_text())
            self.state = {name: row for name, row in old.items() if row["status"] == "ok"}

    def run(self, deadline: float) -> int:
        """Run all jobs. Return 0 if each succeeded."""
        stopping = False
        try:
            while True:
                now = time.monotonic()
                self._collect(now)
                if now >= deadline and not stopping:
                    stopping = True
                    for running_job in self.running:
                        self._interrupt(running_job, now)
                if not stopping:
                    self._begin(now)
                if not self.running and (stopping or not self._waiting()):
                    break
                time.sleep(0.2)
        finally:
            for running_job in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running_job.process.pid, signal.SIGKILL)
        return 0 if all(self._status(job.name) == "ok" for job in self.jobs) else 1

    def _status(self, name: str) -> str:
        return str(self.state.get(name, {}).get("status", "waiting"))

    def _waiting(self) -> list[Job]:
        """Return the jobs that can still start: those that do not depend, directly or indirectly, on a failed job."""
        can_succeed = {job.name for job in self.jobs if self._status(job.name) in ("ok", "running")}
        waiting = []
        for job in self.jobs:  # prerequisites come first
            if self._status(job.name) == "waiting" and can_succeed.issuperset(job.after):
                can_succeed.add(job.name)
                waiting.append(job)
        return waiting

    def _begin(self, now: float) -> None:
        for job in self._waiting():
            if any(self._status(name) != "ok" for name in job.after):
                continue
            need = min(job.gpus, self.total)
            if need > len(self.free):
                return  # later jobs wait too, so that this job is not starved
            gpus, self.free = self.free[:need], self.free[need:]
            folder = self.out / job.name
            folder.mkdir(exist_ok=True)
            words = {**self.words, "out": str(folder), "work": str(self.out / "work"), "gpus": ",".join(gpus)}
            log = (self.out / f"{job.name}.log").open("wb")
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            if self.total:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", job.run.format(**words)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            self.running.append(Running(job, process, gpus, now, log))
            self._note(job.name, status="running", gpus=gpus)
            print(f"{job.name}: begins" + (f" on GPU {','.join(gpus)}" if gpus else ""), flush=True)

    def _collect(self, now: float) -> None:
        for running_job in list(self.running):
            code = running_job.process.poll()
            if code is None:
                if running_job.kill_at is None and now - running_job.began > 60 * running_job.job.minutes:
                    self._interrupt(running_job, now)
                elif running_job.kill_at is not None and now > running_job.kill_at:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(running_job.process.pid, signal.SIGKILL)
                continue
            running_job.log.close()
            self.running.remove(running_job)
            self.free = sorted([*self.free, *running_job.gpus])
            status = "cut off" if running_job.kill_at is not None else "ok" if code == 0 else "failed"
            seconds = round(now - running_job.began, 1)
            self._note(running_job.job.name, status=status, code=code, seconds=seconds)
            print(f"{running_job.job.name}: {status} after {seconds:.0f} s", flush=True)

    def _interrupt(self, running_job: Running, now: float) -> None:
        running_job.kill_at = now + GRACE
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running_job.process.pid, signal.SIGINT)

    def _note(self, name: str, **fields: Any) -> None:
        self.state[name] = fields
        write_atomically(self.out / "state.json", json.dumps(self.state, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every job succeeded, 1 if one did not, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--file", type=Path, nargs="+", default=[FILE], help="lists of jobs")
    parser.add_argument("--data", default="data/english", help="the prepared corpus")
    parser.add_argument("--sets", default="data", help="folder with sft/, preference/, verifiable/, eval/")
    parser.add_argument("--out", type=Path, default=Path("release"))
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="only these jobs; * and ? are wildcards"
    )
    parser.add_argument("--gpus", help="GPU numbers, separated by commas; default: all visible GPUs")
    parser.add_argument("--minutes", type=float, default=600.0, help="time limit for all jobs together")
    parser.add_argument("--list", action="store_true", help="list the jobs and exit")
    options = parser.parse_args(argv)
    try:
        jobs = chosen(read(*options.file), options.only)
        gpus = options.gpus.split(",") if options.gpus else [entry for _, entry in visible()]
        if options.list:
            for job in jobs:
                print(
                    f"{job.name:16} {job.gpus} GPU  {job.document:28} {'; '.join(job.run.split(chr(10))).strip('; ')}"
                )
            return 0
        words = {"data": str(Path(options.data).resolve()), "sets": str(Path(options.sets).resolve())}
        return Release(jobs, gpus, options.out.resolve(), words).run(time.monotonic() + 60 * options.minutes)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
