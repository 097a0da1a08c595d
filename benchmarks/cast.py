"""Record `deskside plan` and `deskside go` in a terminal as an animated SVG, for the README and the site.

    python -m benchmarks.cast                         writes docs/images/cast.svg; takes three minutes

The commands run for real, in a pseudo-terminal and a new folder. What is shown differs from the run in time only:
typing is added, and long commands are shown faster (the title says how much). pyte, a terminal emulator, interprets
the output.
"""

import argparse
import os
import pty
import select
import shlex
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

import pyte

from benchmarks.terminal_svg import Frame, Line, Run, svg
from deskside.utils.machine import this_machine

OUT = Path(__file__).parents[1] / "docs" / "images" / "cast.svg"
COLUMNS, ROWS = 84, 37
PROMPT = "$ "
TYPING, STEP = 0.9, 0.45  # seconds for which a command is typed, and between two frames of a long one
SHOWN_SECONDS = 14.0  # at most, for the output of one command


@dataclass(frozen=True)
class Scene:
    """A command, and the seconds for which its last screen is shown."""

    command: str
    hold: float


SCENES = (
    Scene("deskside plan --gpu rtx4090 --hours 24", 9.0),
    Scene("deskside go --preset demo --hours 0.05 --yes", 9.0),
)
DESCRIPTION = (
    "A terminal. deskside plan says what an RTX 4090 trains in 24 hours. Then deskside go trains a small model in "
    "three minutes and prints its bits per byte and a sample."
)


def record(
    command: Sequence[str], folder: Path, columns: int = COLUMNS, rows: int = ROWS
) -> list[tuple[float, tuple[Line, ...]]]:
    """Run a command in a pseudo-terminal; return (seconds since its start, screen) whenever the screen changed.

    Raises RuntimeError if the command fails.
    """
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        environment = {
            key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        os.execvpe(command[0], list(command), {**environment, "TERM": "xterm-256color"})
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    began, screens = time.monotonic(), []
    for chunk in _output(terminal):
        stream.feed(chunk)
        shown = lines_of(screen)
        if not screens or screens[-1][1] != shown:
            screens.append((time.monotonic() - began, shown))
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code != 0:
        raise RuntimeError(f"{shlex.join(command)}: exit code {code}")
    return screens


def _output(terminal: int) -> Iterator[bytes]:
    while True:
        select.select([terminal], [], [])
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # Linux reports the end of a pseudo-terminal as an input/output error
            return
        if not chunk:
            return
        yield chunk


def lines_of(screen: pyte.Screen) -> tuple[Line, ...]:
    """Return the screen's lines as runs of one style, without empty lines at its end."""
    lines = []
    for row in range(screen.lines):
        runs: list[Run] = []
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            style = (cell.fg, cell.bold)
            if runs and (runs[-1].colour, runs[-1].bold) == style:
                runs[-1] = Run(runs[-1].column, runs[-1].text + cell.data, *style)
            else:
                runs.append(Run(column, cell.data, *style))
        lines.append(tuple(_stripped(runs)))
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines)


def _stripped(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs without white space around them, whose width fonts may not agree on."""
    for run in runs:
        text = run.text.rstrip()
        start = len(text) - len(text.lstrip())
        if text.strip():
            yield Run(run.column + start, text[start:], run.colour, run.bold)


def frames_of(scene: Scene, screens: Sequence[tuple[float, tuple[Line, ...]]]) -> list[Frame]:
    """Return the frames of a scene: the typed command, then its output in at most SHOWN_SECONDS."""
    typed = [len(PROMPT), *range(len(PROMPT) + 6, len(PROMPT) + len(scene.command), 6)]
    line = PROMPT + scene.command
    frames = [Frame(((Run(0, line[:end], bold=True),),), TYPING / len(typed)) for end in typed]
    heading: Line = (Run(0, line, bold=True),)
    frames.append(Frame((heading,), 0.4))
    total = screens[-1][0]
    shown = min(total, SHOWN_SECONDS)
    count = max(1, round(shown / STEP))
    for number in range(1, count + 1):
        until = total * number / count
        lines = [lines for seconds, lines in screens if seconds <= until][-1:]
        if lines:
            frames.append(Frame((heading, *lines[0])[-ROWS:], shown / count))
    return [*frames[:-1], Frame(frames[-1].lines, scene.hold)]


def speed(screens: Sequence[tuple[float, tuple[Line, ...]]]) -> float:
    """Return how many times faster than the run the output is shown."""
    return max(1.0, screens[-1][0] / SHOWN_SECONDS)


def main() -> None:
    """Record the scenes and write the SVG."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    frames: list[Frame] = []
    fastest = 1.0
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        for scene in SCENES:
            screens = record(shlex.split(scene.command), Path(folder))
            fastest = max(fastest, speed(screens))
            frames += frames_of(scene, screens)
    machine = this_machine()
    where = f"{machine.cores} CPU cores, no GPU" if machine.device == "cpu" else machine.card
    title = f"{where}; the second command is shown {fastest:.0f} times faster than it ran"
    out.write_text(svg(frames, COLUMNS, ROWS, title, DESCRIPTION), "utf-8")
    print(f"{out}: {len(frames)} frames, {out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
