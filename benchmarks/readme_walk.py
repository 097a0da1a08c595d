"""Run every command of the README in order, in an empty folder, on small data.

    python -m benchmarks.readme_walk FOLDER --out docs/data/2026-11-22-readme/walk.md [--only TEXT]

Commands that need hours or a GPU are made smaller (`SMALLER`) or left out (`LEFT_OUT`), with a reason. The table shows
the command that was run, the seconds and the exit code. The input texts are made from the bundled sample.
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Prefix of a README command -> replacements (old, new)..., and the reason for all of them.
SMALLER: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "deskside data prepare": ((("--out", "--vocab-size 1024 --out"),), "the vocabulary of the preset demo"),
    "deskside go --hours 24 --data": ((("--hours 24", "--hours 0.08 --yes"),), "24 hours"),
    "deskside go --resume": ((), "of a finished run it says so and exits 2"),
    "deskside train 124m --data.path data/corpus --hours 2 --precision.name fp8": (
        (("124m", "demo"), ("--hours 2", "--hours 0.02 --name fp8")), "2 hours on a card"),
    "deskside train 124m --data.path data/corpus --hours 2": (
        (("124m", "demo"), ("--hours 2", "--hours 0.02 --name 124m")), "2 hours on a card"),
    "deskside train 124m --init": (
        (("124m --init", "demo --init"), ("--hours 1", "--hours 0.02")), "an hour on a card"),
    "deskside train --resume": ((), "of a finished run it says so and exits 2"),
    "deskside sft": ((("--name chat", "--name chat --hours 0.02 --batch.sequence_length 256"),), "an epoch takes long"),
    "deskside dpo": ((("--name polite", "--name polite --hours 0.03"),), "an epoch takes long"),
    "deskside kto": ((("--name rated", "--name rated --hours 0.03"),), "an epoch takes long"),
    "deskside grpo": ((("--hours 1", "--hours 0.05 --questions 2 --align.answer_tokens 32"),), "an hour"),
    "deskside eval": ((("--tasks-dir DIR", "--tasks-dir tasks --limit 10 --shots 0"),), "whole tasks"),
    "deskside study matrix16-quick": ((), ""),
    "deskside study my.toml": ((("studies/mine", "studies/mine --dry-run"),), "minutes for each arm"),
    "deskside study claims": ((("data/corpus", "data/corpus --dry-run"),), "hours on a card"),
    "deskside chat": ((), "asked nothing: standard input is empty"),
}  # fmt: skip
LEFT_OUT = {
    "make test": "the whole suite; CI runs it",
    "git clone": "the walk runs in a checkout",
    "source .venv/bin/activate": "the walk puts .venv/bin on the PATH itself",
    "deskside serve": "runs until it is stopped; tests/serve starts it",
    "deskside dashboard": "runs until it is stopped; tests/dashboard starts it",
}
EXPECTED_EXIT_CODES = {"deskside go --resume": 2, "deskside train --resume": 2}


@dataclass(frozen=True)
class Command:
    """A command of the README, and the command that is run instead, None if it is left out.

    reason: for the difference. exit_code: the expected one.
    """

    written: str
    run: str | None
    reason: str
    exit_code: int = 0


def commands(readme: str) -> list[Command]:
    """Return the commands of all code blocks in order. Raises ValueError for a line that is not a command."""
    parsed = []
    for block in re.findall(r"^```\n(.*?)^```", readme, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            written = line.partition("  #")[0].strip()
            if not written:
                continue
            if not written.startswith(("deskside ", "make ", "source ", "git ")):
                raise ValueError(
                    f"{written!r}: unknown command; extend benchmarks/readme_walk.py to run it or leave it out"
                )
            parsed.append(_command(written))
    return parsed


def _command(written: str) -> Command:
    for start, reason in LEFT_OUT.items():
        if written == start or written.startswith(f"{start} "):
            return Command(written, None, reason)
    changes, reason, code = (), "", 0
    for start, (changes, reason) in SMALLER.items():  # noqa: B007 - the first that fits
        if written.startswith(start):
            code = EXPECTED_EXIT_CODES.get(start, 0)
            break
    else:
        changes, reason = (), ""
    run = written
    for old, new in changes:
        if old not in run:
            raise ValueError(
                f"{written!r}: does not contain {old!r}; update SMALLER in benchmarks/readme_walk.py"
            )
        run = run.replace(old, new)
    return Command(written, run, reason, code)


def make_inputs(folder: Path) -> None:
    """Write small data of every kind that the README mentions."""
    text = (ROOT / "deskside/data/bundled/tiny_shakespeare.txt").read_text("utf-8")
    parts = [part for part in text.split("\n\n") if part.strip()]

    def write(name: str, rows: list[dict[str, object]]) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))

    write("corpus/part.jsonl.gz", [{"text": "\n\n".join(parts[n : n + 8])} for n in range(0, len(parts), 8)])
    asked = [(f"What comes after {n}?", str(n + 1), str(n)) for n in range(400)]
    turn = lambda role, content: {"role": role, "content": content}  # noqa: E731
    write("chats.jsonl.gz", [{"messages": [turn("user", q), turn("assistant", a)]} for q, a, _ in asked])
    write("pairs.jsonl.gz", [{"prompt": q, "chosen": a, "rejected": w} for q, a, w in asked])
    rated = [(q, text, good) for q, a, w in asked for text, good in ((a, True), (w, False))]
    write("rated.jsonl.gz", [{"prompt": q, "completion": text, "label": good} for q, text, good in rated])
    (folder / "qlora.yml").write_text(
        "base_model: Qwen/Qwen3-0.6B\nadapter: qlora\nlora_r: 16\nmicro_batch_size: 2\n"
    )
    write("sums.jsonl.gz", [{"prompt": q, "answer": a} for q, a, _ in asked])
    tasks = [{"prompt": q, "solution": f"It is {a}.", "answer": a} for q, a, _ in asked[:50]]
    (folder / "tasks").mkdir()
    for name in ("gsm8k_test", "svamp"):
        (folder / f"tasks/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    (folder / "my.toml").write_text((ROOT / "deskside/study/presets/batch-quick.toml").read_text())


def main() -> int:
    """Run the walk and write the table. Return 1 if an exit code differs from what the README implies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="run commands that contain this text")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    make_inputs(options.folder)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    lines = ["| README | run | seconds | exit code | wanted |", "|---|---|---|---|---|"]
    wrong = 0
    for command in commands((ROOT / "README.md").read_text("utf-8")):
        if command.run is None:
            lines.append(f"| `{command.written}` | left out: {command.reason} | | | |")
            continue
        if options.only not in command.run:
            continue
        where = ROOT if command.run.startswith("make ") else options.folder
        began = time.monotonic()
        done = subprocess.run(
            command.run,
            shell=True,
            cwd=where,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        seconds = time.monotonic() - began
        wrong += done.returncode != command.exit_code
        lines.append(
            f"| `{command.written}` | `{command.run}` | {seconds:.1f} | {done.returncode} | {command.exit_code} |"
        )
        print(lines[-1], flush=True)
        if done.returncode != command.exit_code:
            print(done.stderr[-1500:], flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines) + "\n", "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
