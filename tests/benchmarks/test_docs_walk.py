"""The documentation walk covers every code block, and the pages name only commands and options that exist."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from benchmarks.docs_steps import (
    CONTINUES,
    EXPECTED_EXIT_CODES,
    LEFT_OUT,
    ROOT,
    SMALLER,
    Step,
    begins,
    pages,
    steps,
)
from benchmarks.docs_walk import SERVERS, make_inputs
from benchmarks.walk_record import newest_record, not_walked, read_record, row, section, write_record
from deskside.cli.completion import all_commands
from deskside.config.merge import LENGTH_ALIASES

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in pages()}
STEPS = {name: steps(text) for name, text in PAGES.items()}


@cache
def known_options() -> dict[str, set[str]]:
    """Return the options of each command, with hyphens."""
    return {
        command.name: {name for group in command.groups().values() for names, _ in group for name in names}
        | {"--help", *(f"--schedule.{alias}" for alias in LENGTH_ALIASES)}
        for command, _ in all_commands()
    }


def unknown_parts(command: str) -> list[str]:
    """Return the command if it does not exist, or the options that it does not have."""
    words = shlex.split(command.partition(" > ")[0])[1:]
    if not words or words[0].startswith("-"):
        return [word for word in words if word not in ("--help", "--version", "--debug")]
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in known_options()), words[0])
    if name not in known_options():
        return [name]
    flags = [word.partition("=")[0].replace("_", "-") for word in words if re.match(r"--\w", word)]
    return [flag for flag in flags if flag not in known_options()[name]]


def inline_commands(text: str) -> list[str]:
    """Return the complete commands in a page's prose, without those that have placeholders such as `...`."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`(deskside [^`]+)`", prose)]
    return [span for span in spans if "..." not in span and "NAME|" not in span]


def test_every_command_is_run_or_left_out_with_a_reason() -> None:
    every = [step for page in STEPS.values() for step in page]
    assert len(every) > 100
    assert all(step.run is not None or step.reason for step in every)
    run = {shlex.split(step.run)[1] for step in every if (step.run or "").startswith("deskside ")}
    written = {name.split()[0] for name in known_options()}
    assert run >= written


def test_no_line_of_a_block_is_lost() -> None:
    for name, text in PAGES.items():
        blocks = re.findall(r"^```(\w*(?: title=[^\n]*)?)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        lines = [
            line
            for language, body in blocks
            if language in ("", "bash")
            for line in CONTINUES.sub("", body).splitlines()
            if line.strip() and not line.startswith("#")
        ]
        given = [s for s in STEPS[name] if s.kind == "command" and s.reason != "the page begins with it"]
        assert len(given) == len(lines), name


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_options_exist(name: str) -> None:
    blocks = [step.written for step in STEPS[name] if step.written.startswith("deskside ")]
    assert {command: bad for command in blocks if (bad := unknown_parts(command))} == {}
    assert {command: bad for command in inline_commands(PAGES[name]) if (bad := unknown_parts(command))} == {}


def test_a_command_or_option_that_does_not_exist_is_found() -> None:
    assert unknown_parts("deskside trains demo") == ["trains"]
    assert unknown_parts("deskside train demo --model.layers 3 --hours 2") == ["--model.layers"]
    assert inline_commands("run `deskside trains\ndemo` or `ls`") == ["deskside trains demo"]


def test_no_entry_is_stale() -> None:
    written = [step.written for page in STEPS.values() for step in page]
    for start in (*SMALLER, *LEFT_OUT, *EXPECTED_EXIT_CODES, *SERVERS):
        assert any(begins(line, start) for line in written), start


def test_what_is_unknown_or_changed_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown command"):
        steps("```\ncargo install deskside\n```\n")
    with pytest.raises(ValueError, match="does not contain"):
        steps("```\ndeskside grpo runs/x --data y --hours 3\n```\n")
    with pytest.raises(ValueError, match="neither run nor shown"):
        steps("```sh\nls\n```\n")
    with pytest.raises(ValueError):
        steps('```json\n{"prompt": 1,}\n```\n')


def test_marks_before_a_block() -> None:
    text = "<!-- before: deskside presets -->\n<!-- not run: why -->\n```bash\nmake x\n```\n"
    text += '```toml title="a.toml"\nb = 1\n```\n'
    assert steps(text) == [
        Step("command", "deskside presets", "deskside presets", "the page begins with it"),
        Step("command", "make x", None, "why"),
        Step("file", "b = 1\n", "b = 1\n", name="a.toml"),
    ]


@pytest.mark.parametrize("name", [name for name, page in STEPS.items() if page])
def test_every_command_is_in_the_newest_record(name: str) -> None:
    record = read_record(newest_record().read_text("utf-8"))
    assert not_walked(name, STEPS[name], record) == [], (
        "python -m benchmarks.docs_walk FOLDER --changed walks the pages that changed"
    )


def test_a_step_that_changed_or_failed_is_not_in_the_record(tmp_path: Path) -> None:
    text = "Read a | b.\n```bash\ndeskside chat runs/x | cat\n```\n```python\nimport json\nprint(1)\n```\n"
    text += '```toml title="a.toml"\nb = 1\n```\n```bash\nmake test\n```\n'
    todo = steps(text)
    rows = [row(todo[0], 0, 1.0), row(todo[1], 0, 0.1), row(todo[2]), row(todo[3])]

    def record(rows: list[str]) -> dict[str, str]:
        write_record(tmp_path / "walk.md", {"b.md": section(rows, "today")}, ["a.md", "b.md"])
        return read_record((tmp_path / "walk.md").read_text("utf-8"))

    walked = record(rows)
    assert not_walked("b.md", todo, walked) == []
    assert not_walked("b.md", steps(text.replace("Read", "Look at")), walked) == []
    assert not_walked("a.md", todo, walked) == [step.written for step in todo[:3]]
    for old, new, which in (("runs/x", "runs/y", 0), ("print(1)", "print(2)", 1), ("b = 1", "b = 2", 2)):
        changed = steps(text.replace(old, new))
        assert not_walked("b.md", changed, walked) == [changed[which].written]
    for failed in ([row(todo[0], 1, 1.0), *rows[1:]], [*rows, row(todo[0], 1, 1.0)]):
        assert not_walked("b.md", todo, record(failed)) == [todo[0].written]


def test_pages_of_the_planner_may_change_their_numbers() -> None:
    page, text = "docs/cards/x.md", "```bash\ndeskside train d8 --data.path DIR --batch.tokens 512\n```\n"
    todo = steps(text)
    record = {page: section([row(todo[0], 0, 1.0)], "today")}
    assert not_walked(page, steps(text.replace("512", "1024").replace("d8", "d12")), record) == []
    assert len(not_walked(page, steps(text.replace("tokens", "micro_tokens")), record)) == 1
    assert len(not_walked("docs/x.md", todo, record)) == 1


def test_a_page_that_is_walked_again_replaces_its_section(tmp_path: Path) -> None:
    path = tmp_path / "walk.md"
    write_record(path, {"b.md": "old b", "gone.md": "old"}, ["a.md", "b.md", "gone.md"])
    write_record(path, {"a.md": "new a", "b.md": "new b"}, ["a.md", "b.md"])
    assert read_record(path.read_text("utf-8")) == {"a.md": "new a", "b.md": "new b"}


def test_inputs_are_made(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= {"corpus", "english", "indic", "chats.jsonl.gz", "pairs.jsonl.gz", "sums.jsonl.gz"}


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150
