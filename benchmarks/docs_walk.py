"""Run every command of the README and of the documentation in order, at a small size and on made-up data.

    python -m benchmarks.docs_walk FOLDER [--out docs/data/2026-11-24-walk/walk.md] [--only docs/guides/serve.md ...]
    python -m benchmarks.docs_walk FOLDER --changed

Each page runs in a folder of its own, from top to bottom; `benchmarks/docs_steps.py` says what is run of it. Servers
run until their page ends, and must then end with exit code 0. The log and docs/claims.md are dated records and are not
run; neither is the command-line reference, which is made from the help texts.

The record has a section for each page (`benchmarks/walk_record.py`). tests/benchmarks/test_docs_walk.py compares the
newest one with the pages; --changed walks those that differ, and replaces their sections.
"""

import argparse
import datetime
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.docs_steps import ROOT, Step, pages, steps
from benchmarks.walk_record import newest_record, not_walked, read_record, row, section, write_record

FIRST_RUN = "deskside train demo --name base --steps 20"  # runs/base, which every page may use
# Servers, and the address that answers once they are ready.
SERVERS = {
    "deskside serve": "http://127.0.0.1:18000/health",
    "deskside dashboard": "http://127.0.0.1:18501/_stcore/health",
}
READY_SECONDS = 180


def make_inputs(folder: Path) -> None:
    """Write small data of every kind that the pages mention."""
    text = (ROOT / "deskside/data/bundled/tiny_shakespeare.txt").read_text("utf-8")
    parts = [part for part in text.split("\n\n") if part.strip()]

    def write(name: str, rows: list[dict[str, object]]) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in rows).encode()))

    texts = [{"text": "\n\n".join(parts[n : n + 8])} for n in range(0, len(parts), 8)]
    write("corpus/part.jsonl.gz", [*texts])
    (folder / "my-texts").mkdir(parents=True)
    for number, each in enumerate(texts):
        (folder / f"my-texts/{number}.txt").write_text(each["text"], "utf-8")
    (folder / "held.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts[-20:]), "utf-8")
    write("english/part.jsonl.gz", [*texts[: len(texts) // 2]])
    write("indic/hi_train.jsonl.gz", [{**each, "lang": "hi"} for each in texts[len(texts) // 2 :]])
    write("indic/hi_val.jsonl.gz", [{**each, "lang": "hi"} for each in texts[-20:]])
    asked = [(f"What comes after {n}?", str(n + 1), str(n)) for n in range(400)]
    turn = lambda role, content: {"role": role, "content": content}  # noqa: E731
    write("chats.jsonl.gz", [{"messages": [turn("user", q), turn("assistant", a)]} for q, a, _ in asked])
    write("pairs.jsonl.gz", [{"prompt": q, "chosen": a, "rejected": w} for q, a, w in asked])
    rated = [(q, text, good) for q, a, w in asked for text, good in ((a, True), (w, False))]
    write("rated.jsonl.gz", [{"prompt": q, "completion": text, "label": good} for q, text, good in rated])
    write("sums.jsonl.gz", [{"prompt": q, "answer": a} for q, a, _ in asked])
    (folder / "qlora.yml").write_text(
        "base_model: Qwen/Qwen3-0.6B\nadapter: qlora\nlora_r: 16\nmicro_batch_size: 2\n"
    )


class PageWalk:
    """Runs the steps of one page in a folder."""

    def __init__(self, folder: Path, title: str):
        self._folder = folder
        self._title = title
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._servers: list[tuple[Step, subprocess.Popen[str], float]] = []
        self.wrong = 0
        self.rows: list[str] = []

    def run(self, todo: Sequence[Step]) -> None:
        """Run all steps, then stop the servers."""
        for step in todo:
            if step.run is None:
                self._note(step)
            elif step.kind == "file":
                (self._folder / step.name).write_text(step.run, "utf-8")
                self._note(step)
            elif step.run.startswith(tuple(SERVERS)):
                self._start(step)
            else:
                self._finish(step)
        for running, _, _ in tuple(self._servers):
            self._stop(_address(running))

    def _finish(self, step: Step) -> None:
        assert step.run is not None
        command: str | list[str] = step.run if step.kind == "command" else [sys.executable, "-c", step.run]
        began = time.monotonic()
        done = subprocess.run(
            command,
            shell=isinstance(command, str),
            cwd=ROOT if step.run.startswith(("make ", "python -m benchmarks.")) else self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        self._note(step, done.returncode, time.monotonic() - began, done.stderr)

    def _start(self, step: Step) -> None:
        """Start a server and wait until it answers. One at the same address is stopped before."""
        address = _address(step)
        if address in [_address(running) for running, _, _ in self._servers]:
            self._stop(address)
        began = time.monotonic()
        process = subprocess.Popen(
            f"exec {step.run}",
            shell=True,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._servers.append((step, process, began))
        while time.monotonic() - began < READY_SECONDS and process.poll() is None:
            try:
                with urllib.request.urlopen(address, timeout=5):
                    return
            except OSError:
                time.sleep(0.5)

    def _stop(self, address: str) -> None:
        """Stop the server at an address."""
        index = [_address(running) for running, _, _ in self._servers].index(address)
        step, process, began = self._servers.pop(index)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        self._note(step, process.returncode, time.monotonic() - began, errors)

    def _note(self, step: Step, code: int | None = None, seconds: float = 0, errors: str = "") -> None:
        """Add a row to the table. Without an exit code: of a file, or of what is left out."""
        self.rows.append(row(step, code, seconds))
        print(self._title, self.rows[-1], flush=True)
        if code is not None and code != step.exit_code:
            self.wrong += 1
            print(errors[-3000:], flush=True)


def _address(step: Step) -> str:
    """Return the address that answers once a server is ready."""
    return next(address for start, address in SERVERS.items() if (step.run or "").startswith(start))


def main() -> int:
    """Run the walk and write the record. Return 1 if an exit code differs from what the pages imply."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--out", type=Path, help="the record (default: the newest one)")
    parser.add_argument("--only", nargs="*", default=[], help="walk only these pages")
    parser.add_argument(
        "--changed", action="store_true", help="walk only pages that the record does not cover"
    )
    options = parser.parse_args()
    out = options.out or newest_record()
    todo = {path.relative_to(ROOT).as_posix(): steps(path.read_text("utf-8")) for path in pages()}
    todo = {page: page_steps for page, page_steps in todo.items() if page_steps}
    order = list(todo)
    if options.only:
        todo = {page: todo[page] for page in options.only}
    if options.changed:
        record = read_record(out.read_text("utf-8"))
        todo = {page: page_steps for page, page_steps in todo.items() if not_walked(page, page_steps, record)}
    walked = _walked()  # before the record is written, which belongs to the checkout
    template = options.folder / "template"
    template.mkdir(parents=True)
    make_inputs(template)
    prepared = PageWalk(template, "template")
    prepared.run([Step("command", FIRST_RUN, FIRST_RUN)])
    wrong = prepared.wrong
    for page, page_steps in todo.items():
        folder = options.folder / page.replace("/", "_")
        shutil.copytree(template, folder)
        walk = PageWalk(folder, page)
        walk.run(page_steps)
        wrong += walk.wrong
        write_record(out, {page: section(walk.rows, walked)}, order)
    return 1 if wrong else 0


def _walked() -> str:
    """Return the day, and the commit of this checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return f"Walked on {datetime.date.today()} at {commit}."


if __name__ == "__main__":
    sys.exit(main())
