"""The steps that the documentation asks its reader to do, and the commands that `benchmarks.docs_walk` runs instead.

Blocks of code are commands; with a title, they are files (```toml title="my.toml"); Python without a title is run.
Commands that need hours, a GPU or the hub are made smaller (`SMALLER`) or left out (`LEFT_OUT`), with a reason.
Comments before a block:

    <!-- not run: REASON -->     the commands of the block are left out
    <!-- before: COMMAND -->     what the page takes for granted, such as a trained model
"""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ("docs/log.md", "docs/claims.md")

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
    "deskside grpo": ((("--hours 1", "--steps 2 --questions 2"),), "an hour on a card"),
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
    "deskside sft --resume": 2,
    "torchrun --nnodes 2 * -m deskside train 124m": 1,  # a node is lost
}
PROGRAMS = ("deskside", "make", "source", "git", "curl", "python", "mkdir", "docker", "torchrun", "grep")

Kind = Literal["command", "python", "file"]
# A command on several lines, also inside a list of tables.
CONTINUES = re.compile(r"\\\n\s*|(?<=\},)\n\s*(?=\{)")
LANGUAGES: dict[str, Kind] = {"": "command", "bash": "command", "python": "python"}
NOT_RUN = ("json", "mermaid", "text", "toml")  # languages of what is shown, and not run


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

    Raises ValueError for a line that is not a known command, a block in another language, and for JSON and TOML that
    cannot be read.
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
        elif block.language not in NOT_RUN:
            raise ValueError(
                f"a block in {block.language!r} is neither run nor shown: give it a title, or use text"
            )
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
