"""Lines of prose and commands: a shell reads the printed commands correctly, however narrow the terminal is."""

import re
import shlex
import subprocess

import pytest
from rich.cells import cell_len

from deskside.utils.console import command_lines, wrap

STAGES = '[{"until"=0.35,"sequence_length"=512},{"until"=0.7,"sequence_length"=1024},{"until"=1.0}]'
COMMANDS = [
    [
        "deskside",
        "train",
        "d20",
        "--data.path",
        "DIR",
        "--schedule.stages",
        STAGES,
        "--schedule.length",
        "20h",
    ],
    [
        "deskside",
        "sft",
        "runs/a name",
        "--data",
        "a.jsonl",
        "b.jsonl",
        "it's.jsonl",
        "--epochs",
        "3",
        "--json",
    ],
    ["deskside", "eval", "x" * 90, "--tasks", "core"],
]


def read_by_bash(lines: list[str]) -> list[str]:
    """Return the words of a command, as bash reads them. Asserts that there is one command."""
    script = "deskside() { printf '%s\\0' deskside \"$@\"; }\n" + "\n".join(lines)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[1])
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_shell_reads_the_same_command(words: list[str], width: int) -> None:
    lines = command_lines(shlex.join(words), width)
    found = read_by_bash(lines)
    assert [re.sub(r"\s+(?=\{)", "", word) for word in found] == words
    # An option is on the line of its first value if both fit. Only a long word may be too wide.
    assert all(len(line) <= width or max(map(len, line.split())) > width - 8 for line in lines)
    if width >= 80:
        assert not any(re.search(r" --\S+ \\$", line) for line in lines if "--json" not in line)


@pytest.mark.parametrize("text", ["\u8a9e\u8a00 \u6a21\u578b " * 20, "e\u0301te\u0301 " * 30])
def test_characters_of_no_and_of_two_columns_are_counted_as_such(text: str) -> None:
    lines = wrap(text, 30, indent=2)
    assert " ".join(" ".join(lines).split()) == text.strip()
    assert all(25 <= cell_len(line) <= 30 for line in lines[:-1]) and cell_len(lines[-1]) <= 30


def test_words_are_not_broken_and_indentation_is_kept() -> None:
    text = "  - a path/that/is/long and self-made words\nnext"
    lines = wrap(text, 20, hanging=2)
    assert lines == ["  - a", "    path/that/is/long", "    and self-made", "    words", "next"]
    assert wrap("short  line ", 20) == ["short  line"]


@pytest.mark.parametrize("end", ["", ", or give another --out", "; the run is kept"])
def test_a_command_in_a_message_can_be_pasted(end: str) -> None:
    command = "deskside study studies/with-a-long-name --resume --again oom,failed"
    start, *lines = wrap(f"stopped by SIGINT; continue with: {command}{end}", 60)
    assert start == "stopped by SIGINT; continue with:"
    assert read_by_bash(lines[:2]) == shlex.split(command)
    assert "\n".join(lines[2:]) == end.lstrip(",; ")
    assert wrap(f"continue with: {command}{end}", 200) == [f"continue with: {command}{end}"]
