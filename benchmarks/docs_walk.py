"""Run every command of the README and of the documentation in order, at a small size and on made-up data.

    python -m benchmarks.docs_walk FOLDER --out docs/data/2026-11-24-walk/walk.md [--only docs/guides/serve.md ...]

Each page runs in a folder of its own, from top to bottom. Its blocks of code are commands; with a title, they are files
(```toml title="my.toml"); Python without a title is run. Commands that need hours, a GPU or the hub are made smaller
(`SMALLER`) or left out (`LEFT_OUT`), with a reason. Comments before a block:

    <!-- not run: REASON -->     the commands of the block are left out
    <!-- before: COMMAND -->     what the page takes for granted, such as a trained model

Servers run until their page ends, and must then end with exit code 0. The log, docs/claims.md and docs/records.md are
dated records and are not run; neither is the command-line reference, which is made from the help texts.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ("docs/log.md", "docs/claims.md", "docs/records.md")
FIRST_RUN = "deskside train demo --name base --steps 20"  # runs/base, which every page may use

DOCKER_RUN = 'docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" -v "$PWD/data:/work/data" '
DOCKER_RUN += "-v deskside-cache:/cache "
# Two nodes are two shells that run the command of the page.
ON_ONE_MACHINE = (
    ("torchrun", "node() { exec torchrun"),
    ("--nproc-per-node auto", "--nproc-per-node 1 --local-addr 127.0.0.1"),
    ("node-a:", "127.0.0.1:"),
    ("/shared/", ""),
)
BOTH_NODES = "node & a=$!; node & b=$!; wait $b; wait $a"
LOSE_A_NODE = BOTH_NODES.replace(
    "wait $b",
    "while kill -0 $b && [ ! -e runs/mine/checkpoints/step-*[1-9]* ]; do sleep 0.2; done; "
    "pkill -KILL -P $b; wait $b",
)

# Beginning of a command (* is any text) -> replacements (old, new)..., and the reason for all of them. The first that
# fits counts.
SMALLER: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "deskside data prepare corpus": (
        (("--out", "--vocab-size 1024 --out"),), "the vocabulary of the preset demo"),
    "deskside data prepare my-texts": (
        (("--out", "--vocab-size 1024 --out"),), "the vocabulary of the preset demo"),
    "deskside data prepare indic": (
        (("--vocab-size 50304", "--vocab-size 1024"),), "the vocabulary of the preset demo"),
    "deskside train * --data.path DIR": (
        (("DIR", "data/corpus --dry-run"),), "hours on the card of this page; --dry-run checks every option"),
    "deskside train searches/demo/winner.toml": (
        (("deskside", "test ! -e searches/demo/winner.toml || deskside"),), "only if the search found something"),
    "docker run * deskside doctor": (
        (("docker run --rm --gpus all deskside", "deskside"), ("doctor", "doctor --quick")),
        "no docker here; what the container would run"),
    "docker run * deskside train": (
        ((DOCKER_RUN, ""), ("124m", "demo"), ("--hours 2", "--steps 20 --name 124m")),
        "no docker here; what the container would run, and 2 hours on a card"),
    "torchrun --nnodes 2 * -m deskside train 124m": (
        (*ON_ONE_MACHINE, ("124m", "demo"), ("/data", "data"), ("--hours 24", "--steps 60 --checkpoint.every 5s"),
         ("--name mine", "--name mine; }; " + LOSE_A_NODE)),
        "both nodes on this machine; once there is a checkpoint, the process of the second is killed"),
    "torchrun --nnodes 2 * -m deskside train --resume": (
        (*ON_ONE_MACHINE, ("runs/mine", "runs/mine; }; " + BOTH_NODES)), "both nodes on this machine"),
    "deskside go --hours 24 --data": ((("--hours 24", "--hours 0.06 --yes"),), "24 hours"),
    "deskside go --hours 1 --data": ((("--hours 1", "--hours 0.06 --yes"),), "an hour"),
    "deskside train 124m --data.path data/corpus --hours 2 --precision.name fp8": (
        (("124m", "demo"), ("--hours 2", "--steps 20 --name fp8")), "2 hours on a card"),
    "deskside train 124m --data.path data/corpus --hours 2": (
        (("124m", "demo"), ("--hours 2", "--steps 20 --name 124m")), "2 hours on a card"),
    "deskside train 124m --init": ((("124m --init", "demo --init"), ("--hours 1", "--steps 5")), "an hour on a card"),
    "deskside train indicmoe-300m": (
        (("indicmoe-300m", "demo"), ("--hours 10m", "--steps 5")), "ten minutes on a card"),
    "deskside sft Qwen/Qwen3-0.6B": (
        (("Qwen/Qwen3-0.6B", "small-model"), ("--hours 1", "--steps 5 --batch.sequence_length 256")),
        "the hub, and an hour on a card"),
    "deskside dpo": ((("--name", "--steps 5 --name"),), "a pass over the data"),
    "deskside kto": ((("--name", "--steps 5 --name"),), "a pass over the data"),
    "deskside grpo": ((("--hours 1", "--steps 2 --questions 2 --align.answer_tokens 16"),), "an hour on a card"),
    "deskside serve": ((("deskside serve", "deskside serve --port 18000"),), "another port"),
    "deskside dashboard": ((("deskside dashboard", "deskside dashboard --port 18501"),), "another port"),
    "curl http://127.0.0.1:8000": (
        (("curl", "curl --fail-with-body"), (":8000", ":18000")), "the other port; an HTTP error is a failure"),
    "from openai": (((":8000", ":18000"),), "the other port"),
}  # fmt: skip
LEFT_OUT = {
    "make install": "the walk runs in an installed checkout",
    "make test": "the whole suite; CI runs it",
    "make test-full": "the whole suite; hours",
    "make lint": "tests/test_lint.py runs it",
    "make docs": "tests/benchmarks/test_docs_site.py runs it",
    "git clone": "the walk runs in a checkout",
    "mkdir -p runs data && sudo": "no docker here",
    "source .venv/bin/activate": "the walk puts .venv/bin on the PATH itself",
}
# Of a finished run, --resume says so and exits with 2.
EXPECTED_EXIT_CODES = {
    "deskside go --resume": 2,
    "deskside train --resume": 2,
    "torchrun --nnodes 2 * -m deskside train 124m": 1,  # a node is lost
}
# Servers, and the address that answers once they are ready.
SERVERS = {
    "deskside serve": "http://127.0.0.1:18000/health",
    "deskside dashboard": "http://127.0.0.1:18501/_stcore/health",
}
READY_SECONDS = 180
PROGRAMS = ("deskside", "make", "source", "git", "curl", "python", "mkdir", "docker", "torchrun", "grep")

Kind = Literal["command", "python", "file"]
# A command on several lines, also inside a list of tables.
CONTINUES = re.compile(r"\\\n\s*|(?<=\},)\n\s*(?=\{)")
LANGUAGES: dict[str, Kind] = {"": "command", "bash": "command", "python": "python"}


@dataclass(frozen=True)
class Step:
    """One command, program or file of a page.

    written: its text on the page. run: what is run instead, None if it is left out, and the reason for the difference.
    name: of a file. exit_code: the expected one.
    """

    kind: Kind
    written: str
    run: str | None
    reason: str = ""
    name: str = ""
    exit_code: int = 0


@dataclass
class _Block:
    language: str
    title: str
    not_run: str
    lines: list[str] = field(default_factory=list)


def pages() -> list[Path]:
    """Return all pages whose commands are run, the README first."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        path
        for path in found
        if path.relative_to(ROOT).as_posix() not in RECORDS and ROOT / "docs" / "data" not in path.parents
    ]


def steps(text: str) -> list[Step]:
    """Return what a page asks its reader to do, in order.

    Raises ValueError for a line that is not a known command, and for JSON and TOML that cannot be read.
    """
    result: list[Step] = []
    for block in _blocks(text):
        if isinstance(block, Step):
            result.append(block)
            continue
        content = "\n".join(block.lines) + "\n"
        if block.language == "toml":
            tomllib.loads(content)
        elif block.language == "json":
            for line in block.lines:
                json.loads(line)
        if block.title:
            result.append(Step("file", content, content, name=block.title))
        elif LANGUAGES.get(block.language) == "python":
            result.append(_smaller("python", content, block.not_run))
        elif LANGUAGES.get(block.language) == "command":
            result += [
                _smaller("command", line, block.not_run)
                for line in _commands(block.lines, bool(block.not_run))
            ]
    return result


def _blocks(text: str) -> list["_Block | Step"]:
    """Return the blocks of code of a page, and the commands of `before` comments, in order."""
    found: list[_Block | Step] = []
    block: _Block | None = None
    not_run = ""
    for line in text.splitlines():
        fence = re.match(r"```(\w*)(?: title=\"([^\"]+)\")?", line)
        if block is not None:
            if line.startswith("```"):
                block = None
            else:
                block.lines.append(line)
        elif fence:
            block = _Block(fence[1], fence[2] or "", not_run)
            found.append(block)
            not_run = ""
        elif comment := re.fullmatch(r"<!-- (before|not run): (.+) -->", line):
            if comment[1] == "not run":
                not_run = comment[2]
            else:
                found.append(_smaller("command", comment[2], "", "the page begins with it"))
    return found


def _commands(lines: Sequence[str], not_run: bool = False) -> list[str]:
    """Return the commands of a block: joined lines, without comments.

    Raises ValueError for what is not a known command, unless the block is not run.
    """
    joined = CONTINUES.sub("", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        command = re.split(r"(?:^|\s\s+)#", line)[0].strip()
        if command and not not_run and command.split()[0] not in PROGRAMS:
            raise ValueError(
                f"{command!r}: unknown command; extend benchmarks/docs_walk.py to run it or leave it out"
            )
        if command:
            found.append(command)
    return found


def begins(command: str, start: str) -> bool:
    """Return whether a command begins with this; * is any text."""
    return fnmatchcase(command, f"{start}*")


def _smaller(kind: Kind, written: str, not_run: str, because: str = "") -> Step:
    """Return the step that is run for a command or program."""
    for start, reason in LEFT_OUT.items():
        if written == start or begins(written, f"{start} "):
            return Step(kind, written, None, reason)
    if not_run:
        return Step(kind, written, None, not_run)
    code = next((code for start, code in EXPECTED_EXIT_CODES.items() if begins(written, start)), 0)
    run, reason = written, because
    for start, (changes, why) in SMALLER.items():
        if begins(written, start):
            for old, new in changes:
                if old not in run:
                    raise ValueError(
                        f"{written!r}: does not contain {old!r}; update SMALLER in benchmarks/docs_walk.py"
                    )
                run = run.replace(old, new)
            reason = because or why
            break
    return Step(kind, written, run, reason, exit_code=code)


def make_inputs(folder: Path) -> None:
    """Write small data of every kind that the pages mention."""
    text = (ROOT / "deskside/data/bundled/tiny_shakespeare.txt").read_text("utf-8")
    parts = [part for part in text.split("\n\n") if part.strip()]

    def write(name: str, rows: list[dict[str, object]]) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))

    texts = [{"text": "\n\n".join(parts[n : n + 8])} for n in range(0, len(parts), 8)]
    write("corpus/part.jsonl.gz", [*texts])
    (folder / "my-texts").mkdir(parents=True)
    for number, row in enumerate(texts):
        (folder / f"my-texts/{number}.txt").write_text(row["text"], "utf-8")
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts[-20:]), "utf-8")
    write("english/part.jsonl.gz", [*texts[: len(texts) // 2]])
    write("indic/hi_train.jsonl.gz", [{**row, "lang": "hi"} for row in texts[len(texts) // 2 :]])
    write("indic/hi_val.jsonl.gz", [{**row, "lang": "hi"} for row in texts[-20:]])
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
                self._note(step, None, None)
            elif step.kind == "file":
                (self._folder / step.name).write_text(step.run, "utf-8")
            elif server := next((s for s in SERVERS if step.run.startswith(s)), None):
                self._start(step, SERVERS[server])
            else:
                self._finish(step)
        for step, process, began in self._servers:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
            self._note(step, process.returncode, time.monotonic() - began, errors)

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

    def _start(self, step: Step, address: str) -> None:
        """Start a server and wait until it answers."""
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

    def _note(self, step: Step, code: int | None, seconds: float | None, errors: str = "") -> None:
        """Add a row to the table."""
        shown, run = (_cell(text) for text in (step.written, step.run or ""))
        if code is None:
            self.rows.append(f"| {shown} | not run: {step.reason} | | | |")
        else:
            wrong = code != step.exit_code
            self.wrong += wrong
            run = "the same" if run == shown else run
            self.rows.append(f"| {shown} | {run} | {seconds:.1f} | {code} | {step.exit_code} |")
            if wrong:
                print(errors[-3000:], flush=True)
        print(self._title, self.rows[-1], flush=True)


def _cell(text: str) -> str:
    """Return a command as a table's cell. Of a program only the first line is shown."""
    lines = text.strip().splitlines() or [""]
    shown = lines[0] + (" ..." if len(lines) > 1 else "")
    return f"`{shown}`".replace("|", "\\|")


def main() -> int:
    """Run the walk and write the tables. Return 1 if an exit code differs from what the pages imply."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--out", type=Path, required=True, help="Markdown file of the tables")
    parser.add_argument("--only", nargs="*", default=[], help="run only these pages")
    options = parser.parse_args()
    todo = {path: steps(path.read_text("utf-8")) for path in pages()}  # all of them, before anything runs
    template = options.folder / "template"
    template.mkdir(parents=True)
    make_inputs(template)
    prepared = PageWalk(template, "template")
    prepared.run([Step("command", FIRST_RUN, FIRST_RUN)])
    wrong, tables = prepared.wrong, []
    for path, page_steps in todo.items():
        name = path.relative_to(ROOT).as_posix()
        if not page_steps or (options.only and name not in options.only):
            continue
        folder = options.folder / name.replace("/", "_")
        shutil.copytree(template, folder)
        walk = PageWalk(folder, name)
        walk.run(page_steps)
        wrong += walk.wrong
        tables += [
            f"## {name}",
            "",
            "| written | run | seconds | exit code | wanted |",
            "|---|---|---|---|---|",
        ]
        tables += [*walk.rows, ""]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(tables), "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
