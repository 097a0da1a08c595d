"""Repeat a record: train its command with each of its seeds, and score the models.

Everything is in one folder: the runs `seed-1`, `seed-2` ..., and `seed-1.json` ... once a seed is scored. Started again
on the same folder, it skips scored runs and continues the others.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from deskside.facts.records import Corpus, LossRecord
from deskside.records.score import ScoredRun, check_corpus, score_run
from deskside.run.record import read_run
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import clear_temporary, create_folder, write_atomically
from deskside.utils.parsing import read_json_object
from deskside.utils.signals import signal_number

Train = Callable[[Sequence[str]], int]  # runs `deskside train` with these arguments and returns its exit code
Say = Callable[[str], None]
STANDARD_ERROR = 2
# The program of a training run, which ends when its parent, the first argument, does.
TRAIN = """\
import sys
from deskside.utils.signals import die_with
die_with(int(sys.argv.pop(1)))
from deskside.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def train_in_process(arguments: Sequence[str]) -> int:
    """Run `deskside train` in a separate process, so that each seed finds an empty GPU.

    It gets Ctrl-C and SIGTERM from this one, and ends if this one is killed. Its output goes to standard error.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(os.getpid()), "train", *arguments],
        stdout=STANDARD_ERROR,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C reaches it once, from here
    )
    try:
        return process.wait()
    except KeyboardInterrupt as error:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by now
            os.kill(process.pid, signal_number(error))
        process.wait()  # it saves a checkpoint
        raise


def replay(
    record: LossRecord,
    corpus: Corpus,
    data: str,
    folder: Path,
    seeds: Sequence[int],
    say: Say,
    train: Train = train_in_process,
) -> list[ScoredRun]:
    """Train and score a record's command with each seed, in `folder`.

    Raises UsageError for other data and for a folder of another record, RunError if a training run fails.
    """
    check_corpus(corpus, data)
    create_folder(folder)
    _claim(folder, record)
    found = []
    for seed in seeds:
        scored = folder / f"seed-{seed}.json"
        if scored.exists():
            found.append(_read(scored))
            continue
        path = folder / f"seed-{seed}"
        _train(record, data, path, seed, say, train)
        say(f"seed {seed}: score the exported model with transformers")
        run = score_run(read_run(path), corpus, data, record.minutes)
        write_atomically(scored, json.dumps(asdict(run), indent=1) + "\n")
        found.append(run)
    return found


def _claim(folder: Path, record: LossRecord) -> None:
    """Record in the folder what it repeats. Raises UsageError if that is something else."""
    claim, options = folder / "record.json", {"name": record.name, "options": list(record.options)}
    if claim.exists():
        if read_json_object(claim) != options:
            raise UsageError(f"{folder}: repeats another record or command; give another folder with --out")
    elif any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty, and not of this command; give another folder with --out")
    else:
        write_atomically(claim, json.dumps(options) + "\n")


def _train(record: LossRecord, data: str, path: Path, seed: int, say: Say, train: Train) -> None:
    """Train one seed, or continue it. Raises RunError if that fails."""
    if (path / "run.json").exists():
        if read_run(path).finished:
            return
        arguments = ["--resume", str(path)]
    else:
        if path.exists():  # killed before the run was recorded
            clear_temporary(path)
            with contextlib.suppress(FileNotFoundError):
                (path / "checkpoints").rmdir()
            path.rmdir()
        arguments = [*record.arguments(data, seed), "--runs", str(path.parent), "--name", path.name]
    say(f"seed {seed}: train for {record.minutes:g} minutes")
    code = train(arguments)
    if code != 0:
        raise RunError(
            f"{path}: training ended with exit code {code}; give the same command again to continue from here"
        )


def _read(path: Path) -> ScoredRun:
    """Read a scored seed. Raises RunError if the file is damaged."""
    values = read_json_object(path)
    try:
        return ScoredRun(**values)
    except TypeError:
        raise RunError(
            f"{path}: is damaged; delete it, and give the command again to score the run"
        ) from None
